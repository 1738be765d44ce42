// The arithmetic of merging partial results, for host and device.
#ifndef STROBE_CORE_MERGE_ROW_H_
#define STROBE_CORE_MERGE_ROW_H_

#include "core/macros.h"

namespace strobe {

/// The widest head_dim_v that is merged: multi-head latent attention has values of 512.
inline constexpr int kMostMerged = 512;

/// lse of a row without keys.
STROBE_INLINE constexpr float lse_of_no_keys() { return -__builtin_inff(); }

/// A part's lse as merging counts it. Some libraries report +inf for a row without keys (the
/// flash_attn package does). It cannot be the lse of keys: weights of infinity over infinity make
/// the row and its lse NaN.
STROBE_INLINE constexpr float merged_lse(float lse) {
  return lse == __builtin_inff() ? lse_of_no_keys() : lse;
}

/// Averages of the parts' values, for some columns of a row. Weights are rounded, and their sum may
/// pass 1: an average lies between the smallest and the largest value whatever they are, so that it
/// is finite where the values are. Values without weight take no part, NaN and infinities included.
/// NaN is neither small nor large, and reaches the average through the sum.
template <int kColumns>
struct MergedColumns {
  float sum[kColumns], low[kColumns], high[kColumns];

  STROBE_INLINE constexpr void clear(int column) {
    sum[column] = 0;
    low[column] = __builtin_inff();
    high[column] = -__builtin_inff();
  }
  STROBE_INLINE constexpr void add(int column, float weight, float value) {
    sum[column] += weight * value;
    low[column] = value < low[column] ? value : low[column];
    high[column] = value > high[column] ? value : high[column];
  }
  STROBE_INLINE constexpr float average(int column) const {
    if (low[column] > high[column]) return sum[column];  // no values, or no numbers
    const float x = sum[column] < low[column] ? low[column] : sum[column];
    return x > high[column] ? high[column] : x;
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_MERGE_ROW_H_
