// Hopper backward, wide heads: the three consumer warpgroups, one class each. The head of
// backward_sm90_wide.cuh lists all warps and barriers, and has the order of a step of each
// warpgroup.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CONSUMER_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CONSUMER_CUH_

#include "cuda/backward/math.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/hopper/backward_sm90_scores.cuh"
#include "cuda/hopper/backward_sm90_weights.cuh"
#include "cuda/hopper/backward_sm90_wide_layout.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90_wide {

/// Calls run(tile, full, last) for each step of an item (HeadStep), and next_head(head) before each
/// head. What the loop needs of the item is read once and kept in registers, since a load from
/// shared memory would wait behind those of wgmma's operands: hence two loops, which keep less, and
/// read a head's first place anew.
template <typename Block, typename NextHead, typename Run>
__device__ __forceinline__ void for_each_step(const Block& block, const NextHead& next_head,
                                              const Run& run) {
  const int32_t direction = block.direction;
  if constexpr (kWalksAreLists) {
    int32_t head = -1;
    for (HeadStep now = HeadStep::first(block.walk, block.head_begin, direction);
         !now.done(block.head_end); now.advance(block.walk, direction)) {
      if (now.head != head) next_head(head = now.head);
      run(now.tile(block.walk), now.is_full(block.walk),
          now.is_last(block.walk, block.head_end, direction));
    }
  } else {  // all heads have the item's walk
    const int32_t end = last_place(block.walk, direction);
    const auto walk = block.walk;
#pragma unroll 1
    for (int32_t head = block.head_begin, left = block.head_end - head; left > 0; ++head) {
      next_head(head);
      --left;
#pragma unroll 1
      for (int32_t place = first_place(block.walk, direction);
           direction < 0 ? place >= end : place <= end; place += direction)
        run(walk.block(place), walk.is_full(place), left == 0 && place == end);
    }
  }
}

/// What the three consumer warpgroups have in common.
template <typename Tr>
struct Warpgroup {
  using T = typename Tr::T;
  typename Tr::Shared& shared;
  const BackwardParams& p;
  const BackwardScratch& scratch;

  __device__ __forceinline__ Warpgroup(typename Tr::Shared& shared_, const BackwardParams& p_,
                                       const BackwardScratch& scratch_)
      : shared(shared_), p(p_), scratch(scratch_) {}

