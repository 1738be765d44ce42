// Packs a mask as data on the device: the words that the CPU's packing writes (cpu/mask_pack.cpp),
// bit for bit. strobe.h says from what, and into which words.
//
//   clear    nothing is in any list as yet
//   find     which blocks of keys a block of queries sees, and which of those in part: two bits a
//            pair of blocks in scratch memory, and their number. A thread block has one block of
//            queries and some windows of 32 blocks of keys: one where pairs have to be read, which
//            takes long, else up to 64. All that the mask is packed from is read here, once
//   room     from the numbers, where each list is, and which do not fit
//   write    entries, and the bits of partial blocks, which are read again
//   begins   where each list of keys is
//   keys     their entries, from the two bits: a thread block has a window of them and goes through
//            the blocks of queries
//   order    which lists are the longest
//
// No step waits for the host, and none has a number from another thread block of the same step but
// for sums of integers, whose order does not matter.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/checks.h"
#include "core/validate_mask.h"
#include "cuda/common/block_sum.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/machine.h"
#include "cuda/rows/mask_windows.cuh"

namespace strobe::cuda {

__global__ void __launch_bounds__(kPackThreads, 1)
    mask_clear_kernel(const __grid_constant__ MaskPack p) {
  const int64_t n = block_index() * kPackThreads + thread_index();
  if (n < 2 * p.l.blocks_q) p.list(0)[n] = 0;
  if (n < 2 * p.l.blocks_k) p.key_list(0)[n] = 0;
}

/// Which of a window's blocks are what.
struct FoundBlocks {
  uint32_t meet, part_whole, partial_list, full_list;  // part_whole: not seen whole by some row
};

__global__ void __launch_bounds__(kPackThreads, 1)
    mask_find_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const seen = reinterpret_cast<MaskIntervals*>(shared);
  auto* const found = reinterpret_cast<FoundBlocks*>(seen + kMostRows);
  auto* const read = reinterpret_cast<uint2*>(found + kMostWindows);
  const MaskWindow first = MaskWindow::of(p);
  if (!first.exists) return;
  const int warp = thread_index() / 32;
  const auto windows = static_cast<int>(first.windows.size());

  if (thread_index() < windows) found[thread_index()] = {};
  if (p.a.intervals) first.read_intervals(p, seen);
  __syncthreads();
  if (p.a.intervals) {
    for (int n = 0; n < windows; ++n) {
      uint32_t meet = 0, whole = ~0u;  // of the rows that this thread has read
      first.at(first.windows.begin + n).look_at_intervals(p, seen, meet, whole);
      uint32_t part_whole = ~whole;
      for (int step = 16; step > 0; step /= 2) {
        meet |= __shfl_xor_sync(0xffffffffu, meet, step);
        part_whole |= __shfl_xor_sync(0xffffffffu, part_whole, step);
      }
      if (lane_index() > 0) continue;
      if (meet) atomicOr(&found[n].meet, meet);
      if (part_whole) atomicOr(&found[n].part_whole, part_whole);
    }
  }
  // Entries that lead nowhere are left out.
  const auto look_at_list = [&](const int32_t* counts, const int32_t* blocks, int64_t columns,
                                uint32_t FoundBlocks::*list) {
    if (!counts || !blocks) return;
    const int64_t count = min64(max64(counts[first.list], 0), columns);
    for (int64_t n = thread_index(); n < count; n += kPackThreads) {
      const int64_t bit = int64_t{blocks[first.list * columns + n]} - first.windows.begin * kWindow;
      if (0 <= bit && bit < int64_t{windows} * kWindow)
        atomicOr(&(found[bit / kWindow].*list), 1u << (bit % kWindow));
    }
  };
  look_at_list(p.a.partial_counts, p.a.partial_blocks, p.a.partial_columns,
               &FoundBlocks::partial_list);
  look_at_list(p.a.full_counts, p.a.full_blocks, p.a.full_columns, &FoundBlocks::full_list);
  __syncthreads();

