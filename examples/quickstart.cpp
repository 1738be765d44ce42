// Attention over 1024 tokens, 8 heads of 64, in float32.
//
//     c++ -std=c++20 examples/quickstart.cpp $(pkg-config --cflags --libs strobe) -o quickstart
#include <cstdio>
#include <strobe/strobe.hpp>
#include <vector>

int main() {
  std::vector<float> q(1024 * 8 * 64, 0.1F), k(q), v(q),
      out(q);  // [batch, seqlen, heads, head_dim]
  const strobe::Plan plan({.seqlen_q = 1024, .seqlen_k = 1024, .heads = 8, .head_dim = 64});
  plan.forward({.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()});
  std::printf("%s\nout[0] = %g\n", plan.text().c_str(), out[0]);
}
