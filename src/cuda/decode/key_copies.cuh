// A team's copies of its keys into its ring, tile after tile of its share.
#ifndef STROBE_CUDA_DECODE_KEY_COPIES_CUH_
#define STROBE_CUDA_DECODE_KEY_COPIES_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/cache/cache_update.cuh"
#include "cuda/decode/pieces.cuh"
#include "cuda/decode/quantised_copies.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

/// A team's first key of the unit at a place of a piece's walk.
template <typename Shape, typename Params>
__device__ __forceinline__ int32_t team_key(const Params& p, const Piece& x, int32_t place,
                                            int team) {
  if constexpr (kMasked<Params>) {
    const int32_t n = place * Shape::kUnit + team * Shape::kKeys;
    return x.listed.key(n, p.span_lists.width, p.span_lists.log2_k);
  } else {
    return x.walk.block(place) * Shape::kUnit + team * Shape::kKeys;
  }
}

/// kElements: rows need not be made of whole 16-byte units.
template <typename Shape, bool kElements, typename Params>
class KeyCopies {
 public:
  /// pieces: kPiecesKept of them in shared memory, in turn. ring: the shared address of the team's
  /// stages.
  __device__ __forceinline__ KeyCopies(const Params& p, const Piece* pieces, uint32_t ring)
      : p_(p), pieces_(pieces), ring_(ring), place_(pieces[0].walk.begin) {
    // (Of a list nothing is read before there is one: begin().)
    if constexpr (!kMasked<Params>) key_ = key_at(pieces[0], place_);
  }
  /// Before the first copy: there is a piece.
  __device__ __forceinline__ void begin() {
    if constexpr (kMasked<Params>) enter(pieces_[0]);
  }

  /// Copies tiles until kAhead are on their way that are not `done`, as far as there are so many.
  /// known: pieces that are known, from the first.
  __device__ __forceinline__ void fill(int32_t done, int32_t known) {
    while (issued_ - done < Shape::kAhead && find_tile(known)) copy();
  }
  /// Copies one tile, if there is one. As fill() otherwise.
  __device__ __forceinline__ void issue(int32_t known) {
    if (find_tile(known)) copy();
  }
  /// Waits for this thread's part of tile `done`, which has been issued.
  __device__ __forceinline__ void wait(int32_t done) {
    if constexpr (Shape::kQuantised) codes_.complete(p_, done, issued_, ring_);
    if (issued_ - done >= Shape::kAhead) {
      ptx::cp_async_wait<Shape::kAhead - 1>();
    } else {
      ptx::cp_async_wait<0>();
    }
  }

 private:
  struct None {};

  static constexpr int kChunks = Shape::kWidth / 8;  // 16-byte chunks of a row
  static constexpr int kRowsOfWarp = 32 / kChunks;   // at once
  static constexpr int kRowsAtOnce = Shape::kTeamWarps * kRowsOfWarp;
  static constexpr bool kAllCopy = kRowsOfWarp * kChunks == 32;
  static_assert(Shape::kKeys % kRowsAtOnce == 0 && kRowsOfWarp >= 1);
  static_assert(Shape::kKeys / Shape::kTeamWarps <= 32, "a lane looks up one page");