  // A thread has a window.
  const auto leave = [&](const MaskWindow& w, uint32_t full, uint32_t partial) {
    uint32_t* const kinds = p.kinds + (w.list * p.windows + w.window) * 2;
    kinds[0] = full | partial;
    kinds[1] = partial;
    auto* const numbers = reinterpret_cast<unsigned*>(p.list(w.list));
    if (partial) atomicAdd(numbers, static_cast<unsigned>(count_bits(partial)));
    if (kinds[0]) atomicAdd(numbers + 1, static_cast<unsigned>(count_bits(kinds[0])));
  };
  const auto take_lists = [&](const MaskWindow& w, const FoundBlocks& x, uint32_t& full,
                              uint32_t& partial) {
    full = x.full_list & w.there();
    partial = w.there() & ~full;
    if (p.a.partial_counts || p.a.full_counts) partial &= x.partial_list;
    if (p.a.intervals) partial &= x.meet;
  };
  uint32_t full = 0, partial = 0;
  if (!p.reads_pairs()) {
    if (thread_index() >= windows) return;
    const MaskWindow w = first.at(first.windows.begin + thread_index());
    const FoundBlocks& x = found[thread_index()];
    take_lists(w, x, full, partial);
    const uint32_t in_part = p.a.intervals ? x.part_whole : 0;
    leave(w, full | (partial & ~in_part), partial & in_part);
    return;
  }
  // Only the pairs themselves say what is seen: by all warps, of the only window.
  take_lists(first, found[0], full, partial);
  uint2 own = make_uint2(0, 0);  // full ones, partial ones
  int turn = 0;
  for (uint32_t rest = partial; rest != 0; rest &= rest - 1) {
    if (turn++ % kPackWarps != warp) continue;
    const int bit = __ffs(static_cast<int>(rest)) - 1;
    const MaskBlock block = MaskBlock::of(p, first, seen, first.block(bit));
    bool some = false, every = true;
    for (int64_t n = 0; n < p.l.block_k / 32; ++n) {
      const uint32_t whole = block.whole_word(n);
#pragma unroll 8
      for (int64_t row = 0; row < first.queries.size(); ++row) {
        const uint32_t bits = block.word(row, n);
        some |= bits != 0;
        every &= bits == whole;
      }
    }
    if (every) own.x |= 1u << bit;
    if (some && !every) own.y |= 1u << bit;
  }
  if (lane_index() == 0) read[warp] = own;
  __syncthreads();
  if (thread_index() > 0) return;
  partial = 0;
  for (int n = 0; n < kPackWarps; ++n) full |= read[n].x, partial |= read[n].y;
  leave(first, full, partial);
}

/// One thread block. A list that does not fit counts for those behind it all the same.
__global__ void __launch_bounds__(kScanThreads, 1)
    mask_room_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const of_warps = reinterpret_cast<int64_t*>(shared);
  const MaskLayout& l = p.l;
  int64_t entries = 0, partial = 0, over = 0;
  for (int64_t first = 0; first < l.blocks_q; first += kScanThreads) {
    const int64_t n = first + thread_index();
    const bool exists = n < l.blocks_q;
    const int64_t some = exists ? p.list(n)[0] : 0, count = exists ? p.list(n)[1] : 0;
    int64_t all_entries = 0, all_partial = 0, all_over = 0;
    const int64_t entries_before = entries + sum_before(count, of_warps, all_entries);
    const int64_t partial_before = partial + sum_before(some, of_warps, all_partial);
    const bool fits = (count == 0 || entries_before + count <= l.capacity) &&
                      (some == 0 || partial_before + some <= l.partial);
    sum_before(int64_t{!fits}, of_warps, all_over);
    if (exists) {
      p.list(n)[0] = static_cast<int32_t>(min64(entries_before, l.capacity));
      p.list(n)[1] = fits ? static_cast<int32_t>(count) : -1;
      *p.bits_begin(n) = static_cast<int32_t>(min64(partial_before, l.partial));
    }
    entries += all_entries;
    partial += all_partial;
    over += all_over;
  }
  const int64_t header[] = {STROBE_MASK_MAGIC, l.block_q,  l.block_k, l.blocks_q,
                            l.blocks_k,        l.capacity, l.partial, entries,
                            partial,           over,       p.rows_q,  p.rows_k};
  constexpr int kNumbers = sizeof header / sizeof header[0];
  if (thread_index() > 0) return;
