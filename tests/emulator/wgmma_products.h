// wgmma: products of a warpgroup that are under way beside it (cuda/ptx/wgmma.h says what there
// is).
//
// A product reads its operands either when its group is committed or when it is waited for, as the
// seed draws: an operand that was not there yet shows, and so does one that was written too early
// afterwards. Sums are what nobody has written until a wait covers their product, and may not be
// written before. They are float32's, also those of float8 products, of which tensor cores keep
// some 14 bits.
#ifndef STROBE_TESTS_EMULATOR_WGMMA_PRODUCTS_H_
#define STROBE_TESTS_EMULATOR_WGMMA_PRODUCTS_H_

#include <cstdint>

namespace strobe::emulator {

enum class Operands : uint8_t { kRows, kColumns, kRegisters };  // ss, ss_mn, rs
enum class Values : uint8_t { kHalf, kBfloat16, kE4m3 };

struct WgmmaShape {
  Operands operands;
  int n;  // columns of B
  Values values;

  bool operator==(const WgmmaShape&) const = default;
};

/// d += A B, or d = A B. registers: of A, else null; a, b: descriptors.
void wgmma(const WgmmaShape& shape, float* d, const uint32_t* registers, uint64_t a, uint64_t b,
           bool keep);
void wgmma_fence();
void wgmma_commit();
/// Until at most `pending` groups are under way.
void wgmma_wait(int pending);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_WGMMA_PRODUCTS_H_
