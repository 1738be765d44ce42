// As src/cuda/ptx/shared_access.h, on the CPU.
#ifndef STROBE_CUDA_PTX_SHARED_ACCESS_H_
#define STROBE_CUDA_PTX_SHARED_ACCESS_H_

#include <cstdint>
#include <cstring>

#include "run_time.h"

namespace strobe::cuda::ptx {

inline uint32_t shared_address(const void* p) { return emulator::shared_address(p); }
inline uint32_t load_shared(uint32_t address) {
  uint32_t x;
  std::memcpy(&x, emulator::shared_at(address, 4), 4);
  return x;
}
inline void store_shared(uint32_t address, uint32_t x) {
  std::memcpy(emulator::shared_at(address, 4), &x, 4);
}

inline void store_shared_words(uint32_t address, const uint32_t (&x)[4]) {
  std::memcpy(emulator::shared_at(address, 16), x, 16);
}
inline void load_shared_words(uint32_t address, uint32_t (&x)[4]) {
  std::memcpy(x, emulator::shared_at(address, 16), 16);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_SHARED_ACCESS_H_
