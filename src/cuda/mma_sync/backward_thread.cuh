// One thread's view of the backward pass through mma.sync: which half and warp it is of, what of
// the tiles is its warp's, where things lie in shared memory, which item and step it is at. What
// threads do is in backward_copies.cuh, backward_products.cuh, backward_results.cuh, and in the two
// halves' loops, backward_weights.cuh and backward_gradients.cuh.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_THREAD_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_THREAD_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/backward/math.cuh"
#include "cuda/common/config.h"
#include "cuda/common/params.h"
#include "cuda/mma_sync/backward_barriers.cuh"
#include "cuda/mma_sync/backward_item.cuh"
#include "cuda/mma_sync/backward_layout.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm80 {

/// kGeneral: the kernel has softcap, ALiBi and dropout. kOrdered: it can keep the order of
/// additions to dQ; with kGeneral it does where asked to, else always. (What only that takes costs
/// a kernel 2 % where it is there and not used.)
/// kBias: a general kernel with an additive bias; where Shape::kMask, which is a general kernel
/// with a mask as data, with a bias if there is one.
template <typename Shape_, bool kGeneral_, bool kOrdered, bool kBias_>
struct BackwardThread {
  using Shape = Shape_;
  static constexpr BackwardConfig kC = Shape::kConfig, kConfig = kC;
  static constexpr bool kGeneral = kGeneral_, kBias = kBias_, kMask = Shape::kMask;
  static constexpr bool kHides = kBias || kMask;  // pairs that the rule shows
  using Step = std::conditional_t<kMask, MaskedStep, HeadStep>;
  using StepRecord = typename Shape::StepRecord;
  using StepFinder = typename Shape::StepFinder;
  using Barriers = BackwardBarriers<Shape>;
  using T = typename Shape::T;
  using KTile = typename Shape::KTile;
  using QTile = typename Shape::QTile;
  using ScoreTile = typename Shape::ScoreTile;

  const BackwardParams& p;
  const BackwardScratch& scratch;
  const uint32_t shared;  // address of all shared memory
  const Barriers barriers;
  const int half_thread;  // of the half
  // Steps so far in the low half of the bits, items in the high half. Both matter only modulo 4,
  // for the stages of what is in shared memory. One register, for the kernel has none to spare.
  uint32_t count = 0;

  __device__ __forceinline__ BackwardThread(const BackwardParams& params,
                                            const BackwardScratch& scratch_, uint32_t shared_,
                                            int half)
      : p(params),
        scratch(scratch_),
        shared(shared_),
        barriers{shared_},
        half_thread(static_cast<int>(threadIdx.x) - half * Shape::kHalfThreads) {}

  static_assert((kOrdered || !kGeneral) && (kGeneral || !kBias) && (kGeneral || !kMask));
  __device__ __forceinline__ bool deterministic() const {
    return kGeneral ? p.deterministic != 0 : kOrdered;
  }

  // --- Where the thread stands ---

  /// Where a thread stands in its half, and what follows from it.
  struct Place {
    int thread;
    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int warp() const { return thread / 32; }
    // Where the warp's keys, queries and columns begin.
    __device__ __forceinline__ int key_row() const { return 32 * (warp() / Shape::kQueryWarps); }
    __device__ __forceinline__ int query() const {
      return Shape::kSplit ? warp() % Shape::kQueryWarps * Shape::kQueries : 0;
    }
    __device__ __forceinline__ int column() const {
      return Shape::kSplit ? warp() % Shape::kQueryWarps * Shape::kColumns : 0;
    }
    // Which queries and columns of the tile's dQ are the warp's.
    static constexpr int kDqColumnWarps = Shape::kHalfWarps / Shape::kDqRowWarps;
    __device__ __forceinline__ int dq_row() const { return 32 * (warp() / kDqColumnWarps); }
    __device__ __forceinline__ int dq_column() const {
      return warp() % kDqColumnWarps * Shape::kDqColumns;
    }
    // The lane's part of an address in a tile of rows, and of scores.
    __device__ __forceinline__ uint32_t part_a() const {
      return static_cast<uint32_t>(KTile::fragment_offset(lane(), 0));
    }
    __device__ __forceinline__ uint32_t part_b() const {
      return static_cast<uint32_t>(KTile::fragment_offset_b(lane(), 0));
    }
    __device__ __forceinline__ uint32_t score_part_a() const {
      return static_cast<uint32_t>(ScoreTile::fragment_offset(lane(), 0));
    }
    __device__ __forceinline__ uint32_t score_part_b() const {
      return static_cast<uint32_t>(ScoreTile::fragment_offset_b(lane(), 0));
    }
  };
  /// Made anew for each phase of a step, from a thread number that the compiler takes for unknown.
  /// It would otherwise compute every address before the loop, and spill them all.
  __device__ __forceinline__ Place fresh_place() const {
    return {ptx::thread_again() % Shape::kHalfThreads};
  }
  /// The same for what every step needs: kept from step to step where there are registers.
  __device__ __forceinline__ Place place() const {
    if constexpr (Shape::kFresh) return fresh_place();
    return {half_thread};
  }
  __device__ __forceinline__ void arrive_warp(uint32_t barrier) const {
    ptx::barrier_arrive_warp(barrier, place().lane());
  }

