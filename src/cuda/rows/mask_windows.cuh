// What the kernels that pack a mask as data (mask_pack.cu) share: their arguments, which blocks a
// thread block has, and what is seen of one.
#ifndef STROBE_CUDA_ROWS_MASK_WINDOWS_CUH_
#define STROBE_CUDA_ROWS_MASK_WINDOWS_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/mask_sources.h"
#include "core/packed_mask.h"

namespace strobe::cuda {

/// What the kernels are given. (In this namespace, as all that uses shared memory, since the
/// emulator's is.)
struct MaskPack {
  MaskArgs a;
  MaskLayout l;
  MaskRows rows;
  int32_t* words;
  int64_t rows_q, rows_k;    // MaskLayout's
  int64_t planes;            // sequences and heads
  int64_t lists_q, lists_k;  // of the longest sequence and head
  int64_t windows;           // of its blocks of keys
  int64_t windows_at_once;   // of a thread block that finds or writes
  int64_t groups;            // of so many windows
  uint32_t* kinds;           // [blocks_q][windows]: which are seen, which of those in part
  int32_t* unsorted;         // [blocks_q + blocks_k]
  int32_t most_in_list[2];   // entries of a list of queries, of keys

  /// Whether only the pairs themselves say what is seen of a block.
  STROBE_INLINE constexpr bool reads_pairs() const {
    return a.keep != nullptr || a.partial_bits != nullptr;
  }
  STROBE_INLINE constexpr MaskPlane plane(int64_t n) const {
    return MaskPlane::of(l, rows, n / l.heads, n % l.heads);
  }
  STROBE_INLINE constexpr int32_t* list(int64_t n) const { return words + l.lists + 2 * n; }
  STROBE_INLINE constexpr int32_t* key_list(int64_t n) const { return words + l.key_lists + 2 * n; }
  STROBE_INLINE constexpr const uint32_t* kinds_of(int64_t list) const {
    return kinds + list * windows * 2;
  }
  /// Where the bits of a list's partial blocks begin, until the order is there.
  STROBE_INLINE constexpr int32_t* bits_begin(int64_t list) const { return words + l.order + list; }
};

constexpr int kPackThreads = 256, kPackWarps = kPackThreads / 32;
constexpr int kKeyThreads = 128, kScanThreads = 512;
constexpr int kWindow = 32;       // blocks of keys: the bits of a word
constexpr int kMostWindows = 64;  // of a thread block
constexpr int kMostRows = 256;    // of a block

__device__ __forceinline__ int64_t block_index() {
  return int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
}
__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }
__device__ __forceinline__ uint32_t bits_below(int64_t n) {
  return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1;
}
__device__ __forceinline__ int count_bits(uint32_t x) { return __popc(x); }

/// A block of queries and a window of its blocks of keys, one of the thread block's.
struct MaskWindow {
  MaskPlane plane;
  int64_t list, window;
  Range windows;  // the thread block's
  Range queries;
  bool exists;

  /// The thread block's first one.
  __device__ __forceinline__ static MaskWindow of(const MaskPack& p) {
    MaskWindow w{};
    int64_t n = block_index();
    w.window = n % p.groups * p.windows_at_once;
    n /= p.groups;
    const int64_t block = n % p.lists_q;
    n /= p.lists_q;
    if (n >= p.planes) return w;
    w.plane = p.plane(n);
    w.list = w.plane.first_q + block;
    w.queries = block_at({0, w.plane.rows_q}, block * p.l.block_q, p.l.block_q);
    w.windows = {w.window,
                 min64(w.window + p.windows_at_once, ceil_div(w.plane.blocks_k, kWindow))};
    w.exists = block < w.plane.blocks_q && !w.windows.empty();
    return w;
  }
  __device__ __forceinline__ MaskWindow at(int64_t n) const {
    MaskWindow w = *this;
    w.window = n;
    return w;
  }
  /// Which blocks of keys there are.
  __device__ __forceinline__ uint32_t there() const {
    return bits_below(plane.blocks_k - window * kWindow);
  }
  __device__ __forceinline__ int64_t block(int bit) const { return window * kWindow + bit; }

