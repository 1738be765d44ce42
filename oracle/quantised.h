// Quantised rows as the tests understand them, value by value (docs/quantised.md), written apart
// from the library's own.
#ifndef STROBE_ORACLE_QUANTISED_H_
#define STROBE_ORACLE_QUANTISED_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "numeric.h"

namespace oracle {

enum class Form { kNone, kInt8, kE4m3, kQ8, kQ4, kE5m2 };

const char* Name(Form form);
/// Whether the scales of a form are in a tensor of their own.
bool HasScales(Form form);
/// Bytes of a row of so many values.
int64_t RowBytes(Form form, int64_t values);

/// What the scale of value n multiplies: the code, as a number.
double CodeAt(Form form, const uint8_t* row, int64_t n);
/// The scale of value n. scale: of the row, for forms that have one.
double ScaleAt(Form form, const uint8_t* row, double scale, int64_t n);
/// Value n of a row.
double ValueAt(Form form, const uint8_t* row, double scale, int64_t n);

struct QuantisedRow {
  std::vector<uint8_t> bytes;
  float scale = 0;  // as it is stored; forms with scales
};
/// given: the row's scale, where it is not made here. scale_dtype: of a scale that is made.
QuantisedRow Quantise(Form form, const std::vector<float>& x, DType scale_dtype,
                      std::optional<float> given);

/// The values that a code may stand for, smallest first.
std::vector<double> CodeValues(Form form);

}  // namespace oracle

#endif  // STROBE_ORACLE_QUANTISED_H_
