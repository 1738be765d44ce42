// A team's copies of the keys of a quantised cache into its ring: what KeyCopies does with a tile.
//
// A lane has a key of the tile: it looks up its page, and its scales of int8 or e4m3. Codes come by
// cp.async, row after row, several lanes to a row; where nothing is aligned, each lane copies its
// key's row byte by byte. Scales of 2 or 4 bytes are loaded when a tile's copies are issued, and
// stored kDelay tiles later, so that nobody waits for them.
#ifndef STROBE_CUDA_DECODE_QUANTISED_COPIES_CUH_
#define STROBE_CUDA_DECODE_QUANTISED_COPIES_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "core/codes.h"
#include "cuda/common/params.h"
#include "cuda/common/unpack.cuh"
#include "cuda/decode/layout.h"
#include "cuda/decode/pieces.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

template <typename Shape>
class QuantisedCopies {
 public:
  /// Copies tile number `tile`, the keys from `key` on, to `stage`. ahead: the first key of the
  /// piece's next tile, or negative; ring: of the team.
  __device__ __forceinline__ void copy(const QuantisedParams& p, const Piece& x, int32_t key,
                                       int32_t ahead, uint32_t ring, int32_t tile) {
    const uint32_t stage = ring + static_cast<uint32_t>(tile) % Shape::kStages * Shape::kStage;
    const Row own = row_of(x, key, ahead);
    const int64_t k_offset = own.entry * p.k.batch_stride + own.row * p.k.row_stride;
    const int64_t v_offset = own.entry * p.v.batch_stride + own.row * p.v.row_stride;
    const uint32_t there = __ballot_sync(0xffffffffu, own.there);
    // Keys that some row sees, and that have no page: what depends on them is NaN.
    const uint32_t lost = __ballot_sync(0xffffffffu, own.seen && !own.there);
    if (!p.quantised.in_units) {
      copy_bytes(stage, x.k + k_offset, own.there ? p.quantised.k_bytes : 0);
      copy_bytes(stage + Shape::kHalf, x.v + v_offset, own.there ? p.quantised.v_bytes : 0);
    } else if (x.rows.pages) {
      copy_units<true>(p, x, stage, k_offset, v_offset, there, lost);
    } else {
      copy_units<false>(p, x, stage, k_offset, v_offset, there, lost);
    }
    if constexpr (Codes::kBlocks) {
      if (lost >> lane() & 1) lose_row(stage);
    } else {
      take_scales(p, x, own, ring, tile);
    }
  }

  /// Before the first tile of another piece.
  __device__ __forceinline__ void enter_piece() { ahead_ = -1; }
  /// Sees to it that scales of tile `tile` are stored, of `issued` tiles whose copies are.
  __device__ __forceinline__ void complete(const QuantisedParams& p, int32_t tile, int32_t issued,
                                           uint32_t ring) {
    if constexpr (!Codes::kBlocks && kDelay > 0) {
      if (tile < stored_) return;
#pragma unroll
      for (int d = kDelay - 1; d >= 0; --d) {
        if (issued - 1 - d >= stored_) store_scales(p, ring, issued - 1 - d, k_[d], v_[d]);
      }
      stored_ = issued;
    }
  }

 private:
  using Codes = typename Shape::Codes;
  static constexpr int kUnit = Codes::kUnit;
  // Of a row of blocks the last unit is left for a copy of its own.
  static constexpr int kLanesOfRow = Codes::kUnits - Codes::kUnits % 2;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  static constexpr bool kOneMore = Codes::kUnits != kLanesOfRow;
  static constexpr int kDelay = Codes::kBlocks ? 0 : Shape::kAhead > 1 ? Shape::kAhead - 1 : 1;
  static_assert(Codes::kUnits == kLanesOfRow + (kOneMore ? 1 : 0) && 32 % kLanesOfRow == 0);
  static_assert(kOneMore == Codes::kBlocks && Shape::kKeys == 32);

