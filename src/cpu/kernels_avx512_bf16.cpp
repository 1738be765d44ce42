#define STROBE_ISA avx512_bf16
#define STROBE_ISA_TABLE kAvx512Bf16
#include "cpu/instruction_set-inl.h"
