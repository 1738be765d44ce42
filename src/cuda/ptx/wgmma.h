// wgmma: products of a warpgroup (128 threads) with float32 accumulators, m64nNk16 of fp16 or bf16
// operands and m64nNk32 of float8 e4m3; and the register trade that goes with it. sm_90a.
//
// Asynchronous: between wgmma_fence() and the wgmma_wait that covers them the accumulators (and A,
// where it comes from registers) belong to the tensor core. The compiler does not know: pin() them
// after the wait, or it reads them early. It also serialises everything where a product is under
// way across a branch or a loop's end (ptxas note C7514): keep each group straight-line.
//
// Accumulator of m64nN: for j = 0 to N / 8 - 1, d[4j + {0, 1}] are columns 8j + 2 (lane % 4) +
// {0, 1} of row 16 warp + lane / 4, and d[4j + {2, 3}] of the row 8 further down. A operand in
// registers: a[0..3] as in ptx/mma.h, so eight accumulators, packed in pairs, are a k16 step's A.
// Of e4m3 a register holds four values, k = 4 (lane % 4) + {0 to 3}: a[0] and a[1] of the first 16,
// a[2] and a[3] of the last 16 of a k32 step.
//
// Of e4m3 both operands are K-major. Its sums keep some 14 bits of mantissa while they grow:
// whoever adds many products takes fresh accumulators now and then, and adds these in float32.
#ifndef STROBE_CUDA_PTX_WGMMA_H_
#define STROBE_CUDA_PTX_WGMMA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/float8.h"

namespace strobe::cuda::ptx {

/// Orders register writes of this warp before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// The compiler may move no use of these registers across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
/// Sets the registers to 0 at this place and not earlier: the compiler would set variables to 0 as
/// early as it can, which may be before the warpgroup has got registers for them.
template <int kCount>
__device__ __forceinline__ void clear(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(r[i])::"memory");
}

/// Sets this warpgroup's registers per thread. Every warp of it has to execute this.
template <int kRegisters>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// A tile in shared memory as wgmma's 64-bit matrix descriptor, 128-byte swizzle. `low` is what
/// differs from product to product; adding bytes / 16 to it moves the tile's begin.
///
///   K-major operand (Q, K of S = Q K^T): rows of 128 bytes (64 columns, of e4m3 128) follow one
///     another. A k16 or k32 step is 32 bytes on, the next columns are the next panel.
///   MN-major operand (V of O = P V, transposed): leading = bytes from a panel of 64 columns to the
///     next one. A k16 step is 16 rows on: 2048 bytes.
struct Descriptor {
  uint32_t low;  // bits 0-13: address / 16; 16-29: leading byte offset / 16

  /// Bits 32-45: stride byte offset / 16, from 8 rows to the next 8: 1024 bytes; 62-63: 1 for the
  /// 128-byte swizzle.
  static constexpr uint32_t kHigh = 1024 / 16 | 1u << 30;

  __device__ __forceinline__ static Descriptor make(uint32_t shared_address, int leading_bytes) {
    return {shared_address / 16 | static_cast<uint32_t>(leading_bytes) / 16 << 16};
  }
  __device__ __forceinline__ uint64_t at(int bytes) const {
    return uint64_t{kHigh} << 32 | (low + static_cast<uint32_t>(bytes) / 16);
  }
};

/// d += A B, or d = A B where keep is 0. ss: A and B in shared memory, both K-major; ss_mn: both
/// MN-major. rs: A in registers, B in shared memory, MN-major. E4m3 has no ss_mn, and rs takes a
/// K-major B.
template <typename T, int kN>
struct Wgmma;

// clang-format off
#define STROBE_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define STROBE_D16(d, i) STROBE_D8(d, i), STROBE_D8(d, i + 8)
#define STROBE_D32(d, i) STROBE_D16(d, i), STROBE_D16(d, i + 16)
#define STROBE_D40(d, i) STROBE_D32(d, i), STROBE_D8(d, i + 32)
#define STROBE_D48(d, i) STROBE_D32(d, i), STROBE_D16(d, i + 32)
#define STROBE_D64(d, i) STROBE_D32(d, i), STROBE_D32(d, i + 32)
#define STROBE_D96(d, i) STROBE_D64(d, i), STROBE_D32(d, i + 64)
#define STROBE_D128(d, i) STROBE_D64(d, i), STROBE_D64(d, i + 64)
#define STROBE_P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define STROBE_P16 STROBE_P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define STROBE_P24 STROBE_P16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define STROBE_P32 STROBE_P24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define STROBE_P40 STROBE_P32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define STROBE_P48 STROBE_P40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define STROBE_P56 STROBE_P48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define STROBE_P64 STROBE_P56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define STROBE_P72 STROBE_P64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define STROBE_P80 STROBE_P72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define STROBE_P88 STROBE_P80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define STROBE_P96 STROBE_P88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define STROBE_P128 STROBE_P96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define STROBE_WGMMA_SS(N, R, K, TYPE, MAJORS, A, B, KEEP)                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" KEEP ", 0; "                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k" K ".f32." TYPE "." TYPE                  \
               " {" STROBE_P##R "}, %" A ", %" B ", p, 1, 1" MAJORS "; }"                          \
               : STROBE_D##R(d, 0) : "l"(a), "l"(b), "r"(keep))
