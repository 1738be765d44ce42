// What distinguishes one decode kernel from another, and its shared memory.
#ifndef STROBE_CUDA_DECODE_LAYOUT_H_
#define STROBE_CUDA_DECODE_LAYOUT_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/element.h"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// A team's keys of a quantised cache in shared memory, of K or of V.
///
///   codes as they are multiplied   [key][chunk of 16 bytes], and chunks change places with the
///                                  key, so that the same chunk of eight keys, which an ldmatrix
///                                  phase reads, lies in different banks. Rows stay whole: cp.async
///                                  asks L2 once for what neighbouring lanes copy to one line of
///                                  128 bytes, and once a lane for what they scatter
///   scales                         behind them. int8 and e4m3: float32 [key]; blocks: fp16
///                                  [block][key]
///
/// int8 and e4m3 are copied to these places. A row of blocks is copied as it lies in memory, where
/// scales among the codes leave nothing aligned: kRowPitch bytes from row to row, in the same
/// memory. Who is about to multiply them puts them in order first (quantised_keys.cuh).
template <int kKvDtype, int kWidth, int kKeys>
struct CodeLayout {
  static constexpr bool kBlocks = kKvDtype == kQ8Blocks || kKvDtype == kQ4Blocks;
  static constexpr int kBlocksOfRow = kBlocks ? kWidth / 32 : 0;
  static constexpr int kCodeBytes = kKvDtype == kQ4Blocks ? kWidth / 2 : kWidth;  // of a row
  static constexpr int kChunks = kCodeBytes / 16;
  static constexpr int kScalesOffset = kKeys * kCodeBytes;
  static constexpr int kRowBytes = kCodeBytes + 2 * kBlocksOfRow, kRowPitch = kRowBytes;
  /// Bytes that are copied at a time, where rows are made of whole units of that size and lie at
  /// them. A row of blocks is 16 units (8 in q4_0) and one more.
  static constexpr int kUnit = kBlocks ? kWidth / 16 : 16;
  static constexpr int kUnits = kRowBytes / kUnit;
  static constexpr int kBytes = kBlocks ? kKeys * kRowBytes : kScalesOffset + 4 * kKeys;
  static_assert(kRowBytes % kUnit == 0 && kBytes % 128 == 0 && 8 % kChunks == 0);

  /// Byte offset of a chunk. That of an even chunk c + chunk is this one's with 16 * c flipped, and
  /// 16 keys on it is 16 * kCodeBytes more.
  STROBE_INLINE static constexpr int at(int key, int chunk) {
    return key * kCodeBytes + 16 * (chunk ^ turn(key));
  }
  /// What a key flips in the number of a chunk: it grows with the lines of 128 bytes.
  STROBE_INLINE static constexpr int turn(int key) { return key * kChunks / 8 % kChunks; }
};
template <int kWidth, int kKeys>
struct CodeLayout<kSameAsQ, kWidth, kKeys> {
  static constexpr int kBytes = 0;
};

/// How a row's columns are shared out among a warp's lanes when rows are merged: kCount for each,
/// from the first lane on. At widths that are no power of 2 the last lanes have none.
template <int kWidth>
struct LaneColumns {
  static constexpr int kCount = kWidth <= 64 ? 2 : kWidth <= 128 ? 4 : 8;
  static_assert(kWidth % kCount == 0 && kWidth <= 32 * kCount);

  STROBE_INLINE static constexpr bool are_there(int lane) {
    return kWidth == 32 * kCount || kCount * lane < kWidth;
  }
};

/// A team is as many warps as a tile has 16 rows; where it has eight, one warp that turns its
/// products (turned_warp.cuh). It has its own keys of each unit, its own ring of stages, and each
/// of its warps 16 rows. A row of K or V in shared memory is 16 bytes longer than
/// it need be: the eight rows that an ldmatrix phase reads then lie in different banks.
template <int kDtype_, int kWidth_, int kTileRows_, int kKeys_, int kStages_, int kWarps_,
          int kKvDtype_ = kSameAsQ>
struct DecodeShape {
  static constexpr int kDtype = kDtype_, kWidth = kWidth_, kTileRows = kTileRows_, kKeys = kKeys_,
                       kStages = kStages_, kWarps = kWarps_, kKvDtype = kKvDtype_;
  using T = Element<kDtype>;
  static constexpr bool kQuantised = kKvDtype != kSameAsQ;
  using Codes = CodeLayout<kKvDtype, kWidth, kKeys>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kTurned = kTileRows == 8;
  static constexpr int kTeamWarps = kTurned ? 1 : kTileRows / 16, kTeams = kWarps / kTeamWarps;
  static constexpr int kTeamThreads = 32 * kTeamWarps;
  static constexpr int kUnit = kTeams * kKeys;
  static_assert(kTeams * kTeamWarps == kWarps && kTeams >= 1 && kStages >= 2);

  static constexpr int kPitch = 2 * kWidth + 16;  // bytes from row to row
  static constexpr int kHalf = kQuantised ? Codes::kBytes : kKeys * kPitch;  // a stage: K, then V
  static constexpr int kStage = 2 * kHalf;
  static constexpr int kOPitch = kWidth + 4;  // floats; a team's O, in stages that are free
  /// Stages that are free when a span ends: one, or two where O takes as many.
  static constexpr int kFree = (kTileRows * kOPitch * 4 + kStage - 1) / kStage;
  static constexpr int kRowsOfStage = kTileRows / kFree;  // of O
  static constexpr int kAhead = kStages - kFree;          // tiles that are on their way
  static_assert(kFree <= 2);
  static_assert(kTileRows % kFree == 0 && kRowsOfStage * kOPitch * 4 <= kStage && kAhead >= 1);
  /// Of a quantised cache a lane has a key, and unpacks codes for one warp's rows alone.
  static_assert(!kQuantised || (kKeys == 32 && kTileRows <= 16));
  static_assert(kQuantised || !kTurned);

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
  static constexpr int kMinBlocks = kWarps > 4 ? 1 : kTurned ? 3 : 2;
  using Columns = LaneColumns<kWidth>;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_LAYOUT_H_
