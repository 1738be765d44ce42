// What a launch does to the cache besides reading it, and to rows on their way into products: new
// keys and values, and the rotary embedding.
//
// Either a kernel of its own does that before the one that attends (update_kernel.cuh). Or one
// kernel does both, and no thread block reads what another one writes: a thread block that attends
// to a new key takes it from k_new and rotates it itself, by the same arithmetic as the one that
// writes it to the cache, so that the bits are the same. The rows of the cache that new keys go to
// are then not read in this launch.
#ifndef STROBE_CUDA_CACHE_CACHE_UPDATE_CUH_
#define STROBE_CUDA_CACHE_CACHE_UPDATE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/load.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Where the new keys of a sequence are: key j, from `begin` on, at k + j rows. Where the cache has
/// them already, `begin` is past every key.
struct NewKeys {
  const char *k, *v;
  int32_t begin;
  int32_t position;  // in the rotary tables: that of key j is position + j
};

/// Whether a kernel with these parameters appends and rotates. One that does not is compiled
/// without all of this.
template <typename Params>
inline constexpr bool kUpdates = std::is_base_of_v<CachedUpdateParams, Params>;

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
  const CachedUpdateParams* p;  // what they hold costs no registers
  int64_t first;                // of the row's position in the tables; negative: it stays as it is

  /// position: in range, where anything is rotated.
  __device__ __forceinline__ static Rotation at(const CachedUpdateParams& p, int64_t position) {
    return {&p, p.rotary_cos ? position * (p.cache.rotary_dim / 2) : -1};
  }
  /// Element d of the row after the embedding, in float32.
  __device__ __forceinline__ float exact(const T* row, int d) const {
    if (first < 0 || d >= p->cache.rotary_dim) return static_cast<float>(row[d]);
    const Pair pair = Pair::of(d, p->cache.rotary_dim, p->cache.rotary_interleaved);
    return pair.turn(row[d], row[pair.other], static_cast<const T*>(p->rotary_cos)[first + pair.n],
                     static_cast<const T*>(p->rotary_sin)[first + pair.n]);
  }
  /// The same, rounded once.
  __device__ __forceinline__ T value(const T* row, int d) const {
    if (first < 0 || d >= p->cache.rotary_dim) return row[d];
    const Pair pair = Pair::of(d, p->cache.rotary_dim, p->cache.rotary_interleaved);
    return pair.rotate(row[d], row[pair.other],
                       static_cast<const T*>(p->rotary_cos)[first + pair.n],
                       static_cast<const T*>(p->rotary_sin)[first + pair.n]);
  }

  /// Which element an element is rotated with, and by which angle of the tables.
  struct Pair {
    int n, other;
    bool leads;

    __device__ __forceinline__ static Pair of(int d, int rotary_dim, bool interleaved) {
      const int half = rotary_dim / 2;
      if (interleaved) return {d / 2, d ^ 1, d % 2 == 0};
      return d < half ? Pair{d, d + half, true} : Pair{d - half, d - half, false};
    }
    __device__ __forceinline__ float turn(T x, T y, T cosine, T sine) const {
      const float by = static_cast<float>(sine);
      return __fmaf_rn(static_cast<float>(x), static_cast<float>(cosine),
                       static_cast<float>(y) * (leads ? -by : by));
    }
    __device__ __forceinline__ T rotate(T x, T y, T cosine, T sine) const {
      return static_cast<T>(turn(x, y, cosine, sine));
    }
  };
};

/// Eight elements of a row from `column` on, of which `columns` are there, rotated by the angles at
/// `cosine` and `sine`. Not inlined: registers are short where this is used.
template <typename T>
__device__ __noinline__ uint4 rotated_chunk(const T* row, const T* cosine, const T* sine,
                                            int column, int columns, int rotary_dim,
                                            bool interleaved) {
  constexpr int kAtOnce = 4;  // so much is on its way together
  uint2 half[2] = {};
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    T x[kAtOnce] = {}, y[kAtOnce] = {}, c[kAtOnce] = {}, s[kAtOnce] = {};
    const int first = column + kAtOnce * h;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (kAtOnce * h + i >= columns) continue;
      x[i] = row[first + i];
      if (first + i >= rotary_dim) continue;
      const auto pair = Rotation<T>::Pair::of(first + i, rotary_dim, interleaved);
      y[i] = row[pair.other];
      c[i] = cosine[pair.n];
      s[i] = sine[pair.n];
    }
    uint32_t word[kAtOnce / 2] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto pair = Rotation<T>::Pair::of(first + i, rotary_dim, interleaved);
      const T value = first + i < rotary_dim ? pair.rotate(x[i], y[i], c[i], s[i]) : x[i];
      word[i / 2] |= static_cast<uint32_t>(__builtin_bit_cast(uint16_t, value)) << (16 * (i % 2));
    }
    half[1] = make_uint2(word[0], word[1]);
    if (h == 0) half[0] = half[1];
  }
  return make_uint4(half[0].x, half[0].y, half[1].x, half[1].y);
}
/// The same of a row at this position; columns: of the row from `column` on.
template <typename T>
__device__ __forceinline__ void rotate_chunk(uint32_t (&word)[4], const CachedUpdateParams& p,
                                             const char* row, int64_t position, int column,
                                             int columns) {
  const int64_t first = position * (p.cache.rotary_dim / 2);
  const uint4 x =
      rotated_chunk(reinterpret_cast<const T*>(row), static_cast<const T*>(p.rotary_cos) + first,
                    static_cast<const T*>(p.rotary_sin) + first, column, columns,
                    p.cache.rotary_dim, p.cache.rotary_interleaved);
  word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
}

