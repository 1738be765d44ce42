#include "core/machine.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace strobe {

namespace {

#if defined(__x86_64__)

#if STROBE_AMX_EMULATED

// Tiles lie in memory (cpu/amx-emulated.h).
bool request_amx() { return true; }
bool cpu_has_amx_bf16() { return true; }

#else

// Linux gives a process AMX's 8 KB of tile state only when it asks.
bool request_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool cpu_has_amx_bf16() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  // The operating system must save the tile state too: XCR0 bits 17 and 18.
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (1u << 27)) == 0) return false;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

#endif

// Clang 14's __builtin_cpu_supports does not know the name.
bool cpu_has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

void read_name(char (&name)[64]) {
  unsigned words[12];
  for (unsigned i = 0; i < 3; ++i) {
    unsigned* w = words + 4 * i;
    if (!__get_cpuid(0x80000002u + i, &w[0], &w[1], &w[2], &w[3])) return;
  }
  std::memcpy(name, words, 48);
  name[48] = '\0';
  size_t length = std::strlen(name);
  while (length > 0 && name[length - 1] == ' ') name[--length] = '\0';
}

#endif

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__)
  __builtin_cpu_init();
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c() &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
  f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16");
#if STROBE_AVX512_EMULATED
  const bool vectors = f.avx2;  // cpu/avx512-emulated.h
#else
  const bool vectors = f.avx512_bf16;
#endif
  f.amx = vectors && cpu_has_amx_bf16() && request_amx();
  f.amd = __builtin_cpu_is("amd");
  read_name(f.name);
#elif defined(__aarch64__)
  f.neon = true;
#endif
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace strobe