  // --- Where things are in shared memory ---

  __device__ __forceinline__ uint32_t k_tile() const {
    return shared + static_cast<uint32_t>(Shape::kKAt);
  }
  __device__ __forceinline__ uint32_t v_tile() const {
    return shared + static_cast<uint32_t>(Shape::kVAt);
  }
  /// A stage of Q or dO; offset: of their first stage.
  __device__ __forceinline__ uint32_t q_tile(int offset, int stage) const {
    return shared + static_cast<uint32_t>(offset + stage * QTile::kBytes);
  }
  /// This thread's weights in the exchange: vectors 512 bytes apart.
  __device__ __forceinline__ uint32_t exchange(const Place& me) const {
    return shared + static_cast<uint32_t>(Shape::kExchangeAt + 64 * Shape::kQueries * me.warp() +
                                          16 * me.lane());
  }
  /// Which queries see each key of the item (key_limits). They are loaded and freed together with
  /// K.
  __device__ __forceinline__ uint32_t limits_at() const {
    return shared + static_cast<uint32_t>(Shape::kLimitsAt);
  }
  /// For SeenQueries of the lane's rows from the warp's row `row` on.
  __device__ __forceinline__ uint32_t seen_limits(const Place& me, int row) const {
    return limits_at() + static_cast<uint32_t>(8 * (me.key_row() + row + me.lane() / 4));
  }

  // The record of an item: single members are read by their address, whole ones where it is rare.
  __device__ __forceinline__ uint32_t record_at(int i, size_t offset) const {
    return shared + static_cast<uint32_t>(Shape::kRecordAt + i % 2 * Shape::kRecordBytes + offset);
  }
  __device__ __forceinline__ int32_t record_int(int i, size_t offset) const {
    return static_cast<int32_t>(ptx::load_shared(record_at(i, offset)));
  }
  __device__ __forceinline__ int32_t record_int(size_t offset) const {
    return record_int(item(), offset);
  }
  __device__ __forceinline__ ItemRecord& record(int i) const {
    extern __shared__ __align__(1024) char shared_bytes[];
    return *reinterpret_cast<ItemRecord*>(shared_bytes + Shape::kRecordAt +
                                          i % 2 * Shape::kRecordBytes);
  }

  // --- Items and steps ---

  __device__ __forceinline__ int item() const { return static_cast<int>(count >> 16); }
  __device__ __forceinline__ int n_step() const { return static_cast<int>(count & 0xffffu); }
  __device__ __forceinline__ void next_item() { count += 0x10000u; }
  __device__ __forceinline__ void next_step() {
    count = (count & 0xffff0000u) | ((count + 1) & 0xffffu);
    // ptxas otherwise keeps the items' half once more, and spills it: before 9.0, and where
    // registers are short (with this it does so where queries are split).
    if constexpr (!kAddFour || kMask || (Shape::kFresh && !Shape::kSplit)) ptx::make_opaque(count);
  }

