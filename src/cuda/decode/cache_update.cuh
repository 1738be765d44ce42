// What a launch does to the cache besides reading it, and to rows on their way into products: new
// keys and values, and the rotary embedding.
//
// No thread block reads what another one writes: whoever attends to a new key takes it from k_new
// and turns it itself, by the same arithmetic as whoever writes it to the cache, so that the bits
// are the same. The rows of the cache that new keys go to are read by nobody.
#ifndef STROBE_CUDA_DECODE_CACHE_UPDATE_CUH_
#define STROBE_CUDA_DECODE_CACHE_UPDATE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/decode/pieces.cuh"

namespace strobe::cuda {

/// Whether a kernel with these parameters appends and turns. One that does not is compiled without
/// all of this.
template <typename Params>
inline constexpr bool kUpdates = std::is_same_v<Params, DecodeUpdateParams>;

/// Eight values of a row, of which there may be less, from memory that is not aligned.
__device__ __forceinline__ void read_values(uint32_t (&word)[4], const char* row, int columns) {
  word[0] = word[1] = word[2] = word[3] = 0;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    if (c < columns)
      word[c / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[c])
                     << (c % 2 * 16);
  }
}
/// The same; kElements: rows need not be made of whole 16-byte units. columns: at least 1.
template <bool kElements>
__device__ __forceinline__ void read_chunk(uint32_t (&word)[4], const char* from, int columns) {
  if constexpr (kElements) {
    read_values(word, from, columns);
  } else {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
  }
}

/// The rotary embedding of one row of Q or of new keys.
template <typename T>
struct Rotation {
  const DecodeUpdateParams* p;  // what they hold costs no registers
  int64_t first;                // of the row's position in the tables; negative: it stays as it is

  /// position: in range, where anything is turned.
  __device__ __forceinline__ static Rotation at(const DecodeUpdateParams& p, int64_t position) {
    return {&p, position * (p.cache.rotary_dim / 2)};
  }
  /// Element d of the row after the embedding, rounded once.
  __device__ __forceinline__ T value(const T* row, int d) const {
    if (first < 0 || d >= p->cache.rotary_dim) return row[d];
    const int half = p->cache.rotary_dim / 2;
    const bool interleaved = p->cache.rotary_interleaved;
    const bool leads = interleaved ? d % 2 == 0 : d < half;
    const int n = interleaved ? d / 2 : leads ? d : d - half;
    const int other = interleaved ? d ^ 1 : leads ? d + half : d - half;
    const float x = static_cast<float>(row[d]), y = static_cast<float>(row[other]);
    const float cosine = static_cast<float>(static_cast<const T*>(p->rotary_cos)[first + n]);
    const float sine = static_cast<float>(static_cast<const T*>(p->rotary_sin)[first + n]);
    return static_cast<T>(__fmaf_rn(x, cosine, y * (leads ? -sine : sine)));
  }
  /// Eight elements from `column` on, of which `columns` are there: give(n, word) gets them in
  /// pairs. One pair after the other, since registers are short where this is used.
  template <typename Give>
  __device__ __forceinline__ void chunk(const T* row, int column, int columns,
                                        const Give& give) const {
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = 2 * n + i;
        if (c < columns)
          word |= static_cast<uint32_t>(__builtin_bit_cast(uint16_t, value(row, column + c)))
                  << (16 * i);
      }
      give(n, word);
    }
  }
};

/// A row whose elements are turned where they are asked for; null: there is none.
template <typename T>
struct TurnedRow {
  const T* row;
  Rotation<T> rotation;

  __device__ __forceinline__ explicit operator bool() const { return row != nullptr; }
  __device__ __forceinline__ T operator[](int d) const { return rotation.value(row, d); }
};

/// Where a piece's new keys are: key j, from `begin` on, at k + j rows.
struct NewKeys {
  const char *k, *v;
  int32_t begin;
  int32_t position;  // in the rotary tables: that of key j is position + j

  __device__ __forceinline__ static NewKeys of(const DecodeUpdateParams& p, const CachedSequence& s,
                                               int32_t head_kv) {
    const auto row = [&](const Tensor& t) {
      return static_cast<const char*>(t.data) +
             2 * (s.new_entry * t.batch_stride + (s.new_row - s.new_begin) * t.row_stride +
                  head_kv * t.head_stride);
    };
    return {row(p.k_new), row(p.v_new), static_cast<int32_t>(s.new_begin),
            static_cast<int32_t>(s.rotary_start - s.new_begin)};
  }
};

/// The sequence that packed row `row` of the new keys belongs to, or -1. By a whole warp.
__device__ __forceinline__ int32_t sequence_of_new(const CachedSequences& c, int64_t row) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t first = 0; first < c.batch; first += 32) {
    const int32_t b = first + lane;
    const uint32_t past = __ballot_sync(0xffffffffu, b < c.batch && c.cu_new[b + 1] > row);
    if (past) return first + __ffs(static_cast<int>(past)) - 1;
  }
  return -1;
}

/// Writes all new keys and values to the cache: each row by one warp of the launch. Every warp of
/// every thread block has to come by. Not inlined: it happens once, and its registers are its own.
template <typename Shape, bool kElements>
__device__ __noinline__ void append(const DecodeUpdateParams& p) {
  using T = typename Shape::T;
  static_assert(Shape::kWidth / 8 <= 32, "a lane has one chunk of a row");
  const CachedSequences& c = p.cache;
  const int lane = static_cast<int>(threadIdx.x % 32), column = 8 * lane;
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t step = int64_t{gridDim.x} * Shape::kWarps;
#pragma unroll 1
  for (int64_t n = int64_t{blockIdx.x} * Shape::kWarps + threadIdx.x / 32; n < rows * p.heads_kv;
       n += step) {
    const int64_t row = n / p.heads_kv;
    const auto head = static_cast<int32_t>(n - row * p.heads_kv);
    const int32_t b = c.cu_new ? sequence_of_new(c, row) : static_cast<int32_t>(row / c.rows_new);
    if (b < 0) continue;
    const CachedSequence s = c.sequence(b);
    const int64_t own = c.cu_new ? row - s.new_row : row - int64_t{b} * c.rows_new;
    const int64_t key = s.new_begin + own;
    if (!s.in_range || own < 0 || key >= s.mask.seqlen_k) continue;
    const KeyRows::Place place = s.keys.place(key);
    if (!place.there) continue;
    const NewKeys fresh = NewKeys::of(p, s, head);
    const auto to = [&](const Tensor& t) {
      return static_cast<char*>(t.data) +
             2 * (place.offset(t.batch_stride, t.row_stride) + head * t.head_stride);
    };
    uint32_t word[4];
    if (column < p.head_dim) {
      const char* const from = fresh.k + 2 * key * p.k_new.row_stride;
      if (column < c.rotary_dim) {
        const Rotation<T> rotation = Rotation<T>::at(p, fresh.position + key);
        auto* const cached = reinterpret_cast<T*>(to(p.k));
#pragma unroll 1
        for (int d = column; d < column + 8 && d < p.head_dim; ++d)
          cached[d] = rotation.value(reinterpret_cast<const T*>(from), d);
      } else {
        read_chunk<kElements>(word, from + 2 * column, p.head_dim - column);
        store_words(to(p.k), column, p.head_dim, !kElements, word);
      }
    }
    if (column < p.head_dim_v) {
      const char* const from = fresh.v + 2 * key * p.v_new.row_stride;
      read_chunk<kElements>(word, from + 2 * column, p.head_dim_v - column);
      store_words(to(p.v), column, p.head_dim_v, !kElements, word);
    }
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_CACHE_UPDATE_CUH_
