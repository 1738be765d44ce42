// Attention of a few queries to many keys, as fast as memory can be read: decoding. Compute
// capability 8.0 and newer.
//
//   grid           [blocks][tracks]: as many thread blocks as the device runs at once. Each reads
//                  an equal share of the keys of its track's heads (shares.h)
//   thread block   teams of warps. A team has every kTeams-th tile of kKeys keys, and reads it by
//                  cp.async into a ring of its own; its warps have 16 rows each (8 where
//                  products are turned, turned_warp.cuh): queries times the query heads that share
//                  the key head. Teams wait for each other only where a span ends.
//   registers      O (float32), sums, references; Q's fragments up to head dimension 128
//   shared memory  [team][stage] x (K, V): rows 16 bytes longer than they need be (layout.h)
//                  Q: the span's, replaced where a span ends
//                  sums: [team][row] maxima and sums; score: slopes and positions; words: each
//                  team's free stage, where it puts its O when a span ends; whether this thread
//                  block merges; units of the sequences that a warp has looked at
//
// One stage of a ring is always free (two where a stage is smaller than O): the one that was read
// last. Its copy is issued when the next one is about to be read, so a span's
// end finds room for O there, while the other stages fill with the keys of the next span.
//
// Where a span is cut, its thread blocks write their pieces (O, maxima, sums; float32) to the
// workspace and count themselves; the last to do so reads all pieces, in order, and merges them.
// Where a thread block has all chunks of a span (shares.h), it keeps what it has so far of the rows
// in the workspace, and appends each chunk to that.
// The counters hold the launch's nonce above the count (hopper/scheduler.cuh says why), and a
// launch leaves them 0. Where that thread block would have many rows for each of its warps, nobody
// counts, and a kernel with a warp for each row merges (rows/merge_pieces.cu).
#ifndef STROBE_CUDA_DECODE_DECODE_CUH_
#define STROBE_CUDA_DECODE_DECODE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/cache/cache_update.cuh"
#include "cuda/common/rows_past_end.cuh"
#include "cuda/decode/key_copies.cuh"
#include "cuda/decode/layout.h"
#include "cuda/decode/pieces.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/decode/turned_warp.cuh"
#include "cuda/decode/warp.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/next_kernel.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

/// A tile's rows of Q on their way to shared memory, in chunks of 16 bytes.
template <typename Shape, bool kElements, typename Params>
struct QueryChunks {
  static constexpr int kOfRow = Shape::kWidth / 8;
  static constexpr int kAll = Shape::kTileRows * kOfRow;
  static constexpr int kOfThread = (kAll + Shape::kThreads - 1) / Shape::kThreads;

  /// This thread's i-th chunk; zeros beyond the tile's rows.
  __device__ __forceinline__ static void read(uint32_t (&word)[4], const Params& p,
                                              const Division& d, const Piece& piece, int i) {
    const int chunk = number(i), row = chunk / kOfRow, column = chunk % kOfRow * 8;
    const TileRows tile = piece.tile;
    word[0] = word[1] = word[2] = word[3] = 0;
    if (row >= tile.count || column >= p.head_dim) return;
    const auto packed = static_cast<uint32_t>(tile.first + row);
    const uint32_t query = d.group.divide(packed), head = packed - query * d.group.value;
    const char* const from = piece.q + 2 * (p.q.element(0, query, head) + column);
    if constexpr (kUpdates<Params>) {
      // Where the sequence's numbers are out of range, so is the position, and the row becomes NaN
      // anyhow. (Kernels for whole units are launched with these parameters only where they rotate
      // themselves.)
      const bool rotates = !kElements || p.rotary_cos;
      if (rotates && column < p.cache.rotary_dim && piece.in_range) {
        const int64_t position = p.cache.query_rotation(piece.rotary_start, query);
        rotate_chunk<typename Shape::T>(word, p, from - 2 * column, position, column,
                                        p.head_dim - column);
        return;
      }
    }
    read_chunk<kElements>(word, from, p.head_dim - column);
  }
  __device__ __forceinline__ static void write(const uint32_t (&word)[4], uint32_t q_tile, int i) {
    const int chunk = number(i), row = chunk / kOfRow, column = chunk % kOfRow * 8;
    if (kAll % Shape::kThreads != 0 && chunk >= kAll) return;
    if constexpr (Shape::kQuantised) {
      place_query(q_tile + static_cast<uint32_t>(row * Shape::kPitch), column / 8, word);
    } else {
      ptx::store_shared_words(q_tile + static_cast<uint32_t>(row * Shape::kPitch + 2 * column),
                              word);
    }
  }

