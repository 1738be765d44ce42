// Hopper forward: how a consumer warpgroup's O leaves: rounded by way of shared memory, where warp
// 3 stores it, or straight from registers, or in float32; and what rows get that see no key.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_OUTPUT_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_OUTPUT_CUH_

#include <cstdint>

#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/quad.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/hopper/transposed_values.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Scales, rounds and stores O of the tile in slot slots_.done(), whose products are all done. A
/// tile with rows that are not finite goes onto the list of suspects.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::finish_tile() {
  Tile<Tr::kWarpgroups>& tile = shared_.tiles[slots_.done()];
  if constexpr (Tr::kChunked) {
    if (p_.chunks.of_tile > 1) {
      store_piece(tile);
      arrive(shared_.tile_ring.empty[slots_.done()]);
      return;
    }
    if (p_.chunks.parked) {
      const PartWalk& walk = tile.part[warpgroup_];
      finish_chunk(walk, walk.begin, true);
    }
  }
  // Where O leaves straight from registers there is none to spare. ptxas otherwise takes one that
  // the steps need for the thread's number, and spills that.
  const int lane = Tr::kStagesO ? this->lane() : ptx::thread_again() % 32;
  const bool valid[2] = {row(0) < tile.rows, row(1) < tile.rows};
  const bool suspect = p_.template writes_float<!kAllRowsUsed>() ? store_floats(tile, lane, valid)
                                                                 : store_rounded(tile, lane, valid);
  if (__any_sync(0xffffffffu, suspect) && lane == 0 && atomicExch(&tile.suspect, 1) == 0) {
    auto* const workspace = static_cast<Workspace*>(p_.workspace);
    workspace->suspects[tile.number] = {atomicExch(&shared_.suspects, tile.number), tile.batch,
                                        tile.head, tile.first};
  }
  arrive(shared_.tile_ring.empty[slots_.done()]);
}

/// Two neighbours of O, rounded to the 16 bits of out.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ uint32_t
Consumer<Tr, kGeneral, kAllRowsUsed, Params>::narrow(float x, float y) const {
  if constexpr (Tr::kFloat8) {
    return p_.half_out ? ptx::pack<__half>(x, y) : ptx::pack<__nv_bfloat16>(x, y);
  } else {
    return ptx::pack<T>(x, y);
  }
}

/// The thread's i-th value of O, its columns in their order.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ float Consumer<Tr, kGeneral, kAllRowsUsed, Params>::o_value(
    int i) const {
  return o_[Tr::kFloat8 ? accumulator_at(i) : i];
}

/// O times the factors, rounded. Returns whether a value of a row is not finite, unless a score
/// of it is NaN: then so are the sum and the factor, O is rightly NaN, and the row is not
/// computed again.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_rounded(
    const Tile<Tr::kWarpgroups>& tile, int lane, const bool (&valid)[2]) {
  const float(&factor)[2] = done_factor_;
  uint32_t marks[2] = {0, 0};
  [[maybe_unused]] float zero[2] = {0.f, 0.f};  // 0 * x is NaN where x is not finite
#pragma unroll
  for (int i = 0; i < kWidth / 16; i += 2) {
    // O passes through shared memory in rounds of kOPanels panels. Before each, wait until warp 3
    // has read the round before.
    if constexpr (Tr::kStagesO) {
      if (i % (4 * Tr::kOPanels) == 0) shared_.o_ring[warpgroup_].empty[0].wait(o_at_.free());
    }
    uint32_t block[2][4];  // two of 16 x 16 of the warp's rows, each as four 8 x 8
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int o = 8 * i + 2 * j;
      const float x = o_value(o) * factor[j % 2], y = o_value(o + 1) * factor[j % 2];
      block[j / 4][j % 4] = narrow(x, y);
      if constexpr (Tr::kFloat8) {  // whichever the 16 bits are
        zero[j % 2] = __fmaf_rn(x, 0.f, __fmaf_rn(y, 0.f, zero[j % 2]));
      } else {
        marks[j % 2] = mark_not_finite<T>(marks[j % 2], block[j / 4][j % 4]);
      }
    }
    if constexpr (Tr::kStagesO) {
      store_shared(i, block[0]);
      store_shared(i + 1, block[1]);
      if (i + 2 == kWidth / 16 || (i + 2) % (4 * Tr::kOPanels) == 0) {
        ptx::fence_proxy_async();
        arrive(shared_.o_ring[warpgroup_].full[0]);
        ++o_at_.count;
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t w[4] = {block[0][r], block[0][2 + r], block[1][r], block[1][2 + r]};
        store_global(tile, i, r, lane, valid[r], w);
      }
    }
  }
  bool suspect = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_finite = Tr::kFloat8 ? zero[r] == 0.f : !marked(marks[r]);
    suspect |= valid[r] && !is_finite && factor[r] == factor[r];
  }
  return suspect;
}

