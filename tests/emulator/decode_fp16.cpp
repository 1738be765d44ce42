#include "decode_kernels.inc"

namespace strobe::cuda {
#define STROBE_EMULATED_ROW_fp16(name, ...) STROBE_EMULATED_ROW(name, kFloat16, __VA_ARGS__)
#define STROBE_EMULATED_ROW_bf16(...)
#include "cuda/kernels.def"
}  // namespace strobe::cuda
