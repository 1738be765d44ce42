// Backward pass through mma.sync: the numbers of a configuration, what lies in shared memory, and
// the work items. backward_sm80.cuh has the whole picture.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_

#include "cuda/common/backward_order.cuh"
#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/load.cuh"
#include "cuda/common/tile.cuh"

namespace strobe::cuda::sm80 {

template <BackwardConfig kC>
struct BackwardShape {
  static constexpr BackwardConfig kConfig = kC;
  using T = Element<kC.dtype>;
  static constexpr int kThreads = 32 * kC.warps;
  static constexpr int kHalfWarps = kC.warps / 2;
  static constexpr int kHalfThreads = 32 * kHalfWarps;
  static constexpr int kKeyWarps = kC.tile_k / 32;
  static constexpr int kQueryWarps = kHalfWarps / kKeyWarps;
  static constexpr bool kSplit = kQueryWarps > 1;
  static constexpr int kM = 2;                              // 16-key blocks of a warp
  static constexpr int kQueries = kC.tile_q / kQueryWarps;  // of a warp's scores
  static constexpr int kN = kQueries / 8;
  static constexpr int kColumns = kC.width / kQueryWarps;  // of a warp's dV or dK
  static constexpr int kSumN = kColumns / 8;
  // dQ: 32 queries by kDqColumns a warp, in passes that leave registers beside dK.
  static constexpr int kDqRowWarps = kC.tile_q / 32;
  static constexpr int kDqColumns = kC.width / (kHalfWarps / kDqRowWarps);
  static constexpr int kPass =
      kDqColumns <= 64 ? kDqColumns : kDqColumns / (kC.tile_k < 64 ? 4 : 2);
  // Registers for running ahead are few where sums and scores take 192 of 255.
  static constexpr int kAhead = 2;
  /// Whether there are registers for softcap, ALiBi and dropout: else the row is for plain
  /// problems.
  static constexpr bool kHasRules = 8 * (kSumN + kN) < 192;
  /// Whether addresses that every step needs are computed anew (BackwardThread::Place).
  static constexpr bool kFresh = 8 * (kSumN + kN) >= 160;
  /// Whether the weights half passes a turn on before it issues the next copies, which the release
  /// would wait for too: 2 % less for `deterministic`. Where registers are short it spills there.
  static constexpr bool kPassEarly = !kFresh;

  using KTile = SharedTile<kC.tile_k, kC.width>;
  using QTile = SharedTile<kC.tile_q, kC.width>;
  using ScoreTile = SharedTile<kC.tile_k, kC.tile_q>;  // [key][query]

  // stages: 1 everything once, 2 Q and dO twice, 3 K also.
  static constexpr int kStages = kC.stages > 1 ? 2 : 1;
  static constexpr int kKeyStages = kC.stages > 2 ? 2 : 1;

  /// Whether the weights half holds one step at a time: once the next one's tiles are asked for,
  /// that takes its place. Else both are held to the end, which needs registers: 4 % faster at 192,
  /// 1 % slower at 64 and 256, spills at 128 before 9.0.
  static constexpr bool kOneStep = kStages == 2 || kFresh;

  static constexpr int kKAt = 0;
  static constexpr int kVAt = kKAt + kKeyStages * KTile::kBytes;
  static constexpr int kQAt = kVAt + KTile::kBytes;
  static constexpr int kDoutAt = kQAt + kStages * QTile::kBytes;
  static constexpr int kDsAt = kDoutAt + kStages * QTile::kBytes;
  static constexpr int kExchangeAt = kDsAt + ScoreTile::kBytes;
  static constexpr int kWeightsAt = kExchangeAt + 2 * kC.tile_k * kC.tile_q;
  static constexpr int kLseAt = kWeightsAt + (kSplit ? ScoreTile::kBytes : 0);
  static constexpr int kDeltaAt = kLseAt + 4 * kStages * kC.tile_q;
  static constexpr int kBarriersAt = kDeltaAt + 4 * kStages * kC.tile_q;
  static constexpr int kBarriers = 11 + 2 * kKeyStages + 4 * kStages + 2 * kHalfWarps;
  static constexpr int kBlockAt = (kBarriersAt + 8 * kBarriers + 15) / 16 * 16;
  static constexpr int kBlockBytes = 208;
  static constexpr int kLimitsAt = kBlockAt + 2 * kBlockBytes;
  static constexpr int kTurnsAt = kLimitsAt + kKeyStages * 8 * kC.tile_k;
  static constexpr int kTurnBytes = 4 * 8 * kHalfWarps;
  static constexpr int kSharedBytes = kTurnsAt + kTurnBytes;

