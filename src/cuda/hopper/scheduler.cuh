// Which tile of queries a persistent thread block computes next.
//
// The first is its own number; the others come from a counter in global memory, so that a block
// that was given short tiles, or a slow multiprocessor, takes what is left. Where there are few
// tiles for each block, they are fixed: nothing can be evened out there, and the counter's answer
// would take as long as a short tile. The order is StaticOrder's; where numbers of queries differ,
// sequence after sequence, in each of them the last tile of all heads first.
#ifndef STROBE_CUDA_HOPPER_SCHEDULER_CUH_
#define STROBE_CUDA_HOPPER_SCHEDULER_CUH_

#include <cstdint>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "cuda/common/params.h"
#include "cuda/common/stagger.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda {

/// Where a tile lies: its queries begin there, as far as there are any. head: of groups of 2^pack.
struct TilePlace {
  int32_t batch, head, begin;
};

/// The order, made on the host.
struct TileOrder {
  StaticOrder tiles;  // where numbers of queries differ, only an upper bound
  TileRule rule;
  bool fixed;      // a block takes every gridDim.x-th tile, and needs no counter
  uint32_t nonce;  // of this launch, never 0
  unsigned long long* counter;
  Stagger stagger;

  /// kMay: false in kernels whose tiles are never fixed: `fixed` is then not read.
  template <bool kMay>
  STROBE_INLINE bool is_fixed() const {
    return kMay && fixed;
  }
};

/// The same where a tile's chunks of keys may be shared by thread blocks (key_chunks.h): the pieces
/// of a tile have numbers one after the other.
struct ChunkedTileOrder : TileOrder {
  Divisor pieces;

  /// Of the piece with this number.
  STROBE_INLINE constexpr int32_t tile(int32_t number) const {
    return static_cast<int32_t>(pieces.divide(static_cast<uint32_t>(number)));
  }
  STROBE_INLINE constexpr int32_t chunk(int32_t number) const {
    return number - tile(number) * static_cast<int32_t>(pieces.value);
  }
};

/// The order with a bias. One that sequences or heads share is larger than all else that a head
/// reads: a tile comes for all of them side by side, so that L2 has its bias for all but the first.
struct BiasTileOrder : TileOrder {
  Divisor sequences;  // 1: the order is that of the tiles

  STROBE_INLINE static constexpr BiasTileOrder make(const TileOrder& order, const CommonParams& p,
                                                    int32_t tile_q) {
    const Bias& b = p.bias;
    const int64_t sequences = b.batch_stride == 0 ? p.batch : 1;
    const int64_t sharers = sequences * (b.head_stride == 0 ? p.heads : 1);
    BiasTileOrder o{order, Divisor(1)};
    if (sharers == 1 || b.row_stride == 0 || p.query_counts_differ()) return o;
    o.tiles = StaticOrder::make(p, tile_q, true, sharers);
    o.sequences = Divisor(static_cast<uint32_t>(sequences));
    return o;
  }
  /// Where the tile lies that the order of the tiles has at `place`.
  STROBE_INLINE constexpr TilePlace at(const TilePlace& place) const {
    if (sequences.value == 1) return place;
    const auto n =
        static_cast<uint32_t>(place.batch) * tiles.heads.value + static_cast<uint32_t>(place.head);
    const uint32_t head = sequences.divide(n);
    return {static_cast<int32_t>(n - head * sequences.value), static_cast<int32_t>(head),
            place.begin};
  }
};

/// The order under a mask as data. Where the mask is one for all sequences and heads, and its
/// blocks of queries are the tiles, the mask's own order says which tiles of a head visit most, and
/// they may come first.
struct MaskedTileOrder : TileOrder {
  // Where one tile visits several times what they do on average (a block of queries that sees all
  // keys, beside those with a window), heads come in larger groups than L2 holds: as the last
  // group's first, such a tile would otherwise begin when the other thread blocks are nearly done.
  static constexpr int64_t kUnevenHeads = 32;
  static constexpr int32_t kUneven = 4;

