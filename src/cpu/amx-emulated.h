// AMX's instructions as functions over tiles in memory, for tests on machines that have AVX-512 and
// no AMX. What the processor answers with an exception ends the program here, with a message.
// Sanitizers see these functions' accesses, and none of an instruction's.
//
// The arithmetic is that of Intel's manual (volume 2, TDPBF16PS): for each element of C the
// products of the pairs' first values are summed by fused multiply-adds from zero, those of the
// second values as well, then the two sums are added, and at last C. All of it is rounded to
// nearest even, and denormals are zeros before and after every operation, whatever the thread's own
// modes are.
#ifndef STROBE_CPU_AMX_EMULATED_H_
#define STROBE_CPU_AMX_EMULATED_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // as in amx-tile.h
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#if STROBE_AVX512_EMULATED
#define STROBE_EMULATED_PRODUCTS __attribute__((noinline))
#else
#define STROBE_EMULATED_PRODUCTS __attribute__((noinline, target("avx512f")))
#endif

namespace strobe::cpu::amx {

/// The tiles of a thread.
struct EmulatedTiles {
  static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

  struct Tile {
    alignas(64) uint8_t row[kRows][kRowBytes];
    int rows, row_bytes;  // 0: the tile has no shape, and may not be used
  };

  bool configured;
  Tile tile[kTiles];

  static void require(bool holds, const char* instruction, const char* why) {
    if (holds) return;
    std::fprintf(stderr, "emulated %s: %s\n", instruction, why);
    std::abort();
  }

  Tile& usable(int t, const char* instruction) {
    require(configured, instruction, "tiles are not configured");
    require(tile[t].rows > 0, instruction, "the tile has no shape");
    return tile[t];
  }

  void release() { std::memset(static_cast<void*>(this), 0, sizeof *this); }

  void configure(const uint8_t* config) {
    constexpr const char* kName = "ldtilecfg";
    release();
    if (config[0] == 0) return;
    require(config[0] == 1, kName, "palette, expected 0 or 1");
    require(config[1] == 0, kName, "start row, expected 0");
    for (int i = 2; i < 64; ++i) {
      const bool reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
      require(!reserved || config[i] == 0, kName, "a reserved byte is not zero");
    }
    for (int t = 0; t < kTiles; ++t) {
      const int row_bytes = config[16 + 2 * t] | config[17 + 2 * t] << 8, rows = config[48 + t];
      require(rows <= kRows, kName, "rows, expected at most 16");
      require(row_bytes <= kRowBytes, kName, "bytes of a row, expected at most 64");
      require((rows == 0) == (row_bytes == 0), kName, "rows without bytes, or bytes without rows");
      tile[t].rows = rows;
      tile[t].row_bytes = row_bytes;
    }
    configured = true;
  }

  void load(int t, const void* from, int64_t stride, const char* instruction) {
    Tile& to = usable(t, instruction);
    std::memset(to.row, 0, sizeof to.row);
    const auto* const row = static_cast<const uint8_t*>(from);
    for (int r = 0; r < to.rows; ++r) {
      std::memcpy(to.row[r], row + r * stride, static_cast<size_t>(to.row_bytes));
    }
  }
  void store(int t, void* to, int64_t stride) {
    const Tile& from = usable(t, "tilestored");
    auto* const row = static_cast<uint8_t*>(to);
    for (int r = 0; r < from.rows; ++r) {
      std::memcpy(row + r * stride, from.row[r], static_cast<size_t>(from.row_bytes));
    }
  }
  void zero(int t) { std::memset(usable(t, "tilezero").row, 0, sizeof tile[t].row); }

  void multiply(int c, int a, int b) {
    constexpr const char* kName = "tdpbf16ps";
    require(c != a && c != b && a != b, kName, "the three tiles are not different ones");
    Tile &to = usable(c, kName), &left = usable(a, kName), &right = usable(b, kName);
    require(to.row_bytes % 4 == 0 && left.row_bytes % 4 == 0, kName,
            "bytes of a row, expected a multiple of 4");
    require(to.rows == left.rows, kName, "C and A have different numbers of rows");
    require(to.row_bytes == right.row_bytes, kName, "C and B have different numbers of columns");
    require(left.row_bytes / 4 == right.rows, kName, "A's columns are not B's rows");
    sum_products(to, left, right);
  }

 private:
  // A function of its own, whose arithmetic cannot move past the changes of mode.
  STROBE_EMULATED_PRODUCTS static void sum_products(Tile& c, const Tile& a, const Tile& b) {
    // Denormals are zeros, exceptions masked, to nearest even.
    const uint32_t mode = 0x9FC0;
    uint32_t before;
    __asm__ volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(before) : "m"(mode) : "memory");
    const auto columns = static_cast<__mmask16>((1u << c.row_bytes / 4) - 1);
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int m = 0; m < c.rows; ++m) {
      __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
      for (int k = 0; k < b.rows; ++k) {
        uint32_t pair;
        std::memcpy(&pair, a.row[m] + 4 * k, sizeof pair);
        const __m512i x = _mm512_set1_epi32(static_cast<int>(pair)),
                      y = _mm512_load_si512(b.row[k]);
        first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), first);
        second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                                 _mm512_castsi512_ps(_mm512_and_si512(y, high)), second);
      }
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(c.row[m]), _mm512_add_ps(first, second));
      _mm512_store_ps(c.row[m], _mm512_maskz_mov_ps(columns, sum));
    }
    __asm__ volatile("ldmxcsr %0" ::"m"(before) : "memory");
  }
};

static inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

static inline void tile_configure(const uint8_t (&config)[64]) {
  emulated_tiles().configure(config);
}
static inline void tile_release() { emulated_tiles().release(); }
template <int kT>
static inline void tile_load(const void* p, int64_t row_bytes = 64) {
  emulated_tiles().load(kT, p, row_bytes, "tileloadd");
}
template <int kT>
static inline void tile_stream(const void* p, int64_t row_bytes = 64) {
  emulated_tiles().load(kT, p, row_bytes, "tileloaddt1");
}
template <int kT>
static inline void tile_store(void* p, int64_t row_bytes = 64) {
  emulated_tiles().store(kT, p, row_bytes);
}
template <int kT>
static inline void tile_zero() {
  emulated_tiles().zero(kT);
}
/// C += A B.
template <int kC, int kA, int kB>
static inline void tile_multiply() {
  emulated_tiles().multiply(kC, kA, kB);
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_EMULATED_H_
