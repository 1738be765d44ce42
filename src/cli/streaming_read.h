// A plain read of memory, from begin to end: what decoding a long KV cache is measured against,
// here and in bench/cpu_peak.cpp.
#ifndef STROBE_CLI_STREAMING_READ_H_
#define STROBE_CLI_STREAMING_READ_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "core/team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace strobe::cli {

inline constexpr int kReadChains = 16;  // loads in flight that wait for nothing
inline constexpr size_t kReadStep = size_t{kReadChains} * 32;

namespace internal {

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void ReadWithAvx2(const std::byte* begin, size_t bytes) {
  __m256i sum[kReadChains] = {};
  for (size_t i = 0; i < bytes; i += kReadStep) {
#pragma GCC unroll 16
    for (int n = 0; n < kReadChains; ++n) {
      const auto* const at = reinterpret_cast<const __m256i*>(begin + i + 32 * n);
      sum[n] = _mm256_add_epi64(sum[n], _mm256_loadu_si256(at));
    }
  }
  for (__m256i& x : sum) asm volatile("" : "+x"(x));  // not to be optimised away
}
#endif

inline void ReadWords(const std::byte* begin, size_t bytes) {
  uint64_t sum[kReadChains] = {};
  constexpr size_t kStep = kReadChains * sizeof(uint64_t);
  for (size_t i = 0; i < bytes; i += kStep) {
    uint64_t words[kReadChains];
    std::memcpy(words, begin + i, kStep);
    for (int n = 0; n < kReadChains; ++n) sum[n] += words[n];
  }
  for (uint64_t& x : sum) asm volatile("" : "+r"(x));
}

}  // namespace internal

// Reads the whole steps of `bytes` once, with the widest loads that every machine with them runs at
// full speed.
inline void StreamingRead(const std::byte* begin, size_t bytes) {
  bytes -= bytes % kReadStep;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return internal::ReadWithAvx2(begin, bytes);
#endif
  internal::ReadWords(begin, bytes);
}

// The same of each of some tensors, in as many shares as `threads`, and on as many threads if the
// system makes them.
inline void StreamingRead(std::initializer_list<const void*> tensors, size_t bytes, int threads) {
  const size_t share = bytes / static_cast<size_t>(threads) / kReadStep * kReadStep;
  share_out(threads, threads, [&](int64_t n) {
    for (const void* tensor : tensors) {
      StreamingRead(static_cast<const std::byte*>(tensor) + static_cast<size_t>(n) * share, share);
    }
  });
}

}  // namespace strobe::cli

#endif  // STROBE_CLI_STREAMING_READ_H_