  /// Of item i; what nobody asks of it is not read.
  __device__ __forceinline__ decltype(auto) walk(int i) const {
    if constexpr (kWalksAreLists) {
      return static_cast<const ItemWalk&>(record(i).walk);
    } else {
      uint32_t x[4];
      ptx::load_shared_words(record_at(i, offsetof(ItemRecord, walk)), x);
      return IntervalWalk<int32_t>{static_cast<int32_t>(x[0]), static_cast<int32_t>(x[1]),
                                   static_cast<int32_t>(x[2]), static_cast<int32_t>(x[3])};
    }
  }
  __device__ __forceinline__ decltype(auto) walk() const { return walk(item()); }
  /// The first step of item i, of all steps the n-th; where it has none, any.
  __device__ __forceinline__ Step first_step(int i, [[maybe_unused]] int n) const {
    if constexpr (kMask) {
      if (record_int(i, offsetof(ItemRecord, steps)) <= 0) return {};
      return masked_step(n);
    } else {
      return HeadStep::first(walk(i), record_int(i, offsetof(ItemRecord, head_begin)), kDirection);
    }
  }
  /// The step after the one that the thread is at; where that is the last one, any.
  __device__ __forceinline__ Step after(Step step) const {
    if constexpr (kMask) {
      if (!is_last(step)) step = masked_step(n_step() + 1);
    } else {
      step.advance(walk(), kDirection);
    }
    return step;
  }
  __device__ __forceinline__ bool is_last([[maybe_unused]] const Step& step) const {
    if constexpr (kMask) {
      return ptx::load_shared(last_at(n_step())) != 0;
    } else {
      return step.is_last(walk(), record_int(offsetof(ItemRecord, head_end)), kDirection);
    }
  }
  __device__ __forceinline__ bool masked([[maybe_unused]] const Step& step) const {
    if constexpr (kMask) {
      return true;
    } else {
      return !step.is_full(walk());
    }
  }
  /// The tile of queries of a step of item i.
  __device__ __forceinline__ int32_t tile_of([[maybe_unused]] int i, const Step& step) const {
    if constexpr (kMask) {
      return step.tile;
    } else {
      return step.tile(walk(i));
    }
  }
  /// The first query of a step of item i.
  __device__ __forceinline__ int32_t q_begin(int i, const Step& step) const {
    return tile_of(i, step) * kC.tile_q;
  }
  __device__ __forceinline__ int32_t q_begin(const Step& step) const {
    return q_begin(item(), step);
  }
  /// Scratch tile of a step of item i.
  __device__ __forceinline__ uint32_t scratch_tile(int i, const Step& step) const {
    return static_cast<uint32_t>(step.head) * scratch.tiles +
           static_cast<uint32_t>(record_int(i, offsetof(ItemRecord, scratch))) +
           static_cast<uint32_t>(tile_of(i, step));
  }
  /// Whether some query, or row of dO, of a step may hold an infinity or a NaN.
  __device__ __forceinline__ bool queries_nonfinite(const Step& step) const {
    return scratch.nonfinite[scratch_tile(item(), step)] != 0;
  }

  // --- A mask as data (backward_mask.cuh) ---

  __device__ __forceinline__ uint32_t masked_step_at(int n) const {
    return shared +
           static_cast<uint32_t>(Shape::kStepsAt + (n & 3) * static_cast<int>(sizeof(StepRecord)));
  }
  __device__ __forceinline__ StepRecord& step_record(int n) const {
    extern __shared__ __align__(1024) char shared_bytes[];
    return *reinterpret_cast<StepRecord*>(shared_bytes + Shape::kStepsAt +
                                          (n & 3) * static_cast<int>(sizeof(StepRecord)));
  }
  __device__ __forceinline__ uint32_t last_at(int n) const {
    return shared + static_cast<uint32_t>(Shape::kLastsAt + 4 * (n & 3));
  }
  __device__ __forceinline__ uint32_t bits_at(int n) const {
    return shared + static_cast<uint32_t>(Shape::kBitsAt + (n & 3) * Shape::kBitsBytes);
  }
  __device__ __forceinline__ int32_t masked_step_int(int n, size_t offset) const {
    return static_cast<int32_t>(
        ptx::load_shared(masked_step_at(n) + static_cast<uint32_t>(offset)));
  }
  __device__ __forceinline__ MaskedStep masked_step(int n) const {
    const auto both = ptx::load_shared_wide<int2>(masked_step_at(n));
    return {both.x, both.y};
  }
  /// The thread that finds steps keeps here where it is.
  __device__ __forceinline__ StepFinder& finder() const {
    extern __shared__ __align__(1024) char shared_bytes[];
    return *reinterpret_cast<StepFinder*>(shared_bytes + Shape::kFinderAt);
  }
  /// Those of the step that the thread is at.
  __device__ __forceinline__ StepBits step_bits() const {
    const int n = n_step();
    if (masked_step_int(n, offsetof(StepRecord, bits)) < 0) return {0, 0};
    const uint32_t stride = StepBits::stride_of(p);
    const uint32_t tile = static_cast<uint32_t>(masked_step(n).tile);
    // A tile of 32 queries has a word of them, and one of 64 has two.
    return {bits_at(n) + (tile * (kC.tile_q / 8) & (stride - 1)), stride};
  }
  /// Which of 32 queries of the step, from a multiple of 32 on, are allowed one of the item's keys.
  __device__ __forceinline__ uint32_t allowed(const StepBits& bits, int key, int query) const {
    if (bits.at == 0) return ~uint32_t{0};
    return ptx::load_shared(bits.at + static_cast<uint32_t>(key) * bits.stride +
                            static_cast<uint32_t>(query / 32 * 4));
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_THREAD_CUH_
