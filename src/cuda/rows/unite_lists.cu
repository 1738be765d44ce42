// The lists of the query heads that share a key head, as one list: what a tile of decoding goes
// through, which holds the rows of all of them (decode/listed_keys.h).
//
//   list of head 0     {1, full} {4, bits 7}                 union of the two
//   list of head 1               {4, full}   {5, bits 2}     {1: full, -} {4: 7, full} {5: -, 2}
//
// A thread block makes one: it marks the blocks of keys that some list has in a window of bits in
// shared memory, counts them, writes them with nothing seen in any head, and then, list by list,
// what each head sees of them.
//
// A union has no more entries than its lists have together, and lies where these leave room: lists
// of a head lie one after the other, by number, and so do heads of a plane. So the unions of a key
// head lie one after the other too, from where the entries of its first head begin.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/packed_mask.h"
#include "cuda/common/block_sum.cuh"
#include "cuda/common/mask_visits.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/unite_lists.h"

namespace strobe::cuda {

/// What the kernel is given.
struct UniteLists {
  MaskLayout l;
  const int32_t* mask;
  int32_t *lists, *entries;
  int64_t unions;
  int64_t lists_of_head;  // of one plane
  int32_t heads_kv, group;
  int32_t blocks_k;  // of the longest sequence

  STROBE_INLINE constexpr int32_t width() const { return 1 + group; }
  STROBE_INLINE constexpr BlockLists lists_from(int64_t first) const {
    return {mask + l.lists, mask + l.entries, MaskLayout::kEntry, l.block_q, l.block_k,
            first,          l.capacity};
  }
};

constexpr int kUniteThreads = 128;
constexpr int kUniteWords = 2 * kUniteThreads, kUniteWindow = 32 * kUniteWords;  // blocks of keys
constexpr int kUniteBytes = (2 * kUniteWords + kUniteThreads / 32) * 4;

/// visit(entry's words, its block) for this thread's share of those entries of a list whose blocks
/// lie in the window from `begin` on.
template <typename Visit>
__device__ __forceinline__ void entries_in_window(const UniteLists& p, const BlockLists& list,
                                                  int32_t begin, const Visit& visit) {
  const int64_t count = list.count(0);
#pragma unroll 1
  for (int64_t n = threadIdx.x; n < count; n += kUniteThreads) {
    const int32_t* const entry = list.words(0, n);
    // (Of a mask all blocks are there.)
    if (begin <= *entry && *entry < min(begin + kUniteWindow, p.blocks_k))
      visit(entry, *entry - begin);
  }
}

__global__ void __launch_bounds__(kUniteThreads, 1)
    unite_lists_kernel(const __grid_constant__ UniteLists p) {
  extern __shared__ __align__(128) char shared[];
  auto* const seen = reinterpret_cast<uint32_t*>(shared);
  auto* const before = reinterpret_cast<int32_t*>(seen + kUniteWords);  // blocks seen, of a word
  int32_t* const of_warps = before + kUniteWords;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t number = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (number >= p.unions) return;
  const int64_t plane = number / p.lists_of_head, n = number - plane * p.lists_of_head;
  const int64_t first_head = plane / p.heads_kv * p.l.heads + plane % p.heads_kv * p.group;
  const auto list_of = [&](int32_t h) {
    return p.lists_from((first_head + h) * p.lists_of_head + n);
  };
  // Numbers of a mask lead to [0, capacity]; others are cut to it.
  int64_t at = p.lists_from(first_head * p.lists_of_head).place(0);
#pragma unroll 1
  for (int32_t h = 0; h < p.group; ++h) {
    at += list_of(h).place(0) - p.lists_from((first_head + h) * p.lists_of_head).place(0);
  }
  at = min64(max64(at, 0), p.l.capacity);
  const auto room = static_cast<int32_t>(min64(p.l.capacity - at, INT32_MAX));
  int32_t* const to = p.entries + at * p.width();
  int32_t written = 0;
#pragma unroll 1
  for (int32_t begin = 0; begin < p.blocks_k; begin += kUniteWindow) {
    for (int i = thread; i < kUniteWords; i += kUniteThreads) seen[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t h = 0; h < p.group; ++h) {
      entries_in_window(p, list_of(h), begin, [&](const int32_t*, int32_t block) {
        atomicOr(seen + block / 32, 1u << (block % 32));
      });
    }
    __syncthreads();
    const uint32_t own[2] = {seen[2 * thread], seen[2 * thread + 1]};
    int32_t all = 0;
    const int32_t first = written + sum_before(__popc(own[0]) + __popc(own[1]), of_warps, all);
    before[2 * thread] = first;
    before[2 * thread + 1] = first + __popc(own[0]);
    int32_t place = first;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll 1
      for (uint32_t rest = own[w]; rest != 0 && place < room; rest &= rest - 1, ++place) {
        int32_t* const entry = to + int64_t{place} * p.width();
        entry[0] = begin + 64 * thread + 32 * w + __ffs(static_cast<int32_t>(rest)) - 1;
        for (int32_t h = 0; h < p.group; ++h) entry[1 + h] = MaskVisit::kHidden;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t h = 0; h < p.group; ++h) {
      entries_in_window(p, list_of(h), begin, [&](const int32_t* entry, int32_t block) {
        const uint32_t below = seen[block / 32] & ((1u << (block % 32)) - 1);
        const int32_t place = before[block / 32] + __popc(below);
        if (place < room) to[int64_t{place} * p.width() + 1 + h] = max(entry[1], MaskVisit::kFull);
      });
    }
    written += all;
    __syncthreads();
  }
  if (thread > 0) return;
  p.lists[2 * number] = static_cast<int32_t>(at);
  p.lists[2 * number + 1] = min(written, room);
}

cudaError_t launch_unite_lists(const CachedParams& p, const SpanLists& lists,
                               const LaunchTarget& target) {
  if (!unites_lists(p)) return cudaSuccess;
  const MaskLayout& l = p.mask_layout;
  const int64_t of_head = l.per_sequence_q < 0 ? l.blocks_q / l.heads : l.per_sequence_q;
  UniteLists u{l,
               p.mask,
               const_cast<int32_t*>(lists.lists),
               const_cast<int32_t*>(lists.entries),
               lists.numbers.blocks_q,
               of_head,
               p.heads_kv,
               p.group,
               static_cast<int32_t>(l.per_sequence_k)};
  if (u.unions == 0) return cudaSuccess;
  static KernelHandle kernel(reinterpret_cast<const void*>(&unite_lists_kernel), kUniteBytes);
  const GridSize grid = grid_for(u.unions);
  void* args[] = {&u};
  return kernel.launch(dim3(grid.x, grid.y), kUniteThreads, args, target);
}

}  // namespace strobe::cuda