#define STROBE_WGMMA_RS(N, R, K, TYPE, MAJOR, A0, A1, A2, A3, B, KEEP)                            \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" KEEP ", 0; "                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k" K ".f32." TYPE "." TYPE                  \
               " {" STROBE_P##R "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1" MAJOR "; }" \
               : STROBE_D##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))

// N, its registers R = N / 2, and the numbers R to R + 5 that the other operands get.
#define STROBE_WGMMA(N, R, R0, R1, R2, R3, R4, R5)                                                \
  template <typename T>                                                                            \
  struct Wgmma<T, N> {                                                                             \
    __device__ __forceinline__ static void ss(float* d, uint64_t a, uint64_t b, int keep) {        \
      if constexpr (std::is_same_v<T, E4m3>) STROBE_WGMMA_SS(N, R, "32", "e4m3", "", R0, R1, R2);  \
      else if constexpr (std::is_same_v<T, __nv_bfloat16>)                                         \
        STROBE_WGMMA_SS(N, R, "16", "bf16", ", 0, 0", R0, R1, R2);                                 \
      else STROBE_WGMMA_SS(N, R, "16", "f16", ", 0, 0", R0, R1, R2);                               \
    }                                                                                              \
    __device__ __forceinline__ static void ss_mn(float* d, uint64_t a, uint64_t b, int keep) {     \
      static_assert(!std::is_same_v<T, E4m3>, "both operands are K-major");                        \
      if constexpr (std::is_same_v<T, __nv_bfloat16>)                                              \
        STROBE_WGMMA_SS(N, R, "16", "bf16", ", 1, 1", R0, R1, R2);                                 \
      else STROBE_WGMMA_SS(N, R, "16", "f16", ", 1, 1", R0, R1, R2);                               \
    }                                                                                              \
    __device__ __forceinline__ static void rs(float* d, const uint32_t* a, uint64_t b, int keep) { \
      if constexpr (std::is_same_v<T, E4m3>)                                                       \
        STROBE_WGMMA_RS(N, R, "32", "e4m3", "", R0, R1, R2, R3, R4, R5);                           \
      else if constexpr (std::is_same_v<T, __nv_bfloat16>)                                         \
        STROBE_WGMMA_RS(N, R, "16", "bf16", ", 1", R0, R1, R2, R3, R4, R5);                        \
      else STROBE_WGMMA_RS(N, R, "16", "f16", ", 1", R0, R1, R2, R3, R4, R5);                      \
    }                                                                                              \
  };
STROBE_WGMMA(64, 32, "32", "33", "34", "35", "36", "37")
STROBE_WGMMA(80, 40, "40", "41", "42", "43", "44", "45")
STROBE_WGMMA(96, 48, "48", "49", "50", "51", "52", "53")
STROBE_WGMMA(128, 64, "64", "65", "66", "67", "68", "69")
STROBE_WGMMA(192, 96, "96", "97", "98", "99", "100", "101")
STROBE_WGMMA(256, 128, "128", "129", "130", "131", "132", "133")
// clang-format on

#undef STROBE_WGMMA
#undef STROBE_WGMMA_RS
#undef STROBE_WGMMA_SS
#undef STROBE_D8
#undef STROBE_D16
#undef STROBE_D32
#undef STROBE_D40
#undef STROBE_D48
#undef STROBE_D64
#undef STROBE_D96
#undef STROBE_D128
#undef STROBE_P8
#undef STROBE_P16
#undef STROBE_P24
#undef STROBE_P32
#undef STROBE_P40
#undef STROBE_P48
#undef STROBE_P56
#undef STROBE_P64
#undef STROBE_P72
#undef STROBE_P80
#undef STROBE_P88
#undef STROBE_P96
#undef STROBE_P128

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_WGMMA_H_
