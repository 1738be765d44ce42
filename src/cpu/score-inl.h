// The score and dropout in Highway vectors; score.h says what they are.
#ifndef STROBE_CPU_SCORE_INL_H_
#define STROBE_CPU_SCORE_INL_H_

#include "cpu/score.h"
#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

struct Score {
  VF value;
  VF derivative;  // of the value by the scaled product
};

/// The scores of one (batch, head). The lanes may be queries or keys.
struct Scorer {
  const ScoreOptions& options;

  /// product: q.k. position: the key position that the query stands at.
  STROBE_INLINE Score operator()(VF product, VI position, VI key) const {
    VF s = hn::Mul(product, set(options.scale)), derivative = set(1);
    if (options.softcap > 0) {
      // A division: 1 / softcap is infinite below 2.9e-39.
      const VF x = hn::Div(s, set(options.softcap));
      VF tanh = x;
#if HWY_TARGET == HWY_SCALAR
      // There Highway makes an integer of x, which nothing defines for a NaN.
      if (hn::AllFalse(f32, hn::IsNaN(x)))
#endif
        tanh = hn::Tanh(f32, x);
      s = hn::Mul(tanh, set(options.softcap));
      derivative = hn::NegMulAdd(tanh, tanh, set(1));
    }
    // The distance is an integer until here: forward and backward round it alike.
    const VF distance = hn::ConvertTo(f32, hn::Abs(hn::Sub(position, key)));
    return {hn::NegMulAdd(set(options.slope), distance, s), derivative};
  }
};

/// A score and its bias. -inf hides the pair, even where q.k is NaN.
STROBE_SIMD VF add_bias(VF score, VF bias) {
  return hn::IfThenElse(hn::Eq(bias, set(-kInfinity)), bias, hn::Add(score, bias));
}
/// Lanes that the bias does not hide; those of a NaN, for which Highway's Ne is false, among them.
STROBE_SIMD hn::Mask<F> shown(VF bias) { return hn::Not(hn::Eq(bias, set(-kInfinity))); }

// The softmax of a linear score keeps q.k unscaled: its exponential multiplies by log2(e) anyway,
// and takes the scale along. The maximum has to be that of the scaled scores, so the scale's sign
// (or its being zero) goes into Q.
STROBE_SIMD float q_factor(const ScoreOptions& options) {
  return !options.linear || options.scale > 0 ? 1 : options.scale < 0 ? -1 : 0;
}
/// What a difference of 1 between two kept scores is worth.
STROBE_SIMD float score_unit(const ScoreOptions& options) {
  return !options.linear || options.scale == 0 ? 1
         : options.scale < 0                   ? -options.scale
                                               : options.scale;
}

/// How two partial results of a row are merged, each with O and the sum of its weights against a
/// maximum of its own.
struct Merging {
  VF max, left, right;  // the common maximum; what the two parts are multiplied by

  STROBE_INLINE Merging(VF left_max, VF right_max, float unit) : max(hn::Max(left_max, right_max)) {
    const VF reference = hn::IfThenZeroElse(hn::Eq(max, set(-kInfinity)), max);
    left = exp2(hn::Sub(left_max, reference), unit);
    right = exp2(hn::Sub(right_max, reference), unit);
  }
  STROBE_INLINE VF out(VF a, VF b) const { return hn::MulAdd(a, left, hn::Mul(b, right)); }
  STROBE_INLINE VF sum(VF a, VF b) const { return hn::Add(hn::Mul(a, left), hn::Mul(b, right)); }
};

/// The end of a row of which `max` was taken off the scores.
STROBE_SIMD RowEnd row_end(const Context& c, const ScoreOptions& options, int64_t head, float max,
                           bool empty) {
  const double unit = static_cast<double>(score_unit(options));
  return RowEnd::of(c, head, static_cast<double>(max) * unit, empty);
}

