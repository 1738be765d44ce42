// A C++ program as a user would write one: attention over equal values gives that value back.
#include <cmath>
#include <cstdio>
#include <strobe/strobe.hpp>
#include <vector>

int main() try {
  std::vector<float> q(4 * 8, 1.0F), k(q), v(4 * 8, 3.0F), out(4 * 8);
  const strobe::Plan plan({.seqlen_q = 4, .seqlen_k = 4, .head_dim = 8, .causal = true});
  plan.forward({.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()});
  for (const float x : out) {
    if (!(std::abs(x - 3.0F) < 1e-3F)) {
      std::printf("out has %g, expected 3\n", x);
      return 1;
    }
  }
  std::printf("strobe %s, %s\n", strobe::version().c_str(), plan.kernel());
} catch (const strobe::Error& error) {
  std::printf("%s\n", error.what());
  return 1;
}
