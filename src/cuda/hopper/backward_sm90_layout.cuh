// Hopper backward: the numbers of a configuration, and what lies in shared memory.
// backward_sm90.cuh has the kernel, and the whole picture.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_

#include <type_traits>

#include "cuda/backward/masked_steps.cuh"
#include "cuda/backward/order.cuh"
#include "cuda/backward/pre.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/backward/steps.h"
#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/tile.cuh"
#include "cuda/hopper/item_order.h"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/ptx/tensor_map.h"

namespace strobe::cuda::sm90 {

/// What the kernel needs to know of a block of kTileK keys of a sequence. The kernel before the
/// main one works it out (prepare), since the producer has too few registers for it. One record
/// serves all heads, since a mask is the same for all of them: only `walk` and `limits` depend on
/// it, and where heads have walks of their own, an item takes those of its heads from `walk`. (The
/// kernel for wide heads works out its KeyBlock for each item, which is of one key head.)
template <int kTileK>
struct alignas(16) KeyRecord {
  ItemWalk walk;               // tiles of queries that see some of the keys
  int64_t k_row;               // of the sequence's first key
  int32_t seqlen_q, seqlen_k;  // of the sequence; seqlen_k 0: there is no such block
  int32_t key_begin;           // in the sequence
  int32_t batch;
  uint32_t scratch;                 // the sequence's first scratch tile of head 0
  int32_t map_batch, map_q, map_k;  // of query 0 and of the first key in the tensor maps
  int2 limits[kTileK];              // queries [x, y) that see the key
  int32_t position;                 // of query 0 among the keys

  /// Fills in the record of the index-th key block of the launch, by all threads of a thread block.
  __device__ __forceinline__ void prepare(const BackwardParams& p, uint32_t index, int32_t tile_q) {
    const auto begin = [&](int32_t i) { return key_block_begin(p, kTileK, i); };
    const int32_t b = sequence_at(index, p.batch, begin);
    const Sequence sequence = p.sequence_of_all_heads(b);
    // At most the problem's seqlen_k: there are no more flags for rows that are not finite.
    const int32_t seqlen = min(static_cast<int32_t>(sequence.mask.seqlen_k), p.seqlen_k);
    const int32_t first = static_cast<int32_t>(index - begin(b)) * kTileK;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < kTileK) limits[thread] = key_limits(sequence.mask, first + thread);
    if (thread != 0) return;
    const Range keys{first, min64(first + kTileK, seqlen)};
    walk = {};
    if (first < seqlen) {
      walk = item_walk(WalkLists::of_heads(p, b, 0, p.heads), sequence.mask, keys, tile_q, kTileK);
    }
    k_row = sequence.k_row;
    seqlen_q = static_cast<int32_t>(sequence.mask.seqlen_q);
    seqlen_k = first < seqlen ? seqlen : 0;
    key_begin = first;
    batch = b;
    scratch = scratch_begin(p, tile_q, b);
    map_batch = p.cu_q ? 0 : b;
    map_q = static_cast<int32_t>(sequence.q_row);
    map_k = static_cast<int32_t>(sequence.k_row) + first;
    position = static_cast<int32_t>(sequence.mask.position(0));
  }
  __device__ __forceinline__ bool exists() const { return seqlen_k > 0; }
  /// Whether an item of these query heads has a step.
  __device__ __forceinline__ bool has_steps([[maybe_unused]] int32_t head_begin,
                                            [[maybe_unused]] int32_t head_end) const {
    return cuda::has_steps(walk, head_begin, head_end);
  }
};

/// The same under a mask as data: what depends on it is the same for all heads too, but for the
/// lists. `walk` is the rule's.
template <int kTileK>
struct alignas(16) MaskedKeyRecord : KeyRecord<kTileK> {
  int64_t list, list_step;  // MaskedSteps::Keys

  __device__ __forceinline__ void prepare(const BackwardParams& p, uint32_t index, int32_t tile_q) {
    KeyRecord<kTileK>::prepare(p, index, tile_q);
    if (threadIdx.x != 0) return;
    const MaskLayout& l = p.mask_layout;
    list = l.first_k(this->batch, 0, this->k_row) + this->key_begin / l.block_k;
    list_step = l.head_step_k();
  }
};

/// A work item: a block of keys, of a key head, with all query heads that read them, or a part of
/// these.
template <int kTileK>
struct alignas(16) KeyBlock : KeyRecord<kTileK> {
  // Behind all that a copy of the record writes, also what fills its last 16 bytes.
  alignas(16) int32_t head_kv;  // negative: no item, the thread block ends
  int32_t part;
  int32_t head_begin, head_end;  // query heads
  // Tiles descend, so that all key blocks of a head that are under way begin with the same tile,
  // also under a causal mask.
  static constexpr int32_t direction = -1;