/// The same in float32, straight from registers: a quad stores eight columns, a sector, at a
/// time.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_floats(
    const Tile<Tr::kWarpgroups>& tile, int lane, const bool (&valid)[2]) {
  bool suspect = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float zero = 0.f;  // 0 * x is NaN where x is not finite
    const int column = 2 * (lane % 4);
    float* const to = reinterpret_cast<float*>(out_row(tile, row(r))) + column;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const float x = o_value(4 * n + 2 * r) * done_factor_[r];
      const float y = o_value(4 * n + 2 * r + 1) * done_factor_[r];
      zero = __fmaf_rn(x, 0.f, __fmaf_rn(y, 0.f, zero));
      if (valid[r] && 8 * n + column < p_.head_dim_v)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(x, y);
    }
    suspect |= valid[r] && zero != 0.f && done_factor_[r] == done_factor_[r];
  }
  return suspect;
}

/// Columns 16i to 16i + 15 of the warp's rows.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_shared(
    int i, const uint32_t (&block)[4]) {
  using OTile = typename Tr::OTile;
  ptx::stmatrix(ptx::shared_address(shared_.o[warpgroup_]) +
                    static_cast<uint32_t>(OTile::block_offset(16 * warp(), 0) +
                                          i / 4 % Tr::kOPanels * OTile::kPanelBytes +
                                          OTile::fragment_offset(lane(), i % 4)),
                block);
}

/// Columns 16i to 16i + 31 of the thread's row r. Lane t of a quad has columns 2t, 2t + 1 of each
/// 8; transposed, 8 in a row, so that a quad stores 64 bytes in a row.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_global(
    const Tile<Tr::kWarpgroups>& tile, int i, int r, int lane, bool valid, uint32_t (&w)[4]) {
  quad_transpose(w, lane);
  const int column = 16 * i + 8 * (lane % 4);
  if (valid && column < p_.head_dim_v)
    *reinterpret_cast<uint4*>(out_row(tile, row(r)) + column) = make_uint4(w[0], w[1], w[2], w[3]);
}

/// Where the row begins, in 16-bit words.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ uint16_t* Consumer<Tr, kGeneral, kAllRowsUsed, Params>::out_row(
    const Tile<Tr::kWarpgroups>& tile, int row) const {
  return static_cast<uint16_t*>(p_.out.data) +
         out_words() * p_.out.element(tile.batch, tile.map_q + query_of(p_, row),
                                      tile.head + head_of(p_, row));
}

template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ int32_t Consumer<Tr, kGeneral, kAllRowsUsed, Params>::out_words() const {
  return p_.template out_words<!kAllRowsUsed>();
}

/// Tells warp 3, which under a mask as data waits for each tile, that there is no O for it.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::announce_nothing() {
  if (!Tr::kStagesO || p_.template writes_float<!kAllRowsUsed>()) return;
  shared_.o_ring[warpgroup_].empty[0].wait(o_at_.free());
  if (threadIdx.x % kWarpgroupThreads == 0)
    shared_.mask.tiles[slot_.stage()].has_nothing[warpgroup_] = 1;
  arrive(shared_.o_ring[warpgroup_].full[0]);
  ++o_at_.count;
}

/// No row of the warpgroup sees a key: writes O = 0 and lse = -inf (with a sink in lse, that), or
/// NaN where the numbers of a cached sequence are out of range, or a mask as data has no room for
/// the rows.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_nothing(
    const Tile<Tr::kWarpgroups>& tile) {
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    if (row(r) >= tile.rows) return;
    if constexpr (Tr::kChunked) {
      if (p_.chunks.of_tile > 1) {
        const int64_t piece = int64_t{tile.number} * p_.chunks.piece_rows + row(r);
        *reinterpret_cast<float2*>(p_.chunks.piece_sums + 2 * piece) =
            make_float2(-infinity(), 0.f);
        continue;
      }
    }
    bool in_range = !kCached<Params> || tile.entry >= 0;
    if constexpr (Tr::kMasked) {
      const auto& lists = shared_.mask.tiles[slot_.stage()];
      in_range = !lists.lists[lists.list_of(warpgroup_ * kWarpgroupRows)].lacks_room;
    }
    const uint32_t value = in_range ? 0u : 0x7fff7fffu;
    if (p_.lse && lane() % 4 == 0) {
      const int32_t head = tile.head + head_of(p_, row(r));
      const float lse = finish_row(p_, head, false, 0.f, 0.f, 1.f).lse;
      p_.lse[lse_row(tile, r)] = in_range ? lse : __int_as_float(0x7fffffff);
    }
#pragma unroll 1
    for (int column = 8 * (lane() % 4); column < out_words() * p_.head_dim_v; column += 32)
      *reinterpret_cast<uint4*>(out_row(tile, row(r)) + column) =
          make_uint4(value, value, value, value);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_OUTPUT_CUH_
