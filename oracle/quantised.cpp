#include "quantised.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace oracle {
namespace {

constexpr int64_t kBlock = 32;

int64_t BlockBytes(Form form) { return form == Form::kQ8 ? 34 : 18; }
bool HasBlocks(Form form) { return form == Form::kQ8 || form == Form::kQ4; }

double HalfAt(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return static_cast<double>(DecodeFloat16(bits));
}
float PutHalf(float x, uint8_t* p) {
  const uint16_t bits = EncodeFloat16(x);
  std::memcpy(p, &bits, 2);
  return DecodeFloat16(bits);
}

// The value largest in magnitude, the first of several; NaN if there is one.
float Largest(const float* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  }
  return largest;
}

// In units of the scale.
double Units(float x, float scale) { return scale == 0 ? 0 : static_cast<double>(x / scale); }

// Nearest integer, ties to even, cut.
int Nearest(double x, int least, int most) {
  if (std::isnan(x)) return 0;
  return static_cast<int>(
      std::nearbyint(std::clamp(x, static_cast<double>(least), static_cast<double>(most))));
}

// Whether its codes are float8, and which.
bool IsFloat8(Form form) { return form == Form::kE4m3 || form == Form::kE5m2; }
DType Float8(Form form) { return form == Form::kE4m3 ? DType::kE4m3 : DType::kE5m2; }

}  // namespace

const char* Name(Form form) {
  constexpr const char* kNames[] = {"floats", "int8", "float8 e4m3", "q8_0", "q4_0", "float8 e5m2"};
  return kNames[static_cast<int>(form)];
}

bool HasScales(Form form) { return form == Form::kInt8 || IsFloat8(form); }

int64_t RowBytes(Form form, int64_t values) {
  return HasBlocks(form) ? values / kBlock * BlockBytes(form) : values;
}

double CodeAt(Form form, const uint8_t* row, int64_t n) {
  const int64_t within = n % kBlock;
  const uint8_t* const block = HasBlocks(form) ? row + n / kBlock * BlockBytes(form) : nullptr;
  switch (form) {
    case Form::kInt8:
      return static_cast<int8_t>(row[n]);
    case Form::kE4m3:
    case Form::kE5m2:
      return DecodeFloat8(Float8(form), row[n]);
    case Form::kQ8:
      return static_cast<int8_t>(block[2 + within]);
    case Form::kQ4:
      return (within < 16 ? block[2 + within] & 15 : block[2 + within - 16] >> 4) - 8;
    case Form::kNone:
      break;
  }
  return 0;
}

double ScaleAt(Form form, const uint8_t* row, double scale, int64_t n) {
  return HasBlocks(form) ? HalfAt(row + n / kBlock * BlockBytes(form)) : scale;
}

double ValueAt(Form form, const uint8_t* row, double scale, int64_t n) {
  const double by = ScaleAt(form, row, scale, n);
  return std::isfinite(by) ? CodeAt(form, row, n) * by : NAN;
}

QuantisedRow Quantise(Form form, const std::vector<float>& x, DType scale_dtype,
                      std::optional<float> given) {
  const auto n = static_cast<int64_t>(x.size());
  QuantisedRow row;
  row.bytes.resize(static_cast<size_t>(RowBytes(form, n)));
  if (HasScales(form)) {
    const float most = form == Form::kInt8 ? 127 : static_cast<float>(LargestFinite(Float8(form)));
    row.scale = given ? *given : Round(scale_dtype, std::fabs(Largest(x.data(), n)) / most);
    for (size_t i = 0; i < x.size(); ++i) {
      const double units = Units(x[i], row.scale);
      row.bytes[i] = form == Form::kInt8 ? static_cast<uint8_t>(Nearest(units, -127, 127))
                                         : EncodeFloat8(Float8(form), units);
    }
    return row;
  }
  for (int64_t first = 0; first < n; first += kBlock) {
    uint8_t* const block = row.bytes.data() + first / kBlock * BlockBytes(form);
    const float* const values = x.data() + first;
    const float largest = Largest(values, kBlock);
    const float scale = PutHalf(form == Form::kQ8 ? std::fabs(largest) / 127 : largest / -8, block);
    for (int64_t i = 0; i < kBlock; ++i) {
      const double units = Units(values[i], scale);
      if (form == Form::kQ8) {
        block[2 + i] = static_cast<uint8_t>(Nearest(units, -127, 127));
      } else {
        const int code = Nearest(units, -8, 7) + 8;
        block[2 + i % 16] = static_cast<uint8_t>(block[2 + i % 16] | (i < 16 ? code : code << 4));
      }
    }
  }
  return row;
}

std::vector<double> CodeValues(Form form) {
  std::vector<double> values;
  if (IsFloat8(form)) {
    for (int code = 0; code < 256; ++code) {
      const double value = DecodeFloat8(Float8(form), static_cast<uint8_t>(code));
      if (std::isfinite(value)) values.push_back(value);
    }
    std::sort(values.begin(), values.end());
    return values;
  }
  const int least = form == Form::kQ4 ? -8 : -127, most = form == Form::kQ4 ? 7 : 127;
  for (int code = least; code <= most; ++code) values.push_back(code);
  return values;
}

}  // namespace oracle