  // Read anew at each use, since registers are short.
  __device__ __forceinline__ static int team() {
    return static_cast<int>(threadIdx.x) / Shape::kTeamThreads;
  }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x) % Shape::kTeamThreads;
  }

  // Whether this thread has a chunk of a row: where these are no power of 2, the last lanes of a
  // warp have none.
  __device__ __forceinline__ static bool copies() {
    return kAllCopy || thread() % 32 < kRowsOfWarp * kChunks;
  }
  // Which one, and of which of the rows that are copied at once.
  __device__ __forceinline__ static int own_chunk() {
    return (kAllCopy ? thread() : thread() % 32) % kChunks;
  }
  __device__ __forceinline__ static int own_row() {
    if constexpr (kAllCopy) return thread() / kChunks;
    return thread() / 32 * kRowsOfWarp + thread() % 32 / kChunks;
  }

  // This team's first key of the unit at a place of a piece's walk.
  __device__ __forceinline__ int32_t key_at(const Piece& x, int32_t place) const {
    return team_key<Shape>(p_, x, place, team());
  }
  // Of the place after this one. (That of a list is asked for in time: it comes from memory.)
  __device__ __forceinline__ int32_t key_after(const Piece& x) const {
    return kMasked<Params> ? after_ : key_at(x, place_ + 1);
  }
  __device__ __forceinline__ void step(const Piece& x) {
    key_ = key_after(x);
    ++place_;
    if constexpr (kMasked<Params>) after_ = key_at(x, place_ + 1);
  }
  // To the first place of a piece.
  __device__ __forceinline__ void enter(const Piece& x) {
    place_ = x.walk.begin;
    key_ = key_at(x, place_);
    if constexpr (kMasked<Params>) after_ = key_at(x, place_ + 1);
  }

  // The next unit in which this team has keys.
  __device__ __forceinline__ bool find_tile(int32_t known) {
    for (;;) {
      const Piece& x = pieces_[piece_ % kPiecesKept];
      for (; place_ < x.walk.end; step(x)) {
        if (key_ < x.end && key_ + Shape::kKeys > x.begin) return true;
      }
      if (!x.more || piece_ + 1 >= known) return false;
      ++piece_;
      enter(pieces_[piece_ % kPiecesKept]);
      ahead_ = -1;
      if constexpr (Shape::kQuantised) codes_.enter_piece();
    }
  }

  // The page of a key that some row sees.
  __device__ __forceinline__ static int32_t look_up(const Piece& x, int32_t key) {
    if (key < x.begin || key >= x.end) return -1;
    return __ldg(x.rows.pages +
                 x.rows.page_size.quotient(static_cast<int32_t>(x.rows.first) + key));
  }

  __device__ __forceinline__ void copy() {
    const Piece& x = pieces_[piece_ % kPiecesKept];
    if constexpr (Shape::kQuantised) {
      const int32_t next = place_ + 1 < x.walk.end ? key_at(x, place_ + 1) : -1;
      codes_.copy(p_, x, key_, next, ring_, issued_);
    } else if constexpr (kUpdates<Params>) {
      copy_cached<kElements>(x, x.fresh.begin);
      if (key_ + Shape::kKeys > x.fresh.begin) put_new(p_, x, key_, stage());
    } else if constexpr (kMasked<Params>) {
      // One kernel for both kinds of rows.
      if (p_.span_lists.in_units) {
        copy_cached<false>(x, INT32_MAX);
      } else {
        copy_cached<true>(x, INT32_MAX);
      }
    } else {
      copy_cached<kElements>(x, INT32_MAX);
    }
    ptx::cp_async_commit();
    ++issued_;
    step(x);
  }

  // Where the next tile goes.
  __device__ __forceinline__ uint32_t stage() const {
    return ring_ + static_cast<uint32_t>(issued_) % Shape::kStages * Shape::kStage;
  }

  // The keys of a tile that the cache has: those from `new_begin` on are left out, as far as rows
  // of the tile see them.
  template <bool kOfElements>
  __device__ __forceinline__ void copy_cached(const Piece& x, [[maybe_unused]] int32_t new_begin) {
    constexpr int kUnroll = kOfElements ? 1 : 8;  // registers
    const int chunk = own_chunk(), first = own_row();
    const uint32_t to = stage() + static_cast<uint32_t>(first * Shape::kPitch + 16 * chunk);
    const int32_t row = key_ + first;
    const int32_t begin = x.begin, end = x.end;
    const auto is_new = [&](int32_t key) {
      return kUpdates<Params> && key >= new_begin && key >= begin && key < end;
    };
    const int k_columns = p_.head_dim - 8 * chunk, v_columns = p_.head_dim_v - 8 * chunk;
    const int64_t k_stride = 2 * p_.k.row_stride, v_stride = 2 * p_.v.row_stride;
    const char* const k = x.k + 16 * chunk;
    const char* const v = x.v + 16 * chunk;
    if (!x.rows.pages) {
      const int64_t at = x.rows.first + row;
      const char* k_row = k + 2 * x.rows.entry * p_.k.batch_stride + at * k_stride;
      const char* v_row = v + 2 * x.rows.entry * p_.v.batch_stride + at * v_stride;
#pragma unroll kUnroll
      for (int i = 0; i < Shape::kKeys; i += kRowsAtOnce) {
        // Keys that no row of the tile sees are stored as zeros, so that no product with them is
        // NaN.
        const bool there = row + i >= begin && row + i < end;
        if (copies() && !is_new(row + i)) {
          copy_chunk<kOfElements>(to + static_cast<uint32_t>(i * Shape::kPitch), k_row, v_row,
                                  there ? k_columns : 0, there ? v_columns : 0);
        }
        k_row += kRowsAtOnce * k_stride;
        v_row += kRowsAtOnce * v_stride;
      }
    } else {
      // A lane looks up the page of one of its warp's rows, one tile ahead.
      const int lane = static_cast<int>(threadIdx.x % 32);
      const int32_t own = key_ + lane / kRowsOfWarp * kRowsAtOnce + thread() / 32 * kRowsOfWarp +
                          lane % kRowsOfWarp;
      const int32_t page = !kOfElements && ahead_ == key_ ? page_ : look_up(x, own);
      if (!kOfElements && place_ + 1 < x.walk.end) {
        ahead_ = key_after(x);
        page_ = look_up(x, own + (ahead_ - key_));
      }
      const auto of_cache = static_cast<int32_t>(x.rows.first) + own;
      const int32_t of_page = of_cache - x.rows.page_size.quotient(of_cache) *
                                             static_cast<int32_t>(x.rows.page_size.divisor);
      // A page that is not there, or not looked up, is -1.
      const bool good = page >= 0 && page < x.rows.pool;
      const uint32_t bytes_of_page = 2u * static_cast<uint32_t>(page);  // of each element's stride
      const int64_t k_offset = int64_t{bytes_of_page} * p_.k.batch_stride + of_page * k_stride;
      const int64_t v_offset = int64_t{bytes_of_page} * p_.v.batch_stride + of_page * v_stride;
      const uint32_t all_good = __ballot_sync(0xffffffffu, good);
#pragma unroll kUnroll
      for (int i = 0; i < Shape::kKeys; i += kRowsAtOnce) {
        const int source = i / kRowsAtOnce * kRowsOfWarp + lane / kChunks;
        const int64_t k_at = __shfl_sync(0xffffffffu, k_offset, source);
        const int64_t v_at = __shfl_sync(0xffffffffu, v_offset, source);
        const bool seen = row + i >= begin && row + i < end;
        const bool there = seen && (all_good >> source & 1) != 0;
        const uint32_t at = to + static_cast<uint32_t>(i * Shape::kPitch);
        if (!copies() || is_new(row + i)) continue;
        if (seen && !there) {
          put_nan(at);
        } else {
          copy_chunk<kOfElements>(at, k + k_at, v + v_at, there ? k_columns : 0,
                                  there ? v_columns : 0);
        }
      }
    }
  }

  // Copies the new keys of a tile. Not inlined: there are few such tiles, and registers are short.
  __device__ __noinline__ static void put_new(const Params& p, const Piece& x, int32_t tile_key,
                                              uint32_t stage) {
    const NewKeys& fresh = x.fresh;
    const int chunk = own_chunk(), first = own_row(), column = 8 * chunk;
    const int k_columns = p.head_dim - column, v_columns = p.head_dim_v - column;
    if (!copies()) return;
#pragma unroll 1
    for (int i = first; i < Shape::kKeys; i += kRowsAtOnce) {
      const int32_t key = tile_key + i;
      if (key < x.begin || key < fresh.begin || key >= x.end) continue;
      const uint32_t at = stage + static_cast<uint32_t>(i * Shape::kPitch + 16 * chunk);
      if (!x.rows.place(key).there) {
        put_nan(at);
        continue;
      }
      const char* const k = fresh.k + 2 * p.k_new.element(0, key, 0);
      const char* const v = fresh.v + 2 * p.v_new.element(0, key, 0);
      if (column < p.cache.rotary_dim) {
        uint32_t word[4];
        rotate_chunk<typename Shape::T>(word, p, k, fresh.position + key, column, k_columns);
        ptx::store_shared_words(at, word);
      } else {
        copy_half<kElements>(at, k + 2 * column, k_columns);
      }
      copy_half<kElements>(at + Shape::kHalf, v + 2 * column, v_columns);
    }
  }

  // A key that has no page is NaN, and so is the result of every query that sees it.
  __device__ __forceinline__ static void put_nan(uint32_t at) {
    const uint32_t nan[4] = {0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff}, zero[4] = {};
    ptx::store_shared_words(at, nan);
    ptx::store_shared_words(at + Shape::kHalf, zero);
  }

  template <bool kOfElements>
  __device__ __forceinline__ static void copy_chunk(uint32_t to, const char* k, const char* v,
                                                    int k_columns, int v_columns) {
    copy_half<kOfElements>(to, k, k_columns);
    copy_half<kOfElements>(to + Shape::kHalf, v, v_columns);
  }
  template <bool kOfElements>
  __device__ __forceinline__ static void copy_half(uint32_t to, const char* from, int columns) {
    if constexpr (kOfElements) {
      uint32_t word[4];
      read_values(word, from, columns);
      ptx::store_shared_words(to, word);
    } else {
      ptx::cp_async_16_if(to, from, columns > 0);
    }
  }

  const Params& p_;
  const Piece* const pieces_;
  const uint32_t ring_;
  int32_t place_, key_ = 0;  // of the piece's walk; the team's first key of the unit there
  int32_t piece_ = 0, issued_ = 0;
  int32_t ahead_ = -1, page_ = -1;  // the key of a tile of the same piece, and its rows' pages
  int32_t after_ = 0;               // under a mask as data key_ of the next place
  [[no_unique_address]] std::conditional_t<Shape::kQuantised, QuantisedCopies<Shape>, None> codes_;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_KEY_COPIES_CUH_