struct PhiloxLanes {
  using V = VU;
  STROBE_INLINE static VU set(uint32_t word) { return hn::Set(u32, word); }
  STROBE_INLINE static VU xor3(VU a, VU b, VU c) { return hn::Xor(hn::Xor(a, b), c); }
  STROBE_INLINE static void multiply(VU a, uint32_t by, VU& high, VU& low) {
#if HWY_TARGET == HWY_SCALAR
    const uint64_t wide = static_cast<uint64_t>(hn::GetLane(a)) * by;
    high = hn::Set(u32, static_cast<uint32_t>(wide >> 32));
    low = hn::Set(u32, static_cast<uint32_t>(wide));
#else
    const VU b = hn::Set(u32, by);
    const VU even = hn::BitCast(u32, hn::MulEven(a, b));
    const VU odd = hn::BitCast(u32, hn::MulEven(hn::DupOdd(a), b));
    low = hn::OddEven(hn::DupEven(odd), even);
    high = hn::OddEven(odd, hn::DupOdd(even));
#endif
  }
};

/// Philox's bits for a vector of (query, group of 8 keys of the whole problem).
struct DropoutBits {
  VU word[4];
};
STROBE_SIMD DropoutBits dropout_bits(const ScoreOptions& options, VU query, VU group) {
  const Dropout& generator = options.generator;
  DropoutBits bits{{group, hn::Add(query, hn::Set(u32, generator.first_row)),
                    hn::Set(u32, options.batch_head), hn::Set(u32, generator.counter3)}};
  philox_rounds<PhiloxLanes>(options.generator, bits.word);
  return bits;
}

/// Lanes whose 16 bits say that the weight is kept.
STROBE_SIMD hn::Mask<F> kept_lanes(const ScoreOptions& options, VU half) {
  // Both sides are below 2^17, so a signed comparison will do.
  const auto least = static_cast<int32_t>(options.generator.threshold) - 1;
  return hn::RebindMask(f32, hn::Gt(hn::BitCast(i32, half), hn::Set(i32, least)));
}

/// Which weights of a vector of queries are kept, asked for one key after the other.
class KeptQueries {
 public:
  STROBE_INLINE KeptQueries(const ScoreOptions& options, VU queries)
      : options_(options), queries_(queries), bits_() {}

  STROBE_INLINE hn::Mask<F> operator()(int64_t key) {
    key += options_.generator.first_column;
    if (key / 8 != group_) {
      group_ = key / 8;
      bits_ = dropout_bits(options_, queries_, hn::Set(u32, static_cast<uint32_t>(group_)));
    }
    const VU word = bits_.word[key / 2 % 4];
    return kept_lanes(options_,
                      key % 2 ? hn::ShiftRight<16>(word) : hn::And(word, hn::Set(u32, 0xFFFF)));
  }

 private:
  const ScoreOptions& options_;
  const VU queries_;
  DropoutBits bits_;
  int64_t group_ = -1;
};

/// Which weights of one query and a vector of keys are kept. Every lane runs the generator,
/// although one call serves eight keys: dropout is rarely trained on a CPU.
STROBE_SIMD hn::Mask<F> kept_keys(const ScoreOptions& options, int64_t query, VU key) {
  key = hn::Add(key, hn::Set(u32, options.generator.first_column));
  const DropoutBits bits =
      dropout_bits(options, hn::Set(u32, static_cast<uint32_t>(query)), hn::ShiftRight<3>(key));
  const auto bit1 = hn::TestBit(key, hn::Set(u32, 2)), bit2 = hn::TestBit(key, hn::Set(u32, 4));
  const VU word = hn::IfThenElse(bit2, hn::IfThenElse(bit1, bits.word[3], bits.word[2]),
                                 hn::IfThenElse(bit1, bits.word[1], bits.word[0]));
  return kept_lanes(options,
                    hn::IfThenElse(hn::TestBit(key, hn::Set(u32, 1)), hn::ShiftRight<16>(word),
                                   hn::And(word, hn::Set(u32, 0xFFFF))));
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_SCORE_INL_H_