/// A row whose elements are rotated where they are asked for; null: there is none.
template <typename T>
struct RotatedRow {
  const T* row;
  Rotation<T> rotation;

  __device__ __forceinline__ explicit operator bool() const { return row != nullptr; }
  __device__ __forceinline__ T operator[](int d) const { return rotation.value(row, d); }
};

/// Where the new keys of a sequence are, for a key head.
__device__ __forceinline__ NewKeys new_keys_of(const CachedUpdateParams& p, const CachedRows& s,
                                               int32_t head_kv) {
  const auto row = [&](const Tensor& t) {
    return static_cast<const char*>(t.data) +
           2 * t.element(s.new_entry, s.new_row - s.new_begin, head_kv);
  };
  return {row(p.k_new), row(p.v_new), p.k_new.data ? static_cast<int32_t>(s.new_begin) : INT32_MAX,
          static_cast<int32_t>(s.rotary_start - s.new_begin)};
}

/// The sequence that packed row `row` belongs to, by the sequences' begins, or -1. By a whole warp.
__device__ __forceinline__ int32_t sequence_of_row(const int32_t* begins, int32_t batch,
                                                   int64_t row) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t first = 0; first < batch; first += 32) {
    const int32_t b = first + lane;
    const uint32_t past = __ballot_sync(0xffffffffu, b < batch && begins[b + 1] > row);
    if (past) return first + __ffs(static_cast<int>(past)) - 1;
  }
  return -1;
}

/// visit(sequence, key, place) for a new row of all sequences together that goes somewhere. By a
/// whole warp.
template <typename Visit>
__device__ __forceinline__ void visit_new_row(const CachedUpdateParams& p, int64_t row,
                                              const Visit& visit) {
  const CachedSequences& c = p.cache;
  const int32_t b =
      c.cu_new ? sequence_of_row(c.cu_new, c.batch, row) : static_cast<int32_t>(row / c.rows_new);
  if (b < 0) return;
  const CachedRows s = c.of_all().sequence_rows(b);
  const int64_t own = c.cu_new ? row - s.new_row : row - int64_t{b} * c.rows_new;
  const int64_t key = s.new_begin + own;
  if (!s.in_range || own < 0 || key >= s.seqlen_k) return;
  const KeyRows::Place place = s.keys.place(key);
  if (!place.there) return;
  visit(s, key, place);
}

/// Writes all new keys and values to the cache, each row by one warp of the launch. Every warp of
/// every thread block has to call it.
template <typename Shape, bool kElements>
__device__ __forceinline__ void append(const CachedUpdateParams& p) {
  static_assert(Shape::kWidth / 8 <= 32, "a lane has one chunk of a row");
  if (!p.k_new.data) return;
  const CachedSequences& c = p.cache;
  const int lane = static_cast<int>(threadIdx.x % 32), column = 8 * lane;
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t step = int64_t{gridDim.x} * gridDim.y * Shape::kWarps;
#pragma unroll 1
  for (int64_t n = block * Shape::kWarps + threadIdx.x / 32; n < rows * p.heads_kv; n += step) {
    const int64_t row = n / p.heads_kv;
    const auto head = static_cast<int32_t>(n - row * p.heads_kv);
    visit_new_row(p, row, [&](const CachedRows& s, int64_t key, const KeyRows::Place& place) {
      const NewKeys fresh = new_keys_of(p, s, head);
      const auto to = [&](const Tensor& t) {
        return static_cast<char*>(t.data) + 2 * t.element(place.entry, place.row, head);
      };
      uint32_t word[4];
      if (column < p.head_dim) {
        const char* const from = fresh.k + 2 * p.k_new.element(0, key, 0);
        if (column < c.rotary_dim) {
          rotate_chunk<typename Shape::T>(word, p, from, fresh.position + key, column,
                                          p.head_dim - column);
        } else {
          read_chunk<kElements>(word, from + 2 * column, p.head_dim - column);
        }
        store_words(to(p.k), column, p.head_dim, !kElements, word);
      }
      if (column < p.head_dim_v) {
        const char* const from = fresh.v + 2 * p.v_new.element(0, key, 0);
        read_chunk<kElements>(word, from + 2 * column, p.head_dim_v - column);
        store_words(to(p.v), column, p.head_dim_v, !kElements, word);
      }
    });
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_CACHE_UPDATE_CUH_
