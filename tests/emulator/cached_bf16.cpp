// The decode kernels in bf16.
#define STROBE_EMULATED_INSTANCES "cached_80_bf16.inc"
#include "cached_kernels.inc"