#pragma unroll
  for (int n = 0; n < MaskLayout::kHeader; ++n) {
    const int64_t x = n < kNumbers ? header[n] : 0;
    p.words[n] = static_cast<int32_t>(min64(x, INT32_MAX));
  }
}

/// Bits of the words before `word`, of every second word; by a warp.
__device__ __forceinline__ int64_t bits_before(const uint32_t* words, int64_t word) {
  int64_t sum = 0;
  for (int64_t n = lane_index(); n < word; n += 32) sum += count_bits(words[2 * n]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

/// By a warp: the words of bits of a partial block, which is the place-th.
__device__ __forceinline__ void write_bits(const MaskPack& p, const MaskWindow& w,
                                           const MaskBlock& block, int64_t place) {
  const int lane = lane_index();
  const int64_t width = p.l.block_k / 32, height = p.l.block_q / 32;
  auto* const by_query =
      reinterpret_cast<uint32_t*>(p.words + p.l.bits + place * p.l.words_of_bits());
  auto* const by_key =
      reinterpret_cast<uint32_t*>(p.words + p.l.key_bits + place * p.l.words_of_bits());
  for (int64_t square = 0; square < height * width; ++square) {
    const int64_t q = square / width, k = square % width;
    uint32_t own = 0, transposed = 0;  // this lane's row, and its column
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const int64_t row = q * 32 + i;
      const uint32_t bits = row < w.queries.size() ? block.word(row, k) : 0;
      if (i == lane) own = bits;
    }
#pragma unroll 8
    for (int j = 0; j < 32; ++j) {
      const uint32_t column = __ballot_sync(0xffffffffu, (own >> j & 1) != 0);
      if (j == lane) transposed = column;
    }
    by_query[(q * 32 + lane) * width + k] = own;
    by_key[(k * 32 + lane) * height + q] = transposed;
  }
}

__global__ void __launch_bounds__(kPackThreads, 1)
    mask_write_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const seen = reinterpret_cast<MaskIntervals*>(shared);
  const MaskWindow first = MaskWindow::of(p);
  if (!first.exists) return;
  const int32_t count = p.list(first.list)[1];
  if (count <= 0) return;
  if (p.a.intervals) {
    first.read_intervals(p, seen);
    __syncthreads();
  }
  const uint32_t* const kinds = p.kinds_of(first.list);
  const int warp = thread_index() / 32, lane = lane_index();
  // Of the windows before this one.
  int64_t entries = bits_before(kinds, first.windows.begin);
  int64_t places = *p.bits_begin(first.list) + bits_before(kinds + 1, first.windows.begin);
  int turn = 0;
#pragma unroll 1
  for (int64_t window = first.windows.begin; window < first.windows.end; ++window) {
    const uint32_t visited = kinds[2 * window], partial = kinds[2 * window + 1];
    if (visited == 0) continue;
    const MaskWindow w = first.at(window);
    const auto place = [&](int bit) { return places + count_bits(partial & bits_below(bit)); };
    if (window % kPackWarps == warp) {
      const int64_t n = entries + count_bits(visited & bits_below(lane));
      // (n is below count, unless packed sequences overlap.)
      if ((visited >> lane & 1) != 0 && n < count) {
        int32_t* const entry = p.words + p.l.entries + (p.list(w.list)[0] + n) * MaskLayout::kEntry;
        entry[0] = static_cast<int32_t>(w.block(lane));
        entry[1] = (partial >> lane & 1) != 0 ? static_cast<int32_t>(place(lane)) : -1;
        atomicAdd(reinterpret_cast<unsigned*>(p.key_list(w.plane.first_k + w.block(lane)) + 1), 1u);
      }
    }
    for (uint32_t rest = partial; rest != 0; rest &= rest - 1) {
      if (turn++ % kPackWarps != warp) continue;
      const int bit = __ffs(static_cast<int>(rest)) - 1;
      if (place(bit) < p.l.partial)  // as above
        write_bits(p, w, MaskBlock::of(p, w, seen, w.block(bit)), place(bit));
    }
    entries += count_bits(visited);
    places += count_bits(partial);
  }
}