 private:
  // Computed anew at each use, since registers are short while keys are read.
  __device__ __forceinline__ static int number(int i) {
    return ptx::opaque(static_cast<int>(threadIdx.x)) + i * Shape::kThreads;
  }
};

/// Copies a tile's rows of Q to shared memory, by the whole thread block; a barrier must follow.
template <typename Shape, bool kElements, typename Params>
__device__ __forceinline__ void copy_queries(const Params& p, const Division& d, const Piece& piece,
                                             uint32_t q_tile) {
  using Chunks = QueryChunks<Shape, kElements, Params>;
  constexpr int kUnroll = kElements ? 1 : 2;
#pragma unroll kUnroll
  for (int i = 0; i < Chunks::kOfThread; ++i) {
    uint32_t word[4];
    Chunks::read(word, p, d, piece, i);
    Chunks::write(word, q_tile, i);
  }
}

/// Writes the share's next piece, which must exist. Not inlined, since it is not in a hurry and
/// would cost registers.
template <typename Params, typename AnyDivision>
__device__ __noinline__ void later_piece(const Params& p, const AnyDivision& d,
                                         ShareWalk<Params>& walk, Piece& x) {
  walk.next(d, p, walk.enter(d, p), x);
  walk.complete(d, p, x);
}

// A counter holds the launch's nonce above a count of this many bits. Thread blocks, and chunks,
// are fewer than that. In memory that was never prepared a nonce of the other 48 bits is found by
// chance once in 2^48 counters.
constexpr int kCountBits = 16;

/// Prepares a span's counter for this launch: nonce, and count 0. Launches leave counters 0, so
/// that value is tried first.
__device__ __forceinline__ void prepare_counter(unsigned long long* counter, uint64_t nonce) {
  unsigned long long old = 0;
#pragma unroll 1
  do {
    const unsigned long long seen =
        atomicCAS(counter, old, static_cast<unsigned long long>(nonce) << kCountBits);
    if (seen == old) break;
    old = seen;
  } while (old >> kCountBits != nonce);
}
/// Counts a piece whose writes this thread has seen. Returns whether it was the last of `count`; if
/// so, the writes of all pieces are visible to this thread.
__device__ __forceinline__ bool arrive_last(unsigned long long* counter, int32_t count) {
  constexpr auto kCount = (1ull << kCountBits) - 1;
  const bool last =
      static_cast<int32_t>(ptx::add_acquire_release(counter, 1) & kCount) + 1 == count;
  if (last) *counter = 0;
  return last;
}

/// Leaves a span for the kernel that merges, by the warp of these 32 lanes.
__device__ __forceinline__ void leave_open(const Division& d, const Piece& piece, int lane) {
  constexpr int kWords = sizeof(Piece) / sizeof(uint64_t);
  static_assert(sizeof(Piece) % sizeof(uint64_t) == 0);
  OpenSpan& to = d.open_spans[piece.counter];
  const auto* const from = reinterpret_cast<const uint64_t*>(&piece);
  auto* const words = reinterpret_cast<uint64_t*>(&to.piece);
#pragma unroll
  for (int i = lane; i < kWords; i += 32) words[i] = from[i];
  if (lane == 0) to.nonce = d.nonce, to.looks = 0;
}

