// A ring from the installed headers: one rank, so that there is nobody to send to.
#include <cstddef>
#include <cstdio>
#include <memory>
#include <strobe/ring.hpp>
#include <vector>

int main() try {
  const strobe::RingProblem problem = {
      .layer = {.seqlen_q = 8, .seqlen_k = 8, .heads = 2, .head_dim = 4, .causal = true}};
  const strobe::Ring ring(problem);
  std::vector<float> x(8 * 2 * 4, 1.0F), out(x.size());
  std::vector<std::byte> room(ring.workspace_bytes() + 64);
  void* at = room.data();
  size_t space = room.size();
  std::align(64, ring.workspace_bytes(), at, space);
  strobe::OneRank nobody;
  ring.forward({.q = x.data(),
                .k = x.data(),
                .v = x.data(),
                .out = out.data(),
                .workspace = {static_cast<std::byte*>(at), ring.workspace_bytes()}},
               nobody);
  std::printf("a ring of one rank: out[5] = %g\n", static_cast<double>(out[5]));
  return out[5] == 1.0F ? 0 : 1;
} catch (const strobe::Error& error) {
  std::printf("%s\n", error.what());
  return 1;
}