/// A thread block for each sequence and head.
__global__ void __launch_bounds__(kScanThreads, 1)
    mask_begins_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const of_warps = reinterpret_cast<int64_t*>(shared);
  if (block_index() >= p.planes) return;
  const MaskPlane plane = p.plane(block_index());
  // The entries lie where those of the blocks of queries lie, which are as many or, beside some
  // that do not fit, more.
  int64_t at = p.list(plane.first_q)[0];
  for (int64_t first = 0; first < plane.blocks_k; first += kScanThreads) {
    const int64_t n = first + thread_index();
    int32_t* const list = p.key_list(plane.first_k + n);
    int64_t all = 0;
    const int64_t begin = at + sum_before(n < plane.blocks_k ? int64_t{list[1]} : 0, of_warps, all);
    if (n < plane.blocks_k) list[0] = static_cast<int32_t>(begin);
    at += all;
  }
}

/// A thread block for each window of blocks of keys. A thread has a block of queries, and finds
/// what its list says of the window; a lane besides one of the window's blocks of keys.
__global__ void __launch_bounds__(kKeyThreads, 1)
    mask_keys_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kWarps = kKeyThreads / 32;
  auto* const of_warps = reinterpret_cast<int32_t*>(shared);  // [2][warp][block of keys]
  const int64_t window = block_index() % p.windows;
  if (block_index() / p.windows >= p.planes) return;
  const MaskPlane plane = p.plane(block_index() / p.windows);
  if (window * kWindow >= plane.blocks_k) return;
  const int warp = thread_index() / 32, lane = lane_index();
  const int64_t own_key = window * kWindow + lane;
  const int32_t* const list = p.key_list(plane.first_k + min64(own_key, plane.blocks_k - 1));
  const int64_t begin = list[0], count = list[1];  // of the lane's block of keys
  int32_t at = 0;                                  // its entries of the queries before
  for (int64_t first = 0, turn = 0; first < plane.blocks_q; first += kKeyThreads, ++turn) {
    const int64_t q = first + thread_index(), of_q = plane.first_q + q;
    const int32_t of_list = q < plane.blocks_q ? p.list(of_q)[1] : 0;
    uint32_t visited = 0;
    if (of_list > 0) visited = p.kinds_of(of_q)[2 * window];
    uint32_t queries = 0;  // of the warp's, those whose list has the lane's block of keys
    for (int j = 0; j < kWindow; ++j) {
      const uint32_t those = __ballot_sync(0xffffffffu, (visited >> j & 1) != 0);
      if (j == lane) queries = those;
    }
    int32_t* const counts = of_warps + turn % 2 * kWarps * kWindow;
    counts[warp * kWindow + lane] = count_bits(queries);
    __syncthreads();  // and all have read the counts before the last ones
    int32_t before = at;
    for (int n = 0; n < kWarps; ++n) {
      if (n < warp) before += counts[n * kWindow + lane];
      at += counts[n * kWindow + lane];
    }
    // The list's entries ascend with their blocks: the first one of this window.
    const int32_t* const entries =
        p.words + p.l.entries + (visited != 0 ? int64_t{p.list(of_q)[0]} * MaskLayout::kEntry : 0);
    int64_t rank = 0;
    for (int64_t size = visited != 0 && window > 0 ? of_list : 0; size > 0;) {
      const int64_t half = size / 2;
      const bool past = entries[(rank + half) * MaskLayout::kEntry] < window * kWindow;
      rank += past ? half + 1 : 0;
      size = past ? size - half - 1 : half;
    }
    for (int j = 0; j < kWindow; ++j) {
      const uint32_t those = __shfl_sync(0xffffffffu, queries, j);
      if (those == 0) continue;
      const int64_t n = __shfl_sync(0xffffffffu, before, j) + count_bits(those & bits_below(lane));
      const int64_t to = __shfl_sync(0xffffffffu, begin, j) + n;
      const bool has_room = n < __shfl_sync(0xffffffffu, count, j) && to < p.l.capacity;
      if ((visited >> j & 1) == 0) continue;
      // Where sequences overlap, which nobody has checked, lists may begin where others are, and
      // have other entries.
      if (has_room && rank < of_list) {
        int32_t* const entry = p.words + p.l.key_entries + to * MaskLayout::kKeyEntry;
        entry[0] = static_cast<int32_t>(q);
        entry[1] = entries[rank * MaskLayout::kEntry + 1];
        entry[2] = static_cast<int32_t>(rank);
        entry[3] = of_list;
      }
      ++rank;
    }
  }
}

