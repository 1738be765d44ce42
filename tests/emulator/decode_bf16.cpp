#include "decode_kernels.inc"

namespace strobe::cuda {
#define STROBE_EMULATED_ROW_bf16(name, ...) STROBE_EMULATED_ROW(name, kBfloat16, __VA_ARGS__)
#define STROBE_EMULATED_ROW_fp16(...)
#include "cuda/kernels.def"
}  // namespace strobe::cuda