  struct Row {
    int64_t entry, row;
    bool seen, there;  // `there` means seen, too
  };

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  // A page of the table; -1 where no row sees the key.
  __device__ __forceinline__ static int32_t look_up(const Piece& x, int32_t key) {
    if (key < x.begin || key >= x.end) return -1;
    return __ldg(x.rows.pages +
                 x.rows.page_size.quotient(static_cast<int32_t>(x.rows.first) + key));
  }
  // This lane's key of those from `key` on. A page is looked up one tile ahead.
  __device__ __forceinline__ Row row_of(const Piece& x, int32_t key, int32_t ahead) {
    const int32_t own = key + lane();
    const bool seen = own >= x.begin && own < x.end;
    if (!x.rows.pages) return {x.rows.entry, x.rows.first + own, seen, seen};
    const int32_t page = ahead_ == key ? page_ : look_up(x, own);
    ahead_ = ahead;
    if (ahead >= 0) page_ = look_up(x, ahead + lane());
    const auto of_cache = static_cast<int32_t>(x.rows.first) + own;
    const int32_t of_page = of_cache - x.rows.page_size.quotient(of_cache) *
                                           static_cast<int32_t>(x.rows.page_size.divisor);
    return {page, of_page, seen, page >= 0 && page < x.rows.pool};
  }

  // Where unit `unit` of the row of key `key` goes.
  __device__ __forceinline__ static uint32_t place(int key, int unit) {
    return static_cast<uint32_t>(Codes::kBlocks ? key * Codes::kRowPitch + unit * kUnit
                                                : Codes::at(key, unit));
  }
  __device__ __forceinline__ static void copy_unit(uint32_t to, const char* from, uint32_t there) {
    if constexpr (kUnit == 16) {
      ptx::cp_async_16_if(to, from, there);
    } else {
      ptx::cp_async_if<kUnit>(to, from, there);
    }
  }

  // kPaged: rows are anywhere; else one stride apart. Offsets: of this lane's key.
  template <bool kPaged>
  __device__ __forceinline__ static void copy_units(const QuantisedParams& p, const Piece& x,
                                                    uint32_t stage, int64_t k_offset,
                                                    int64_t v_offset, uint32_t there,
                                                    uint32_t lost) {
    // Computed anew, with everything that depends on it, since registers are short while keys are
    // multiplied.
    const int own = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    const int unit = own % kLanesOfRow, first = own / kLanesOfRow;
    // Bit i: whether this lane's unit of row first + i is copied.
    const uint32_t k_there = unit * kUnit < p.quantised.k_bytes ? there >> first : 0;
    const uint32_t v_there = unit * kUnit < p.quantised.v_bytes ? there >> first : 0;
    const uint32_t to = stage + place(first, unit);
    const int64_t back = first - own;
    const char* k = x.k + unit * kUnit + (kPaged ? 0 : k_offset + back * p.k.row_stride);
    const char* v = x.v + unit * kUnit + (kPaged ? 0 : v_offset + back * p.v.row_stride);
#pragma unroll
    for (int i = 0; i < Shape::kKeys; i += kRowsAtOnce) {
      const int row = first + i;
      const char *k_from = k, *v_from = v;
      if constexpr (kPaged) {
        k_from += __shfl_sync(0xffffffffu, k_offset, row);
        v_from += __shfl_sync(0xffffffffu, v_offset, row);
      }
      // (A row's first unit is its key's turn, and that is what `to` has to flip.)
      const uint32_t at = Codes::kBlocks ? to + place(i, 0)
                                         : (to ^ static_cast<uint32_t>(16 * Codes::turn(i))) +
                                               static_cast<uint32_t>(i * Codes::kCodeBytes);
      if (!Codes::kBlocks || !(lost >> row & 1)) copy_unit(at, k_from, k_there & 1u << i);
      copy_unit(at + Shape::kHalf, v_from, v_there & 1u << i);
      if constexpr (!kPaged) {
        k += kRowsAtOnce * p.k.row_stride;
        v += kRowsAtOnce * p.v.row_stride;
      }
    }
    if constexpr (kOneMore) {
      constexpr int kAt = kLanesOfRow * kUnit;
      const uint32_t at = stage + place(own, kLanesOfRow);
      const uint32_t own_there = there & 1u << own;
      if (!(lost >> own & 1))
        copy_unit(at, x.k + k_offset + kAt, kAt < p.quantised.k_bytes ? own_there : 0);
      copy_unit(at + Shape::kHalf, x.v + v_offset + kAt, kAt < p.quantised.v_bytes ? own_there : 0);
    }
  }

