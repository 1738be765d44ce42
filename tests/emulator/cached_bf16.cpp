#include "cached_kernels.inc"

namespace strobe::cuda {
constexpr int kDtype = kBfloat16;
#define STROBE_KERNEL(...) STROBE_EMULATED_IN(bf16, __VA_ARGS__)
#include "cuda/kernels.def"
}  // namespace strobe::cuda