  // (The lane and the warp are computed anew at each use: kept in registers, they would be
  // spilled.)
  __device__ __forceinline__ static int lane() { return ptx::thread_again() % 32; }
  /// The warp's number in its warpgroup, 0 to 3. It has rows 16 * warp() to 16 * warp() + 15 of the
  /// accumulators.
  __device__ __forceinline__ static int warp() { return ptx::thread_again() / 32 % 4; }
  __device__ __forceinline__ static void arrive(ptx::Barrier& barrier) {
    __syncwarp();
    if (ptx::arrives(lane())) barrier.arrive();
  }
  /// Frees a stage that this warp has read by ordinary loads. TMA writes it next, and the fence
  /// orders that write after those loads.
  __device__ __forceinline__ static void release(ptx::Barrier& empty) {
    ptx::fence_proxy_async();
    arrive(empty);
  }
  /// A step's position in the ring of dO, from that in the other rings: it may have another number
  /// of stages.
  __device__ __forceinline__ static RingPosition<Tr::kDoutStages> dout_at(RingPosition<2> at) {
    return {at.count};
  }
  /// A shared address for a descriptor. Computed anew in each step, from a value that the compiler
  /// takes for unknown: it would otherwise keep every address in a register through all steps. In a
  /// cluster the high bits of an address say which thread block's memory it is; a descriptor takes
  /// none of these bits, and is always of this block's.
  __device__ __forceinline__ static uint32_t fresh(const void* shared) {
    uint32_t address = ptx::shared_address(shared);
    ptx::make_opaque(address);
    return address & 0x3ffffu;
  }
  /// Where P^T of queries 16j to 16j + 15 (in the general kernel: the factors) passes from a thread
  /// of the weights warpgroup to the same thread of the gradients warpgroup.
  __device__ __forceinline__ uint32_t weights_of(int stage, int j) const {
    return ptx::shared_address(shared.weights[stage]) +
           static_cast<uint32_t>(weights_offset(ptx::thread_again() % 128, j));
  }
  /// 1 / (1 - dropout_p): what a weight that dropout keeps is multiplied by.
  __device__ __forceinline__ float keep_scale() const {
    return Tr::kGeneral ? p.dropout.keep_scale : 1.f;
  }
  /// Whether a query sees the thread's two keys, 8 rows apart.
  template <bool kMasked>
  __device__ __forceinline__ SeenQueries<kMasked ? 2 : 0> seen(int slot, int32_t tile) const {
    return {ptx::shared_address(shared.limits[slot] + 16 * warp() + lane() / 4), tile * kQueries};
  }
  /// Calls run(block, slot) for item after item.
  template <typename Run>
  __device__ __forceinline__ void for_each_item(const Run& run) {
#pragma unroll 1
    for (RingPosition<2> at;; ++at.count) {
      shared.block_ring.full[at.stage()].wait(at.phase());
      const typename Tr::Block& block = shared.blocks[at.stage()];
      if (block.number < 0) return;
      run(block, at);
      arrive(shared.block_ring.empty[at.stage()]);
    }
  }
  /// acc = the block's keys times the queries of a tile: both K-major.
  template <typename Keys, typename Queries>
  __device__ __forceinline__ static void issue_scores(float (&acc)[kQueries / 2],
                                                      const uint8_t* keys, const uint8_t* queries) {
    const auto a = ptx::Descriptor::make(fresh(keys), 0);
    const auto b = ptx::Descriptor::make(fresh(queries), 0);
#pragma unroll
    for (int i = 0; i < 4 * Keys::kPanels; ++i) {
      ptx::Wgmma<T, kQueries>::ss(acc, a.at(i / 4 * Keys::kPanelBytes + i % 4 * 32),
                                  b.at(i / 4 * Queries::kPanelBytes + i % 4 * 32), i != 0);
    }
  }
  /// sum += values of (keys, queries) times rows of dO or Q. In pieces of 128 columns where these
  /// divide the width: ptxas does not take 256 of a kernel that begins with 128 registers.
  template <typename Rows, int kCount>
  __device__ __forceinline__ static void issue_sum(float (&sum)[kCount],
                                                   const uint32_t (&values)[kQueries / 4],
                                                   const uint8_t* rows) {
    constexpr int kColumns = 2 * kCount, kPiece = kColumns % 128 == 0 ? 128 : kColumns;
    const auto b = ptx::Descriptor::make(fresh(rows), Rows::kPanelBytes);
#pragma unroll
    for (int piece = 0; piece < kColumns / kPiece; ++piece) {
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        ptx::Wgmma<T, kPiece>::rs(
            sum + piece * (kPiece / 2), values + 4 * i,
            b.at(piece * (kPiece / 64) * Rows::kPanelBytes + i * 16 * Rows::kRowBytes), 1);
      }
    }
  }
  /// Whether one of the warp's rows, of those that are keys, has an infinity or a NaN that a
  /// product with a weight of 0 may have made: unless all tiles were full.
  template <int kCount>
  __device__ __forceinline__ static bool suspects(const KeyBlock& block,
                                                  const float (&sum)[kCount]) {
    bool found = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      found |= sm90::not_finite(sum, half) &&
               block.key_begin + 16 * warp() + lane() / 4 + 8 * half < block.seqlen_k;
    }
    return __any_sync(0xffffffffu,
                      found && !all_full(block.walk, block.head_begin, block.head_end));
  }
  /// Stores rows of dK or dV: to the caller's tensor, or, where a group has several parts, to the
  /// sums of this item's part.
  template <int kCount>
  __device__ __forceinline__ void store(const KeyBlock& block, const float (&sum)[kCount],
                                        float scale, const Tensor& tensor, int32_t dim,
                                        float* parts_sum, const BackwardOrder& order) const {
    const BackwardItem& item = block.item;
    store_keys<T, Tr::kWidth>(
        p, {item.batch, item.head_kv, item.part, order.parts, block.k_row, block.seqlen_k},
        block.key_begin + 16 * warp() + lane() / 4, 0, lane(),
        reinterpret_cast<const float(&)[1][kCount / 4][4]>(sum), scale, tensor, dim, parts_sum);
  }
};

