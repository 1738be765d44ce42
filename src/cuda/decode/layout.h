// What distinguishes one decode kernel from another, and its shared memory.
#ifndef STROBE_CUDA_DECODE_LAYOUT_H_
#define STROBE_CUDA_DECODE_LAYOUT_H_

#include <cstdint>

#include "cuda/common/element.h"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// A team is as many warps as a tile has 16 rows. It has its own keys of each unit, its own ring of
/// stages, and each of its warps 16 rows. A row of K or V in shared memory is 16 bytes longer than
/// it need be: the eight rows that an ldmatrix phase reads then lie in different banks.
template <int kDtype_, int kWidth_, int kTileRows_, int kKeys_, int kStages_, int kWarps_>
struct DecodeShape {
  static constexpr int kDtype = kDtype_, kWidth = kWidth_, kTileRows = kTileRows_, kKeys = kKeys_,
                       kStages = kStages_, kWarps = kWarps_;
  using T = Element<kDtype>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTeamWarps = kTileRows / 16, kTeams = kWarps / kTeamWarps;
  static constexpr int kTeamThreads = 32 * kTeamWarps;
  static constexpr int kUnit = kTeams * kKeys;
  static_assert(kTeams * kTeamWarps == kWarps && kTeams >= 1 && kStages >= 2);

  static constexpr int kPitch = 2 * kWidth + 16;  // bytes from row to row
  static constexpr int kHalf = kKeys * kPitch;    // a stage: K, then V
  static constexpr int kStage = 2 * kHalf;
  static constexpr int kOPitch = kWidth + 4;  // floats; a team's O, in a stage that is free
  static_assert(kTileRows * kOPitch * 4 <= kStage);

  // Of a Piece and a ShareWalk (pieces.cuh).
  static constexpr int kPieceBytes = 224 + static_cast<int>(sizeof(BlocksOf<int32_t>));

  static constexpr int kRingBytes = kTeams * kStages * kStage;
  static constexpr int kQOffset = kRingBytes;
  static constexpr int kSumsOffset = kQOffset + kTileRows * kPitch;         // [team][row]: float2
  static constexpr int kRuleOffset = kSumsOffset + kTeams * kTileRows * 8;  // the same
  static constexpr int kWordsOffset = kRuleOffset + kTeams * kTileRows * 8;
  static constexpr int kPiecesOffset = kWordsOffset + (kTeams + 1 + kWarps + 7) / 8 * 8 * 4;
  static constexpr int kSharedBytes = kPiecesOffset + 7 * kPieceBytes;

  /// Whether Q's fragments stay in registers: there is room beside O and few scores.
  static constexpr bool kKeepsQ = kWidth <= 128 && kTeamWarps == 1;
  /// Of a multiprocessor, where shared memory suffices: bounds the registers.
  static constexpr int kMinBlocks = kWarps <= 4 ? 2 : 1;
  static constexpr int kColumns = kWidth / 32;  // of a row, that a lane has when rows are merged
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_LAYOUT_H_
