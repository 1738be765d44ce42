// As src/cuda/ptx/shared_access.h, on the CPU.
#ifndef STROBE_CUDA_PTX_SHARED_ACCESS_H_
#define STROBE_CUDA_PTX_SHARED_ACCESS_H_

#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "run_time.h"

namespace strobe::cuda::ptx {

inline uint32_t shared_address(const void* p) { return emulator::shared_address(p); }

template <typename Value>
Value load_from_shared(uint32_t address) {
  Value x;
  std::memcpy(&x, emulator::shared_at(address, sizeof x), sizeof x);
  return x;
}
template <typename Value>
void store_to_shared(uint32_t address, const Value& x) {
  std::memcpy(emulator::shared_at(address, sizeof x), &x, sizeof x);
  emulator::wrote_shared(address, sizeof x);
}

template <typename Value>
Value load_shared_wide(uint32_t address) {
  static_assert(sizeof(Value) == 8);
  return load_from_shared<Value>(address);
}
inline float2 load_shared_pair(uint32_t address) { return load_from_shared<float2>(address); }
inline uint32_t load_shared(uint32_t address) { return load_from_shared<uint32_t>(address); }
inline void store_shared(uint32_t address, uint32_t x) { store_to_shared(address, x); }

inline void store_shared_half(uint32_t address, uint16_t x) { store_to_shared(address, x); }
inline uint16_t load_shared_half(uint32_t address) { return load_from_shared<uint16_t>(address); }

inline void store_shared_words(uint32_t address, const uint32_t (&x)[4]) {
  store_to_shared(address, x);
}
inline void load_shared_words(uint32_t address, uint32_t (&x)[4]) {
  std::memcpy(x, emulator::shared_at(address, 16), 16);
}

inline void store_shared_float(uint32_t address, float x) { store_to_shared(address, x); }
inline float load_shared_float(uint32_t address) { return load_from_shared<float>(address); }

inline void never_store_shared(uint32_t, float) {}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_SHARED_ACCESS_H_
