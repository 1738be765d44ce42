// All kernels of this build, in the order in which a plan asks them.
#include <vector>

#include "api/plan.h"
#include "cpu/dispatch.h"
#if STROBE_HAVE_CUDA
#include "cuda/host/dispatch.h"
#endif

namespace strobe {

std::span<const Kernel> kernel_table() {
  static const std::vector<Kernel> table = [] {
    std::vector<Kernel> all(cpu::kernels().begin(), cpu::kernels().end());
#if STROBE_HAVE_CUDA
    for (const Kernel& kernel : cuda::kernels()) all.push_back(kernel);
#endif
    return all;
  }();
  return table;
}

}  // namespace strobe