  bool has_order;
  // L2 holds a head's keys. Else neighbours had better come side by side, since they share keys,
  // unless the mask is uneven: there most of them visit the same number, and are neighbours yet.
  bool fits;
  StaticOrder uneven;

  STROBE_INLINE static constexpr MaskedTileOrder make(const TileOrder& order, const CommonParams& p,
                                                      int32_t tile_q) {
    MaskedTileOrder o{order, false, false, {}};
    const MaskLayout& l = p.mask_layout;
    o.has_order = !p.query_counts_differ() && l.block_q == tile_q && l.blocks_q == l.per_sequence_q;
    o.fits = StaticOrder::head_bytes(p) <= StaticOrder::kGroupBytes;
    if (o.has_order) {
      if (o.fits) o.tiles = StaticOrder::make(p, tile_q, true, 1);
      o.uneven = StaticOrder::make(p, tile_q, true, kUnevenHeads);
    }
    return o;
  }
  /// Whether the mask is uneven: the same for all thread blocks.
  STROBE_INLINE constexpr bool is_uneven(const CommonParams& p) const {
    if (!has_order) return false;
    constexpr int kNeeded = 7;  // entries: a word of the header
    const int32_t* const words = p.mask;
    const int32_t visits_most = words[p.mask_layout.lists + 2 * int64_t{list_at(p, 0)} + 1];
    return int64_t{visits_most} * tiles.tiles > int64_t{kUneven} * words[kNeeded];
  }
  STROBE_INLINE constexpr bool by_visits(bool is_uneven) const {
    return has_order && (fits || is_uneven);
  }
  /// Where the tile with this number lies.
  STROBE_INLINE constexpr TilePlace place(const CommonParams& p, int32_t number,
                                          bool is_uneven) const {
    const WorkItem item = (is_uneven ? uneven : tiles).item(number);
    const auto last = static_cast<int32_t>(tiles.tiles) - 1;
    const int32_t list = list_at(p, last - item.tile);
    return {item.batch, item.head, list * static_cast<int32_t>(p.mask_layout.block_q)};
  }

 private:
  /// The block of queries that is the n-th by its visits. Words that are no mask's stay inside.
  STROBE_INLINE constexpr int32_t list_at(const CommonParams& p, int32_t n) const {
    const int64_t list = p.mask[p.mask_layout.order + n];
    return static_cast<int32_t>(min64(max64(list, 0), int64_t{tiles.tiles} - 1));
  }
};

#if defined(__CUDACC__)

