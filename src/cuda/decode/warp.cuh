// What a warp computes: 16 rows of a tile with the keys of its team.
#ifndef STROBE_CUDA_DECODE_WARP_CUH_
#define STROBE_CUDA_DECODE_WARP_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/bias.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mask_visits.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/decode/quantised_keys.cuh"
#include "cuda/decode/row_keys.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/opaque.h"

namespace strobe::cuda {

/// What a mask as data says of a warp's rows and the keys of a step.
template <int kKeys>
struct RowBits {
  static constexpr int kWords = (kKeys + 31) / 32;
  static constexpr uint32_t kAll = kKeys < 32 ? (1u << kKeys) - 1 : ~0u;  // of a word

  int32_t head[2];  // of a row: of those that an entry speaks of
  int32_t word[2];  // of a row: its first one among the bits of a pair of blocks
  uint32_t bits[2][kWords];

  /// At the begin of a piece. head: of a key head's; query: of the sequence.
  __device__ __forceinline__ void begin(const MaskedParams& p, int h, int32_t head_of_group,
                                        int32_t query) {
    const MaskLayout& l = p.mask_layout;
    const auto block_q = static_cast<int32_t>(l.block_q), block_k = static_cast<int32_t>(l.block_k);
    head[h] = p.span_lists.width == MaskLayout::kEntry ? 0 : head_of_group;
    word[h] = (query & (block_q - 1)) * (block_k / 32);
  }
  /// Reads those of the keys from `key` on, which lie in the block of this entry; null: all are
  /// seen.
  __device__ __forceinline__ void look(const MaskedParams& p, const int32_t* entry, int32_t key) {
    const MaskLayout& l = p.mask_layout;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t place = entry ? entry[1 + head[h]] : MaskVisit::kFull;
#pragma unroll
      for (int w = 0; w < kWords; ++w) bits[h][w] = place == MaskVisit::kHidden ? 0 : kAll;
      if (place < 0) continue;
      const int64_t pair = min64(place, l.partial - 1) * l.words_of_bits();
      const auto in_block = key & (static_cast<int32_t>(l.block_k) - 1);
      const auto* const from =
          reinterpret_cast<const uint32_t*>(p.mask) + l.bits + pair + word[h] + in_block / 32;
#pragma unroll
      for (int w = 0; w < kWords; ++w) bits[h][w] = (from[w] >> (in_block % 32)) & kAll;
    }
  }
  /// Whether all rows see all keys of the step.
  __device__ __forceinline__ bool all() const {
    uint32_t some = kAll;
#pragma unroll
    for (int w = 0; w < kWords; ++w) some &= bits[0][w] & bits[1][w];
    return some == kAll;
  }
  /// Of the keys from `column` on in the step: key 32 w + i is bit i of word w, where i + column is
  /// below 32.
  __device__ __forceinline__ bool has(int h, int column, int key) const {
    return (bits[h][key / 32] >> column >> (key % 32) & 1) != 0;
  }
};

/// The bias of a lane's pairs in a step: of its two rows, with keys 2 (lane % 4) and the next of
/// each eight. It is loaded before the products of the step, which cover what memory takes.
template <int kKeys>
struct StepBias {
  const char* row[2];
  float value[kKeys / 8][2][2];  // [eight keys][row][key]

  /// At the begin of a piece. A row that is not there has that of some row that is.
  __device__ __forceinline__ void begin(const Bias& bias, int h) {
    row[h] = static_cast<const char*>(bias.data);
  }
  __device__ __forceinline__ void begin(const Bias& bias, int h, int32_t batch, int32_t head,
                                        int32_t query) {
    if (bias.data) row[h] = BiasPlane::of(bias, batch, head).row(query);
  }
  /// Of the keys from `column` on, this lane's first. last: the last key that has a bias; those
  /// past it take its.
  __device__ __forceinline__ void load(const Bias& bias, int32_t column, int32_t last) {
    const int64_t element = bias.element_bytes();
    const auto places = reinterpret_cast<uintptr_t>(row[0]) | reinterpret_cast<uintptr_t>(row[1]);
    const bool pairs = bias.key_stride == 1 && places % static_cast<uintptr_t>(2 * element) == 0 &&
                       column + kKeys - 7 <= last;  // the last one that is read
    const BiasPlane plane{nullptr, 0, bias.key_stride * element, bias.type, pairs};
    plane.of_type([&](auto type) {
      constexpr int32_t kType = decltype(type)::value;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t key = column + 8 * n;
          if (plane.pairs) {
            const float2 two = BiasPlane::two<kType>(row[h], key);
            value[n][h][0] = two.x, value[n][h][1] = two.y;
          } else {
            value[n][h][0] = plane.value_as<kType>(row[h], min(key, last));
            value[n][h][1] = plane.value_as<kType>(row[h], min(key + 1, last));
          }
        }
      }
    });
  }
  /// Adds it to scores in log 2 units.
  __device__ __forceinline__ void add(float (&s)[kKeys / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = add_bias(s[n][i], value[n][i / 2][i % 2]);
    }
  }
};

