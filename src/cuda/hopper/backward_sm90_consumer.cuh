// Hopper backward: a consumer warpgroup, which computes the five products for 64 keys.
// BackwardConsumer::step has the order of a step; the head of backward_sm90.cuh lists all warps and
// barriers.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_CONSUMER_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_CONSUMER_CUH_

#include "cuda/backward/math.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/backward_sm90_bias.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/backward_sm90_mask.cuh"
#include "cuda/hopper/backward_sm90_scores.cuh"
#include "cuda/hopper/backward_sm90_weights.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/packed.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// Which copy of a step runs. kFirst and kNext are for the first step of an item; both apply the
/// mask.
enum class StepKind {
  kFirst,   // of no step before it is dQ still to be computed
  kNext,    // dQ is still to be computed of the last step of the item before
  kMasked,  // some query does not see some key, or lies past the end; all other steps of the
            // general one
  kFull
};

/// A consumer warpgroup: 64 of an item's keys.
template <typename Tr>
class BackwardConsumer {
 public:
  using T = typename Tr::T;
  using Step = typename Tr::Step;
  static constexpr int kTileQ = Tr::kTileQ, kWidth = Tr::kWidth;

  __device__ __forceinline__ BackwardConsumer(typename Tr::Shared& shared, const BackwardParams& p,
                                              const BackwardScratch& scratch, int warpgroup)
      : shared_(shared), p_(p), scratch_(scratch), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run(const BackwardOrder& order) {
    if constexpr (Tr::kPersistent) {
      run_items(order);
    } else {
      run_item(order);
    }
  }

