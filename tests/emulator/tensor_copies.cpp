#include "tensor_copies.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "run_time.h"

namespace strobe::emulator {

namespace {

constexpr uint32_t kMostRank = 5, kRowBytes = 128, kUnitBytes = 16;
constexpr uint32_t kMark = 0x746d6170;

// What CUtensorMap hides. A box's rows are of 64 or 128 values, 128 bytes, with the 128-byte
// swizzle.
struct Map {
  const char* data;
  uint32_t value_bytes;
  uint64_t lengths[kMostRank], strides[kMostRank];  // bytes; the innermost values lie side by side
  uint32_t box[kMostRank];
  uint32_t rank, mark;

  uint32_t box_rows() const {
    uint32_t rows = 1;
    for (uint32_t i = 1; i < rank; ++i) rows *= box[i];
    return rows;
  }
  int64_t unit_values() const { return kUnitBytes / value_bytes; }
  // Copies the box at `at`; `to` is at shared address `address`.
  void land(char* to, uint32_t address, const int (&at)[kMostRank]) const {
    for (uint32_t row = 0; row < box_rows(); ++row) {
      const char* from = data;
      bool inside = true;
      for (uint32_t i = 1, rest = row; i < rank; rest /= box[i++]) {
        const int64_t place = int64_t{at[i]} + rest % box[i];
        inside = inside && place >= 0 && place < static_cast<int64_t>(lengths[i]);
        from += place * static_cast<int64_t>(strides[i]);
      }
      for (uint32_t unit = 0; unit < kRowBytes / kUnitBytes; ++unit) {
        const uint32_t bytes = row * kRowBytes + unit * kUnitBytes;
        const uint32_t flipped = ((address + bytes) >> 7 & 7) << 4;
        land_unit(to + (bytes ^ flipped), from,
                  inside ? at[0] + unit_values() * unit : -unit_values());
      }
    }
  }
  // The other way round: what is outside of the tensor is left out.
  void store(uint32_t address, const int (&at)[kMostRank]) const {
    for (uint32_t row = 0; row < box_rows(); ++row) {
      int64_t offset = 0;
      bool inside = true;
      for (uint32_t i = 1, rest = row; i < rank; rest /= box[i++]) {
        const int64_t place = int64_t{at[i]} + rest % box[i];
        inside = inside && place >= 0 && place < static_cast<int64_t>(lengths[i]);
        offset += place * static_cast<int64_t>(strides[i]);
      }
      for (uint32_t unit = 0; unit < kRowBytes / kUnitBytes; ++unit) {
        const uint32_t logical = address + row * kRowBytes + unit * kUnitBytes;
        const uint32_t place = logical ^ (logical >> 7 & 7) << 4;
        const char* const from = shared_at(place, kUnitBytes);
        note_read(from, kUnitBytes);
        expect_fenced("TMA", place, kUnitBytes);
        const int64_t column = at[0] + unit_values() * unit;
        const int64_t count =
            inside
                ? std::clamp<int64_t>(static_cast<int64_t>(lengths[0]) - column, 0, unit_values())
                : 0;
        if (count == 0) continue;
        char* const to = const_cast<char*>(data) + offset + column * value_bytes;
        note_write(to, static_cast<uint32_t>(count * value_bytes));
        std::memcpy(to, from, static_cast<size_t>(count * value_bytes));
      }
    }
  }

