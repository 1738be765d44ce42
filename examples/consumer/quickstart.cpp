#include <iostream>
#include <strobe/strobe.hpp>
#include <vector>

int main() {
  // [batch, seqlen, heads, head_dim]
  std::vector<float> q(1024 * 8 * 64, 0.1F), k(q), v(q), out(q);
  // How it will be done: by which kernel, in which tiles, on how many threads.
  strobe::Plan plan({.seqlen_q = 1024, .seqlen_k = 1024, .heads = 8, .head_dim = 64});
  plan.forward({.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()});
  std::cout << plan.text() << "\nout[0] = " << out[0] << "\n";
}
