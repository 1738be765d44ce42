// What the two halves of the backward pass through mma.sync have in common: addresses, barriers,
// copies, products. backward_sm80.cuh puts them together and explains.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_BLOCK_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_BLOCK_CUH_

#include <cstddef>

#include "cuda/common/backward_math.cuh"
#include "cuda/common/backward_pre.cuh"
#include "cuda/common/config.h"
#include "cuda/common/dropout.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/seen_queries.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/mma_sync/backward_layout.cuh"
#include "cuda/ptx/arrive.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm80 {

/// One thread's view of its block: addresses, barriers, copies, and the products that both halves
/// make.
template <BackwardConfig kC, bool kRules, bool kOrdered>
struct BackwardThread {
  using Shape = BackwardShape<kC>;
  using T = typename Shape::T;
  using KTile = typename Shape::KTile;
  using QTile = typename Shape::QTile;
  using ScoreTile = typename Shape::ScoreTile;
  static constexpr int kM = Shape::kM, kN = Shape::kN, kSumN = Shape::kSumN;

  static constexpr int kStages = Shape::kStages, kKeyStages = Shape::kKeyStages;

  const BackwardParams& p;
  const BackwardScratch& scratch;
  const uint32_t shared;  // address of all shared memory
  const int half_thread;  // of the half
  // Steps so far in the low half, items in the high half: where the rings are, for which either
  // matters modulo 4 only. One register, for the kernel has none to spare.
  uint32_t count = 0;

  /// kOrdered: the kernel keeps the order of additions to dQ; with kRules, where asked to. (What
  /// only that takes costs a kernel 2 % where it is there and not used.)
  static_assert(kOrdered || !kRules);
  __device__ __forceinline__ bool deterministic() const {
    return kRules ? p.deterministic != 0 : kOrdered;
  }

  __device__ __forceinline__ BackwardThread(const BackwardParams& params,
                                            const BackwardScratch& scratch_, uint32_t shared_,
                                            int half)
      : p(params),
        scratch(scratch_),
        shared(shared_),
        half_thread(static_cast<int>(threadIdx.x) - half * Shape::kHalfThreads) {}

  /// Where a thread stands, and what follows from it. Made anew for each phase of a step, behind
  /// the compiler's back: it would otherwise compute every address ahead of the loop and spill them
  /// all.
  struct Place {
    int thread;
    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int warp() const { return thread / 32; }
    // Where the warp's keys, queries and columns begin.
    __device__ __forceinline__ int key_row() const { return 32 * (warp() / Shape::kQueryWarps); }
    __device__ __forceinline__ int query() const {
      return Shape::kSplit ? warp() % Shape::kQueryWarps * Shape::kQueries : 0;
    }
    __device__ __forceinline__ int column() const {
      return Shape::kSplit ? warp() % Shape::kQueryWarps * Shape::kColumns : 0;
    }
    // dQ: which queries and columns of the tile are the warp's.
    static constexpr int kDqColumnWarps = Shape::kHalfWarps / Shape::kDqRowWarps;
    __device__ __forceinline__ int dq_row() const { return 32 * (warp() / kDqColumnWarps); }
    __device__ __forceinline__ int dq_column() const {
      return kDqColumnWarps > 1 ? warp() % kDqColumnWarps * Shape::kDqColumns : 0;
    }
    // The lane's part of an address in a tile of rows, and of scores.
    __device__ __forceinline__ uint32_t part_a() const {
      return static_cast<uint32_t>(KTile::fragment_offset(lane(), 0));
    }
    __device__ __forceinline__ uint32_t part_b() const {
      return static_cast<uint32_t>(KTile::fragment_offset_b(lane(), 0));
    }
    __device__ __forceinline__ uint32_t score_part_a() const {
      return static_cast<uint32_t>(ScoreTile::fragment_offset(lane(), 0));
    }
    __device__ __forceinline__ uint32_t score_part_b() const {
      return static_cast<uint32_t>(ScoreTile::fragment_offset_b(lane(), 0));
    }
  };
  __device__ __forceinline__ Place fresh_place() const {
    return {ptx::thread_again() % Shape::kHalfThreads};
  }
  /// For what every step needs: kept where there are registers.
  __device__ __forceinline__ Place place() const {
    if constexpr (Shape::kFresh) return fresh_place();
    return {half_thread};
  }
  __device__ __forceinline__ void arrive_warp(uint32_t barrier) const {
    ptx::barrier_arrive_warp(barrier, place().lane());
  }
  /// Address of this thread's weights in the exchange: vectors 512 bytes apart.
  __device__ __forceinline__ uint32_t exchange(const Place& me) const {
    return shared + static_cast<uint32_t>(Shape::kExchangeAt + 64 * Shape::kQueries * me.warp() +
                                          16 * me.lane());
  }
  /// For SeenQueries of the lane's rows from the warp's row `row` on.
  __device__ __forceinline__ uint32_t seen_limits(const Place& me, int row) const {
    return limits_at(item()) + static_cast<uint32_t>(8 * (me.key_row() + row + me.lane() / 4));
  }

