// The decode kernels for quantised caches, with queries in bf16.
#define STROBE_EMULATED_INSTANCES "cached_80_bf16_quantised.inc"
#include "cached_kernels.inc"