/// Warpgroup 1: S, P and dV.
template <typename Tr>
struct WeightsWarpgroup : Warpgroup<Tr> {
  using Base = Warpgroup<Tr>;
  using Base::Base;
  using Base::shared;
  using typename Base::T;

  __device__ __forceinline__ void run(const BackwardOrder& order) {
    Base::for_each_item([&](const typename Tr::Block& block, RingPosition<2> item) {
      const int slot = item.stage();
      float dv[Tr::kWidthV / 2];
      ptx::clear(dv);
      if (has_steps(block)) {
        shared.k_ring.full[0].wait(k_at_.phase());
        if constexpr (Tr::kGeneral) {
          const auto position = static_cast<int32_t>(
              Base::p.sequence_of_all_heads(block.item.batch).mask.position(0));
          int32_t head = 0;
          for_each_step(
              block, [&](int32_t next) { head = next; },
              [&](int32_t tile, bool, bool last) {
                general_step(dv, block, slot, head, tile, position, last);
              });
        } else {
          for_each_step(
              block, [](int32_t) {},
              [&](int32_t tile, bool full, bool last) {
                if (full) {
                  step<false>(dv, slot, tile, last);
                } else {
                  step<true>(dv, slot, tile, last);
                }
              });
        }
        ++k_at_.count;
      }
      const bool found = Base::suspects(block, dv);
      if (Base::lane() == 0) shared.nonfinite[slot][Base::warp()] = found;
      Base::arrive(shared.nonfinite_full[slot]);
      Base::store(block, dv, Base::keep_scale() / Tr::StageTraits::kScale, Base::p.dv,
                  Base::p.head_dim_v, Base::scratch.dv, order);
    });
  }

