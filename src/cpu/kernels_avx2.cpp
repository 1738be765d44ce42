#define STROBE_ISA avx2
#define STROBE_ISA_TABLE kAvx2
#include "cpu/instruction_set-inl.h"
