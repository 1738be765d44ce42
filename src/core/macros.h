// What the compiler calls things.
#ifndef STROBE_CORE_MACROS_H_
#define STROBE_CORE_MACROS_H_

#if defined(__CUDACC__)
#define STROBE_HOST_DEVICE __host__ __device__
#else
#define STROBE_HOST_DEVICE
#endif

// For functions in headers that per-instruction-set files include: were one of them emitted out of
// line with AVX-512 code, the linker could pick that copy for every caller, and older CPUs would
// crash.
#define STROBE_INLINE STROBE_HOST_DEVICE inline __attribute__((always_inline))

#endif  // STROBE_CORE_MACROS_H_
