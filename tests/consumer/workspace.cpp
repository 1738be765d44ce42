// A workspace that grows from one launch to the next, a copy of it, and launches that are refused
// where it is not aligned.
#include <cstdint>
#include <cstdio>
#include <strobe/strobe.hpp>
#include <vector>

int main() try {
  strobe::Workspace workspace;
  for (const int64_t length : {1, 10, 100, 1000, 2000}) {
    const strobe::Plan plan(
        strobe::Problem{.seqlen_q = length, .seqlen_k = length, .head_dim = 64}.backward());
    std::vector<float> x(static_cast<size_t>(length) * 64, 1.0F), dx(x), dk(x), dv(x);
    std::vector<float> lse(static_cast<size_t>(length));
    for (strobe::Workspace copy = workspace; strobe::Workspace * each : {&workspace, &copy}) {
      const auto room = each->of(plan);
      if (room.size() != plan.workspace_bytes() ||
          reinterpret_cast<uintptr_t>(room.data()) % 64 != 0) {
        std::printf("%zu bytes at %p, expected %zu at a multiple of 64\n", room.size(),
                    static_cast<void*>(room.data()), plan.workspace_bytes());
        return 1;
      }
      plan.backward({.q = x.data(),
                     .k = x.data(),
                     .v = x.data(),
                     .out = x.data(),
                     .lse = lse.data(),
                     .dout = x.data(),
                     .dq = dx.data(),
                     .dk = dk.data(),
                     .dv = dv.data(),
                     .workspace = room});
    }
  }
} catch (const strobe::Error& error) {
  std::printf("%s\n", error.what());
  return 1;
}