 private:
  template <bool kMasked>
  __device__ __forceinline__ void step(float (&dv)[Tr::kWidthV / 2], int slot, int32_t tile,
                                       bool last) {
    float s[kQueries / 2];
    uint32_t weights[kQueries / 4];
    const int stage = at_.stage();
    shared.q_ring.full[stage].wait(at_.phase());
    ptx::wgmma_fence();
    Base::template issue_scores<typename Tr::KTile, typename Tr::QTile>(
        s, shared.k, shared.q[stage]);  // S^T = K Q^T
    ptx::wgmma_commit();
    // lse is loaded while the product is under way, since shared memory answers slowly meanwhile.
    // (A masked step has no registers for that, and loads it after the product.)
    float4 lse[kQueries / 16];
    if constexpr (!kMasked) sm90::load_of_queries(lse, shared.lse[stage], Base::lane());
    shared.weights_ring.empty[stage].wait(at_.free());
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if constexpr (kMasked) sm90::load_of_queries(lse, shared.lse[stage], Base::lane());
    const auto seen = Base::template seen<kMasked>(slot, tile);
    if (last) Base::arrive(shared.k_ring.empty[0]);
    const float scale = Base::p.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      sm90::take_weights<T, kMasked>(s + 8 * j, scale, sm90::NoBias(), lse[j], Base::lane(), 16 * j,
                                     seen, weights + 4 * j);
    }
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      ptx::store_shared_words(Base::weights_of(stage, j),
                              reinterpret_cast<const uint32_t(&)[4]>(weights[4 * j]));
    }
    add_dv(dv, weights);
  }
  /// The same with softcap, ALiBi and dropout.
  __device__ __forceinline__ void general_step(float (&dv)[Tr::kWidthV / 2], const KeyBlock& block,
                                               int slot, int32_t head, int32_t tile,
                                               int32_t position, bool last) {
    float s[kQueries / 2];
    uint32_t weights[kQueries / 4];
    const int stage = at_.stage(), lane = Base::lane();
    const int32_t query = tile * kQueries, key = block.key_begin + 16 * Base::warp();
    const auto dropped =
        sm90::DroppedWeights<kQueries>::draw(Base::p, block.item.batch, head, query, key, lane);
    shared.q_ring.full[stage].wait(at_.phase());
    ptx::wgmma_fence();
    Base::template issue_scores<typename Tr::KTile, typename Tr::QTile>(
        s, shared.k, shared.q[stage]);  // S^T = K Q^T
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    shared.weights_ring.empty[stage].wait(at_.free());
    const auto seen = Base::template seen<true>(slot, tile);
    if (last) Base::arrive(shared.k_ring.empty[0]);
    const Score score = Score::of(Base::p, block.item.batch, head);
    const float4* const lses = reinterpret_cast<const float4*>(shared.lse[stage]) + lane % 4;
    const auto lse_of = [&](int j) { return lses[4 * j]; };
    sm90::take_general_weights<Tr>(s, score, position + query - key, Base::p.dropout.enabled(),
                                   dropped, lse_of, lane, seen, weights,
                                   [&](int j, const uint32_t(&factors)[4]) {
                                     ptx::store_shared_words(Base::weights_of(stage, j), factors);
                                   });
    add_dv(dv, weights);
  }
  /// The end of a step. Tells the gradients warpgroup that the weights are there, frees Q, waits
  /// for dO, and adds dV += P^T dO.
  __device__ __forceinline__ void add_dv(float (&dv)[Tr::kWidthV / 2],
                                         const uint32_t (&weights)[kQueries / 4]) {
    const int stage = at_.stage();
    Base::arrive(shared.weights_ring.full[stage]);
    Base::release(shared.q_ring.empty[stage]);

    const int dout_stage = Base::dout_at(at_).stage();
    shared.dout_ring.full[dout_stage].wait(Base::dout_at(at_).phase());
    ptx::wgmma_fence();
    Base::template issue_sum<typename Tr::DoutTile>(dv, weights,
                                                    shared.dout[dout_stage]);  // dV += P^T dO
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    Base::arrive(shared.dout_ring.empty[dout_stage]);
    ++at_.count;
  }

  RingPosition<1> k_at_;
  RingPosition<2> at_;
};

/// Warpgroup 2: dP, dS and dK.
template <typename Tr>
struct GradientsWarpgroup : Warpgroup<Tr> {
  using Base = Warpgroup<Tr>;
  using Base::Base;
  using Base::shared;
  using typename Base::T;

  __device__ __forceinline__ void run(const BackwardOrder& order, uint32_t rank) {
    Base::for_each_item([&](const typename Tr::Block& block, RingPosition<2> item) {
      const int slot = item.stage();
      float dk[Tr::kWidth / 2];
      ptx::clear(dk);
      if (has_steps(block)) {
        shared.v_ring.full[0].wait(v_at_.phase());
        for_each_step(
            block, [](int32_t) {},
            [&](int32_t tile, bool full, bool last) {
              if constexpr (Tr::kGeneral) {
                step<false>(dk, slot, tile, last);
              } else if (full) {
                step<false>(dk, slot, tile, last);
              } else {
                step<true>(dk, slot, tile, last);
              }
            });
        ++v_at_.count;
      }
      shared.nonfinite_full[slot].wait(item.phase());  // until the weights warpgroup has flagged dV
      const bool found = Base::suspects(block, dk) || shared.nonfinite[slot][Base::warp()] != 0;
      if (Base::lane() == 0) {
        Base::scratch.nonfinite[block.number * kFlagWords + flag_word(rank, Base::warp())] = found;
        if (found) *Base::scratch.any_nonfinite = 1;
      }
      Base::store(block, dk, Base::p.scale, Base::p.dk, Base::p.head_dim, Base::scratch.dk, order);
    });
  }