/// A thread block for the lists of queries, one for those of keys: sorts their numbers by their
/// entries, four bits at a time, most first. A thread has neighbours, so that what is equal stays
/// in order.
__global__ void __launch_bounds__(kScanThreads, 1)
    mask_order_kernel(const __grid_constant__ MaskPack p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kDigits = 16;
  auto* const of_warps = reinterpret_cast<int32_t*>(shared);
  auto* const begins = of_warps + kScanThreads / 32;  // [digit, the highest first][thread]
  const bool keys = blockIdx.x == 1;
  const int64_t lists = keys ? p.l.blocks_k : p.l.blocks_q;
  const int32_t* const list = keys ? p.key_list(0) : p.list(0);
  int32_t* const order = p.words + (keys ? p.l.key_order : p.l.order);
  int32_t* const other = p.unsorted + (keys ? p.l.blocks_q : 0);
  int passes = 1;
  while (passes < 8 && p.most_in_list[keys] >> (4 * passes) != 0) ++passes;
  const int64_t share = ceil_div(lists, kScanThreads);
  const Range own{min64(thread_index() * share, lists), min64((thread_index() + 1) * share, lists)};
  for (int pass = 0; pass < passes; ++pass) {
    // The last pass writes the result.
    int32_t* const to = (passes - pass) % 2 == 1 ? order : other;
    const int32_t* const from = to == order ? other : order;
    const auto number = [&](int64_t n) { return pass == 0 ? static_cast<int32_t>(n) : from[n]; };
    const auto slot = [&](int32_t n) {
      const int32_t count = list[2 * int64_t{n} + 1];
      const int digit = (count < 0 ? 0 : count) >> (4 * pass) & (kDigits - 1);
      return begins + (kDigits - 1 - digit) * kScanThreads + thread_index();
    };
    for (int digit = 0; digit < kDigits; ++digit) begins[digit * kScanThreads + thread_index()] = 0;
    for (int64_t n = own.begin; n < own.end; ++n) ++*slot(number(n));
    __syncthreads();
    // The slots one after the other: a thread has kDigits of them.
    int32_t* const mine = begins + thread_index() * kDigits;
    int32_t sum = 0, all = 0;
    for (int n = 0; n < kDigits; ++n) sum += mine[n];
    int32_t before = sum_before(sum, of_warps, all);
    for (int n = 0; n < kDigits; ++n) {
      const int32_t here = mine[n];
      mine[n] = before;
      before += here;
    }
    __syncthreads();
    for (int64_t n = own.begin; n < own.end; ++n) {
      const int32_t x = number(n);
      to[(*slot(x))++] = x;
    }
    __syncthreads();
  }
}

