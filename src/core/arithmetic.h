// Arithmetic on sizes, for host and device.
#ifndef STROBE_CORE_ARITHMETIC_H_
#define STROBE_CORE_ARITHMETIC_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

STROBE_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
STROBE_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
STROBE_INLINE constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
STROBE_INLINE constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace strobe

#endif  // STROBE_CORE_ARITHMETIC_H_
