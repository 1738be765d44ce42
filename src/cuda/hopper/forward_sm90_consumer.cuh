// Hopper forward: a consumer warpgroup, which computes S, the softmax and O of 64 rows.
// Consumer::step has the order of a step. In files of their own: the step of float8
// (forward_sm90_float8.cuh), a tile under a mask as data (forward_sm90_masked_tile.cuh), chunks of
// keys (forward_sm90_chunks.cuh), a block that is computed again (forward_sm90_redo.cuh), and how O
// leaves (forward_sm90_output.cuh). The head of forward_sm90.cuh lists all warps and barriers.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_CONSUMER_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_CONSUMER_CUH_

#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/chunk_sums.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/key_chunks.h"
#include "cuda/hopper/tile_rows.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

enum class Kind {
  kTakeMaximum,   // a block that is masked, or the first of a tile: its maximum and all before it
                  // become the reference
  kKeepReference  // an unmasked block after those: its scores take the reference that there is
};
// Which blocks are masked is a matter of the tile. With Tr::kInvariant, where the bits of a row may
// depend on the row alone, a row's reference is the maximum of the first block in which it has a
// score above -inf, and stays, in blocks of either kind, until a sum of the row's own exceeds the
// limit: then `redo` takes that row's maximum, and leaves the weights of the warp's other rows as
// they are. kTakeMaximum is then for blocks that are masked or in which a row may see its first
// keys: those, and the first unmasked one after them.

/// Places of two tiles in shared memory: of the one that S belongs to, and of the one whose scores
/// have all been seen (retire).
struct TileSlots {
  int begin_ = 0, done_ = 0;

  __device__ __forceinline__ void begin(int slot) { begin_ = slot; }
  __device__ __forceinline__ void finish() { done_ = begin_; }
  __device__ __forceinline__ int done() const { return done_; }
};
/// The same in one register, for kernels that have none to spare.
template <int kSlots>
struct PackedSlots {
  uint32_t both_ = 0;

  __device__ __forceinline__ void begin(int slot) {
    both_ = both_ / kSlots * kSlots + static_cast<uint32_t>(slot);
  }
  __device__ __forceinline__ void finish() { both_ = both_ % kSlots * (1 + kSlots); }
  __device__ __forceinline__ int done() const { return static_cast<int>(both_ / kSlots); }
};