 private:
  template <bool kMasked>
  __device__ __forceinline__ void step(float (&dk)[Tr::kWidth / 2], int slot, int32_t tile,
                                       bool last) {
    float dp[kQueries / 2];
    uint32_t ds[kQueries / 4];
    const int stage = at_.stage(), dout_stage = Base::dout_at(at_).stage();
    shared.dout_ring.full[dout_stage].wait(Base::dout_at(at_).phase());
    ptx::wgmma_fence();
    Base::template issue_scores<typename Tr::VTile, typename Tr::DoutTile>(
        dp, shared.v, shared.dout[dout_stage]);  // dP^T = V dO^T
    ptx::wgmma_commit();
    // delta is loaded while the product is under way, where there are registers for it. (A masked
    // step loads it after the product, and the general kernel four values at a time.)
    float4 delta[kQueries / 16];
    if constexpr (!kMasked && !Tr::kGeneral) {
      sm90::load_of_queries(delta, shared.delta[dout_stage], Base::lane());
    }
    shared.ds_ring.empty[stage].wait(at_.free());
    shared.weights_ring.full[stage].wait(at_.phase());
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    if constexpr (kMasked) sm90::load_of_queries(delta, shared.delta[dout_stage], Base::lane());
    const auto seen = Base::template seen<kMasked>(slot, tile);
    if constexpr (!Tr::kGeneral) Base::release(shared.dout_ring.empty[dout_stage]);
    if (last) Base::arrive(shared.v_ring.empty[0]);
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      uint32_t left[4];
      ptx::load_shared_words(Base::weights_of(stage, j), left);
      if constexpr (Tr::kGeneral) {
        const float4* const deltas = reinterpret_cast<const float4*>(shared.delta[dout_stage]);
        sm90::take_general_ds<T>(dp + 8 * j, left, Base::keep_scale() / Tr::StageTraits::kScale,
                                 deltas[4 * j + Base::lane() % 4], ds + 4 * j);
      } else {
        sm90::take_ds<T, kMasked>(dp + 8 * j, left, Tr::StageTraits::kScale, delta[j], Base::lane(),
                                  16 * j, seen, ds + 4 * j);
      }
    }
    if constexpr (Tr::kGeneral) Base::release(shared.dout_ring.empty[dout_stage]);
    leave_ds(ds, stage);
    Base::arrive(shared.weights_ring.empty[stage]);

    shared.q_ring.full[stage].wait(at_.phase());
    ptx::wgmma_fence();
    Base::template issue_sum<typename Tr::QTile>(dk, ds, shared.q[stage]);  // dK += dS^T Q
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    Base::arrive(shared.q_ring.empty[stage]);
    ++at_.count;
  }

  /// Leaves dS in shared memory for the dQ warpgroup, and sends it to the peer's shared memory for
  /// the peer's.
  __device__ __forceinline__ void leave_ds(const uint32_t (&ds)[kQueries / 4], int stage) {
    using Tile = typename Tr::DsTile;
    const int warp = Base::warp(), lane = Base::lane();
    const uint32_t tile = ptx::shared_address(shared.ds[stage][0]);
    sm90::store_rows<Tile>(tile, 16 * warp, lane, ds);
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::Barrier& full = shared.ds_ring.full[stage];
    constexpr uint32_t kBytes = Tile::kBytes / 4;  // the warp's 16 keys
    if (lane == 0) {
      full.arrive_expect(kBytes);  // the phase ends only when the peer's dS has arrived, too
      const uint32_t first = static_cast<uint32_t>(warp) * kBytes, peer = ptx::cluster_rank() ^ 1;
      ptx::send(ptx::shared_of(ptx::shared_address(shared.ds[stage][1]) + first, peer),
                tile + first, kBytes, ptx::shared_of(ptx::shared_address(&full), peer));
    } else if (ptx::arrives(lane)) {
      full.arrive();
    }
  }

  RingPosition<1> v_at_;
  RingPosition<2> at_;
};

