// AMX's instructions. amx-emulated.h has the same functions over tiles in memory.
#ifndef STROBE_CPU_AMX_INSTRUCTIONS_H_
#define STROBE_CPU_AMX_INSTRUCTIONS_H_

#include <cstdint>

namespace strobe::cpu::amx {

// Assembly replaces GCC 12's intrinsics, which take literals only, whose loads do not tell the
// compiler that they read memory, and whose _tile_loadconfig says that it reads 8 bytes, so that
// the compiler may drop what stands in the other 56.

/// The shapes of all tiles, from the 64 bytes that LDTILECFG reads.
STROBE_AMX void tile_configure(const uint8_t (&config)[64]) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
/// No tile has a shape any more.
STROBE_AMX void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int kT>
STROBE_AMX void tile_load(const void* p, int64_t row_bytes = 64) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(kT) : "memory");
}
/// Loads from L2 past L1. An operand that streams through L1 would evict the lines that scores and
/// weights are about to be written to.
template <int kT>
STROBE_AMX void tile_stream(const void* p, int64_t row_bytes = 64) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(kT) : "memory");
}
template <int kT>
STROBE_AMX void tile_store(void* p, int64_t row_bytes = 64) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(kT) : "memory");
}
template <int kT>
STROBE_AMX void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kT));
}
/// C += A B.
template <int kC, int kA, int kB>
STROBE_AMX void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_INSTRUCTIONS_H_
