// As src/cuda/ptx/tma.h, on the CPU.
#ifndef STROBE_CUDA_PTX_TMA_H_
#define STROBE_CUDA_PTX_TMA_H_

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tensor_map.h"
#include "tensor_copies.h"

namespace strobe::cuda::ptx {

enum class L2 : uint64_t { kEvictFirst, kEvictLast };

inline void tma_prefetch(const CUtensorMap&) {}

inline void tma_load(void* shared, const CUtensorMap& map, Barrier& barrier, L2, int column,
                     int row, int head, int batch) {
  emulator::tma_load(shared_address(shared), map, barrier.address(), {column, row, head, batch});
}
inline void tma_load(void* shared, const CUtensorMap& map, Barrier& barrier, L2, int column,
                     int head, int row, int group, int batch) {
  emulator::tma_load(shared_address(shared), map, barrier.address(),
                     {column, head, row, group, batch});
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, Barrier& barrier) {
  emulator::bulk_load(shared_address(shared), global, bytes, barrier.address());
}
inline void tma_store(const CUtensorMap& map, const void* shared, int column, int row, int head,
                      int batch) {
  emulator::tma_store(map, shared_address(shared), {column, row, head, batch});
}
inline void tma_store(const CUtensorMap& map, const void* shared, int column, int head, int row,
                      int group, int batch) {
  emulator::tma_store(map, shared_address(shared), {column, head, row, group, batch});
}
inline void tma_store_wait_read() { emulator::tma_store_wait_read(); }
inline void tma_store_wait() {}
inline void fence_proxy_async() { emulator::fence_proxy_async(); }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_TMA_H_