/// kRule: softcap, ALiBi, scales that are not positive. kElements: tensors that are not made of
/// whole 16-byte units. Params: CachedParams, or CachedUpdateParams where new keys are appended or
/// rows are rotated; or either WithoutChunks; MaskedParams under a mask as data or with a bias,
/// where the launch says whether rows are made of units. AnyDivision: Division or ChunkedDivision.
template <typename Shape, bool kRule, bool kElements, typename Params,
          typename AnyDivision = Division>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    decode_kernel(const __grid_constant__ Params p, const __grid_constant__ AnyDivision d) {
  constexpr bool kCut = kChunked<AnyDivision>;
  constexpr int kStages = Shape::kStages, kColumns = Shape::Columns::kCount;
  OutRule out_rule{kRule, kElements};
  if constexpr (kMasked<Params>) out_rule.elements = !p.span_lists.in_units;
  extern __shared__ __align__(128) char shared[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int team = warp / Shape::kTeamWarps, slice = warp % Shape::kTeamWarps;
  const uint32_t ring =
      ptx::shared_address(shared) + static_cast<uint32_t>(team * kStages * Shape::kStage);
  const uint32_t q_tile = ptx::shared_address(shared + Shape::kQOffset);
  auto* const sums = reinterpret_cast<float2*>(shared + Shape::kSumsOffset);
  auto* const score_rows =
      reinterpret_cast<float2*>(shared + Shape::kRuleOffset) + team * Shape::kTileRows;
  // The words that are read together come first: a read of 16 bytes takes no other word with it.
  auto* const warp_words = reinterpret_cast<int32_t*>(shared + Shape::kWordsOffset);
  int32_t* const free_stage = warp_words + Shape::kWarps;
  int32_t* const word = free_stage + Shape::kTeams;  // what one thread tells all
  auto* const pieces = reinterpret_cast<Piece*>(shared + Shape::kPiecesOffset);
  const auto team_sync = [&] {
    if constexpr (Shape::kTeamWarps == 1) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync<Shape::kTeamThreads>(1 + team);
    }
  };

  // Where the rows of a team's O are: in the stage that was read last, `free`, and where that has
  // no room for all of them, in the one read before it.
  const auto o_rows = [&](int of_team, int free) {
    auto* const last =
        reinterpret_cast<float*>(shared + (of_team * kStages + free) * Shape::kStage);
    return [last, free](int row) {
      static_assert(Shape::kFree <= 2);
      if constexpr (Shape::kFree == 2) {
        const int before = free == 0 ? Shape::kStages - 1 : -1;
        if (row >= Shape::kRowsOfStage)
          return last + before * (Shape::kStage / 4) + (row - Shape::kRowsOfStage) * Shape::kOPitch;
      }
      return last + row * Shape::kOPitch;
    };
  };

  // One thread walks through the share. Its first piece is written by the thread that has looked at
  // the sequence, as far as the first copies need it.
  constexpr int kWalker = Shape::kThreads - 32;
  static_assert(sizeof(Piece) <= Shape::kPieceBytes);
  static_assert(sizeof(ShareWalk<Params>) <= Shape::kPieceBytes);
  static_assert(kPiecesKept == 6 && Shape::kPiecesOffset % alignof(Piece) == 0);
  auto* const walk = reinterpret_cast<ShareWalk<Params>*>(pieces + kPiecesKept);
  // Kernels that update a cache merge themselves.
  const bool leaves_open = !kUpdates<Params> && !kCut && d.open_spans;
  if (leaves_open) ptx::let_next_kernel_begin();
  if (thread == 0) *word = 0;  // stays so if no thread has a piece to write
  {
    ShareWalk<Params> from{};
    Look<Params> look;
    if (from.template begin<Shape::kThreads>(d, p, look, warp_words, word)) {
      const bool any = from.more(), known = from.in_span();
      if (any && known) from.next(d, p, look.sequence, pieces[0]);
      *walk = from;
      // A share of chunks may begin where the span that was looked at ends. (That piece is
      // completed twice, to the same words.)
      if (any && !known) later_piece(p, d, *walk, pieces[0]);
      *word = any;
    }
  }
  __syncthreads();
  const bool some = *word != 0;
  KeyCopies<Shape, kElements, Params> copies(p, pieces, ring);
  if (some) {
    copies.begin();
    using Chunks = QueryChunks<Shape, kElements, Params>;
    // Where Q has only to be loaded, its loads are issued before the copies of keys, and stored
    // after these are under way.
    if constexpr (!kUpdates<Params> && !kElements) {
      uint32_t q[Chunks::kOfThread][4];
#pragma unroll
      for (int i = 0; i < Chunks::kOfThread; ++i) Chunks::read(q[i], p, d, pieces[0], i);
      copies.fill(0, 1);
#pragma unroll
      for (int i = 0; i < Chunks::kOfThread; ++i) Chunks::write(q[i], q_tile, i);
    } else {
      copies.fill(0, 1);
      copy_queries<Shape, kElements>(p, d, pieces[0], q_tile);
    }
    if (thread == kWalker) {
      walk->complete(d, p, pieces[0]);
      if (walk->more()) later_piece(p, d, *walk, pieces[1]);
    }
  }
  // What follows is done while the first keys are on their way.
  if constexpr (kUpdates<Params>) append<Shape, kElements>(p);
  if (p.cu_q && has_rows_past_end(p)) {
    const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    clear_past_end(p,
                   {block * Shape::kWarps + warp, int64_t{gridDim.x} * gridDim.y * Shape::kWarps});
  }
  if (!some) return;

  static_assert(!Shape::kTurned || !(kRule || kMasked<Params>));
  std::conditional_t<Shape::kTurned, TurnedWarp<Shape>, DecodeWarp<Shape, kRule, kMasked<Params>>>
      w;
  int32_t done = 0;                     // tiles of this team
  [[maybe_unused]] bool begun = false;  // whether earlier chunks of the span are in the workspace
#pragma unroll 1
  for (int32_t n = 0;; ++n) {
    const Piece& now = pieces[n % kPiecesKept];
    const int32_t known = pieces_known(n);
    const auto whole = [&] { return now.pieces.count == 1; };
    // Whether this thread block has all chunks of the span, and this is not the last of them.
    const auto has_all = [&] { return kCut && d.cut.whole_spans != 0; };
    const auto goes_on = [&] { return has_all() && now.number + 1 < now.pieces.count; };
    w.begin(p, d, now, slice, score_rows);
    if (n == 0) __syncthreads();  // Q has been stored, and the first pieces are complete
    if (thread == kWalker) {
#pragma unroll 1
      for (int32_t i = known; i < pieces_known(n + 1) && walk->more(); ++i)
        later_piece(p, d, *walk, pieces[i % kPiecesKept]);
    }
    if (!whole() && thread == 0 && !leaves_open && !has_all())
      prepare_counter(d.counters + now.counter, d.nonce);
    w.take_queries(q_tile, slice);
    copies.fill(done, known);
    {
      // Where O and the scores leave no registers for `begin` and `end`, these are read from shared
      // memory.
      constexpr bool kStay = kRule && Shape::kWidth > 128;
      const int32_t begin = now.begin, end = now.end;
#pragma unroll 1
      for (int32_t place = now.walk.begin; place < now.walk.end; ++place) {
        const int32_t key = team_key<Shape>(p, now, place, team);
        if (key >= (kStay ? now.end : end)) continue;
        if (key + Shape::kKeys <= (kStay ? now.begin : begin)) continue;
        copies.wait(done);
        team_sync();  // all threads' copies have landed, and all have read the stage before
        const uint32_t stage = ring + static_cast<uint32_t>(done) % kStages * Shape::kStage;
        copies.issue(known);
        ++done;
        if constexpr (kMasked<Params>) {
          const int32_t number = place * Shape::kUnit + team * Shape::kKeys;
          w.look(p, now.listed.entry(number, p.span_lists.width, p.span_lists.log2_k), key,
                 now.end);
        }
        w.step(p, stage, stage + Shape::kHalf, key, score_rows + 16 * slice);
      }
    }

    if constexpr (kCut) {
      // Of the chunks of a prompt's tile causal masks hide many.
      if (goes_on() && !now.sees_keys(Shape::kUnit)) {
        __syncthreads();
        continue;
      }
    }

    // --- The teams' rows together ---
    team_sync();
    // Computed anew, with everything that depends on it, since registers are short while keys are
    // read.
    const int late = ptx::opaque(thread), late_lane = late % 32;
    const bool has_columns = Shape::Columns::are_there(late_lane);
    {
      const int own = late / Shape::kTeamThreads, free = (done + kStages - 1) % kStages;
      w.leave(o_rows(own, free), sums + own * Shape::kTileRows, late % Shape::kTeamThreads,
              now.tile.count);
      if (late % Shape::kTeamThreads == 0) free_stage[own] = free;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t row = late / 32; row < now.tile.count; row += Shape::kWarps) {
      OpenRow<kColumns> open;
#pragma unroll
      for (int t = 0; t < Shape::kTeams; ++t)
        open.max = fmaxf(open.max, sums[t * Shape::kTileRows + row].x);
#pragma unroll
      for (int t = 0; t < Shape::kTeams; ++t) {
        const float2 own = sums[t * Shape::kTileRows + row];
        const float weight = OpenRow<kColumns>::weight(own.x, open.max);
        open.sum = __fmaf_rn(own.y, weight, open.sum);
        float x[kColumns] = {};
        if (has_columns) read_columns(x, o_rows(t, free_stage[t])(row) + kColumns * late_lane);
        open.add(x, weight);
      }
      if constexpr (kCut) {
        if (begun) {  // what the row's warp has written
          const int64_t at = int64_t{now.slot} * d.piece_rows + row;
          OpenRow<kColumns> before;
          const float2 sums_before = __ldcg(d.piece_sums + at);
          before.max = sums_before.x, before.sum = sums_before.y;
          if (has_columns)
            read_written(before.o, d.piece_o + at * Shape::kWidth + kColumns * late_lane);
          before.append(open.o, make_float2(open.max, open.sum));
          open = before;
          __syncwarp();  // all lanes have read the sums
        }
      }
      if (whole() || (has_all() && !goes_on())) {
        finish<typename Shape::T>(p, d, now, row, open, out_rule);
      } else {
        const int64_t at = int64_t{now.slot} * d.piece_rows + row;
        if (has_columns)
          write_columns(d.piece_o + at * Shape::kWidth + kColumns * late_lane, open.o);
        if (late_lane == 0) __stcg(d.piece_sums + at, make_float2(open.max, open.sum));
      }
    }
    if constexpr (kCut) begun = goes_on();
    if (now.more) copy_queries<Shape, kElements>(p, d, pieces[(n + 1) % kPiecesKept], q_tile);
    __syncthreads();

    // --- The span's pieces together, by the thread block that comes last ---
    if (!whole() && leaves_open) {
      if (now.slot == now.pieces.first_slot && late < 32) leave_open(d, now, late);
    } else if (!whole() && !has_all()) {
      if (late == 0) *word = arrive_last(d.counters + now.counter, now.pieces.count);
      __syncthreads();
      if (*word) {
        constexpr int kFloats = kElements || kColumns > 4 || Shape::kTurned ? 32 : 64;
        if constexpr (kCut) {
          append_pieces<typename Shape::T, Shape::kWidth, Shape::kWarps>(p, d, now, out_rule);
        } else {
          merge_pieces<typename Shape::T, Shape::kWidth, Shape::kWarps, kFloats>(p, d, now, 0,
                                                                                 out_rule);
        }
      }
    }
    if (!now.more) return;
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_DECODE_CUH_