/// A consumer warpgroup. kGeneral, kAllRowsUsed, Params: the kernel's.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(typename Tr::Shared& shared, const Params& p, int warpgroup)
      : shared_(shared), p_(p), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (uint32_t& p : weights_) p = 0;
    if (warpgroup_ == Tr::kWarpgroups - 1) pass_ping_pong();
    for (bool more = true; more; ++slot_.count) {
      shared_.tile_ring.full[slot_.stage()].wait(slot_.phase());
      const Tile<Tr::kWarpgroups>& tile = shared_.tiles[slot_.stage()];
      more = tile.batch >= 0;
      if constexpr (Tr::kMasked) {
        run_masked_tile(tile, more);
      } else {
        run_tile(tile, more);
      }
    }
    if (warpgroup_ == 0)
      wait_ping_pong();  // the last warpgroup's last pass: every pass is waited for
  }

 private:
  using T = typename Tr::T;
  static constexpr int kTileK = Tr::kTileK, kWidth = Tr::kWidth;
  static constexpr int kSlices = kWidth / Tr::kSlice;  // kFloat8
  // Weights are 2^kWeightShift times as large as against the maximum: of e4m3's numbers, which end
  // at 448, the largest have the most below them.
  static constexpr float kWeightShift = Tr::kFloat8 ? 8.f : 0.f;
  // Whether scores are rounded one by one before a reference is taken off.
  static constexpr bool kRounded = kGeneral || Tr::kBias;
  // With a bias scores and references are in natural units, where every finite bias is a number.
  static constexpr float kUnit = Tr::kBias ? kLog2e : 1.f;
  // The largest sum of a thread's weights in a row of a block with which the block need not be
  // computed again. In fp16 no weight may pass 65504. bf16 has float32's range, and there O += P V
  // has to stay finite.
  static constexpr float kSumLimit = std::is_same_v<T, __half> ? 0x1p15f : 0x1p60f;

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x / 32 % 4); }
  /// The tile's row that this thread's accumulators 4i + 2r and 4i + 2r + 1 belong to.
  __device__ __forceinline__ int row(int r) const {
    return warpgroup_ * kWarpgroupRows + 16 * warp() + lane() / 4 + 8 * r;
  }
  __device__ __forceinline__ static TileMask mask_of(const Tile<Tr::kWarpgroups>& tile) {
    return tile.mask.template assuming<kAllRowsUsed>();
  }
  __device__ __forceinline__ int query(int r) const { return query_of(p_, row(r)); }
  /// Each tile has one stage of Q, so the ring of Q moves on together with the ring of tiles.
  __device__ __forceinline__ RingPosition<Tr::kQStages> q_at() const { return {slot_.count}; }
  __device__ __forceinline__ void arrive(ptx::Barrier& barrier) {
    __syncwarp();
    if (ptx::arrives(lane())) barrier.arrive();
  }
  __device__ __forceinline__ void wait_ping_pong() {
    ptx::named_barrier_sync<2 * kWarpgroupThreads>(1 + warpgroup_);
  }
  __device__ __forceinline__ void pass_ping_pong() {
    const int next = warpgroup_ + 1 == Tr::kWarpgroups ? 0 : warpgroup_ + 1;
    ptx::named_barrier_arrive<2 * kWarpgroupThreads>(1 + next);
  }
  /// All places of a tile's walk. exists: false where the scheduler has no more tiles, and only
  /// what the tile before has left pending is done. When it returns, all tiles before are finished,
  /// and this one's last product may still be pending.
  __device__ __forceinline__ void run_tile(const Tile<Tr::kWarpgroups>& tile, bool exists) {
    const PartWalk walk = tile.part[warpgroup_];
    const int last = tile.walk.begin, loaded = tile.loaded;
    if (exists) wait_for_q(tile);
    first_ = true;
    for (int place = tile.walk.end - 1; place >= last; --place) {
      done_ = false;
      const bool begins = first_ && walk.has(place);
      if constexpr (Tr::kChunked) {
        if (parks_at(walk, place)) begin_chunk();
      }
      if (!walk.has(place)) {
        skip(loaded, true);
      } else if (kGeneral || Tr::kBias || first_ || !walk.is_full(place) ||
                 (Tr::kInvariant && !walk.is_full(place + 1))) {
        if (begins) begin_tile(tile);
        step<Kind::kTakeMaximum>(walk.block(place), place == walk.begin, !walk.is_full(place));
        first_ = false;
      } else {
        for (const int end = run_begin(walk, place);; --place) {
          step<Kind::kKeepReference>(walk.block(place), place == walk.begin, false);
          if (place == end) break;
        }
      }
      if (done_) {
        if (Tr::kChunked && parks_at(walk, place)) {
          finish_chunk(walk, place + 1, false);
        } else {
          finish_tile();
        }
      }
      if (Tr::kFloat8 && Tr::kRunsBeside && begins) ptx::clear(o_);
    }
    if (first_ && exists) {
      store_nothing(tile);
      arrive(shared_.q_ring[warpgroup_].empty[q_at().stage()]);
      arrive(shared_.tile_ring.empty[slot_.stage()]);
    }
  }
  // Of chunks (forward_sm90_chunks.cuh).
  __device__ __forceinline__ static bool begins_chunk(const PartWalk& walk, int place);
  __device__ __forceinline__ bool parks_at(const PartWalk& walk, int place) const;
  __device__ __forceinline__ static int run_begin(const PartWalk& walk, int place);
  __device__ __forceinline__ void begin_chunk();
  __device__ __forceinline__ void retire_chunk();
  __device__ __forceinline__ float4* parked() const;
  __device__ __forceinline__ void finish_chunk(const PartWalk& walk, int last, bool is_complete);
  __device__ __forceinline__ void store_piece(const Tile<Tr::kWarpgroups>& tile);

  __device__ __forceinline__ void wait_for_q(const Tile<Tr::kWarpgroups>& tile) {
    shared_.q_ring[warpgroup_].full[q_at().stage()].wait(q_at().phase());
    uint8_t* const q = shared_.q[q_at().stage()][warpgroup_];
    if constexpr (Tr::kFloat8) {
      if (shared_.float8.scales[slot_.stage()].turns_q) negate_rows<typename Tr::QTile>(q);
    } else if (!kAllRowsUsed && p_.used_q) {
      zero_rows_from<typename Tr::QTile>(q, tile.rows - warpgroup_ * kWarpgroupRows);
    }
  }

  // Under a mask as data (forward_sm90_masked_tile.cuh).
  __device__ __forceinline__ void run_masked_tile(const Tile<Tr::kWarpgroups>& tile, bool exists);
  __device__ __forceinline__ static bool keeps_reference(const PartVisit& visit);
  __device__ __forceinline__ void load_bits(const Tile<Tr::kWarpgroups>& tile,
                                            const PartVisit& visit);
  __device__ __forceinline__ PartVisit next_visit();
  __device__ __forceinline__ bool goes_on_full();

  // With a bias (forward_sm90_bias.cuh).
  __device__ __forceinline__ void add_bias_of_block();

  /// Begins the softmax of a new tile. retire() keeps what the tile before still needs, for its
  /// last O += P V is done in this tile's first step.
  __device__ __forceinline__ void begin_tile(const Tile<Tr::kWarpgroups>& tile) {
    if constexpr (kGeneral) score_ = Score::of(p_, tile.batch, tile.head);
    if constexpr (Tr::kRunsBeside) {
      retire(pending_);
    } else {
      ptx::clear(o_);
    }
    slots_.begin(slot_.stage());
    begin_sums();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Tr::kMasked) sees_[r] = 0;
      if constexpr (kGeneral) position_[r] = static_cast<float>(tile.mask.position(query(r)));
    }
  }

  __device__ __forceinline__ void begin_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max_[r] = -infinity();
      sum_[r] = 0.f;
    }
  }
  /// Called when all scores of the tile before have been seen: writes its lse, and works out the
  /// factor by which its O is multiplied once the last product is done. Not there: there is no tile
  /// before, or it is finished and its place in shared memory may hold another tile. What is worked
  /// out then is not used.
  __device__ __forceinline__ void retire(bool there) {
    if constexpr (Tr::kChunked) {
      if (p_.chunks.parked) {
        retire_chunk();
        return;
      }
    }
    slots_.finish();
    const Tile<Tr::kWarpgroups>& tile = shared_.tiles[slots_.done()];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sum_[r]);
      const float reference = max_[r] - kWeightShift;
      const float lse =
          Tr::kBias ? __fmaf_rn(__log2f(sum), kLn2, reference) : (reference + __log2f(sum)) * kLn2;
      RowResult result{__fdividef(1.f, sum), lse};
      const bool sees_listed = !Tr::kMasked || quad_any(sees_[r]);
      // In float8 the sum of a row that sees nothing is NaN where a scale is.
      if (Tr::kFloat8 || Tr::kBias ? !(sum > 0.f) || p_.sinks : sum == 0.f || p_.sinks) {
        const Range keys = mask_of(tile).row(query(r));
        const int32_t head = tile.head + head_of(p_, row(r));
        const bool sees = Tr::kMasked ? sees_listed : tile.part[warpgroup_].meets(keys, kTileK);
        result = finish_row(p_, head, sees, reference * kUnit, sum, 1.f);
        // In units of log 2 a reference may be too large where it counts: without a sink in lse.
        if (Tr::kBias && sum > 0.f && !(p_.sinks_in_lse && p_.sinks[head] > -infinity()))
          result.lse = lse;
        // A bias may hide what made a NaN, or all keys: O is to be suspect.
        if (Tr::kBias && sees && !(sum > 0.f)) result.factor = infinity();
      }
      if constexpr (Tr::kFloat8) result.scale_values(shared_.float8.scales[slots_.done()].value);
      if (!kRounded && is_coarse<T>(max_[r])) result.factor = infinity();  // so that O is suspect
      done_factor_[r] = result.factor;
      if (there && p_.lse && row(r) < tile.rows && lane() % 4 == 0)
        p_.lse[lse_row(tile, r)] = result.lse;
    }
  }

  /// One step: S and the softmax of block n of the keys; and O += P V of the block before, which
  /// may be the last one of the tile before, and whose weights P are in weights_. In order of time:
  ///
  ///   wait for this block's K, the V of the block before, and the turn to issue (ping-pong)
  ///   issue S = Q K^T, issue O += P V, pass the turn to the next warpgroup
  ///   wait for S; softmax of S, while O += P V is under way
  ///   wait for O; free V; P = S, rounded
  ///
  /// K, and Q after the tile's last block, are freed as soon as S is there if the block takes its
  /// maximum, else (and always with Tr::kInvariant) after the check of the sums, since redo reads
  /// them. last: n is the last block of
  /// the tile that this warpgroup needs. masked: some row does not see all of its keys.
  template <Kind kKind>
  __device__ __forceinline__ void step(int n, bool last, bool masked) {
    if constexpr (!Tr::kRunsBeside) {
      step_one_by_one(n, last, kKind == Kind::kTakeMaximum && masked);
    } else if constexpr (Tr::kFloat8) {
      step_float8(n, last, kKind == Kind::kTakeMaximum && masked);
    } else {
      step_halves<kKind>(n, last, masked);
    }
  }
  template <Kind kKind>
  __device__ __forceinline__ void step_halves(int n, bool last, bool masked) {
    constexpr bool kTakeMaximum = kKind == Kind::kTakeMaximum;
    constexpr bool kMayRedo = !kTakeMaximum || Tr::kInvariant;
    const RingPosition<Tr::kStages> at = at_, v_at{at_.count - 1};  // K's, and the pending V's
    if constexpr (!Tr::kMasked) shared_.k_ring.full[at.stage()].wait(at.phase());
    if (pending_) wait_for_v(v_at);
    if constexpr (Tr::kBias)
      shared_.bias_ring.of[warpgroup_].full[bias_at_.stage()].wait(bias_at_.phase());
    wait_ping_pong();
    ptx::wgmma_fence();
    issue_qk(at.stage());
    ptx::wgmma_commit();
    // Where nothing is pending, this product multiplies whatever is in weights_ and V, and the next
    // one overwrites O (keep_o_). That costs less than a second copy of the step. (In the middle of
    // a tile, under a mask as data, it adds K with weights of 0: skip.)
    issue_pv(Tr::kMasked && !pending_ ? shared_.k[at.stage()] : shared_.v[v_at.stage()]);
    ptx::wgmma_commit();
    pass_ping_pong();
    if constexpr (Tr::kMasked && !kTakeMaximum) {  // run_masked_tile
      visit_ = ptx::load_shared_wide<VisitKind>(
          ptx::shared_address(&shared_.mask.visits[at.stage()][warpgroup_]));
      n = visit_.block;
      last = visit_.is(VisitKind::kLast);
    }
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    if constexpr (kGeneral) {  // its softmax has branches: no wgmma may be in flight there
      ptx::wgmma_wait<0>();
      ptx::pin(o_);
    }
    if constexpr (!kMayRedo) free_k_and_q(at.stage(), last);

    apply_options(n * kTileK);
    if constexpr (Tr::kBias) add_bias_of_block();
    float alpha[2], part[2];
    if constexpr (kTakeMaximum) {
      if (masked) mask(n * kTileK);
      if constexpr (Tr::kInvariant) {
        take_first_maximum(to_log2());
      } else {
        take_maximum(alpha, to_log2());
      }
    }
    if constexpr (Tr::kMasked) {
      if (!masked) sees_[0] = sees_[1] = 1;
    }
    const float scale = to_log2();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      part[r] = take_weights(r, scale, kTakeMaximum ? reference_of(max_[r]) : max_[r]);

    keep_before_wait(part[0] + part[1]);
    ptx::wgmma_wait<0>();
    ptx::pin(o_);
    if constexpr (kTakeMaximum) {
      done_ = first_ && pending_;
      if (first_) {
        keep_o_ = 0;
      } else if (!Tr::kInvariant) {
        rescale(alpha);
      }
    }
    // In a tile's first block each row has just taken its maximum, and O is the tile's before.
    const bool may_redo = kMayRedo && !(kTakeMaximum && first_);
    if (may_redo && __any_sync(0xffffffffu, !(part[0] <= kSumLimit && part[1] <= kSumLimit))) {
      redo(at.stage(), n * kTileK, kTakeMaximum && masked, part);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += part[r];
    if (pending_) arrive(shared_.v_ring.empty[v_at.stage()]);
    if constexpr (kMayRedo) free_k_and_q(at.stage(), last);  // redo is done with them
    ++at_.count;
    pending_ = true;
    if constexpr (!kAllRowsUsed) {
      used_v_ = kTileK;
      // Only a masked block reaches past the last key in use. What V holds there may be NaN, so
      // wait_for_v sets it to zeros. A cache always has such rows.
      if (masked && (kCached<Params> || p_.used_k))
        used_v_ = shared_.tiles[slot_.stage()].mask.seqlen_k - n * kTileK;
    }
#pragma unroll
    for (int i = 0; i < kTileK / 4; ++i) weights_[i] = ptx::pack<T>(s_[2 * i], s_[2 * i + 1]);
  }

  // Of float8 (forward_sm90_float8.cuh).
  __device__ __forceinline__ void step_float8(int n, bool last, bool masked);
  __device__ __forceinline__ void step_one_by_one(int n, bool last, bool masked);
  __device__ __forceinline__ void round_weights();
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take_weights_of(float scale, const float (&reference)[2],
                                                  float (&sum)[2]);
  template <int kNow>
  __device__ __forceinline__ void issue_slice(const uint8_t* tile);
  template <int kNow, typename Beside>
  __device__ __forceinline__ void finish_slices(const uint8_t* tile, const Beside& beside);

  __device__ __forceinline__ void wait_for_v(RingPosition<Tr::kStages> at) {
    if constexpr (Tr::kFloat8) {
      shared_.float8.v_ring.full[at.stage()].wait(at.phase());
    } else {
      shared_.v_ring.full[at.stage()].wait(at.phase());
      if constexpr (!kAllRowsUsed)
        zero_rows_from<typename Tr::KTile>(shared_.v[at.stage()], used_v_);
    }
  }

  __device__ __forceinline__ void free_k_and_q(int stage, bool last) {
    arrive(shared_.k_ring.empty[stage]);
    if (last) arrive(shared_.q_ring[warpgroup_].empty[q_at().stage()]);
  }

  /// Keeps the wait for O += P V behind the softmax. ptxas would move that wait up, and most of the
  /// softmax would then begin after the product instead of running beside it. It does not move the
  /// wait across this store, which depends on all weights and is never executed.
  __device__ __forceinline__ void keep_before_wait(float sum) {
    ptx::never_store_shared(ptx::shared_address(&shared_.never_written), sum);
  }

  /// A turn without a block: this warpgroup needs no key of the block, or the tile has no keys and
  /// nothing is loaded. A pending O += P V is done now. The warpgroup waits for its turn and passes
  /// it on as in a step, since the others count on that. At the barriers of a block that is not
  /// needed, the warp that loads arrives in its place.
  ///
  /// ends: no block of the tile comes after this one. Without a mask as data none that the
  /// warpgroup needs does, so that a pending product is always its tile's last. Under a mask it is
  /// that only if it is the tile's before this one; else the tile goes on, and its next step, which
  /// finds nothing pending, adds weights of 0; or it ends here, pending product or not.
  __device__ __forceinline__ void skip(bool loaded, [[maybe_unused]] bool ends) {
    const bool is_tiles_last = Tr::kMasked && !first_ ? ends : pending_;
    if (pending_) {
      const RingPosition<Tr::kStages> v_at{at_.count - 1};
      wait_for_v(v_at);
      wait_ping_pong();
      if constexpr (Tr::kFloat8) {
        const uint8_t* const v = shared_.float8.v[v_at.stage()];
        ptx::wgmma_fence();
        issue_slice<0>(v);
        ptx::wgmma_commit();
        pass_ping_pong();
        finish_slices<0>(v, [](auto) {});
        arrive(shared_.float8.v_ring.empty[v_at.stage()]);
      } else {
        ptx::wgmma_fence();
        issue_pv(shared_.v[v_at.stage()]);
        ptx::wgmma_commit();
        pass_ping_pong();
        ptx::wgmma_wait<0>();
        ptx::pin(o_);
        arrive(shared_.v_ring.empty[v_at.stage()]);
      }
      if constexpr (!Tr::kMasked) {
        retire(pending_);
        done_ = true;
      }
      pending_ = false;
    } else {
      wait_ping_pong();
      pass_ping_pong();
    }
    if constexpr (Tr::kMasked) {
      if (is_tiles_last) {
        retire(true);
        done_ = true;
      } else if (!first_) {
#pragma unroll
        for (uint32_t& p : weights_) p = 0;
      }
    }
    if (loaded) ++at_.count;
  }

  __device__ __forceinline__ void issue_qk(int stage) {
    const auto q =
        ptx::Descriptor::make(ptx::shared_address(shared_.q[q_at().stage()][warpgroup_]), 0);
    const auto k = ptx::Descriptor::make(ptx::shared_address(shared_.k[stage]), 0);
#pragma unroll
    for (int i = 0; i < kWidth * static_cast<int>(sizeof(T)) / 32; ++i) {
      ptx::Wgmma<T, kTileK>::ss(s_, q.at(i / 4 * Tr::QTile::kPanelBytes + i % 4 * 32),
                                k.at(i / 4 * Tr::KTile::kPanelBytes + i % 4 * 32), i != 0);
    }
  }

  /// O += P V, or O = P V where a tile's first block is pending.
  __device__ __forceinline__ void issue_pv(const uint8_t* tile) {
    const auto v = ptx::Descriptor::make(ptx::shared_address(tile), Tr::KTile::kPanelBytes);
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      ptx::Wgmma<T, kWidth>::rs(o_, weights_ + 4 * i, v.at(i * 16 * Tr::KTile::kRowBytes),
                                i == 0 ? keep_o_ : 1);
    }
    keep_o_ = 1;
  }

  /// Value i of the thread's row r of S, in column 8 * (i / 2) + 2 * (lane % 4) + i % 2.
  __device__ __forceinline__ float& score(int r, int i) { return s_[i / 2 * 4 + 2 * r + i % 2]; }
  static constexpr int kScores = kTileK / 4;
  __device__ __forceinline__ int first_column() const { return 2 * (lane() % 4); }

  /// Softcap and ALiBi.
  __device__ __forceinline__ void apply_options(int first_key) {
    if constexpr (kGeneral) {
      score_.template choose<true>([&](auto cap, auto slopes) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Score::Row row = score_.row(position_[r], first_key + first_column());
          for_row(s_, r, [&](int key, float& x) {
            x = row.template value<decltype(cap)::value, decltype(slopes)::value>(x, key);
          });
        }
      });
    }
  }

  /// Sets the scores of keys that a row does not see to -inf. The keys that the rule lets it see
  /// are consecutive, and so are those that this thread holds of them: [from, to) of its kScores.
  __device__ __forceinline__ void mask(int first_key) {
    const Tile<Tr::kWarpgroups>& tile = shared_.tiles[slot_.stage()];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A row past the end takes the limits of the last row, so that no block is masked because of
      // it. It is not stored.
      const int here = min(row(r), tile.rows - 1);
      int from = 0, to = kScores;
      if (!Tr::kMasked || is_limited_) {
        const Range keys = mask_of(tile).row(query_of(p_, here));
        from = columns_before<kTileK>(static_cast<int>(keys.begin) - first_key - first_column());
        to = columns_before<kTileK>(static_cast<int>(keys.end) - first_key - first_column());
      }
#pragma unroll
      for (int word = 0; word < (kScores + 31) / 32; ++word) {
        uint32_t seen = low_bits(to - 32 * word) & ~low_bits(from - 32 * word);
        if constexpr (Tr::kMasked) {
          static_assert(kScores <= 32);
          seen &= bits_.of_lane(r, lane() % 4);
          sees_[r] |= seen;
        }
#pragma unroll
        for (int i = 32 * word; i < kScores && i < 32 * word + 32; ++i)
          score(r, i) = seen >> (i % 32) & 1 ? score(r, i) : -infinity();
      }
    }
  }

  /// The factor that brings a score to units of log 2 (with a bias, to those of a reference): 1 in
  /// the general kernel and with a bias, where apply_options or add_bias_of_block has multiplied
  /// already.
  __device__ __forceinline__ float to_log2() const { return kRounded ? 1.f : p_.scale * kLog2e; }

  /// The maximum of row r of S.
  __device__ __forceinline__ float largest(int r) {
    float most[2] = {score(r, 0),
                     score(r, 1)};  // two chains, so that fmaxf need not wait for fmaxf
#pragma unroll
    for (int i = 2; i < kScores; ++i) most[i % 2] = fmaxf(most[i % 2], score(r, i));
    return quad_max(fmaxf(most[0], most[1]));
  }
  /// The maximum of S, times scale, and of all blocks before becomes the reference. O has to be
  /// multiplied by alpha.
  __device__ __forceinline__ void take_maximum(float (&alpha)[2], float scale) {
    take_maximum(alpha, scale, {true, true});
  }
  /// The same for these rows; the others keep their reference, and their factor is 1.
  __device__ __forceinline__ void take_maximum(float (&alpha)[2], float scale,
                                               const bool (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = fmaxf(max_[r], largest(r) * scale);
      const float now = rows[r] ? most : max_[r];
      alpha[r] = exp2_fast((max_[r] - reference_of(now)) * kUnit);
      max_[r] = now;
      sum_[r] *= alpha[r];
    }
  }
  /// The maximum of S, times scale, becomes the reference of rows that have none.
  __device__ __forceinline__ void take_first_maximum(float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = largest(r) * scale;
      max_[r] = max_[r] == -infinity() ? now : max_[r];
    }
  }
  /// S = 2^(S * scale - reference) of row r; returns the sum. A row that has had no score above
  /// -inf has the reference -inf. In a block that keeps the reference its weights are then
  /// infinite, and redo computes the block again.
  __device__ __forceinline__ float take_weights(int r, float scale, float reference) {
    float sum[2] = {0.f, 0.f};
    for_row(s_, r, [&](int key, float& x) {
      x = Tr::kBias ? exp2_fast((x - reference) * kUnit)
                    : exp2_fast(__fmaf_rn(x, scale, -reference));
      sum[key % 2] += x;
    });
    return sum[0] + sum[1];
  }
  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) o_[i] *= alpha[i / 2 % 2];
  }

  // A block again (forward_sm90_redo.cuh).
  __device__ __forceinline__ void redo(int stage, int first_key, bool masked, float (&part)[2]);
  __device__ __forceinline__ static void mma(float* s, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

  // What leaves for global memory (forward_sm90_output.cuh).
  __device__ __forceinline__ void finish_tile();
  __device__ __forceinline__ uint32_t narrow(float x, float y) const;
  __device__ __forceinline__ float o_value(int i) const;
  __device__ __forceinline__ bool store_rounded(const Tile<Tr::kWarpgroups>& tile, int lane,
                                                const bool (&valid)[2]);
  __device__ __forceinline__ bool store_floats(const Tile<Tr::kWarpgroups>& tile, int lane,
                                               const bool (&valid)[2]);
  __device__ __forceinline__ void store_shared(int i, const uint32_t (&block)[4]);
  __device__ __forceinline__ void store_global(const Tile<Tr::kWarpgroups>& tile, int i, int r,
                                               int lane, bool valid, uint32_t (&w)[4]);
  __device__ __forceinline__ uint16_t* out_row(const Tile<Tr::kWarpgroups>& tile, int row) const;
  __device__ __forceinline__ int32_t out_words() const;
  __device__ __forceinline__ void announce_nothing();
  __device__ __forceinline__ void store_nothing(const Tile<Tr::kWarpgroups>& tile);

  __device__ __forceinline__ int64_t lse_row(const Tile<Tr::kWarpgroups>& tile, int r) const {
    return tile.lse_row + head_of(p_, row(r)) * p_.lse_head_stride + query(r);
  }

  typename Tr::Shared& shared_;
  const Params& p_;
  const int warpgroup_;
  RingPosition<Tr::kTileSlots> slot_;
  RingPosition<Tr::kStages> at_;  // of the next K; a pending V is one stage behind
  RingPosition<1> o_at_;
  [[no_unique_address]] std::conditional_t<Tr::kBias, RingPosition<Tr::kBiasStages>, NoBiasShared>
      bias_at_;

  float s_[kTileK / 2], o_[kWidth / 2];
  uint32_t weights_[kTileK * static_cast<int>(sizeof(T)) / 8];  // P
  float max_[2], sum_[2];  // in units of log 2 (but kUnit); the sums are the thread's share
  // kFloat8: P V of a slice of columns, and what O is to be multiplied by before that is added.
  float product_[Tr::kFloat8 ? Tr::kSlice / 2 : 1], o_factor_[2] = {1.f, 1.f};
  bool pending_ = false;  // O += P V of the block before has still to be done
  int used_v_ = kTileK;   // its rows of V in use; kept only without kAllRowsUsed
  int keep_o_ = 0;        // 0: the pending product overwrites O
  bool first_ = false;    // the block under way is its tile's first

  std::conditional_t<Tr::kChunked, PackedSlots<Tr::kTileSlots>, TileSlots> slots_;
  bool done_ = false;  // whether the O of that tile is complete
  float done_factor_[2];

  Score score_;  // kGeneral
  float position_[2];

  // kMasked: of the block under way its bits, and whether the rule hides some of it; and of a row
  // something that is not 0 once one of its four threads has seen a key.
  std::conditional_t<Tr::kMasked, MaskBits<kTileK / 64 * 64>, NoMaskShared> bits_;
  VisitKind visit_;  // of the full block under way
  bool is_limited_ = false;
  uint32_t sees_[2];
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_CONSUMER_CUH_
