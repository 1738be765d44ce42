// AMX tiles, and the vector operations that feed them.
//
// A tile register holds 16 rows of 64 bytes. tdpbf16ps does C[16][16] += A[16][32] B[32][16] with
// float32 C and bf16 A and B in 16 cycles. B stands as 16 rows of 16 dwords, each of them a pair of
// values that the sum runs over. These measurements on Sapphire Rapids (docs/log/2026-11.md)
// explain how the kernels are built:
//   - tiles are renamed: zeroing or loading a tile that is still in use costs nothing;
//   - a tile load takes 9 cycles from L1, 22 from L2 into L1, 16 from L2 past L1 (tile_stream); a
//     store 17, or 64 where its lines are not in L1;
//   - while tiles are in use the second 512-bit FMA unit is switched off: fma, mul, max, scalef run
//     once a cycle (port 0), add, integer and shuffle operations on port 5 beside them.
#ifndef STROBE_CPU_AMX_TILE_H_
#define STROBE_CPU_AMX_TILE_H_

// GCC 12's headers give _mm512_undefined_* an "uninitialized" value (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/score.h"

#define STROBE_AMX static inline __attribute__((always_inline))
#define STROBE_UNROLL _Pragma("GCC unroll 32")

#if STROBE_AVX512_EMULATED
#include "cpu/avx512-emulated.h"
#endif
#if STROBE_AMX_EMULATED
#include "cpu/amx-emulated.h"
#else
#include "cpu/amx-instructions.h"
#endif

namespace strobe::cpu::amx {

using Bf16 = uint16_t;

constexpr int64_t kTile = 16;               // rows of a tile, and float32 columns
constexpr int64_t kPair = 32;               // bf16 columns of a tile
constexpr int64_t kTileBf16 = kTile * 32;   // values of a bf16 tile
constexpr int64_t kTileFloat = kTile * 16;  // values of a float32 tile

/// Every tile 16 rows of 64 bytes, until tile_release().
STROBE_AMX void configure_tiles() {
  alignas(64) uint8_t config[64] = {1};  // palette 1
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;  // bytes of a row
    config[48 + t] = 16;      // rows
  }
  tile_configure(config);
}

STROBE_AMX __m512 load(const float* p) { return _mm512_load_ps(p); }
STROBE_AMX void store(float* p, __m512 v) { _mm512_store_ps(p, v); }
STROBE_AMX __m512 set(float x) { return _mm512_set1_ps(x); }
STROBE_AMX __m512i as_int(__m512 v) { return _mm512_castps_si512(v); }
STROBE_AMX __m512 as_float(__m512i v) { return _mm512_castsi512_ps(v); }

/// Lanes [begin, end) of 16 or 32; either end may lie outside.
STROBE_AMX uint32_t lanes(int64_t begin, int64_t end) {
  begin = max64(begin, 0);
  end = min64(end, 32);
  return begin >= end ? 0 : static_cast<uint32_t>(((uint64_t{1} << end) - 1) >> begin << begin);
}

/// 16 x 16 dwords.
STROBE_AMX void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  STROBE_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // Lane l of r[4g + c]: column 4l + c of rows 4g to 4g + 3.
  STROBE_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // 4 x 4 lanes, for each c.
  STROBE_UNROLL for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xEE);
    const __m512i d = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x44);
    const __m512i e = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xEE);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(a, d, 0xDD);
    t[c + 8] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(b, e, 0xDD);
  }
  STROBE_UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_TILE_H_
