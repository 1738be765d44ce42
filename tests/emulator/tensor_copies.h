// TMA: copies of boxes of a tensor, and the maps that say what a tensor is.
#ifndef STROBE_TESTS_EMULATOR_TENSOR_COPIES_H_
#define STROBE_TESTS_EMULATOR_TENSOR_COPIES_H_

#include <cstdint>
#include <initializer_list>

#include "cuda.h"

namespace strobe::emulator {

/// The box at a place in the tensor, innermost dimension first, to shared memory. Its bytes count
/// towards the mbarrier.
void tma_load(uint32_t to, const CUtensorMap& map, uint32_t mbarrier,
              std::initializer_list<int> at);
/// `bytes` that lie one after the other in global memory.
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier);

/// A box from shared memory to the tensor: now, or when the thread waits until its stores have read
/// their shared memory.
void tma_store(const CUtensorMap& map, uint32_t from, std::initializer_list<int> at);
void tma_store_wait_read();

/// cuTensorMapEncodeTiled and cuTensorMapReplaceAddress, with the driver's refusals.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* lengths, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill);
CUresult replace_address(CUtensorMap* map, void* data);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_TENSOR_COPIES_H_