namespace {

/// The kernels in their order.
cudaError_t launch_mask_pack(MaskPack& p, const LaunchTarget& target) {
  constexpr int64_t kScan = kScanThreads / 32 * sizeof(int64_t);
  constexpr int64_t kIntervals = kMostRows * sizeof(MaskIntervals);
  static KernelHandle clear(reinterpret_cast<const void*>(&mask_clear_kernel)),
      find(reinterpret_cast<const void*>(&mask_find_kernel),
           kIntervals + kMostWindows * sizeof(FoundBlocks) + kPackWarps * sizeof(uint2)),
      room(reinterpret_cast<const void*>(&mask_room_kernel), kScan),
      write(reinterpret_cast<const void*>(&mask_write_kernel), kIntervals),
      begins(reinterpret_cast<const void*>(&mask_begins_kernel), kScan),
      keys(reinterpret_cast<const void*>(&mask_keys_kernel),
           2 * kKeyThreads / 32 * kWindow * sizeof(int32_t)),
      order(reinterpret_cast<const void*>(&mask_order_kernel),
            (kScanThreads / 32 + 16 * kScanThreads) * sizeof(int32_t));
  const int64_t groups = p.planes * p.lists_q * p.groups;
  const struct {
    KernelHandle& kernel;
    int64_t blocks;
    int threads;
  } steps[] = {{clear, ceil_div(2 * max64(p.l.blocks_q, p.l.blocks_k), kPackThreads), kPackThreads},
               {find, groups, kPackThreads},
               {room, 1, kScanThreads},
               {write, groups, kPackThreads},
               {begins, p.planes, kScanThreads},
               {keys, p.planes * p.windows, kKeyThreads},
               {order, 2, kScanThreads}};
  for (const auto& [kernel, blocks, threads] : steps) {
    if (blocks == 0) continue;
    const GridSize grid = grid_for(blocks);
    void* args[] = {&p};
    const cudaError_t error = kernel.launch(dim3(grid.x, grid.y), threads, args, target);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

Status pack_mask(const AttentionProblem& problem, const MaskArgs& a) {
  const auto index = problem.device_index;
  STROBE_RETURN_IF_ERROR(check_device(index));
  for (const MaskPointer& x : mask_pointers(problem, problem.seqlen_k, a)) {
    if (x.extents.empty()) continue;
    STROBE_RETURN_IF_ERROR(check_device_pointer(x.name, x.pointer, index));
  }
  const DeviceGuard guard(index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");

  MaskPack p{};
  p.a = a;
  p.l = MaskLayout::of(problem);
  p.rows = MaskRows::of(problem, a.cu_seqlens_q, a.cu_seqlens_k);
  p.words = static_cast<int32_t*>(a.packed);
  p.rows_q = MaskLayout::rows_q(problem);
  p.rows_k = MaskLayout::rows_k(problem);
  p.lists_q = ceil_div(problem.seqlen_q, p.l.block_q);
  p.lists_k = ceil_div(problem.seqlen_k, p.l.block_k);
  p.windows = ceil_div(p.lists_k, kWindow);
  // Heads without queries may be billions.
  p.planes = p.l.blocks_q > 0 && p.lists_q > 0 ? problem.mask.batch * p.l.heads : 0;
  // So many that there are four thread blocks for each multiprocessor, if there is work for them.
  const DeviceProperties& device = machine().devices[static_cast<size_t>(index)];
  const int64_t shared_out = p.planes * p.lists_q * p.windows / (4 * device.multiprocessors);
  p.windows_at_once =
      p.reads_pairs() ? 1 : max64(1, min64(min64(p.windows, kMostWindows), shared_out));
  p.groups = ceil_div(p.windows, p.windows_at_once);
  p.most_in_list[0] = static_cast<int32_t>(p.lists_k);
  p.most_in_list[1] = static_cast<int32_t>(p.lists_q);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int64_t kinds = p.l.blocks_q * p.windows * 2;
  void* scratch = nullptr;  // from the stream's memory pool: ordered like a launch, and capturable
  const auto bytes = static_cast<size_t>(kinds + p.l.blocks_q + p.l.blocks_k + 1) * 4;
  cudaError_t error = cudaMallocAsync(&scratch, bytes, stream);
  if (error != cudaSuccess) return cuda_status(error, "allocating scratch memory");
  p.kinds = static_cast<uint32_t*>(scratch);
  p.unsorted = static_cast<int32_t*>(scratch) + kinds;
  const LaunchTarget target{stream, index, device.multiprocessors, device.shared_bytes};
  error = launch_mask_pack(p, target);
  const cudaError_t freed = cudaFreeAsync(scratch, stream);
  if (error == cudaSuccess) error = freed;
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

}  // namespace strobe::cuda
