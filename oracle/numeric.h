// The element types as the tests understand them: conversions written apart from the library's own.
#ifndef STROBE_ORACLE_NUMERIC_H_
#define STROBE_ORACLE_NUMERIC_H_

#include <cstdint>

namespace oracle {

// kByte: 0 to 255, of codes. kE4m3, kE5m2: float8; what passes their largest number becomes it.
enum class DType { kFloat32, kBFloat16, kFloat16, kByte, kE4m3, kE5m2 };

const char* Name(DType dtype);
int64_t ElementSize(DType dtype);

/// Nearest value of the type, ties to even; overflow gives infinity.
float Round(DType dtype, float x);
/// Distance between x and the next value of the type away from zero. 0 for x = 0 and what is not
/// finite.
float Spacing(DType dtype, float x);
double LargestFinite(DType dtype);

/// Element `index` of an array of the type.
float Load(DType dtype, const void* array, int64_t index);
void Store(DType dtype, void* array, int64_t index, float x);

/// Bit patterns of the 16-bit types.
uint16_t EncodeBFloat16(float x);
uint16_t EncodeFloat16(float x);
float DecodeBFloat16(uint16_t bits);
float DecodeFloat16(uint16_t bits);

/// The same of a float8 type. What is nearest is found among all of its values; NaN has one code.
uint8_t EncodeFloat8(DType dtype, double x);
double DecodeFloat8(DType dtype, uint8_t code);

/// Small, seeded, the same everywhere (SplitMix64): std::*_distribution differs between standard
/// libraries.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Uniform(double low, double high) { return low + (high - low) * Uniform(); }
  /// In [low, high], both included.
  int64_t Integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(double probability) { return Uniform() < probability; }
  /// Close to normal (the sum of four uniforms), standard deviation 1, never beyond +-3.47.
  double Normal() { return (Uniform() + Uniform() + Uniform() + Uniform() - 2) * 1.7320508; }
  template <typename T, int N>
  const T& Pick(const T (&choices)[N]) {
    return choices[Integer(0, N - 1)];
  }

 private:
  uint64_t state_;
};

}  // namespace oracle

#endif  // STROBE_ORACLE_NUMERIC_H_