  __device__ __forceinline__ bool has_steps() const {
    return KeyRecord<kTileK>::has_steps(head_begin, head_end);
  }
};
/// A work item where additions to dQ have an order (OrderedItems).
template <int kTileK>
struct alignas(16) OrderedKeyBlock : KeyRecord<kTileK> {
  alignas(16) int32_t head_kv;
  int32_t part;
  int32_t head_begin, head_end;
  int32_t direction;  // 1 or -1: tiles ascend or descend, and key blocks the other way

  __device__ __forceinline__ bool has_steps() const {
    return KeyRecord<kTileK>::has_steps(head_begin, head_end);
  }
  /// What the counter of the additions to a step's tile says when this block may add; it then goes
  /// on by one. key_tiles: BackwardScratch's.
  __device__ __forceinline__ uint32_t rank(const HeadStep& step, uint32_t key_tiles) const {
    const uint32_t key_tile = static_cast<uint32_t>(this->key_begin) / kTileK;
    const uint32_t place = place_in(this->walk, step.head, step.tile(this->walk), key_tile);
    return addition_rank(place, key_tiles, direction > 0);
  }
};

/// A work item under a mask as data. Its tiles descend, and key blocks ascend.
template <int kTileK>
struct alignas(16) MaskedKeyBlock : MaskedKeyRecord<kTileK> {
  alignas(16) int32_t head_kv;
  int32_t part;
  int32_t head_begin, head_end;
  int32_t steps;  // 0: there is none. Who looks for steps writes it, and arrives at `known`

  __device__ __forceinline__ bool has_steps() const { return steps != 0; }
};
/// What is to be known of the step after one, in its item, to choose its code: -1: there is none;
/// bit n: all queries of its tile see all of the item's keys 64 n to 64 n + 63. It is read beside
/// the products of the step before it (BackwardConsumer::look_ahead): the tensor cores would wait
/// for it if it were read between the two.
struct NextMaskedStep {
  int32_t word;

  /// rule_full: whether the rule lets each query of the tile see each key of the item.
  template <typename Record>
  __device__ __forceinline__ static NextMaskedStep of(const Record& record, bool rule_full) {
    int32_t word = 0;
#pragma unroll
    for (int n = 0; n < Record::kLists; ++n) {
      bool full = rule_full;
#pragma unroll
      for (int i = 0; i < Record::kParts; ++i) full &= record.bits[n][i] == Record::kFull;
      word |= full ? 1 << n : 0;
    }
    return {word};
  }
  __device__ __forceinline__ bool exists() const { return word >= 0; }
  __device__ __forceinline__ bool is_full(int half) const { return (word >> half & 1) != 0; }
};
/// A step of such an item, as it stands in shared memory.
template <int kTileQ, int kTileK>
struct MaskedStepSlot {
  using Record = MaskedStepRecord<kTileQ, kTileK>;
  static constexpr int kLists = Record::kLists, kParts = Record::kParts;

  Record record;
  NextMaskedStep next;
};

// A step's head and tile, whatever a step is.
template <typename Walk>
__device__ __forceinline__ int32_t tile_of(const HeadStep& step, const Walk& walk) {
  return step.tile(walk);
}
template <typename Walk>
__device__ __forceinline__ int32_t tile_of(const MaskedStep& step, const Walk&) {
  return step.tile;
}

/// A BackwardConfig as plain numbers: nvcc 13 writes stubs that do not compile for kernels with
/// template arguments of class type.
/// kOrdered: of the kernel whose additions to dQ have an order. kGeneral: of the one that knows
/// softcap, ALiBi and dropout. kStoresDq: of the one that writes dQ itself, in place of the one
/// addition that each of its tiles gets (adds_once). kMask: of the one that goes through the lists
/// of a mask as data; it keeps an order where it is asked to. kBias: of the one that adds a bias to
/// its scores (backward_sm90_bias.cuh).
template <int kDtype, int kWidth_, int kTileQ_, int kTileK_, bool kOrdered_, bool kGeneral_,
          bool kStoresDq_, bool kMask_ = false, bool kBias_ = false>
