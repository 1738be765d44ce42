#define STROBE_ISA avx512
#define STROBE_ISA_TABLE kAvx512
#include "cpu/instruction_set-inl.h"
