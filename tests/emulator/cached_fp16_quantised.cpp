// The decode kernels for quantised caches, with queries in fp16.
#define STROBE_EMULATED_INSTANCES "cached_80_fp16_quantised.inc"
#include "cached_kernels.inc"
