// The kernels with one value at a time, for CPUs that have none of the other instruction sets.
// Tests compare the others with them.
#define HWY_COMPILE_ONLY_SCALAR
#define STROBE_ISA portable
#define STROBE_ISA_TABLE kPortable
#include "cpu/instruction_set-inl.h"