  /// The rows' intervals, to shared memory; by all threads.
  __device__ __forceinline__ void read_intervals(const MaskPack& p, MaskIntervals* seen) const {
    for (int64_t n = thread_index(); n < queries.size(); n += kPackThreads) {
      seen[n] = MaskIntervals::of(
          p.a.intervals + plane.interval_row(p.l, p.rows, queries.begin + n) * 4, plane.rows_k);
    }
  }
  /// `meet` gets the window's blocks of keys of which one of this thread's rows sees some, `whole`
  /// loses those of which one does not see all.
  __device__ __forceinline__ void look_at_intervals(const MaskPack& p, const MaskIntervals* seen,
                                                    uint32_t& meet, uint32_t& whole) const {
    const int64_t size = p.l.block_k, first = window * kWindow;
    for (int64_t n = thread_index(); n < queries.size(); n += kPackThreads) {
      // Blocks [begin, end) of the window.
      const auto blocks = [&](int64_t begin, int64_t end) {
        return bits_below(end - first) & ~bits_below(begin - first);
      };
      uint32_t all = 0;
      for (const Range& r : {seen[n].first, seen[n].second}) {
        if (r.empty()) continue;
        meet |= blocks(r.begin / size, ceil_div(r.end, size));
        all |=
            blocks(ceil_div(r.begin, size), r.end == plane.rows_k ? plane.blocks_k : r.end / size);
      }
      whole &= all;
    }
  }
};

/// What is seen of a block of keys: word after word, by a warp.
struct MaskBlock {
  const MaskPack& p;
  const MaskWindow& w;
  const MaskIntervals* seen;  // of the rows; null: no intervals
  int64_t block;
  int64_t given;  // the entry that has the pairs; -1: there is none
  bool repeats;   // whether others have some too

  __device__ __forceinline__ static MaskBlock of(const MaskPack& p, const MaskWindow& w,
                                                 const MaskIntervals* seen, int64_t block) {
    MaskBlock b{p, w, p.a.intervals ? seen : nullptr, block, -1, false};
    if (p.a.partial_bits) b.find_given();
    return b;
  }
  /// The 32 keys of a row of the block from key 32 * n on.
  __device__ __forceinline__ uint32_t word(int64_t row, int64_t n) const {
    const int64_t key = block * p.l.block_k + n * 32 + lane_index();
    bool some = key < w.plane.rows_k;
    if (seen) some = some && seen[row].has(key);
    if (p.a.keep) {
      const strobe_strides& s = p.a.keep_strides;
      some =
          some && p.a.keep[w.plane.keep_row(s, p.rows, w.queries.begin + row) + key * s.dim] != 0;
    }
    uint32_t bits = __ballot_sync(0xffffffffu, some);
    if (given >= 0) bits &= given_word(row, n);
    return bits;
  }
  /// All of a row's 32 keys that there are.
  __device__ __forceinline__ uint32_t whole_word(int64_t n) const {
    return bits_below(w.plane.rows_k - block * p.l.block_k - n * 32);
  }

 private:
  __device__ __forceinline__ int64_t entries() const {
    return min64(max64(p.a.partial_counts[w.list], 0), p.a.partial_columns);
  }
  __device__ __forceinline__ void find_given() {
    const int64_t first = w.list * p.a.partial_columns, count = entries();
    for (int64_t n = 0; n < count; n += 32) {
      const bool has =
          n + lane_index() < count && p.a.partial_blocks[first + n + lane_index()] == block;
      const uint32_t found = __ballot_sync(0xffffffffu, has);
      if (found == 0) continue;
      repeats |= given >= 0 || (found & (found - 1)) != 0;
      if (given < 0) given = first + n + __ffs(static_cast<int>(found)) - 1;
    }
  }
  __device__ __forceinline__ uint32_t given_word(int64_t row, int64_t n) const {
    const int64_t at = row * (p.l.block_k / 32) + n, size = p.l.words_of_bits();
    uint32_t bits = p.a.partial_bits[given * size + at];
    if (!repeats) return bits;
    const int64_t end = w.list * p.a.partial_columns + entries();
    for (int64_t entry = given + 1; entry < end; ++entry) {
      if (p.a.partial_blocks[entry] == block) bits |= p.a.partial_bits[entry * size + at];
    }
    return bits;
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_ROWS_MASK_WINDOWS_CUH_