 private:
  /// The thread block's one item.
  __device__ __forceinline__ void run_item(const BackwardOrder& order) {
    if (Tr::kPingPong && warpgroup_ == 1) pass_ping_pong();
    shared_.block_ring.full[0].wait(0);
    if constexpr (Tr::kMask) shared_.known[0].wait(0);
    shared_.k_ring.full[0].wait(0);
    shared_.v_ring.full[0].wait(0);
    if (block().has_steps()) {
      steps(false);
      finish_dq(0);
    } else {
      clear();
    }
    if (block().exists()) store(order);
    if (Tr::kPingPong && warpgroup_ == 0) wait_ping_pong();  // for the other's last pass
  }
  /// All items that the producer takes.
  __device__ __forceinline__ void run_items(const BackwardOrder& order) {
    if (Tr::kPingPong && warpgroup_ == 1) pass_ping_pong();
    bool pending = false;  // whether dQ of the last step is still to be made
#pragma unroll 1
    for (;; ++item_.count) {
      shared_.block_ring.full[item_.stage()].wait(item_.phase());
      if (block().head_kv < 0) break;
      if constexpr (Tr::kMask) shared_.known[item_.stage()].wait(item_.phase());
      shared_.k_ring.full[item_.stage()].wait(item_.phase());
      shared_.v_ring.full[item_v().stage()].wait(item_v().phase());
      if (!Tr::kHasNextStep && pending) finish_dq(item_.stage() ^ 1);
      clear();
      if (block().has_steps()) {
        steps(pending);
      } else {
        if (Tr::kHasNextStep && pending) finish_dq(item_.stage() ^ 1);
        arrive(shared_.k_ring.empty[item_.stage()]);
      }
      arrive(shared_.v_ring.empty[item_v().stage()]);
      pending = block().has_steps();
      if (block().exists()) store(order);
      arrive(shared_.block_ring.empty[item_.stage()]);
    }
    if (pending) finish_dq(item_.stage() ^ 1);
    if (Tr::kPingPong && warpgroup_ == 0) wait_ping_pong();  // for the other's last pass
  }
  /// An item's steps. pending: dQ of the last step of the item before is still to be made.
  __device__ __forceinline__ void steps(bool pending) {
    if constexpr (Tr::kMask) {
      // With copies of the later steps for each kind of first step, which are 8 % faster here.
      if (Tr::kHasNextStep && pending) {
        masked_steps<StepKind::kNext>();
      } else {
        masked_steps<StepKind::kFirst>();
      }
    } else {
      // Both kinds of first step go on in the same copies of the later ones: with copies of their
      // own a kernel of width 64 has twice the code, and what lies behind it comes from memory line
      // by line when it is run for the first time (docs/performance.md).
      HeadStep now = HeadStep::first(block().walk, block().head_begin, block().direction);
      if (Tr::kHasNextStep && pending) {
        step<StepKind::kNext>(now);
      } else {
        step<StepKind::kFirst>(now);
      }
      for (;;) {
        now.advance(ahead().walk, block().direction);
        if (now.done(ahead().head_end)) break;
        if constexpr (Tr::kHasFullStep) {
          if (now.is_full(ahead().walk)) {
            step<StepKind::kFull>(now);
            continue;
          }
        }
        step<StepKind::kMasked>(now);
      }
    }
  }
  template <StepKind kBegin>
  __device__ __forceinline__ void masked_steps() {
    step<kBegin>(await_step());
    while (ahead().next.exists()) {
      if constexpr (Tr::kHasFullStep) {
        if (ahead().next.is_full(warpgroup_)) {
          step<StepKind::kFull>({});  // what it has to know is in its slot (look_ahead)
          continue;
        }
      }
      step<StepKind::kMasked>(await_step());
    }
  }
  /// Under a mask as data what a step is comes together with its queries.
  __device__ __forceinline__ MaskedStep await_step() {
    shared_.q_ring.full[at_.stage()].wait(at_.phase());
    return slot().record.step;
  }
  __device__ __forceinline__ const typename Tr::StepSlot& slot() const {
    return shared_.steps[at_.count % Tr::kSlots];
  }
  /// Sets dK and dV to zero. (They could do without if the first product overwrote them; but then
  /// ptxas puts other values into these registers until that product, and spills.)
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) dv_[i] = dk_[i] = 0.f;
    ptx::pin(dv_);
    ptx::pin(dk_);
  }

  /// Stores dK and dV of the item, and flags rows that are not finite.
  __device__ __forceinline__ void store(const BackwardOrder& order) {
    const typename Tr::Block& block = this->block();
    const int32_t seqlen = block.seqlen_k;
    const int lane = ptx::thread_again() % 32;
    const int32_t key = block.key_begin + key_row() + lane / 4;
    // Masked pairs have weight 0, and 0 times an infinity or a NaN may be the cause: unless all
    // tiles were full, and no pair was masked. (A bias may hide any pair.)
    const bool suspect =
        (Tr::kMask || Tr::kBias || !all_full(block.walk, block.head_begin, block.head_end)) &&
        ((key < seqlen && (not_finite(dk_, 0) || not_finite(dv_, 0))) ||
         (key + 8 < seqlen && (not_finite(dk_, 1) || not_finite(dv_, 1))));
    const bool any = __any_sync(0xffffffffu, suspect);
    if (lane == 0) {
      const int64_t track =
          (int64_t{block.batch} * p_.heads_kv + block.head_kv) * order.parts + block.part;
      const int64_t number = track * order.blocks + block.key_begin / Tr::kTileK;
      scratch_.nonfinite[number * Tr::kWarps + key_row() / 16] = any;
      if (any) *scratch_.any_nonfinite = 1;
    }

    const auto put = [&](const float(&sum)[kWidth / 2], float scale, const Tensor& tensor,
                         int32_t dim, float* parts_sum) {
      store_keys<T, kWidth>(
          p_, {block.batch, block.head_kv, block.part, order.parts, block.k_row, seqlen}, key, 0,
          lane, reinterpret_cast<const float(&)[1][kWidth / 8][4]>(sum), scale, tensor, dim,
          parts_sum);
    };
    put(dv_, keep_scale() / Tr::StageTraits::kScale, p_.dv, p_.head_dim_v, scratch_.dv);
    put(dk_, p_.scale, p_.dk, p_.head_dim, scratch_.dk);
  }

  __device__ __forceinline__ const typename Tr::Block& block() const {
    return shared_.blocks[item_.stage()];
  }
  __device__ __forceinline__ int32_t tile_of(const Step& step) const {
    return sm90::tile_of(step, block().walk);
  }
  /// What it takes to find the step after one, and where dQ of that one goes.
  struct AheadOfWalk {
    ItemWalk walk;
    int32_t head_end;
    uint32_t scratch;  // of the block

    __device__ __forceinline__ static AheadOfWalk of(const BackwardConsumer& c) {
      return {c.block().walk, c.block().head_end, c.block().scratch};
    }
    __device__ __forceinline__ MaskedStep done(const Step& now) const {
      return {now.head, now.tile(walk)};
    }
  };
  struct AheadOfMask {
    MaskedStep step;
    NextMaskedStep next;
    uint32_t scratch;

    __device__ __forceinline__ static AheadOfMask of(const BackwardConsumer& c) {
      return {c.slot().record.step, c.slot().next, c.block().scratch};
    }
    __device__ __forceinline__ MaskedStep done(const Step&) const { return step; }
  };
  using Ahead = std::conditional_t<Tr::kMask, AheadOfMask, AheadOfWalk>;
  /// Read beside the step's last product, where there are registers for it (kLooksAhead). A load
  /// from shared memory waits behind those of wgmma's operands, and between two steps the tensor
  /// cores would wait for it.
  __device__ __forceinline__ void look_ahead() {
    if constexpr (Tr::kLooksAhead) ahead_ = Ahead::of(*this);
  }
  static_assert(Tr::kLooksAhead || !Tr::kMask, "the slot of the step would no longer be at_'s");
  __device__ __forceinline__ Ahead ahead() const {
    if constexpr (Tr::kLooksAhead) {
      return ahead_;
    } else {
      return Ahead::of(*this);
    }
  }
  /// Works out which pairs of a step a mask as data and the rule show, where some are hidden,
  /// before any product is under way: it takes many registers, and ptxas would do it later. Where
  /// the thread keeps what comes out of it no other reads.
  template <bool kMasked>
  __device__ __forceinline__ void prepare_pairs() const {
    if constexpr (Tr::kMask && kMasked) {
      const int lane = ptx::thread_again() % 32;
      AllowedPairs<kTileQ>::make(p_.mask_layout, slot(), limits(), fresh(shared_.bits[at_.stage()]),
                                 key_row() + lane / 4, lane)
          .store(allowed_at());
    }
  }
  __device__ __forceinline__ uint32_t allowed_at() const {
    return ptx::shared_address(shared_.allowed[ptx::thread_again() - 128]);
  }
  /// Which pairs of a step are seen, where some are not.
  template <bool kMasked>
  __device__ __forceinline__ auto seen_pairs(const Step& now) const {
    using Seen = SeenQueries<kMasked ? 2 : 0>;
    if constexpr (Tr::kMask && Tr::kGeneral) {
      return AllowedPairsAt{allowed_at()};
    } else if constexpr (Tr::kMask && kMasked) {
      return AllowedPairs<kTileQ>{};  // look_again loads it
    } else {
      return Seen(limits(), tile_of(now) * kTileQ);
    }
  }
  /// Loads it each time that it is needed: ptxas would otherwise make words for all pairs of it
  /// while it waits for a product, and spill.
  template <typename Seen>
  __device__ __forceinline__ void look_again(Seen& seen) const {
    if constexpr (kSeesTwo<Seen> && !Tr::kGeneral) seen = Seen::load(allowed_at());
  }
  __device__ __forceinline__ RingPosition<Tr::kVStages> item_v() const { return {item_.count}; }
  /// 1 / (1 - dropout_p): what a weight that dropout keeps is multiplied by.
  __device__ __forceinline__ float keep_scale() const {
    return Tr::kGeneral ? p_.dropout.keep_scale : 1.f;
  }
  /// Number of the query tile of the step before, in the scratch memory: where its dQ is added.
  __device__ __forceinline__ auto& tile_before() {
    if constexpr (Tr::kTileInShared) {
      return static_cast<volatile uint32_t&>(shared_.tile_before[ptx::thread_again() - 128]);
    } else {
      return tile_before_;
    }
  }
  __device__ __forceinline__ int lane() const {
    return Tr::kLaneAgain ? ptx::thread_again() % 32 : static_cast<int>(threadIdx.x % 32);
  }
  __device__ __forceinline__ int warp() const { return ptx::thread_again() / 32 % 4; }
  /// The warp's first key, counted from the block's.
  __device__ __forceinline__ int key_row() const { return 16 * (ptx::thread_again() / 32 - 4); }
  __device__ __forceinline__ void arrive(ptx::Barrier& barrier) {
    __syncwarp();
    if (ptx::arrives(lane())) barrier.arrive();
  }
  /// The warpgroup. (Without a mask or a bias ptxas spills where the
  /// thread is not read anew.)
  __device__ __forceinline__ int turn() const {
    return Tr::kMask || Tr::kBias ? warpgroup_ : ptx::thread_again() / 128 - 1;
  }
  __device__ __forceinline__ void wait_ping_pong() { ptx::named_barrier_sync<256>(1 + turn()); }
  __device__ __forceinline__ void pass_ping_pong() { ptx::named_barrier_arrive<256>(2 - turn()); }

  /// One step: query tile i and this warpgroup's 64 keys. The five products have the paper's names;
  /// those whose rows are keys are transposed. In order of time:
  ///
  ///   wait for Q(i), dO(i), and the turn to issue (ping-pong)
  ///   issue S^T = K Q^T, issue dP^T = V dO^T
  ///   wait for S; P = exp2(S - lse), while dP is under way
  ///   wait until both warpgroups have left dS(i-1); issue dQ(i-1) = dS(i-1) K
  ///   issue dV += P^T dO, pass the turn to the other warpgroup
  ///   wait for dP; dS = P (dP - delta); leave dS in shared memory, for dQ in the next step
  ///   issue dK += dS^T Q
  ///   wait for dQ(i-1) and add it to its sum, or store it; wait for dV, free dO; wait for dK, free
  ///   Q
  ///
  /// At width 64 most steps issue dQ and dV with dK, after dS (kIssuesLate); under a mask as data
  /// only those whose pairs are all seen, since the others have no registers for it.
  ///
  /// P of the general kernel has branches, which no wgmma may be in flight across. So it waits for
  /// S with nothing else under way, and issues dP after P.
  template <StepKind kKind>
  __device__ __forceinline__ void step(const Step& now) {
    constexpr bool kMasked = kKind != StepKind::kFull, kHasBefore = kKind != StepKind::kFirst;
    constexpr bool kIssuesLate = Tr::kIssuesLate && (!Tr::kMask || !kMasked);
    constexpr bool kClears = !Tr::kPersistent && kKind == StepKind::kFirst;
    const int stage = at_.stage();
    float s[kTileQ / 2], dp[kTileQ / 2];
    uint32_t weights[kTileQ / 4], ds[kTileQ / 4];  // P^T and dS^T, as operands
    float dq[32];                                  // of the step before

    DroppedWeights<kTileQ> dropped;
    if constexpr (Tr::kGeneral) {
      dropped = DroppedWeights<kTileQ>::draw(p_, block().batch, now.head, tile_of(now) * kTileQ,
                                             block().key_begin + key_row(), lane());
    }
    [[maybe_unused]] const int lane_now = lane();  // before the waits: it takes some time to come
    shared_.q_ring.full[stage].wait(at_.phase());
    prepare_pairs<kMasked>();
    shared_.dout_ring.full[stage].wait(at_.phase());
    if constexpr (Tr::kBias)
      shared_.bias_ring.full[0].wait(typename Tr::BiasPosition{at_.count}.phase());
    [[maybe_unused]] float4 lses[Tr::kLoadsLse ? kTileQ / 16 : 1];
    if constexpr (Tr::kPingPong) wait_ping_pong();
    // (Here, since behind products a load would wait for all of their operands.)
    if constexpr (Tr::kLoadsLse) load_of_queries(lses, shared_.lse[stage], lane_now);
    ptx::wgmma_fence();
    issue_scores(s, shared_.k[item_.stage()], shared_.q[stage]);  // S^T = K Q^T
    ptx::wgmma_commit();
    const auto issue_dp = [&] {
      issue_scores(dp, shared_.v[item_v().stage()], shared_.dout[stage]);  // dP^T = V dO^T
      ptx::wgmma_commit();
    };
    if constexpr (!Tr::kGeneral) issue_dp();

    auto seen = seen_pairs<kMasked>(now);
    if constexpr (Tr::kGeneral) {
      // Loaded while the product is under way.
      const Score score = Score::of(p_, block().batch, now.head);
      float4 own_lses[kTileQ / 16];
      load_of_queries(own_lses, shared_.lse[stage], lane());
      ptx::wgmma_wait<0>();  // no wgmma may be in flight in the branches that follow
      ptx::pin(s);
      look_again(seen);
      take_general_weights(now, s, score, dropped, weights, own_lses, seen);
      ptx::wgmma_fence();
      issue_dp();
    } else {
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      look_again(seen);
      const auto lse_of = [&](int j) {
        if constexpr (Tr::kLoadsLse) {
          return lses[j];
        } else {
          return lse_of_queries(stage, j);
        }
      };
      take_weights<kMasked>(s, weights, lse_of, seen);
      if constexpr (Tr::kBias) arrive(shared_.bias_ring.empty[0]);
    }

    const auto issue_dq_and_dv = [&] {
      if constexpr (kHasBefore) {
        shared_.ds_ring.full[stage ^ 1].wait(before().phase());
        ptx::wgmma_fence();
        // dQ = dS K of the step before
        issue_dq(dq, stage ^ 1, item_.stage() ^ (kKind == StepKind::kNext ? 1 : 0));
        ptx::wgmma_commit();
      }
      // A second fence, before dV. With one fence for both products dQ would wait until the last
      // weights are computed, which dV alone reads: 5 % at width 128. Kernels of width 64 that
      // issue them early, and the general one, have no registers for the second.
      if constexpr (Tr::kPingPong || kIssuesLate || !kHasBefore) ptx::wgmma_fence();
      issue_sum<kClears>(dv_, weights, shared_.dout[stage]);  // dV += P^T dO
      ptx::wgmma_commit();
    };
    if constexpr (!kIssuesLate) issue_dq_and_dv();
    if constexpr (Tr::kPingPong) pass_ping_pong();
    ptx::wgmma_wait<kIssuesLate ? 0 : kHasBefore ? 2 : 1>();
    ptx::pin(dp);
    look_again(seen);
    take_ds<kMasked>(dp, weights, ds, stage, seen);
    shared_.ds_ring.empty[stage].wait(at_.free());
    store_ds(ds, stage);
    ptx::fence_proxy_async();
    arrive(shared_.ds_ring.full[stage]);

    if constexpr (kIssuesLate) issue_dq_and_dv();
    ptx::wgmma_fence();
    issue_sum<kClears>(dk_, ds, shared_.q[stage]);  // dK += dS^T Q
    ptx::wgmma_commit();
    if constexpr (kHasBefore) {
      ptx::wgmma_wait<2>();
      ptx::pin(dq);
      arrive(shared_.ds_ring.empty[stage ^ 1]);
      if constexpr (kKind == StepKind::kNext) arrive(shared_.k_ring.empty[item_.stage() ^ 1]);
      leave_dq(dq);
    }
    ptx::wgmma_wait<1>();
    ptx::pin(dv_);
    arrive(shared_.dout_ring.empty[stage]);
    look_ahead();
    ptx::wgmma_wait<0>();
    ptx::pin(dk_);
    arrive(shared_.q_ring.empty[stage]);
    if constexpr (Tr::kStoresDq) keep_dq_rows(now);
    const MaskedStep done = ahead().done(now);
    tile_before() = static_cast<uint32_t>(done.head) * scratch_.tiles + ahead().scratch +
                    static_cast<uint32_t>(done.tile);
    ++at_.count;
  }

  /// Computes dQ of the last step so far, where no step follows in which that could be done.
  __device__ __forceinline__ void finish_dq(int item_stage) {
    const RingPosition<Tr::kStages> last = before();
    float dq[32];
    shared_.ds_ring.full[last.stage()].wait(last.phase());
    ptx::wgmma_fence();
    issue_dq(dq, last.stage(), item_stage);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    arrive(shared_.ds_ring.empty[last.stage()]);
    arrive(shared_.k_ring.empty[item_stage]);
    leave_dq(dq);
  }
  __device__ __forceinline__ RingPosition<Tr::kStages> before() const { return {at_.count - 1}; }

  // Addresses that depend on the thread are computed anew in each step, from values that the
  // compiler takes for unknown. It would otherwise keep every address in a register through all
  // steps, and spill them.
  __device__ __forceinline__ static uint32_t fresh(const void* shared) {
    uint32_t address = ptx::shared_address(shared);
    ptx::make_opaque(address);
    return address;
  }
  __device__ __forceinline__ uint32_t fresh_warpgroup() const {
    return static_cast<uint32_t>(warpgroup_);
  }

  // --- Products ---

  /// acc = this warpgroup's keys times the queries of the tile: both K-major.
  __device__ __forceinline__ void issue_scores(float (&acc)[kTileQ / 2], const uint8_t* keys,
                                               const uint8_t* queries) {
    const auto a =
        ptx::Descriptor::make(fresh(keys) + fresh_warpgroup() * 64 * Tr::KTile::kRowBytes, 0);
    const auto b = ptx::Descriptor::make(fresh(queries), 0);
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      ptx::Wgmma<T, kTileQ>::ss(acc, a.at(i / 4 * Tr::KTile::kPanelBytes + i % 4 * 32),
                                b.at(i / 4 * Tr::QTile::kPanelBytes + i % 4 * 32), i != 0);
    }
  }
  /// sum += values of (keys, queries) times rows of dO or Q.
  template <bool kClears>
  __device__ __forceinline__ void issue_sum(float (&sum)[kWidth / 2],
                                            const uint32_t (&values)[kTileQ / 4],
                                            const uint8_t* rows) {
    const auto b = ptx::Descriptor::make(fresh(rows), Tr::QTile::kPanelBytes);
#pragma unroll
    for (int i = 0; i < kTileQ / 16; ++i) {
      ptx::Wgmma<T, kWidth>::rs(sum, values + 4 * i, b.at(i * 16 * Tr::QTile::kRowBytes),
                                !kClears || i != 0);
    }
  }
  /// dQ = dS K, this warpgroup's 64 queries or 64 columns.
  __device__ __forceinline__ void issue_dq(float (&dq)[32], int stage, int item_stage) {
    const uint32_t panel = fresh_warpgroup();
    const auto a = ptx::Descriptor::make(
        fresh(shared_.ds[stage]) + (Tr::kDqByColumns ? 0 : panel) * Tr::DsTile::kPanelBytes,
        Tr::DsTile::kPanelBytes);
    const auto b = ptx::Descriptor::make(
        fresh(shared_.k[item_stage]) + (Tr::kDqByColumns ? panel : 0) * Tr::KTile::kPanelBytes,
        Tr::KTile::kPanelBytes);
#pragma unroll
    for (int i = 0; i < Tr::kTileK / 16; ++i) {
      ptx::Wgmma<T, 64>::ss_mn(dq, a.at(i * 16 * Tr::DsTile::kRowBytes),
                               b.at(i * 16 * Tr::KTile::kRowBytes), i != 0);
    }
  }

  // --- Between products ---

  /// Shared address of the first of the limits of the thread's two keys, which are 8 rows apart.
  __device__ __forceinline__ uint32_t limits() const {
    return ptx::shared_address(block().limits + key_row() + lane() / 4);
  }

  /// lse of the lane's queries of 16 j to 16 j + 15 of the tile.
  __device__ __forceinline__ float4 lse_of_queries(int stage, int j) const {
    return (reinterpret_cast<const float4*>(shared_.lse[stage]) + lane() % 4)[4 * j];
  }
  /// P^T from S^T. (take_ds, below, makes dS^T from dP^T.)
  template <bool kMasked, typename LseOf, typename Seen>
  __device__ __forceinline__ void take_weights(const float (&s)[kTileQ / 2],
                                               uint32_t (&weights)[kTileQ / 4], const LseOf& lse_of,
                                               const Seen& seen) {
    uint32_t opaque_scale = __float_as_uint(p_.scale);
    ptx::make_opaque(opaque_scale);
    const float scale = __uint_as_float(opaque_scale) * kLog2e;
    [[maybe_unused]] uint32_t bias = 0;
    if constexpr (Tr::kBias)
      bias = bias_address<typename Tr::BiasTile>(fresh(shared_.bias), p_.bias, key_row(), lane());
#pragma unroll
    for (int j = 0; j < kTileQ / 16; ++j) {
      const auto put = [&](const auto& added) {
        sm90::take_weights<T, kMasked>(s + 8 * j, scale, added, lse_of(j), lane(), 16 * j, seen,
                                       weights + 4 * j);
      };
      if constexpr (Tr::kBias) {
        put(BiasOfQueries<T>::template load<typename Tr::BiasTile>(bias, p_.bias, j));
      } else {
        put(NoBias());
      }
    }
  }
  /// The same with softcap, ALiBi and dropout.
  template <typename Seen>
  __device__ __forceinline__ void take_general_weights(
      const Step& now, const float (&s)[kTileQ / 2], const Score& score,
      const DroppedWeights<kTileQ>& dropped, uint32_t (&weights)[kTileQ / 4],
      const float4 (&lses)[kTileQ / 16], const Seen& seen) {
    const typename Tr::Block& block = this->block();
    const int lane = this->lane();
    const int32_t distance = block.position + tile_of(now) * kTileQ - block.key_begin - key_row();
    sm90::take_general_weights<Tr>(
        s, score, distance, p_.dropout.enabled(), dropped, [&](int j) { return lses[j]; }, lane,
        seen, weights,
        [&](int j, const uint32_t(&factors)[4]) {
          ptx::store_shared_words(factors_of(j), factors);
        });
  }
  /// Where the thread keeps its factors of queries 16 j to 16 j + 15; no other thread reads them.
  __device__ __forceinline__ uint32_t factors_of(int j) const {
    return ptx::shared_address(shared_.factors[j][ptx::thread_again() - 128]);
  }
  template <bool kMasked, typename Seen>
  __device__ __forceinline__ void take_ds(const float (&dp)[kTileQ / 2],
                                          const uint32_t (&weights)[kTileQ / 4],
                                          uint32_t (&ds)[kTileQ / 4], int stage, const Seen& seen) {
    const int lane = this->lane();
    const float4* const deltas = reinterpret_cast<const float4*>(shared_.delta[stage]) + lane % 4;
#pragma unroll
    for (int j = 0; j < kTileQ / 16; ++j) {
      if constexpr (Tr::kGeneral) {
        uint32_t factors[4];
        ptx::load_shared_words(factors_of(j), factors);
        take_general_ds<T>(dp + 8 * j, factors, keep_scale() / Tr::StageTraits::kScale,
                           deltas[4 * j], ds + 4 * j);
      } else {
        sm90::take_ds<T, kMasked>(dp + 8 * j, weights + 4 * j, Tr::StageTraits::kScale,
                                  deltas[4 * j], lane, 16 * j, seen, ds + 4 * j);
      }
    }
  }
  __device__ __forceinline__ void store_ds(const uint32_t (&ds)[kTileQ / 4], int stage) {
    store_rows<typename Tr::DsTile>(ptx::shared_address(shared_.ds[stage]), key_row(), lane(), ds);
  }
  /// The first of the warp's 16 x 8 blocks of a tile of dQ.
  __device__ __forceinline__ int dq_row_block() const {
    return warp() + (Tr::kDqByColumns ? 0 : 4 * warpgroup_);
  }
  __device__ __forceinline__ int dq_column_block() const {
    return Tr::kDqByColumns ? 8 * warpgroup_ : 0;
  }
  __device__ __forceinline__ void leave_dq(const float (&dq)[32]) {
    if constexpr (Tr::kStoresDq) {
      store_dq(dq);
    } else {
      add_dq(dq);
    }
  }
  /// Adds dQ of the step before to its tile's sum. These are reductions in memory: no thread here
  /// waits until they are done.
  __device__ __forceinline__ void add_dq(const float (&dq)[32]) {
    const int row_block = dq_row_block(), column_block = dq_column_block();
    float* const sum = scratch_.dq + int64_t{tile_before()} * (kTileQ * kWidth) +
                       (row_block * (kWidth / 8) + column_block) * 128 + sum_offset(lane());
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      // (At width 96 the second half of the second panel is padding.)
      if (kWidth >= 64 + 8 * (j + 1) || column_block == 0) sum_add(sum + 128 * j, x);
    }
  }
  __device__ __forceinline__ RowsView& dq_before() { return shared_.dq_before[key_row() / 16]; }
  /// Notes which rows of dQ this step's tile has, for store_dq: it runs in the next step, which
  /// computes their dQ.
  __device__ __forceinline__ void keep_dq_rows(const Step& now) {
    __syncwarp();  // all lanes have read the rows of the step before
    if (lane() == 0) {
      const typename Tr::Block& block = this->block();
      const int32_t first = tile_of(now) * kTileQ;
      dq_before() = rows_view(p_.dq, block.map_batch, block.map_q + first, now.head,
                              block.seqlen_q - first, p_.head_dim);
    }
    __syncwarp();
  }
  /// Writes dQ of the step before, and flags the tile if it is not finite, which 0 (the weight of a
  /// masked pair) times an infinity or a NaN may have caused.
  __device__ __forceinline__ void store_dq(const float (&dq)[32]) {
    const int lane = ptx::thread_again() % 32, row = 16 * dq_row_block() + lane / 4;
    const RowsView before = dq_before();
    store_accumulators<T>(before, row, 8 * dq_column_block(),
                          reinterpret_cast<const float(&)[1][8][4]>(dq), p_.scale, lane);
    if ((row < before.rows && not_finite(dq, 0)) || (row + 8 < before.rows && not_finite(dq, 1))) {
      scratch_.dq_nonfinite[tile_before()] = 1;
      *scratch_.any_nonfinite = 1;
    }
  }

  typename Tr::Shared& shared_;
  const BackwardParams& p_;
  const BackwardScratch& scratch_;
  const int warpgroup_;
  RingPosition<Tr::kItemStages> item_;  // in the rings that move on with each item
  RingPosition<Tr::kStages> at_;        // in those that move on with each step
  uint32_t tile_before_ = 0;
  std::conditional_t<Tr::kLooksAhead, Ahead, int> ahead_;
  float dv_[kWidth / 2], dk_[kWidth / 2];
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_CONSUMER_CUH_