 private:
  // The values of a unit of a row from `column` on, zeros where the row has none.
  void land_unit(char* to, const char* row, int64_t column) const {
    const int64_t begin = std::clamp<int64_t>(-column, 0, unit_values());
    const int64_t end =
        std::clamp<int64_t>(static_cast<int64_t>(lengths[0]) - column, begin, unit_values());
    std::memset(to, 0, kUnitBytes);
    if (begin == end) return;
    const char* const from = row + (column + begin) * value_bytes;
    const auto size = static_cast<size_t>((end - begin) * value_bytes);
    note_read(from, static_cast<uint32_t>(size));
    std::memcpy(to + begin * value_bytes, from, size);
  }
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

}  // namespace

void tma_load(uint32_t to, const CUtensorMap& map, uint32_t mbarrier,
              std::initializer_list<int> at) {
  Map own;
  std::memcpy(&own, &map, sizeof own);
  if (own.mark != kMark || own.rank != at.size()) {
    fail("TMA: not a map of " + std::to_string(at.size()) + " dimensions");
  }
  if (to % kRowBytes != 0) fail("TMA: shared address that is no multiple of 128");
  int place[kMostRank] = {};
  std::copy(at.begin(), at.end(), place);
  start_copy(to, own.box_rows() * kRowBytes, mbarrier,
             [=](char* memory) { own.land(memory, to, place); });
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier) {
  if ((reinterpret_cast<uintptr_t>(from) | to | bytes) % kUnitBytes != 0)
    fail("cp.async.bulk: not whole units of 16 bytes");
  start_copy(to, bytes, mbarrier, [=](char* memory) {
    note_read(from, bytes);
    std::memcpy(memory, from, bytes);
  });
}

namespace {

struct Store {
  Map map;
  uint32_t from;
  int at[kMostRank];
};
// By thread, of those that have not waited for them.
std::map<uint64_t, std::vector<Store>>& stores() {
  static auto& all = *new std::map<uint64_t, std::vector<Store>>;
  return all;
}
uint64_t own_thread() { return block_number() * kMostThreads + threadIdx.x; }

}  // namespace

void tma_store(const CUtensorMap& map, uint32_t from, std::initializer_list<int> at) {
  const Quiet quiet;
  Store own{};
  std::memcpy(&own.map, &map, sizeof own.map);
  if (own.map.mark != kMark || own.map.rank != at.size())
    fail("TMA: not a map of " + std::to_string(at.size()) + " dimensions");
  if (from % kRowBytes != 0) fail("TMA: shared address that is no multiple of 128");
  own.from = from;
  std::copy(at.begin(), at.end(), own.at);
  std::vector<Store>& all = stores()[own_thread()];
  if (drawn_for(all.size() * 7919 + from) % 2 == 0) {
    own.map.store(own.from, own.at);
  } else {
    all.push_back(own);
  }
}

void tma_store_wait_read() {
  const Quiet quiet;
  const auto found = stores().find(own_thread());
  if (found == stores().end()) return;
  for (const Store& store : found->second) store.map.store(store.from, store.at);
  stores().erase(found);
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* lengths, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr uint64_t kMostLength = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
  const uint32_t value_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const bool emulated =
      (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ||
       type == CU_TENSOR_MAP_DATA_TYPE_UINT8) &&
      interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
      box[0] * value_bytes == kRowBytes;
  if (!emulated || rank < 1 || rank > kMostRank || !data ||
      reinterpret_cast<uintptr_t>(data) % kUnitBytes != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Map own{};
  own.data = static_cast<const char*>(data);
  own.value_bytes = value_bytes;
  own.rank = rank;
  own.mark = kMark;
  for (cuuint32_t i = 0; i < rank; ++i) {
    const uint64_t stride = i == 0 ? 0 : strides[i - 1];
    if (lengths[i] < 1 || lengths[i] > kMostLength || box[i] < 1 || box[i] > 256 ||
        stride % kUnitBytes != 0 || stride >= kMostStride || (i > 0 && stride == 0) ||
        steps[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    own.lengths[i] = lengths[i];
    own.strides[i] = stride;
    own.box[i] = box[i];
  }
  std::memcpy(map, &own, sizeof own);
  return CUDA_SUCCESS;
}

CUresult replace_address(CUtensorMap* map, void* data) {
  Map own;
  std::memcpy(&own, map, sizeof own);
  if (own.mark != kMark || !data || reinterpret_cast<uintptr_t>(data) % kUnitBytes != 0)
    return CUDA_ERROR_INVALID_VALUE;
  own.data = static_cast<const char*>(data);
  std::memcpy(map, &own, sizeof own);
  return CUDA_SUCCESS;
}

}  // namespace strobe::emulator