/// What is known of pairs one by one: a mask as data, and a bias.
template <int kKeys>
struct PairData {
  RowBits<kKeys> mask;
  StepBias<kKeys> bias;
};

/// kRule: softcap, ALiBi, scales that are not positive. kMask: a mask as data, a bias, or both.
template <typename Shape, bool kRule, bool kMask = false>
struct DecodeWarp {
  using T = typename Shape::T;
  static constexpr int kPitch = Shape::kPitch, kKeys = Shape::kKeys;
  static constexpr int kN = Shape::kWidth / 8, kK = Shape::kWidth / 16;
  using Scores = float[kKeys / 8][4];

  float o[kN][4];
  float reference[2], sum[2];  // of rows lane / 4 and 8 more; sum: this lane's part
  uint32_t q[Shape::kKeepsQ ? kK : 1][4];
  uint32_t q_address;
  RowKeys keys[2];
  uint32_t mantissa;  // kMantissaOf
  struct None {};
  [[no_unique_address]] std::conditional_t<kMask, PairData<kKeys>, None> data;

  /// At the begin of a piece: which keys its rows see. score_rows, of the team: gets slopes and
  /// positions; slice: which 16 rows.
  template <typename Params>
  __device__ __forceinline__ void begin(const Params& p, const Division& d, const Piece& piece,
                                        int slice, float2* score_rows) {
    // Computed anew, with everything that depends on it, since registers are short while keys are
    // read.
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    const TileRows tile = piece.tile;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = -infinity();
      sum[h] = 0.f;
      keys[h] = {};
      if constexpr (kMask) {
        data.mask.begin(p, h, 0, 0);
        data.bias.begin(p.bias, h);
      }
      float2 of_row = make_float2(0.f, 0.f);
      const int number = 16 * slice + lane / 4 + 8 * h;
      if (number < tile.count) {
        const TileRow row = TileRow::of(d, tile, number);
        keys[h] = RowKeys::of(p, piece, row);
        if constexpr (kMask) {
          data.mask.begin(p, h, row.head - tile.head, row.query);
          data.bias.begin(p.bias, h, tile.batch, row.head, row.query);
        }
        if constexpr (kRule) {
          of_row =
              make_float2(alibi_slope_log2(p, tile.batch, row.head),
                          static_cast<float>(piece.mask.position(row.query - piece.first_query)));
        }
      }
      if constexpr (kRule) {
        if (lane % 4 == 0) score_rows[16 * slice + lane / 4 + 8 * h] = of_row;
      }
    }
    if constexpr (kRule) __syncwarp();
  }

  /// Before the first keys of the piece, whose Q lies at the shared address `q_tile`.
  __device__ __forceinline__ void take_queries(uint32_t q_tile, int slice) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int n = 0; n < kN; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    if constexpr (Shape::kQuantised) {
      mantissa = kMantissaOf<T, Shape::kKvDtype>;
      ptx::make_opaque(mantissa);
    }
    q_address = q_tile + static_cast<uint32_t>((16 * slice + lane % 16) * kPitch + lane / 16 * 16);
    if constexpr (Shape::kKeepsQ) {
#pragma unroll
      for (int k = 0; k < kK; ++k) ptx::ldmatrix(q[k], q_address + 32 * k);
    }
  }

  /// Before step(), under a mask as data or with a bias: what this entry says of the keys from key0
  /// on, and their bias. end: of the keys that some row sees.
  __device__ __forceinline__ void look(const MaskedParams& p, const int32_t* entry, int32_t key0,
                                       int32_t end) {
    data.mask.look(p, entry, key0);
    const auto lane = static_cast<int>(threadIdx.x % 32);
    if (p.bias.data) data.bias.load(p.bias, key0 + 2 * (lane % 4), end - 1);
  }

  /// The keys from key0 on, whose K and V lie at the shared addresses.
  __device__ __forceinline__ void step(const CachedParams& p, uint32_t k_tile, uint32_t v_tile,
                                       int32_t key0, const float2* score_rows) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    Scores s;
    if constexpr (Shape::kQuantised) {
      QuantisedKeys<Shape>::order(k_tile, lane);
      QuantisedKeys<Shape>::order(v_tile, lane);
      __syncwarp();
      QuantisedKeys<Shape>::multiply_keys(s, q, k_tile, mantissa, lane);
    } else {
      multiply_keys(s, k_tile + static_cast<uint32_t>((lane % 8 + lane / 16 * 8) * kPitch +
                                                      lane / 8 % 2 * 16));
    }
    const int32_t column = key0 + 2 * (lane % 4);
    const Score score = Score::of(p, 0.f);  // of constants: they cost less than registers
    float scale = score.scale_log2;
    if constexpr (kRule) {
      apply_score(score, s, column, score_rows + lane / 4);
      scale = 1.f;
    }
    const bool all = keys[0].see_all(key0, kKeys) && keys[1].see_all(key0, kKeys);
    bool listed = true;
    if constexpr (kMask) {
      if (p.bias.data) data.bias.add(s);
      listed = data.mask.all();
    }
    if (!__all_sync(0xffffffffu, all && listed)) hide(s, column, key0);
    raise_references(s, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float subtract = reference_of(reference[h]);
      for_row(s, h, [&](int, float& x) {
        x = exp2_fast(kRule ? x - subtract : fmaf(x, scale, -subtract));
        sum[h] += x;
      });
    }
    if constexpr (Shape::kQuantised) {
      QuantisedKeys<Shape>::multiply_values(o, s, v_tile, mantissa, lane);
    } else {
      multiply_values(s, v_tile + static_cast<uint32_t>(lane % 16 * kPitch + lane / 16 * 16));
    }
  }

  /// Leaves O, a row of it at row_at(row), and maxima and sums at `sums`; thread: of the team;
  /// count: of the tile's rows.
  template <typename RowAt>
  __device__ __forceinline__ void leave(const RowAt& row_at, float2* sums, int thread,
                                        int32_t count) {
    const int slice = thread / 32, lane = thread % 32;
    if constexpr (Shape::kQuantised) {
      // Where a value's code is NaN (or a row is), all rows of the tile show it, and are computed
      // again from their own keys.
      if (QuantisedKeys<Shape>::kMayBeNan && __any_sync(0xffffffffu, o[0][0] != o[0][0]))
        o[0][0] = o[0][1] = o[0][2] = o[0][3] = __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = quad_sum(sum[h]);
      const int row = 16 * slice + lane / 4 + 8 * h;
      if (row >= count) continue;
      if (lane % 4 == 0) sums[row] = make_float2(reference[h], total);
      if constexpr (Shape::kQuantised) {
        float* const to = row_at(row) + 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          *reinterpret_cast<float4*>(to + 8 * n) =
              make_float4(o[n][2 * h], o[n + 1][2 * h], o[n][2 * h + 1], o[n + 1][2 * h + 1]);
        }
      } else {
        float* const to = row_at(row) + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kN; ++n)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_keys(Scores& s, uint32_t k_address) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      if constexpr (!Shape::kKeepsQ) ptx::ldmatrix(q[0], q_address + 32 * k);
      const auto& a = q[Shape::kKeepsQ ? k : 0];
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix(b, k_address + static_cast<uint32_t>(16 * n * kPitch + 32 * k));
        ptx::mma<T>(s[2 * n], a, b[0], b[1]);
        ptx::mma<T>(s[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& s, uint32_t v_address) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t a[4] = {ptx::pack<T>(s[2 * k][0], s[2 * k][1]),
                             ptx::pack<T>(s[2 * k][2], s[2 * k][3]),
                             ptx::pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                             ptx::pack<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_trans(b, v_address + static_cast<uint32_t>(16 * k * kPitch + 32 * n));
        ptx::mma<T>(o[2 * n], a, b[0], b[1]);
        ptx::mma<T>(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  /// Scale, softcap and ALiBi; column: this lane's first key.
  __device__ __forceinline__ void apply_score(const Score& score, Scores& s, int32_t column,
                                              const float2* score_rows) const {
    const auto apply = [&](auto cap) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Score own = score;
        const float2 of_row = score_rows[8 * h];
        own.slope_log2 = of_row.x;
        const Score::Row row = own.row(of_row.y, column);
        for_row(s, h, [&](int key, float& x) {
          x = row.template value<decltype(cap)::value, true>(x, key);
        });
      }
    };
    const Cap cap = score.cap();
    if (cap == Cap::kNone) {
      apply(CapConstant<Cap::kNone>());
    } else if (cap == Cap::kSmall) {
      apply(CapConstant<Cap::kSmall>());
    } else {
      apply(CapConstant<Cap::kAny>());
    }
  }

  /// Sets the scores of keys that a row does not see to -inf. column: this lane's first key, of
  /// those from key0 on, which are of one block.
  __device__ __forceinline__ void hide(Scores& s, int32_t column, int32_t key0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool visited = keys[h].own.have(key0);
      for_row(s, h, [&](int key, float& x) {
        bool seen = visited && keys[h].see(column + key);
        if constexpr (kMask) seen = seen && data.mask.has(h, column - key0, key);
        x = seen ? x : -infinity();
      });
    }
  }

  /// The running maxima, and what they make of O and the sums.
  __device__ __forceinline__ void raise_references(const Scores& s, float scale) {
    float max[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < kKeys / 8; ++n)
        max[h] = fmaxf(max[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      max[h] = fmaxf(quad_max(max[h]) * scale, reference[h]);
    }
    if (!__any_sync(0xffffffffu, max[0] != reference[0] || max[1] != reference[1])) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float alpha = exp2_fast(reference[h] - reference_of(max[h]));
      reference[h] = max[h];
      sum[h] *= alpha;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        o[n][2 * h] *= alpha;
        o[n][2 * h + 1] *= alpha;
      }
    }
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_WARP_CUH_