/// The tiles of one thread block, kTileRows rows each; to be run by one warp. kMayBeFixed: as in
/// TileOrder::is_fixed. pack: log2 of the heads of a tile. Of a ChunkedTileOrder it takes piece
/// after piece.
template <int kTileRows, bool kMayBeFixed, typename Sequences, typename Order = TileOrder>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(const Order& order, const Sequences& params, int pack)
      : order_(order), params_(params), pack_(pack), next_(blockIdx.x) {}

  /// The next tile; first: whether it is the first one. False when there is none; must not be
  /// called after that. (Values that can be computed again are not kept, since the warp has few
  /// registers.)
  __device__ bool next(bool first, TilePlace& place) {
    if (!first) next_ = fixed() ? next_ + static_cast<int32_t>(gridDim.x) : fetch();
    const bool there = find(tile_of(next_), place);
    // A block whose own number is past the end takes one from the counter, too: finish() counts on
    // each block taking exactly one number past the end.
    if (!there && !fixed()) {
      if (next_ == static_cast<int32_t>(blockIdx.x)) next_ = fetch();
      finish(next_);
    }
    return there;
  }

  /// Whether a block's tiles are fixed. Where they are not, next() should be called as late as
  /// possible: the later tiles are handed out, the more evenly blocks finish.
  __device__ bool fixed() const { return order_.template is_fixed<kMayBeFixed>(); }

  /// Number of the tile, or piece, that next() gave.
  __device__ int32_t number() const { return next_; }

 private:
  static constexpr bool kHasPieces = std::is_same_v<Order, ChunkedTileOrder>;
  __device__ __forceinline__ int32_t tile_of(int32_t number) const {
    if constexpr (kHasPieces) return order_.tile(number);
    return number;
  }

  // The upper half of the counter holds a number that only this launch has (the nonce), the lower
  // half the count. The first block that reads the counter finds something else in the upper half,
  // whatever was in memory before, and sets both. This saves a memset before each launch, 1.5
  // microseconds.
  __device__ int32_t fetch() {
    unsigned long long got = 0;
    if (ptx::thread_again() % 32 == 0) {
      unsigned long long* const word = order_.counter;
      const auto nonce = static_cast<unsigned long long>(order_.nonce) << 32;
      while (!ready_) {
        const unsigned long long old = *static_cast<volatile unsigned long long*>(word);
        ready_ = old >> 32 == order_.nonce || atomicCAS(word, old, nonce | gridDim.x) == old;
      }
      got = atomicAdd(word, 1ull);
    }
    return static_cast<int32_t>(__shfl_sync(0xffffffffu, static_cast<uint32_t>(got), 0));
  }
  // Every block takes exactly one number past the end; whoever takes the last of those is the last
  // to touch the counter, and leaves it as if no launch had been.
  __device__ void finish(int32_t number) {
    const auto blocks = static_cast<int32_t>(gridDim.x);
    // Where find() searches, begin_ has counted all tiles when the search comes to the end.
    int32_t total =
        params_.query_counts_differ() ? begin_ : static_cast<int32_t>(order_.tiles.items);
    if constexpr (kHasPieces) total *= static_cast<int32_t>(order_.pieces.value);
    const int32_t last = (total > blocks ? total : blocks) + blocks - 1;
    if (number == last && threadIdx.x % 32 == 0) atomicExch(order_.counter, 0ull);
  }

  __device__ bool find(int32_t t, TilePlace& place) {
    if (!params_.query_counts_differ()) {
      if (t >= static_cast<int32_t>(order_.tiles.items)) return false;
      __builtin_assume(order_.tiles.items <= INT32_MAX);  // the launcher saw to it
      const WorkItem item = order_.tiles.item(t);
      place = {item.batch, item.head, item.tile * (kTileRows >> pack_)};
      return true;
    }
    // Sequence after sequence, 32 at a time. Numbers only grow, so the search goes on where it
    // stopped.
    const int lane = ptx::thread_again() % 32;
    while (batch_ < params_.batch) {
      const int32_t b = batch_ + lane;
      const int32_t rows =
          b < params_.batch ? static_cast<int32_t>(params_.sequence_rows(b).seqlen_q) : 0;
      const int32_t tiles = ((rows << pack_) + kTileRows - 1) / kTileRows;
      const int32_t heads = params_.heads >> pack_;
      int32_t end = tiles * heads;  // inclusive scan over the lanes
      for (int step = 1; step < 32; step *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
      }
      const uint32_t past = __ballot_sync(0xffffffffu, t < begin_ + end);
      if (past) {
        const int source = __ffs(static_cast<int>(past)) - 1;
        const int32_t here = __shfl_sync(0xffffffffu, tiles, source);
        const int32_t rest = t - begin_ - __shfl_sync(0xffffffffu, end - tiles * heads, source);
        const auto from_end =
            static_cast<int32_t>(order_.tiles.heads.divide(static_cast<uint32_t>(rest)));
        place = {batch_ + source, rest - from_end * heads,
                 (here - 1 - from_end) * (kTileRows >> pack_)};
        return true;
      }
      begin_ += __shfl_sync(0xffffffffu, end, 31);
      batch_ += 32;
    }
    return false;
  }

  const Order& order_;
  const Sequences& params_;
  const int pack_;
  int32_t next_;
  int32_t batch_ = 0, begin_ = 0;  // where a search stands, and the first tile there
  bool ready_ = false;
};

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOPPER_SCHEDULER_CUH_