  // The block of an item: read by address in the loop, as a whole where it is rare.
  __device__ __forceinline__ uint32_t block_at(int i, size_t offset) const {
    return shared + static_cast<uint32_t>(Shape::kBlockAt + i % 2 * Shape::kBlockBytes + offset);
  }
  __device__ __forceinline__ int32_t block_int(int i, size_t offset) const {
    return static_cast<int32_t>(ptx::load_shared(block_at(i, offset)));
  }
  __device__ __forceinline__ BackwardBlock& block(int i) const {
    extern __shared__ __align__(1024) char shared_bytes[];
    return *reinterpret_cast<BackwardBlock*>(shared_bytes + Shape::kBlockAt +
                                             i % 2 * Shape::kBlockBytes);
  }
  __device__ __forceinline__ int item() const { return static_cast<int>(count >> 16); }
  __device__ __forceinline__ int n_step() const { return static_cast<int>(count & 0xffffu); }
  __device__ __forceinline__ void next_item() { count += 0x10000u; }
  __device__ __forceinline__ void next_step() {
    count = (count & 0xffff0000u) | ((count + 1) & 0xffffu);
    // Before 9.0 ptxas otherwise keeps the items' half once more, and spills it.
    if constexpr (!kAddFour) asm volatile("" : "+r"(count));
  }
  __device__ __forceinline__ int32_t block_int(size_t offset) const {
    return block_int(item(), offset);
  }
  /// Of the queries that see each key (key_limits); they come and go with K.
  __device__ __forceinline__ uint32_t limits_at(int i) const {
    return shared + static_cast<uint32_t>(Shape::kLimitsAt + i % kKeyStages * 8 * kC.tile_k);
  }
  /// tile_begin, tile_end, full_begin, full_end.
  __device__ __forceinline__ int4 limits() const {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(block_at(item(), 0))
                 : "memory");
    return x;
  }
  __device__ __forceinline__ BackwardStep first_step(int i) const {
    return {block_int(i, offsetof(BackwardBlock, head_begin)),
            block_int(i, offsetof(BackwardBlock, tile_end)) - 1};
  }
  /// Tiles descend: all key blocks of a head that are under way then begin at the same tile, also
  /// under a causal mask, and none waits long for the first to add to dQ.
  __device__ __forceinline__ static BackwardStep after(const BackwardStep& step,
                                                       const int4& limits) {
    const bool more = step.tile > limits.x;
    return {more ? step.head : step.head + 1, more ? step.tile - 1 : limits.y - 1};
  }
  __device__ __forceinline__ bool is_last(const BackwardStep& step) const {
    return step.tile == block_int(offsetof(BackwardBlock, tile_begin)) &&
           step.head + 1 == block_int(offsetof(BackwardBlock, head_end));
  }
  /// Also true of a tile that has queries past the end.
  __device__ __forceinline__ static bool masked(const BackwardStep& step, const int4& limits) {
    const int32_t q = step.tile * kC.tile_q;
    return q < limits.z || q + kC.tile_q > limits.w;
  }
  /// Scratch tile of a step, given the sequence's first.
  __device__ __forceinline__ uint32_t scratch_tile(uint32_t first, const BackwardStep& step) const {
    return static_cast<uint32_t>(step.head) * scratch.tiles + first +
           static_cast<uint32_t>(step.tile);
  }

  // Barriers, by address. Those of a ring have as many phases as the ring has come round.
  __device__ __forceinline__ uint32_t barrier(int i) const {
    return shared + static_cast<uint32_t>(Shape::kBarriersAt + 8 * i);
  }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t v_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t ds_full() const { return barrier(2); }
  __device__ __forceinline__ uint32_t ds_empty() const { return barrier(3); }
  __device__ __forceinline__ uint32_t weights_empty() const { return barrier(4); }
  __device__ __forceinline__ uint32_t block_full(int i) const { return barrier(5 + i % 2); }
  __device__ __forceinline__ uint32_t block_empty(int i) const { return barrier(7 + i % 2); }
  __device__ __forceinline__ uint32_t k_full(int i) const { return barrier(9 + i % kKeyStages); }
  __device__ __forceinline__ uint32_t k_empty(int i) const {
    return barrier(9 + kKeyStages + i % kKeyStages);
  }
  __device__ __forceinline__ uint32_t of_stage(int which, int stage) const {
    return barrier(9 + 2 * kKeyStages + which * kStages + stage);
  }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return of_stage(0, stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return of_stage(1, stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return of_stage(2, stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return of_stage(3, stage); }
  /// The gradients half has issued its additions to a step's dQ; only in a deterministic launch.
  /// The steps take two barriers in turns: who waits for one must not take it for the one after
  /// next.
  __device__ __forceinline__ uint32_t added(int n) const {
    return barrier(9 + 2 * kKeyStages + 4 * kStages + n % 2);
  }
  static constexpr int kExchangeBarriers = 11 + 2 * kKeyStages + 4 * kStages;
  __device__ __forceinline__ uint32_t exchange_full() const {
    return barrier(kExchangeBarriers + place().warp());
  }
  __device__ __forceinline__ uint32_t exchange_empty() const {
    return barrier(kExchangeBarriers + Shape::kHalfWarps + place().warp());
  }
  __device__ __forceinline__ void init_barriers_and_turns() const {
    constexpr uint32_t kOfWarp = ptx::kWarpArrivals, kOfHalf = Shape::kHalfWarps * kOfWarp,
                       kOfAll = kC.warps * kOfWarp;
    ptx::barrier_init(v_full(), Shape::kHalfThreads);
    ptx::barrier_init(v_empty(), kOfHalf);
    ptx::barrier_init(ds_full(), kOfHalf);
    ptx::barrier_init(ds_empty(), kOfHalf);
    ptx::barrier_init(weights_empty(), kOfHalf);
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(block_full(i), Shape::kHalfThreads);
      ptx::barrier_init(block_empty(i), kOfAll);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      ptx::barrier_init(k_full(i), 2 * Shape::kHalfThreads);
      ptx::barrier_init(k_empty(i), kOfAll);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(q_full(stage), Shape::kHalfThreads);
      ptx::barrier_init(q_empty(stage), kOfAll);
      ptx::barrier_init(dout_full(stage), Shape::kHalfThreads);
      ptx::barrier_init(dout_empty(stage), kOfAll);
    }
    ptx::barrier_init(added(0), kOfHalf);
    ptx::barrier_init(added(1), kOfHalf);
    for (int w = 0; w < 2 * Shape::kHalfWarps; ++w) {
      ptx::barrier_init(barrier(kExchangeBarriers + w), kOfWarp);
    }
    for (int at = 0; at < Shape::kTurnBytes; at += 4) {
      ptx::store_shared(shared + static_cast<uint32_t>(Shape::kTurnsAt + at), 0);
    }
  }
  /// Waits until the n-th use (from 0) of one of `stages` places is filled, or may be filled.
  __device__ __forceinline__ static void wait_full(uint32_t barrier, int n, int stages) {
    ptx::barrier_wait(barrier, static_cast<uint32_t>(n / stages) & 1);
  }
  __device__ __forceinline__ static void wait_empty(uint32_t barrier, int n, int stages) {
    ptx::barrier_wait(barrier, (static_cast<uint32_t>(n / stages) & 1) ^ 1);
  }
  __device__ __forceinline__ static void sync_weights_half() {
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kHalfThreads) : "memory");
  }

  /// Where step n's turn waits to be passed on (release_turn). Not deterministic: n is 0.
  __device__ __forceinline__ uint32_t turn_slot(const Place& me, int n) const {
    return shared + static_cast<uint32_t>(Shape::kTurnsAt + 32 * me.warp() + 8 * (n & 3));
  }

  __device__ __forceinline__ uint32_t tile_at(int offset, int stage) const {
    return shared + static_cast<uint32_t>(offset + stage * QTile::kBytes);
  }

  /// This thread's part of a copy is issued; tell the barrier when it has landed.
  __device__ __forceinline__ static void arrive_when_landed(uint32_t barrier, bool aligned) {
    if (aligned) {
      ptx::barrier_arrive_after_copies(barrier);
    } else {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::barrier_arrive(barrier);
    }
  }
  /// K or V of item i, by the weights half.
  __device__ __forceinline__ void load_keys(int i, const Tensor& tensor, int32_t dim, uint32_t to,
                                            uint32_t full) const {
    const BackwardBlock& b = block(i);
    const RowsView rows =
        rows_view(tensor, b.batch, b.sequence.k_row, b.head_kv, b.sequence.mask.seqlen_k, dim);
    const bool aligned = rows.aligned();
    load_tile<kC.tile_k, kC.width, Shape::kHalfThreads>(to, rows, b.key_begin, aligned,
                                                        fresh_place().thread);
    arrive_when_landed(full, aligned);
  }
  __device__ __forceinline__ uint32_t k_tile(int i) const {
    return shared + static_cast<uint32_t>(Shape::kKAt + i % kKeyStages * KTile::kBytes);
  }
  __device__ __forceinline__ uint32_t v_tile() const {
    return shared + static_cast<uint32_t>(Shape::kVAt);
  }
  __device__ __forceinline__ void load_k(int i) const {
    wait_empty(k_empty(i), i, kKeyStages);
    const BackwardBlock& b = block(i);
    for (int row = fresh_place().thread; row < kC.tile_k; row += Shape::kHalfThreads) {
      const int2 seen = key_limits(b.sequence.mask, b.key_begin + row);
      ptx::store_shared(limits_at(i) + 8 * row, static_cast<uint32_t>(seen.x));
      ptx::store_shared(limits_at(i) + 8 * row + 4, static_cast<uint32_t>(seen.y));
    }
    ptx::barrier_arrive(k_full(i));  // for the limits
    load_keys(i, p.k, p.head_dim, k_tile(i), k_full(i));
  }
  __device__ __forceinline__ void load_v(int i) const {
    wait_empty(v_empty(), i, 1);
    load_keys(i, p.v, p.head_dim_v, v_tile(), v_full());
  }
  /// A step's Q and lse, or dO and delta, by the weights half. rows_at: of block.q or block.dout.
  __device__ __forceinline__ void load_queries(int i, const BackwardStep& step,
                                               const Tensor& tensor, int32_t dim, size_t rows_at,
                                               int at, const float* values, int values_at,
                                               int stage, uint32_t full) const {
    constexpr int kRowsAtOnce = Shape::kHalfThreads / QTile::kChunks;
    const int thread = fresh_place().thread;
    const int chunk = thread % QTile::kChunks, first = thread / QTile::kChunks;
    const int32_t row = step.tile * kC.tile_q;
    const int32_t seqlen = block_int(
        i, offsetof(BackwardBlock, sequence) + offsetof(Sequence, mask) + offsetof(Mask, seqlen_q));
    const char* const head = ptx::load_shared_wide<const char*>(block_at(i, rows_at)) +
                             2 * step.head * tensor.head_stride;
    const int32_t copies = block_int(i, offsetof(BackwardBlock, copies));
    const uint32_t tile = tile_at(at, stage);
    const auto copy = [&](auto is_whole) {
      const uint32_t to = tile + static_cast<uint32_t>(QTile::offset(first, 8 * chunk));
      const char* source = head + 2 * (row + first) * tensor.row_stride + 16 * chunk;
#pragma unroll
      for (int r = 0; r < kC.tile_q; r += kRowsAtOnce) {
#pragma unroll
        for (int panel = 0; panel < QTile::kPanels; ++panel) {
          const uint32_t address =
              to + static_cast<uint32_t>(panel * QTile::kPanelBytes + r * QTile::kRowBytes);
          if constexpr (decltype(is_whole)::value) {
            ptx::cp_async_16_if(address, source + panel * QTile::kRowBytes, true);
          } else {
            ptx::cp_async_16_if(
                address, source + panel * QTile::kRowBytes,
                row + first + r < seqlen && 8 * chunk + panel * QTile::kPanel < dim);
          }
        }
        source += 2 * kRowsAtOnce * tensor.row_stride;
      }
    };
    if (copies == 2 && row + kC.tile_q <= seqlen) {
      copy(std::true_type());
    } else if (copies > 0) {
      copy(std::false_type());
    } else {
      load_tile<kC.tile_q, kC.width, Shape::kHalfThreads>(
          tile, {const_cast<char*>(head), 2 * tensor.row_stride, seqlen, dim}, row, false, thread);
    }
    if (thread < kC.tile_q / 4) {
      const uint32_t first_tile = ptx::load_shared(block_at(i, offsetof(BackwardBlock, scratch)));
      ptx::cp_async_16_if(
          shared + static_cast<uint32_t>(values_at + 4 * stage * kC.tile_q + 16 * thread),
          values + int64_t{scratch_tile(first_tile, step)} * kC.tile_q + 4 * thread, true);
    }
    arrive_when_landed(full, copies > 0);
  }
  /// Q and dO of item i's `step`, the n-th of all steps.
  __device__ __forceinline__ void load_step(int i, const BackwardStep& step, int n) const {
    const int stage = n % kStages;
    wait_empty(q_empty(stage), n, kStages);
    load_queries(i, step, p.q, p.head_dim, offsetof(BackwardBlock, q), Shape::kQAt, scratch.lse,
                 Shape::kLseAt, stage, q_full(stage));
    wait_empty(dout_empty(stage), n, kStages);
    load_queries(i, step, p.dout, p.head_dim_v, offsetof(BackwardBlock, dout), Shape::kDoutAt,
                 scratch.delta, Shape::kDeltaAt, stage, dout_full(stage));
  }

  /// Whether some value of a masked step may be an infinity or a NaN.
  __device__ __forceinline__ bool nonfinite(const BackwardStep& step) const {
    return scratch.nonfinite[scratch_tile(
               static_cast<uint32_t>(block_int(offsetof(BackwardBlock, scratch))), step)] != 0;
  }

  /// acc = A B^T of the warp's keys against its queries: S^T or dP^T.
  template <typename NearEnd>
  __device__ __forceinline__ void scores(float (&acc)[kM][kN][4], uint32_t keys, uint32_t queries,
                                         const NearEnd& near_end) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
    }
    const Place me = place();
    keys += static_cast<uint32_t>(me.key_row() * KTile::kRowBytes) + me.part_a();
    queries += static_cast<uint32_t>(me.query() * QTile::kRowBytes) + me.part_b();
    multiply<T, kC.width / 16, Shape::kAhead>(
        acc,
        [&](int step, uint32_t(&a)[kM][4]) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            ptx::ldmatrix(a[m], block_address<KTile>(keys, 16 * m, 16 * step));
          }
        },
        [&](int step, int pair, uint32_t(&b)[4]) {
          ptx::ldmatrix(b, block_address<QTile>(queries, 16 * pair, 16 * step));
        },
        near_end);
  }

  /// sum += A B over the tile's queries: dV or dK. A, of the warp's keys, is `values`, or the score
  /// tile at values_at where other warps have some of its queries; B the tile's rows of dO or Q.
  template <int kPackedN>
  __device__ __forceinline__ void accumulate(float (&sum)[kM][kSumN][4],
                                             const uint32_t (&values)[kM][kPackedN][4],
                                             int values_at, uint32_t rows, bool seen_only,
                                             int32_t q_begin) const {
    const Place me = place();
    const uint32_t from = shared +
                          static_cast<uint32_t>(values_at + me.key_row() * ScoreTile::kRowBytes) +
                          me.score_part_a();
    const auto load_a = [&](int step, uint32_t(&a)[kM][4]) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (Shape::kSplit) {
          ptx::ldmatrix(a[m], block_address<ScoreTile>(from, 16 * m, 16 * step));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = values[m][step][i];
        }
      }
    };
    if (seen_only) {
      const Place me = fresh_place();
      const int lane = me.lane(), column = me.column();
      const SeenQueries<2 * kM> seen(seen_limits(me, 0), q_begin);
      multiply_seen<T, kC.tile_q / 16, !Shape::kSplit>(
          sum, lane, load_a,
          [&](int k, int n) {
            return ptx::load_shared(
                rows + static_cast<uint32_t>(QTile::offset(k, column + 8 * n) + 4 * (lane % 4)));
          },
          seen);
      return;
    }
    int first = me.column();
    rows += me.part_a();
    if constexpr (Shape::kColumns % QTile::kPanel == 0) {
      rows += static_cast<uint32_t>(QTile::block_offset(0, first));
      first = 0;
    }
    multiply<T, kC.tile_q / 16, Shape::kAhead>(
        sum, load_a,
        [&](int step, int pair, uint32_t(&b)[4]) {
          ptx::ldmatrix_trans(b, block_address<QTile>(rows, 16 * step, first + 16 * pair));
        },
        [] {});
  }

  /// The warp's scores, packed, to the tile [key][query] at `at`.
  __device__ __forceinline__ void store_scores(int at,
                                               const uint32_t (&value)[kM][kN / 2][4]) const {
    const Place me = place();
    const uint32_t rows = shared + static_cast<uint32_t>(at + me.key_row() * ScoreTile::kRowBytes);
    const uint32_t base = rows + me.score_part_a();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int pair = 0; pair < kN / 2; ++pair) {
        store_block<ScoreTile>(rows, 16 * m, me.query() + 16 * pair, me.lane(), base,
                               value[m][pair]);
      }
    }
  }

  /// Whether this thread's part of the block's keys holds an infinity or a NaN.
  __device__ __forceinline__ bool keys_nonfinite() const {
    constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
    bool found = false;
    for (int i = 16 * fresh_place().thread; i < KTile::kBytes; i += 16 * Shape::kHalfThreads) {
      uint32_t x[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(k_tile(item()) + static_cast<uint32_t>(i))
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        found |= (x[j] & kExponent) == kExponent || (x[j] >> 16 & kExponent) == kExponent;
      }
    }
    return found;
  }

  /// dq += dS K of the warp's queries and kPass columns.
  template <int kPassN>
  __device__ __forceinline__ void multiply_dq(float (&dq)[2][kPassN][4], int pass, bool seen_only,
                                              int32_t q_begin) const {
    const Place me = place();
    const uint32_t ds = shared + static_cast<uint32_t>(Shape::kDsAt) + me.score_part_b();
    uint32_t keys = k_tile(item());
    int first = me.dq_column();
    first += pass;
    if constexpr (Shape::kPass % KTile::kPanel == 0) {
      keys += static_cast<uint32_t>(KTile::block_offset(0, first));
      first = 0;
    }
    const int row = me.dq_row();
    const auto load_a = [&](int step, uint32_t(&a)[2][4]) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::ldmatrix_trans(a[m], block_address<ScoreTile>(ds, 16 * step, row + 16 * m));
      }
    };
    if (seen_only) {
      const Place me = fresh_place();
      const int lane = me.lane(), row = me.dq_row();
      const BackwardBlock& b = block(item());
      const Mask& mask = b.sequence.mask;
      int32_t begin[4], end[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int64_t i = q_begin + row + lane / 4 + 8 * r;
        const Range seen = i < mask.seqlen_q ? mask.row(i) : Range{0, 0};
        begin[r] = static_cast<int32_t>(seen.begin) - b.key_begin;
        end[r] = static_cast<int32_t>(seen.end) - b.key_begin;
      }
      multiply_seen<T, kC.tile_k / 16, false>(
          dq, lane, load_a,
          [&](int k, int n) {
            return ptx::load_shared(
                keys + static_cast<uint32_t>(KTile::offset(k, first + 8 * n) + 4 * (lane % 4)));
          },
          [&](int r, int k) { return begin[r] <= k && k < end[r]; });
      return;
    }
    keys += me.part_a();
    multiply<T, kC.tile_k / 16, Shape::kAhead>(
        dq, load_a,
        [&](int step, int pair, uint32_t(&b)[4]) {
          ptx::ldmatrix_trans(b, block_address<KTile>(keys, 16 * step, first + 16 * pair));
        },
        [] {});
  }
  /// Adds them to the tile's sum, or starts it.
  template <int kPassN>
  __device__ __forceinline__ void add_dq(const float (&dq)[2][kPassN][4], int pass, float* sum,
                                         bool start) const {
    const Place me = place();
    const int first = (me.dq_column() + pass) / 8;
    sum += (me.dq_row() / 16 * (kC.width / 8) + first) * 128 + sum_offset(me.lane());
    const auto each = [&](const auto& put) {
      if (p.head_dim == kC.width) {
#pragma unroll
        for (int n = 0; n < kPassN; ++n) {
#pragma unroll
          for (int m = 0; m < 2; ++m) put(sum + (m * (kC.width / 8) + n) * 128, dq[m][n]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kPassN; ++n) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            if (8 * (first + n) < p.head_dim) put(sum + (m * (kC.width / 8) + n) * 128, dq[m][n]);
          }
        }
      }
    };
    if (start) {
      each([](float* to, const float(&x)[4]) { sum_store(to, x); });
    } else {
      each([](float* to, const float(&x)[4]) { sum_add(to, x); });
    }
  }

  /// Writes dK or dV: to the caller's rows, or as float32 to the part's own.
  __device__ __forceinline__ void store(const float (&sum)[kM][kSumN][4], float scale,
                                        const Tensor& tensor, int32_t dim, float* parts_sum,
                                        int32_t parts) const {
    const Place me = fresh_place();
    const BackwardBlock& b = block(item());
    const int lane = me.lane(), column = me.column();
    const int32_t first = b.key_begin + me.key_row() + lane / 4;
    const int64_t seqlen = b.sequence.mask.seqlen_k;
    if (parts > 1) {
      const int64_t keys = p.cu_k ? b.sequence.k_row : int64_t{b.batch} * p.seqlen_k;
      const int64_t stride = int64_t{p.heads_kv} * parts * 2 * kC.width;
      float* const to = parts_sum + (keys + first) * stride +
                        (b.head_kv * parts + b.part) * 2 * kC.width + column + 2 * (lane % 4);
      store_part_sums(to, stride, seqlen - first, sum, scale);
      return;
    }
    store_accumulators<T>(rows_view(tensor, b.batch, b.sequence.k_row, b.head_kv, seqlen, dim),
                          first, column, sum, scale, lane);
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_BLOCK_CUH_
