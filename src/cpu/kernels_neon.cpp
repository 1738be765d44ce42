#define STROBE_ISA neon
#define STROBE_ISA_TABLE kNeon
#include "cpu/instruction_set-inl.h"
