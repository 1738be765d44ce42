// Products of 32 x 32 blocks, with vector work issued between their tile instructions.
#ifndef STROBE_CPU_AMX_PRODUCT_H_
#define STROBE_CPU_AMX_PRODUCT_H_

#include "cpu/amx-pack.h"

namespace strobe::cpu::amx {

/// Four float32 tiles [rows 0-15, 16-31][columns 0-15, 16-31]: the first, how far the others are
/// from it, and how far a row of a tile is from the next: 0 where all rows of a tile are the same.
template <typename T>
struct Quad {
  T* tile;
  int64_t right, down;
  int64_t row_bytes = 64;

  STROBE_INLINE T* at(int i) const { return tile + i % 2 * right + i / 2 * down; }
};

STROBE_AMX void store_quad(const Quad<float>& to) {
  tile_store<0>(to.at(0), to.row_bytes);
  tile_store<1>(to.at(1), to.row_bytes);
  tile_store<2>(to.at(2), to.row_bytes);
  tile_store<3>(to.at(3), to.row_bytes);
}
/// Tiles 0 to 3 += A B: A in tiles 4 (above) and 5, B in tiles 6 (left) and 7.
STROBE_AMX void multiply_quad() {
  tile_multiply<0, 4, 6>();
  tile_multiply<1, 4, 7>();
  tile_multiply<2, 5, 6>();
  tile_multiply<3, 5, 7>();
}

/// Tiles of A or B: the first, how far each stands after the last, and how far the other row (A) or
/// column (B) of tiles stands after the first; in elements.
struct Operand {
  const Bf16* tile;
  int64_t step, other;
};

/// out [32][32] = in + A [32][32 steps] B [32 steps][32].
struct Product {
  Operand a, b;
  Quad<const float> in;  // null: zero
  Quad<float> out;
  int64_t steps;
};

/// Runs products. The result of a product is stored during the next one, a tile at a time: four
/// stores one after the other would hold up everything behind them (14.5 cycles for a row of
/// weights against 12.6).
///
/// kStreamA: A comes from L2, as B always does.
class Products {
 public:
  STROBE_INLINE explicit Products(float* spare) : spare_(spare), unwritten_{spare, 0, 0} {}

  /// Work is what is issued between the tile instructions:
  ///   bool start()                          whether there is some for the next four of them
  ///   void slot<int i>(const Constants&)    a quarter of it
  ///   void advance()                        after four slots
  ///   void written()                        the result of the product before is in memory
  template <bool kStreamA, typename Work>
  STROBE_INLINE void multiply(const Product& m, Work& work,
                              const typename Work::Constants& constants) {
    step<kStreamA, true>(m, 0, work, constants);
    work.written();
    unwritten_ = m.out;
    for (int64_t i = 1; i < m.steps; ++i) step<kStreamA, false>(m, i, work, constants);
  }

  /// Stores the last product's result.
  STROBE_INLINE void flush() {
    store_quad(unwritten_);
    unwritten_ = {spare_, 0, 0};
  }

 private:
  template <bool kStreamA, bool kFirst, typename Work>
  STROBE_INLINE void step(const Product& m, int64_t i, Work& work,
                          const typename Work::Constants& constants) {
    if (work.start()) [[likely]] {
      step_and_work<kStreamA, kFirst, true>(m, i, work, constants);
      work.advance();
    } else {
      step_and_work<kStreamA, kFirst, false>(m, i, work, constants);
    }
  }

  template <bool kStreamA, bool kFirst, bool kWork, typename Work>
  STROBE_INLINE void step_and_work(const Product& m, int64_t i, Work& work,
                                   const typename Work::Constants& constants) {
    const Bf16* const a = m.a.tile + i * m.a.step;
    const Bf16* const b = m.b.tile + i * m.b.step;
    if constexpr (kFirst) next_result<0>(m);
    load_a<kStreamA, 4>(a);
    tile_stream<6>(b);
    tile_multiply<0, 4, 6>();
    if constexpr (kWork) work.template slot<0>(constants);
    if constexpr (kFirst) next_result<1>(m);
    tile_stream<7>(b + m.b.other);
    tile_multiply<1, 4, 7>();
    if constexpr (kWork) work.template slot<1>(constants);
    if constexpr (kFirst) next_result<2>(m);
    load_a<kStreamA, 5>(a + m.a.other);
    tile_multiply<2, 5, 6>();
    if constexpr (kWork) work.template slot<2>(constants);
    if constexpr (kFirst) next_result<3>(m);
    tile_multiply<3, 5, 7>();
    if constexpr (kWork) work.template slot<3>(constants);
  }

  template <bool kStreamA, int kT>
  STROBE_INLINE static void load_a(const Bf16* a) {
    if constexpr (kStreamA) {
      tile_stream<kT>(a);
    } else {
      tile_load<kT>(a);
    }
  }
  template <int kT>
  STROBE_INLINE void next_result(const Product& m) {
    tile_store<kT>(unwritten_.at(kT), unwritten_.row_bytes);
    if (m.in.tile) {
      tile_load<kT>(m.in.at(kT), m.in.row_bytes);
    } else {
      tile_zero<kT>();
    }
  }

  float* const spare_;  // a tile that is written and never read
  Quad<float> unwritten_;
};

/// No work.
struct Idle {
  struct Constants {};
  STROBE_INLINE static bool start() { return false; }
  template <int kSlot>
  STROBE_INLINE static void slot(const Constants&) {}
  STROBE_INLINE static void advance() {}
  STROBE_INLINE static void written() {}
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_PRODUCT_H_