  static_assert(kC.tile_k % 32 == 0 && kHalfWarps % kKeyWarps == 0);
  static_assert(kN % 2 == 0 && kSumN % 4 == 0 && kPass % 16 == 0 && kDqColumns % kPass == 0);
  static_assert(kC.tile_q % 32 == 0 && kHalfWarps % kDqRowWarps == 0);
  static_assert(kSharedBytes <= 232448, "227 KB are the most that any device has");

  // Two blocks fit a multiprocessor's registers where a block has 128 threads.
  static constexpr int kMinBlocks = kC.warps == 4 && 2 * (kSharedBytes + 1024) <= 233472 ? 2 : 1;
};

/// A step of a block: one query tile of one head.
struct BackwardStep {
  int32_t head, tile;
};

/// A thread block's item, and where its steps are. It lives in shared memory: the same for all
/// threads, and registers are what the kernel is short of.
struct alignas(16) BackwardBlock {
  int32_t tile_begin, tile_end;  // query tiles that see some key of the block
  int32_t full_begin, full_end;  // queries that see every key of it
  int32_t first_query;   // tiles from here on see no key before the block: it is the first to add
  int32_t first_key;     // of query 0; negative: query -first_key is the last to see key 0
  uint32_t scratch;      // first scratch tile of the sequence
  const char *q, *dout;  // row 0 of the sequence, head 0
  Sequence sequence;
  int32_t batch, head_kv, part, key_begin;
  int32_t head_begin, head_end;  // of the query heads
  int32_t steps;                 // -1: there is no item
  int32_t copies;  // q and dout: 0 value by value, 1 sixteen bytes, 2 and all columns of the tile
  int32_t keys_nonfinite;

  __device__ __forceinline__ void fill(const BackwardParams& p, const BackwardItem& item,
                                       int32_t heads_per_part, int32_t tile_q, int32_t tile_k,
                                       int32_t width) {
    batch = item.batch;
    head_kv = item.head_kv;
    part = item.part;
    key_begin = item.block * tile_k;
    head_begin = head_kv * p.group + item.part * heads_per_part;
    keys_nonfinite = 0;
    const Mask& mask = sequence.mask;
    const Range keys{key_begin, min64(key_begin + tile_k, mask.seqlen_k)};
    const Range queries = mask.q_range(keys);
    tile_begin = static_cast<int32_t>(queries.begin) / tile_q;
    tile_end =
        queries.empty() ? tile_begin : (static_cast<int32_t>(queries.end) + tile_q - 1) / tile_q;
    // Keys past the end would count as seen: a block that has some is never unmasked.
    const Range full = keys.size() < tile_k ? Range{0, 0} : mask.full_q_range(keys);
    full_begin = static_cast<int32_t>(full.begin);
    full_end = static_cast<int32_t>(full.end);
    first_query =
        key_begin == 0 ? 0 : static_cast<int32_t>(mask.q_range({key_begin - 1, key_begin}).end);
    // (Clamped, so that adding a query cannot overflow.)
    first_key = static_cast<int32_t>(max64(mask.first, -mask.seqlen_q));
    head_end = min(head_begin + heads_per_part, (head_kv + 1) * p.group);
    steps = (head_end - head_begin) * (tile_end - tile_begin);
    scratch = scratch_begin(p, tile_q, batch);
    const RowsView q_rows = rows_view(p.q, batch, sequence.q_row, 0, mask.seqlen_q, p.head_dim);
    const RowsView dout_rows =
        rows_view(p.dout, batch, sequence.q_row, 0, mask.seqlen_q, p.head_dim_v);
    q = q_rows.data;
    dout = dout_rows.data;
    const bool aligned =
        q_rows.aligned() && dout_rows.aligned() && (p.q.head_stride | p.dout.head_stride) % 8 == 0;
    copies = !aligned ? 0 : p.head_dim == width && p.head_dim_v == width ? 2 : 1;
  }
};

static_assert(sizeof(BackwardBlock) <= 208, "BackwardShape::kBlockBytes");

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_
