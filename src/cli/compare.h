// One result of `strobe check` against the truth.
#ifndef STROBE_CLI_COMPARE_H_
#define STROBE_CLI_COMPARE_H_

#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/reference.h"

namespace strobe::cli {

// That of a framework whose tensors are of that dtype.
[[nodiscard]] Arithmetic ArithmeticOf(DType dtype);

// Error over allowed error, by the rule that users of FlashAttention know: the error may be
// `factor` times that of plain attention in the same dtype. One rounding of the largest value is
// allowed on top: in tiny tensors plain attention can be exact by luck. Infinities and NaNs must
// stand where the truth has them. Above 1, *what says where.
[[nodiscard]] double CompareTensor(const char* name, const std::vector<double>& got,
                                   const std::vector<double>& plain,
                                   const std::vector<double>& truth, double factor, double epsilon,
                                   std::string* what);

}  // namespace strobe::cli

#endif  // STROBE_CLI_COMPARE_H_
