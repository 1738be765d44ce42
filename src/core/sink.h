// What an attention sink does to a row of the softmax, for host and device. A sink is a logit that
// every row of a head has besides its scores: its exponential is in the sum that weights are
// divided by, and no value goes with it. So it enters where a row is finished, and nothing before
// that knows of it.
//
// Math has exp(x) and, for the backward, log1p(x).
#ifndef STROBE_CORE_SINK_H_
#define STROBE_CORE_SINK_H_

#include "core/macros.h"

namespace strobe {

/// Minus infinity: the sink of a head that has none, and the lse of a row without keys. (By its
/// bits, for NVRTC has no __builtin_inff.)
inline constexpr float kNoSink = __builtin_bit_cast(float, 0xff800000u);

/// A head's sink.
STROBE_INLINE constexpr float sink_of(const float* sinks, int64_t head) {
  return sinks ? sinks[head] : kNoSink;
}

/// How a row's sum of weights, which are exp(score - reference), goes together with its sink: their
/// sum is sum * keys + own, against the larger one of the two references, so that neither overflows
/// however far the sink is from the scores.
template <typename Real>
struct SinkShare {
  float keys, own;
  Real reference;

  STROBE_INLINE constexpr float sum(float of_keys) const { return of_keys * keys + own; }

  /// reference: the row's. Math::exp goes with its unit, in which the sink is given as well.
  template <typename Math>
  STROBE_INLINE static SinkShare of(Real sink, Real reference) {
    if (sink == kNoSink) return {1, 0, reference};
    const auto above = static_cast<float>(sink - reference);  // NaN where the sink is
    if (above > 0) return {Math::exp(-above), 1, sink};
    return {1, Math::exp(above), reference};
  }
};

/// How far above the keys' lse a sink counts at most, where lse is without it. What it leaves to
/// the keys, exp(-64), is nothing beside any other rounding, and a gradient of lse, which the sink
/// does not make smaller, stays within the range of float32 on the way through such weights.
inline constexpr float kMostSinkAbove = 64;
/// The same where weights are held as fp16, from 2^-26 on with all their bits, and such a gradient
/// of lse goes through them: exp(-14) leaves six of these bits to a row's weights among each other.
inline constexpr float kMostSinkAboveHalf = 14;

/// What the backward pass has to know of a row.
struct SinkOfRow {
  float lse;          // with the sink: weights are exp(score - lse)
  float weight;       // the sink's
  float dlse_factor;  // of the gradient of lse, where it is taken off dout * out

  /// lse: as the forward pass gave it, with the sink in it or not. most_above: kMostSinkAbove, or
  /// less.
  template <typename Math>
  STROBE_INLINE static SinkOfRow of(float sink, float lse, bool in_lse,
                                    float most_above = kMostSinkAbove) {
    if (sink == kNoSink) return {lse, 0, 1};
    // Also where both are infinite, and without a key.
    if (in_lse) return {lse, lse == sink ? 1 : Math::exp(sink - lse), 1};
    if (lse == kNoSink) return {sink, 1, 1};
    const float above = sink - lse > most_above ? most_above : sink - lse;
    const float ratio = Math::exp(above);
    return {lse + Math::log1p(ratio), ratio / (1 + ratio), 1 + ratio};
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_SINK_H_