struct BackwardTraits {
  static constexpr bool kOrdered = kOrdered_, kGeneral = kGeneral_, kStoresDq = kStoresDq_;
  static constexpr bool kMask = kMask_, kBias = kBias_;
  static_assert(!kBias || !(kOrdered || kGeneral || kStoresDq || kMask));
  static_assert(!(kOrdered && kStoresDq), "one addition has no order");
  static_assert(kOrdered || !kMask);
  static constexpr bool kBf16 = kDtype == kBfloat16;
  using T = Element<kDtype>;
  static constexpr int kWidth = kWidth_, kTileQ = kTileQ_, kTileK = kTileK_;
  // Tiles have whole panels of 64 columns: at width 96 half of the second one is no product's.
  static constexpr int kPanels = (kWidth + 63) / 64, kTileWidth = 64 * kPanels;
  static constexpr int kStages = 2;  // of Q, dO and dS
  // Stages of K and V, which an item loads once. K is read until the first step of the next item
  // has begun, so it has two. V is given back when the steps of an item are done; it has two stages
  // where there is room, which is not so with two panels or beside the factors or a bias.
  static constexpr int kItemStages = 2, kVStages = kPanels == 1 && !kGeneral && !kBias ? 2 : 1;
  static constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

  using KTile = SharedTile<kTileK, kTileWidth>;
  using QTile = SharedTile<kTileQ, kTileWidth>;
  using DsTile = SharedTile<kTileK, kTileQ>;  // [key][query]
  // A step's bias, [query][key]. There is room for one: the next one comes once this one is in the
  // step's scores.
  using BiasTile = SharedTile<kTileQ, kTileK>;
  using BiasPosition = RingPosition<1>;

  using Record = std::conditional_t<kMask, MaskedKeyRecord<kTileK>, KeyRecord<kTileK>>;
  using Block =
      std::conditional_t<kMask, MaskedKeyBlock<kTileK>,
                         std::conditional_t<kOrdered, OrderedKeyBlock<kTileK>, KeyBlock<kTileK>>>;
  /// A step, as a thread keeps it.
  using Step = std::conditional_t<kMask, MaskedStep, HeadStep>;
  using StepSlot = MaskedStepSlot<kTileQ, kTileK>;
  using Items =
      std::conditional_t<kMask, MaskedItems, std::conditional_t<kOrdered, OrderedItems, ItemOrder>>;
  static_assert(sizeof(Record) % 16 == 0);  // bulk copies

  // dQ of a tile is 128 x 64 or 64 x 128: 64 x 64 for each warpgroup.
  static constexpr bool kDqByColumns = kTileQ == 64;
  static_assert(kTileK == 64 * kWarpgroups && kTileQ * kTileWidth == 64 * 64 * kWarpgroups);
  /// Whether the warpgroups issue their products in turn: not where there are branches between
  /// them, since the other warpgroup would wait for those.
  static constexpr bool kPingPong = kPanels == 2 && !kGeneral;

  /// Whether a thread block takes one item after the other. At width 128 fp16, whose products of P
  /// and dP are float32, is a register short of it: there a thread block has one item.
  static constexpr bool kPersistent = kWidth <= 96 || kBf16;
  /// Whether an item's last dQ is made within the first step of the next one, or before that step,
  /// where there are no registers for it: at width 128, in fp16 for tiles of 128 queries, and in
  /// the general kernel.
  static constexpr bool kHasNextStep = !kGeneral && (kWidth == 96 || (kWidth == 64 && kBf16));

  /// Whether there is a copy of the step for full tiles: not in the general kernel, nor under a
  /// mask as data in fp16 at width 128, where with two copies ptxas has too few registers for
  /// either.
  static constexpr bool kHasFullStep = !kGeneral && (!kMask || kPersistent);

  /// Kernels that are short of registers in the build for racecheck, which has more code.
  static constexpr bool kChecked128 = ptx::kWarpArrivals > 1 && kWidth == 128 && !kGeneral;

  /// The ordered kernel of bf16, which is short of registers at width 128.
  static constexpr bool kOrdered128 = kOrdered && kWidth == 128 && kBf16 && !kGeneral && !kMask;

  /// Whether the tile number that each step leaves for the next one (tile_before) is kept in shared
  /// memory, where a register for it would cause a spill.
  static constexpr bool kTileInShared =
      (kWidth == 64 && !kBf16) || kOrdered128 || (kChecked128 && kBf16 != kStoresDq);

  /// Whether a consumer reads what it takes to find the next step while this one's last product is
  /// under way, and not when that has ended (BackwardConsumer::Ahead): not where there are no
  /// registers for it.
  static constexpr bool kLooksAhead = kBf16 || kMask || (kWidth < 128 && !kBias);

  /// Whether lse of a step's queries is read before S is issued, and not when that is there. At
  /// width 64 it takes too many registers, and gains nothing: nobody waits for a turn.
  static constexpr bool kLoadsLse = kPanels == 2 && !kGeneral && (kBf16 || kWidth == 96);

