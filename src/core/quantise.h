// The checks of strobe_quantize and strobe_dequantize.
#ifndef STROBE_CORE_QUANTISE_H_
#define STROBE_CORE_QUANTISE_H_

#include "core/problem.h"
#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

using QuantiseArgs = strobe_quantize_args;

/// Whether scales are made that several rows share: those of the tensor, of heads, or of blocks of
/// rows. Else each row has its own, or all are given.
inline bool makes_shared_scales(const QuantiseArgs& a) {
  const bool of_one_row = a.kv_scale == STROBE_KV_SCALE_ROW && a.scale_rows <= 1;
  return has_scales(a.kv_dtype) && !a.scale_is_given && !of_one_row;
}

/// Checks all of it, and fills in strides that were left at zero.
Status check_quantise(QuantiseArgs& args, bool quantises);

}  // namespace strobe

#endif  // STROBE_CORE_QUANTISE_H_
