// The checks of strobe_quantize and strobe_dequantize.
#ifndef STROBE_CORE_QUANTISE_H_
#define STROBE_CORE_QUANTISE_H_

#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

using QuantiseArgs = strobe_quantize_args;

/// Checks all of it, and fills in strides that were left at zero.
Status check_quantise(QuantiseArgs& args, bool quantises);

}  // namespace strobe

#endif  // STROBE_CORE_QUANTISE_H_
