// Backward pass through mma.sync: the numbers that follow from an instance's configuration, and
// where everything lies in shared memory. backward_sm80.cuh has the whole picture.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_

#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/tile.cuh"
#include "cuda/mma_sync/backward_item.cuh"
#include "cuda/mma_sync/backward_mask.cuh"

namespace strobe::cuda::sm80 {

/// kMask_: of a kernel that goes through the lists of a mask as data (backward_mask.cuh).
template <BackwardConfig kC, bool kMask_ = false>
struct BackwardShape {
  static constexpr BackwardConfig kConfig = kC;
  static constexpr bool kMask = kMask_;
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
  static constexpr int kPass = kDqColumns <= 64                    ? kDqColumns
                               : kC.tile_k < 64 && kDqColumns > 96 ? kDqColumns / 4
                                                                   : kDqColumns / 2;
  // Where sums and scores take 192 of 255 registers, loads run ahead of the products by less.
  static constexpr int kAhead = 2;
  /// Whether there are registers for softcap, ALiBi and dropout: the general kernel. Rows of
  /// kernels.def without them have no such variant.
  static constexpr bool kHasGeneral = 8 * (kSumN + kN) < 192;
  /// Whether addresses that every step needs are computed anew (BackwardThread::Place).
  static constexpr bool kFresh = 8 * (kSumN + kN) >= (kMask ? 128 : 144);
  /// Whether the weights half reports an addition to dQ before it issues the next copies, which the
  /// release would wait for too: `deterministic` then costs 2 % less. Where registers are short the
  /// compiler spills there.
  static constexpr bool kReportEarly = !kFresh;

  using KTile = SharedTile<kC.tile_k, kC.width>;
  using QTile = SharedTile<kC.tile_q, kC.width>;
  using ScoreTile = SharedTile<kC.tile_k, kC.tile_q>;  // [key][query]

  static constexpr int kStages = kC.stages;  // of Q and dO; K and V have one
  /// Whether dQ is stored where each tile gets one addition, instead of added to zeros.
  static constexpr bool kStoresSum = true;

  /// Whether the weights half holds one step at a time: once it has asked for the tiles of the next
  /// step, it holds that one in place of the present one. Else it holds both to the end, which
  /// needs registers: 4 % faster at 192, 1 % slower at 64 and 256, spills at 128 before 9.0.
  static constexpr bool kOneStep = kStages == 2 || kFresh;

  static constexpr int kKAt = 0;
  static constexpr int kVAt = kKAt + KTile::kBytes;
  static constexpr int kQAt = kVAt + KTile::kBytes;
  static constexpr int kDoutAt = kQAt + kStages * QTile::kBytes;
  static constexpr int kDsAt = kDoutAt + kStages * QTile::kBytes;
  static constexpr int kExchangeAt = kDsAt + ScoreTile::kBytes;
  static constexpr int kWeightsAt = kExchangeAt + 2 * kC.tile_k * kC.tile_q;
  static constexpr int kLseAt = kWeightsAt + (kSplit ? ScoreTile::kBytes : 0);
  static constexpr int kDeltaAt = kLseAt + 4 * kStages * kC.tile_q;
  static constexpr int kBarriersAt = kDeltaAt + 4 * kStages * kC.tile_q;
  static constexpr int kBarriers = 13 + 4 * kStages + 2 * kHalfWarps;  // backward_barriers.cuh
  static constexpr int kRecordAt = (kBarriersAt + 8 * kBarriers + 15) / 16 * 16;
  static constexpr int kRecordBytes = sizeof(ItemRecord);
  static constexpr int kLimitsAt = kRecordAt + 2 * kRecordBytes;
  static constexpr int kReportsAt = kLimitsAt + 8 * kC.tile_k;
  static constexpr int kReportBytes = 4 * 8 * kHalfWarps;
  // Of a mask: four steps with their bits, which of them are their item's last, and who finds them.
  // (Other shapes have none of it.)
  using StepRecord = MaskedStepRecord<kMask ? kC.tile_q : 64, kMask ? kC.tile_k : 64>;
  using StepFinder = MaskedSteps<kMask ? kC.tile_q : 64, kMask ? kC.tile_k : 64>;
  static constexpr int kBitsBytes = 16 * kC.tile_k;  // of a step
  static constexpr int kBitsAt = (kReportsAt + kReportBytes + 15) / 16 * 16;
  static constexpr int kStepsAt = kBitsAt + 4 * kBitsBytes;
  static constexpr int kLastsAt = kStepsAt + 4 * static_cast<int>(sizeof(StepRecord));
  static constexpr int kFinderAt = kLastsAt + 16;
  static constexpr int kMaskEnd = kFinderAt + static_cast<int>(sizeof(StepFinder));
  static constexpr int kSharedBytes = kMask ? kMaskEnd : kReportsAt + kReportBytes;
  static_assert(!kMask || (kC.tile_q <= 64 && kC.tile_k <= 64 && kQueries <= 32));

  static_assert(kC.stages == 1 || kC.stages == 2);
  static_assert(kC.tile_k % 32 == 0 && kHalfWarps % kKeyWarps == 0);
  static_assert(kN % 2 == 0 && kSumN % 4 == 0 && kPass % 16 == 0 && kDqColumns % kPass == 0);
  static_assert(kC.tile_q % 32 == 0 && kHalfWarps % kDqRowWarps == 0);
  static_assert(kSharedBytes <= 232448, "227 KB are the most that any device has");

  // Two blocks fit a multiprocessor's registers where a block has 128 threads.
  static constexpr int kMinBlocks = kC.warps == 4 && 2 * (kSharedBytes + 1024) <= 233472 ? 2 : 1;
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_LAYOUT_CUH_
