// What the instructions of a whole warp do, and conversions of 16-bit values. The layouts of
// fragments are those of the PTX ISA (9.7.14, warp-level matrix instructions).
#ifndef STROBE_TESTS_EMULATOR_INSTRUCTIONS_H_
#define STROBE_TESTS_EMULATOR_INSTRUCTIONS_H_

#include <cstdint>

namespace strobe::emulator {

/// The value of 16 bits, and the nearest 16 bits of a value, ties to even.
float from_bfloat16(uint16_t bits);
float from_half(uint16_t bits);
uint16_t to_bfloat16(float x);
uint16_t to_half(float x);

uint32_t shuffle(const char* name, uint32_t mask, uint32_t x, int lane);
uint32_t ballot(const char* name, uint32_t mask, bool x);

/// c += a b for m16n8k16: 16 rows, 8 columns. to_float: of the operands' type.
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
         float (*to_float)(uint16_t));
void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed);
void stmatrix(uint32_t address, const uint32_t (&r)[4]);
uint32_t movmatrix(uint32_t x);

float exp2_approx(float x);
float reciprocal_approx(float x);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_INSTRUCTIONS_H_
