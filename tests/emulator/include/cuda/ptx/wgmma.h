// As src/cuda/ptx/wgmma.h, on the CPU.
#ifndef STROBE_CUDA_PTX_WGMMA_H_
#define STROBE_CUDA_PTX_WGMMA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/float8.h"
#include "wgmma_products.h"

namespace strobe::cuda::ptx {

inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::wgmma_wait(kPending);
}
template <int kCount>
void pin(float (&)[kCount]) {}
template <int kCount>
void clear(float (&r)[kCount]) {
  for (float& x : r) x = 0.f;
}

template <int kRegisters>
void set_max_registers_up() {}
template <int kRegisters>
void set_max_registers_down() {}

struct Descriptor {
  uint32_t low;

  static constexpr uint32_t kHigh = 1024 / 16 | 1u << 30;

  static Descriptor make(uint32_t shared_address, int leading_bytes) {
    return {shared_address / 16 | static_cast<uint32_t>(leading_bytes) / 16 << 16};
  }
  uint64_t at(int bytes) const {
    return uint64_t{kHigh} << 32 | (low + static_cast<uint32_t>(bytes) / 16);
  }
};

template <typename T, int kN>
struct Wgmma {
  static_assert(kN == 64 || kN == 80 || kN == 96 || kN == 128 || kN == 192 || kN == 256);
  static constexpr emulator::Values kValues = std::is_same_v<T, __nv_bfloat16>
                                                  ? emulator::Values::kBfloat16
                                              : std::is_same_v<T, E4m3> ? emulator::Values::kE4m3
                                                                        : emulator::Values::kHalf;
  static_assert(kValues != emulator::Values::kHalf || std::is_same_v<T, __half>);

  static void ss(float* d, uint64_t a, uint64_t b, int keep) {
    emulator::wgmma({emulator::Operands::kRows, kN, kValues}, d, nullptr, a, b, keep != 0);
  }
  static void ss_mn(float* d, uint64_t a, uint64_t b, int keep) {
    emulator::wgmma({emulator::Operands::kColumns, kN, kValues}, d, nullptr, a, b, keep != 0);
  }
  static void rs(float* d, const uint32_t* a, uint64_t b, int keep) {
    emulator::wgmma({emulator::Operands::kRegisters, kN, kValues}, d, a, 0, b, keep != 0);
  }
};

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_WGMMA_H_