  /// Whether dQ, dV and dK of a step are issued one after the other when dS is there, and not dQ
  /// and dV before it. Without turns the tensor cores are busy with the other warpgroup in the
  /// meantime. (Under a mask as data: of steps whose pairs are all seen.)
  static constexpr bool kIssuesLate = kPanels == 1 && !kGeneral && !kBias && !kStoresDq;

  /// Whether a thread reads its lane anew at each use, where keeping it would cause a spill.
  static constexpr bool kLaneAgain = kGeneral || kOrdered128 ||
                                     ((kStoresDq || kMask || kBias) && kPersistent) ||
                                     (kChecked128 && kBf16);

  /// What the kernels before and after have to know (backward/pre.cuh). fp16 has few exponents: its
  /// weights are held times 2^12 (backward/scratch.cuh).
  struct StageTraits {
    static constexpr float kShift = kBf16 ? 0.f : kWeightShift, kScale = kBf16 ? 1.f : kWeightScale;
    static constexpr bool kQuadOrder = true, kMarksNonfinite = false, kPreparesKeys = true;
    static constexpr bool kMayStoreDq = !kMask_, kMask = kMask_;
    __device__ __forceinline__ static void prepare_keys(const BackwardParams& p,
                                                        const BackwardScratch& scratch,
                                                        uint32_t index) {
      static_cast<Record*>(scratch.key_records)[index].prepare(p, index, kTileQ);
    }
  };

  struct alignas(1024) SharedOfAll {
    uint8_t k[kItemStages][KTile::kBytes], v[kVStages][KTile::kBytes];
    uint8_t q[kStages][QTile::kBytes], dout[kStages][QTile::kBytes];
    uint8_t ds[kStages][DsTile::kBytes];
    alignas(16) float lse[kStages][kTileQ], delta[kStages][kTileQ];
    Block blocks[kItemStages];
    uint32_t tile_before[kTileInShared ? 32 * kWarps : 1];  // of each consumer thread
    Ring<kItemStages> block_ring, k_ring;
    Ring<kVStages> v_ring;
    Ring<kStages> q_ring, dout_ring, ds_ring;
    // Factors of each consumer thread, from its scores to its dS: there are no registers for them.
    alignas(16) uint32_t factors[kGeneral ? kTileQ / 16 : 1][kGeneral ? 32 * kWarps : 1][4];
    // The rows of dQ of the tile of the step before, for each warp.
    RowsView dq_before[kStoresDq ? kWarps : 1];
  };
  // Under a mask as data (backward_sm90_mask.cuh).
  static constexpr int kFoundStages = 4, kSlots = 8;
  struct SharedOfMask : SharedOfAll {
    // Of a step's partial blocks, by key: the tile's keys have one block of queries, or two of 64.
    alignas(16) uint8_t bits[kStages][kTileK * 256 / 8];
    StepSlot steps[kSlots];
    uint32_t allowed[32 * kWarps][kTileQ / 64];  // AllowedPairs of each consumer thread
    MaskedSteps<kTileQ, kTileK> finder;
    uint32_t long_blocks;  // MaskedItems': kept here by the producer, which has few registers
    ptx::Barrier found[kFoundStages], known[kItemStages];
    // The item whose last step is to be reported, if it is one's: kept here by ReportAdditions,
    // which has few registers.
    struct Ending {
      static constexpr uint32_t kNone = ~uint32_t{0};
      uint32_t first_word, block;
    } ending;
  };
  struct SharedOfBias : SharedOfAll {
    alignas(1024) uint8_t bias[BiasTile::kBytes];
    Ring<1> bias_ring;
  };
  using Shared =
      std::conditional_t<kMask, SharedOfMask, std::conditional_t<kBias, SharedOfBias, SharedOfAll>>;
  static_assert(sizeof(Shared) <= 232448, "more shared memory than a Hopper thread block has");
};

template <BackwardConfig c, bool kOrdered = false, bool kGeneral = false, bool kStoresDq = false,
          bool kMask = false, bool kBias = false>
using BackwardTraitsOf = BackwardTraits<c.dtype, c.width, c.tile_q, c.tile_k, kOrdered, kGeneral,
                                        kStoresDq, kMask, kBias>;

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};
/// With a bias.
struct BiasBackwardMaps : BackwardMaps {
  CUtensorMap bias;
};
template <typename Tr>
using BackwardMapsOf = std::conditional_t<Tr::kBias, BiasBackwardMaps, BackwardMaps>;

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_