/// Warpgroup 3: dQ.
template <typename Tr>
struct DqWarpgroup : Warpgroup<Tr> {
  using Base = Warpgroup<Tr>;
  using Base::Base;
  using Base::shared;
  using typename Base::T;

  __device__ __forceinline__ void run(uint32_t rank) {
    Base::for_each_item([&](const typename Tr::Block& block, RingPosition<2>) {
      if (!has_steps(block)) return;
      shared.k_ring.full[0].wait(k_at_.phase());
      shared.peer_k_ring.full[0].wait(k_at_.phase());
      if constexpr (Tr::kOrdered) {
        ordered_steps(block, rank);
      } else {
        steps(block, rank);
      }
      Base::arrive(shared.k_ring.empty[0]);
      Base::arrive(shared.peer_k_ring.empty[0]);
      ++k_at_.count;
    });
  }

 private:
  __device__ __forceinline__ void steps(const KeyBlock& block, uint32_t rank) {
    float* of_head = nullptr;  // the sum of the head's tile 0
    for_each_step(
        block,
        [&](int32_t head) {
          of_head = Base::scratch.dq +
                    (int64_t{head} * Base::scratch.tiles + block.scratch) * (kQueries * Tr::kWidth);
        },
        [&](int32_t tile, bool, bool) {
          float* const sum = of_head + int64_t{tile} * (kQueries * Tr::kWidth);
          const DqShare share = dq_share<Tr::KTile::kPanels>(rank, at_.count);
          const int past = share.first + share.count;
          shared.ds_ring.full[at_.stage()].wait(at_.phase());
#pragma unroll 1
          for (int panel = share.first; panel < past;) {
            if (Tr::kEvenShares || panel + 2 <= past) {
              add_panels<2>(sum, at_.stage(), panel, panel + 2 == past, rank);
              panel += 2;
            } else {
              add_panels<1>(sum, at_.stage(), panel, true, rank);
              ++panel;
            }
          }
          ++at_.count;
        });
  }
  /// The same where additions have an order: this block's panels are added when it is its turn.
  __device__ __forceinline__ void ordered_steps(const OrderedKeyBlock& block, uint32_t rank) {
    uint32_t turn = block.rank;  // kept where it is the same for all tiles
    int32_t head = 0;
    for_each_step(
        block, [&](int32_t next) { head = next; },
        [&](int32_t tile, bool, bool) {
          const uint32_t at = static_cast<uint32_t>(head) * Base::scratch.tiles + block.scratch +
                              static_cast<uint32_t>(tile);
          // Of three panels the middle one is one block's or the other's: whose must not change
          // from one item to the next, nor with the batch.
          const DqShare share =
              dq_share<Tr::KTile::kPanels>(rank, static_cast<uint32_t>(head + tile));
          if constexpr (kWalksAreLists) turn = block.turn(head, tile, Base::scratch.key_tiles);
          shared.ds_ring.full[at_.stage()].wait(at_.phase());
          if (Tr::kEvenShares || share.count == 2) {
            add_in_turn<2>(at, share.first, turn, rank);
          } else {
            add_in_turn<1>(at, share.first, turn, rank);
          }
          shared.added_ring.empty[at_.stage()].wait(at_.free());
          Base::arrive(shared.added_ring.full[at_.stage()]);
          ++at_.count;
        });
  }
  /// Computes kPanels panels of dQ, all that this block has of a tile, frees dS, and adds them to
  /// the tile's sum when its counter says `turn`.
  template <int kPanels>
  __device__ __forceinline__ void add_in_turn(uint32_t tile, int panel, uint32_t turn,
                                              uint32_t rank) {
    float dq[kPanels][32];
    issue_panels<kPanels>(dq, at_.stage(), panel, rank);
    // The answer comes from L2 while the products are under way.
    const uint32_t* const counter = additions_of(Base::scratch, tile, rank);
    bool is_turn = ptx::load_acquire(counter) == turn;
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kPanels; ++i) ptx::pin(dq[i]);
    free_ds(at_.stage(), rank);
    while (!is_turn) is_turn = ptx::load_acquire(counter) == turn;
    __syncwarp();
    float* const to = panel_of(Base::scratch.dq + int64_t{tile} * (kQueries * Tr::kWidth), panel);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) add(to + i * 1024, dq[i]);
  }
  /// Computes kPanels panels of dQ and adds them to their tile's sum in global memory. No thread
  /// here waits until the additions are done.
  template <int kPanels>
  __device__ __forceinline__ void add_panels(float* sum, int stage, int panel, bool last,
                                             uint32_t rank) {
    float dq[kPanels][32];
    issue_panels<kPanels>(dq, stage, panel, rank);
    float* const to = panel_of(sum, panel);
    if constexpr (kPanels == 2) {
      ptx::wgmma_wait<1>();
      ptx::pin(dq[0]);
      add(to, dq[0]);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dq[kPanels - 1]);
    if (last) free_ds(stage, rank);
    add(to + (kPanels - 1) * 1024, dq[kPanels - 1]);
  }
  template <int kPanels>
  __device__ __forceinline__ void issue_panels(float (&dq)[kPanels][32], int stage, int panel,
                                               uint32_t rank) {
    ptx::wgmma_fence();
    const int first = peer_panels<Tr::KTile::kPanels>(rank).first;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      issue_dq(dq[i], shared.ds[stage][0], shared.k + (panel + i) * Tr::KTile::kPanelBytes, 0);
      issue_dq(dq[i], shared.ds[stage][1],
               shared.peer_k + (panel + i - first) * Tr::KTile::kPanelBytes, 1);
      ptx::wgmma_commit();
    }
  }
  /// The thread's part of a panel of a tile's sum.
  __device__ __forceinline__ static float* panel_of(float* sum, int panel) {
    return sum + sum_block<Tr::kWidth>(Base::warp(), 8 * panel) + sum_offset(Base::lane());
  }
  __device__ __forceinline__ static void add(float* to, const float (&dq)[32]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      sum_add(to + 128 * j, x);
    }
  }
  /// dQ = dS K over 64 keys; keep: added to what is in dq.
  template <int kCount>
  __device__ __forceinline__ static void issue_dq(float (&dq)[kCount], const uint8_t* ds,
                                                  const uint8_t* keys, int keep) {
    const auto a = ptx::Descriptor::make(Base::fresh(ds), Tr::DsTile::kPanelBytes);
    const auto b = ptx::Descriptor::make(Base::fresh(keys), Tr::KTile::kPanelBytes);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::Wgmma<T, 2 * kCount>::ss_mn(dq, a.at(i * 16 * Tr::DsTile::kRowBytes),
                                       b.at(i * 16 * Tr::KTile::kRowBytes), keep || i != 0);
    }
  }
  /// Says that dS of this stage may be overwritten: to the gradients warpgroup of this thread
  /// block, and to that of the peer, which sends its dS to the same stage.
  __device__ __forceinline__ void free_ds(int stage, uint32_t rank) {
    ptx::Barrier& empty = shared.ds_ring.empty[stage];
    __syncwarp();
    if (ptx::arrives(Base::lane())) {
      empty.arrive();
      ptx::arrive_at(ptx::shared_of(ptx::shared_address(&empty), rank ^ 1));
    }
  }

  RingPosition<1> k_at_;
  RingPosition<2> at_;
};

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CONSUMER_CUH_
