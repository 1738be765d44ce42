// strobe_quantize and strobe_dequantize on the CPU.
#ifndef STROBE_CPU_QUANTISE_H_
#define STROBE_CPU_QUANTISE_H_

#include "core/quantise.h"

namespace strobe::cpu {

/// args: checked.
Status quantise(const QuantiseArgs& args);
Status dequantise(const QuantiseArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_QUANTISE_H_
