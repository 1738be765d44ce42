// What the compiler calls things, and how it is told to read a number once.
#ifndef STROBE_CORE_MACROS_H_
#define STROBE_CORE_MACROS_H_

#include <cstdint>

#if defined(__CUDACC__)
#define STROBE_HOST_DEVICE __host__ __device__
#else
#define STROBE_HOST_DEVICE
#endif

// For functions in headers that per-instruction-set files include: were one of them emitted out of
// line with AVX-512 code, the linker could pick that copy for every caller, and older CPUs would
// crash.
#define STROBE_INLINE STROBE_HOST_DEVICE inline __attribute__((always_inline))

namespace strobe {

/// A number of the caller's memory, which another thread may be writing at this moment: read from
/// there once, so that the number that is checked is the number that is used. (Device code reads
/// the memory of a stream, in which launches follow each other.)
STROBE_INLINE constexpr int32_t read_once(const int32_t* at) {
#if !defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
  return *at;
}

}  // namespace strobe

#endif  // STROBE_CORE_MACROS_H_