  // This lane's row, of which `bytes` are there, and zeros. Not inlined: it is slow by itself.
  __device__ __noinline__ static void copy_bytes(uint32_t tile, const char* from, int32_t bytes) {
#pragma unroll 1
    for (int unit = 0; unit < Codes::kUnits; ++unit) {
      uint32_t w[kUnit / 4] = {};
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const int32_t at = unit * kUnit + i;
        if (at < bytes) w[i / 4] |= uint32_t{static_cast<uint8_t>(from[at])} << (i % 4 * 8);
      }
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i)
        ptx::store_shared(tile + place(lane(), unit) + static_cast<uint32_t>(4 * i), w[i]);
    }
  }
  // A row of blocks all of whose scales are NaN.
  __device__ __noinline__ static void lose_row(uint32_t tile) {
#pragma unroll 1
    for (int at = 0; at < Codes::kRowPitch; at += 4)
      ptx::store_shared(tile + place(lane(), 0) + static_cast<uint32_t>(at), 0x7f7f7f7f);
  }

  /// The bits of a scale under way, its halves apart: a register has one load to wait for, and is
  /// the one that it is read from, since a copy, or a second load, would wait for memory.
  struct ScaleBits {
    uint32_t low, high;
  };
  __device__ __forceinline__ static void load_scale(ScaleBits& bits, const RowScales& s,
                                                    const char* head, const Row& own,
                                                    bool nan_without) {
    const char* const at = head + own.entry * s.batch_stride + own.row * s.row_stride;
    bits.low = bits.high = nan_without && own.seen ? 0x7fff : 0;
    ptx::load_half_if(bits.low, at, own.there);
    ptx::load_half_if(bits.high, at + 2, own.there && !s.is_half);
  }
  __device__ __forceinline__ void take_scales(const QuantisedParams& p, const Piece& x,
                                              const Row& own, uint32_t ring, int32_t tile) {
    const QuantisedCache& q = p.quantised;
    if constexpr (kDelay > 0) {
      const int32_t late = tile - kDelay;
      if (late >= stored_) {
        store_scales(p, ring, late, k_[kDelay - 1], v_[kDelay - 1]);
        stored_ = late + 1;
      }
#pragma unroll
      for (int d = kDelay - 1; d > 0; --d) k_[d] = k_[d - 1], v_[d] = v_[d - 1];
    }
    load_scale(k_[0], q.k_scale, x.scales.k, own, true);
    load_scale(v_[0], q.v_scale, x.scales.v, own, false);
    if constexpr (kDelay == 0) store_scales(p, ring, tile, k_[0], v_[0]);
  }
  __device__ __forceinline__ static float as_float(const RowScales& s, const ScaleBits& bits) {
    if (!s.is_half) return __uint_as_float(bits.low | bits.high << 16);
    return static_cast<float>(__builtin_bit_cast(__half, static_cast<uint16_t>(bits.low)));
  }
  __device__ __forceinline__ static void store_scales(const QuantisedParams& p, uint32_t ring,
                                                      int32_t tile, const ScaleBits& k,
                                                      const ScaleBits& v) {
    constexpr float kTimes = kUnpackedUnit<typename Shape::T, Shape::kKvDtype>;
    const uint32_t to = ring + static_cast<uint32_t>(tile) % Shape::kStages * Shape::kStage +
                        static_cast<uint32_t>(Codes::kScalesOffset + 4 * lane());
    const QuantisedCache& q = p.quantised;
    ptx::store_shared_float(to, usable_scale(as_float(q.k_scale, k)) * kTimes);
    ptx::store_shared_float(to + Shape::kHalf, usable_scale(as_float(q.v_scale, v)) * kTimes);
  }

  // Scales that are under way: [d] of the tile issued d tiles before the last.
  ScaleBits k_[kDelay > 0 ? kDelay : 1] = {}, v_[kDelay > 0 ? kDelay : 1] = {};
  int32_t stored_ = 0;              // tiles whose scales are stored
  int32_t ahead_ = -1, page_ = -1;  // the key of a tile of the same piece, and this lane's page
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_QUANTISED_COPIES_CUH_
