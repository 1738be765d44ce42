// The decode kernels in fp16.
#define STROBE_EMULATED_INSTANCES "cached_80_fp16.inc"
#include "cached_kernels.inc"
