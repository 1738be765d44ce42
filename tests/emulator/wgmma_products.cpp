#include "wgmma_products.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "core/codes.h"
#include "cuda_runtime_api.h"
#include "instructions.h"
#include "run_time.h"

namespace strobe::emulator {

namespace {

constexpr int kMostColumns = 256, kMostRegisters = kMostColumns / 2, kRows = 16, kMostDepth = 32;

// How many products a sum of one instruction adds: rows of 32 bytes.
int depth_of(Values values) { return values == Values::kE4m3 ? 32 : 16; }

struct Product {
  WgmmaShape shape;
  uint64_t a, b;
  bool keep;
  uint64_t sums;   // which
  uint64_t group;  // that it belongs to
  const uint32_t* registers[kLanes];
};

// The accumulators of a warp while products with them are under way.
struct Sums {
  uint32_t lanes = 0;                                     // that have not got them back
  std::vector<std::array<float, kMostRegisters>> values;  // of each lane
};

struct Lane {
  struct InFlight {
    float* d;
    int count;
    uint64_t sums, last_group;
  };
  std::vector<InFlight> in_flight;
  uint64_t products = 0, sums = 0, groups = 0;  // so far
  bool fenced = false;                          // since products were waited for
};

struct WarpProducts {
  std::deque<Product> products;
  uint64_t first = 0;     // the number of products[0]: those before are computed
  uint64_t computed = 0;  // groups
  Sums sums[16];
  Lane lanes[kLanes];
};

int own_lane() { return static_cast<int>(threadIdx.x % kLanes); }

// Of a thread block.
struct BlockProducts {
  uint64_t block = 0;  // block_number()
  WarpProducts warps[kMostThreads / kLanes];
};

// Of the thread's warp.
WarpProducts& own_warp() {
  std::shared_ptr<void>& kept = block_products();
  if (!kept) kept = std::make_shared<BlockProducts>();
  auto& of_block = *static_cast<BlockProducts*>(kept.get());
  if (of_block.block != block_number()) {
    of_block.block = block_number();
    for (WarpProducts& w : of_block.warps) {
      w.products.clear();
      w.first = w.computed = 0;
      for (Sums& s : w.sums) s.lanes = 0;
      for (Lane& l : w.lanes) l = {};
    }
  }
  return of_block.warps[threadIdx.x / kLanes];
}

// --- What a product computes ---

// 128-byte swizzle: the 16-byte unit within 128 bytes is flipped by the number of the 128 bytes.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// The 16 bytes of neighbouring values of a tile, 8 or 16 of them.
void load_unit(uint32_t address, Values values, float* to, int step) {
  address = swizzled(address);
  const char* const from = shared_at(address, 16);
  note_read(from, 16);
  expect_fenced("wgmma", address, 16);
  if (values == Values::kE4m3) {
    uint8_t codes[16];
    std::memcpy(codes, from, 16);
    for (int i = 0; i < 16; ++i) to[i * step] = float_from_e4m3(codes[i]);
    return;
  }
  uint16_t bits[8];
  std::memcpy(bits, from, 16);
  for (int i = 0; i < 8; ++i) {
    // (In place: the half of all conversions.)
    const uint32_t wide = uint32_t{bits[i]} << 16;
    to[i * step] =
        values == Values::kBfloat16 ? __builtin_bit_cast(float, wide) : from_half(bits[i]);
  }
}

// A tile by its descriptor: rows [first, first + count) of A or columns of B, 32 bytes deep.
// Element (i, k) goes to to[i * step + k * deep].
void load_tile(uint64_t descriptor, bool columns, Values values, int first, int count, float* to,
               int step, int deep) {
  const auto bits = [&](int at, int number) {
    return static_cast<uint32_t>(descriptor >> at & ((uint64_t{1} << number) - 1));
  };
  const uint32_t begin = 16 * bits(0, 14), leading = 16 * bits(16, 14), stride = 16 * bits(32, 14);
  if (bits(62, 2) != 1) fail("wgmma: only the 128-byte swizzle is emulated");
  const int depth = depth_of(values), unit = depth / 2;
  if (columns) {
    if (values == Values::kE4m3) fail("wgmma: float8 operands are K-major");
    for (int k = 0; k < depth; ++k) {
      for (int i = 0; i < count; i += 8) {
        const auto at = static_cast<uint32_t>(first + i), row = static_cast<uint32_t>(k);
        load_unit(begin + at / 64 * leading + row / 8 * stride + row % 8 * 128 + at % 64 * 2,
                  values, to + i * step + k * deep, step);
      }
    }
  } else {
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<uint32_t>(first + i);
      for (int k = 0; k < depth; k += unit) {
        load_unit(begin + at / 8 * stride + at % 8 * 128 + static_cast<uint32_t>(16 * k / unit),
                  values, to + i * step + k * deep, deep);
      }
    }
  }
}

typedef float Four __attribute__((vector_size(16)));

// c += a b: the warp's 16 rows.
void multiply(float (&c)[kRows][kMostColumns], const float (&a)[kRows][kMostDepth],
              const float (&b)[kMostDepth][kMostColumns], int columns, int depth) {
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < columns; n += 16) {
      Four sum[4];
      std::memcpy(sum, &c[row][n], sizeof sum);
      for (int k = 0; k < depth; ++k) {
        Four x[4];
        std::memcpy(x, &b[k][n], sizeof x);
        for (int i = 0; i < 4; ++i) sum[i] += a[row][k] * x[i];
      }
      std::memcpy(&c[row][n], sum, sizeof sum);
    }
  }
}

// Calls visit(value, lane, register) for the accumulators.
template <typename Visit>
void for_accumulators(float (&c)[kRows][kMostColumns], int columns, const Visit& visit) {
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < columns; ++n)
      visit(c[row][n], 4 * (row % 8) + n % 8 / 2, 4 * (n / 8) + 2 * (row / 8) + n % 2);
  }
}

// Products of the warp whose group is below `end`, by one lane for all.
void compute(WarpProducts& w, uint64_t end) {
  const Quiet quiet;
  alignas(16) static float c[kRows][kMostColumns], a[kRows][kMostDepth],
      b[kMostDepth][kMostColumns];
  for (const Lane& l : w.lanes) {
    if (l.products != w.lanes[0].products || l.groups != w.lanes[0].groups)
      fail("wgmma: lanes of the warp have issued different numbers of products");
  }
  const int first_row = kRows * static_cast<int>(threadIdx.x / kLanes % 4);
  uint64_t loaded = UINT64_MAX;
  const auto store = [&](int columns) {
    if (loaded == UINT64_MAX) return;
    Sums& s = w.sums[loaded % 16];
    for_accumulators(c, columns, [&](float& x, int lane, int i) {
      s.values[static_cast<size_t>(lane)][static_cast<size_t>(i)] = x;
    });
  };
  int columns = 0;
  while (!w.products.empty() && w.products.front().group < end) {
    const Product p = w.products.front();
    w.products.pop_front();
    ++w.first;
    const WgmmaShape& shape = p.shape;
    if (loaded != p.sums) {
      store(columns);
      loaded = p.sums;
      columns = shape.n;
      const Sums& s = w.sums[loaded % 16];
      for_accumulators(c, columns, [&](float& x, int lane, int i) {
        x = s.values[static_cast<size_t>(lane)][static_cast<size_t>(i)];
      });
    }
    if (!p.keep) std::memset(c, 0, sizeof c);
    if (shape.operands == Operands::kRegisters) {
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = p.registers[lane][i];
          float* const row = a[lane / 4 + i % 2 * 8];
          if (shape.values == Values::kE4m3) {
            for (int byte = 0; byte < 4; ++byte) {
              row[lane % 4 * 4 + byte + i / 2 * 16] =
                  float_from_e4m3(static_cast<uint8_t>(word >> 8 * byte));
            }
            continue;
          }
          for (int half = 0; half < 2; ++half) {
            const auto bits = static_cast<uint16_t>(word >> 16 * half);
            row[lane % 4 * 2 + half + i / 2 * 8] =
                shape.values == Values::kBfloat16 ? from_bfloat16(bits) : from_half(bits);
          }
        }
      }
      // Of 16-bit values B is MN-major then, of float8 values always K-major.
      load_tile(p.b, shape.values != Values::kE4m3, shape.values, 0, shape.n, &b[0][0], 1,
                kMostColumns);
    } else {
      const bool by_columns = shape.operands == Operands::kColumns;
      load_tile(p.a, by_columns, shape.values, first_row, kRows, &a[0][0], kMostDepth, 1);
      load_tile(p.b, by_columns, shape.values, 0, shape.n, &b[0][0], 1, kMostColumns);
    }
    multiply(c, a, b, columns, depth_of(shape.values));
  }
  store(columns);
  w.computed = std::max(w.computed, end);
}

// By the last lane to come, for all.
void compute_committed() {
  WarpProducts& w = own_warp();
  compute(w, w.lanes[own_lane()].groups);
}
int pending_of_wait = 0;  // of the wait that the lane which computes has come to
void compute_awaited() {
  WarpProducts& w = own_warp();
  compute(w, w.lanes[own_lane()].groups - static_cast<uint64_t>(pending_of_wait));
}

}  // namespace

void wgmma(const WgmmaShape& shape, float* d, const uint32_t* registers, uint64_t a, uint64_t b,
           bool keep) {
  const Quiet quiet;
  WarpProducts& w = own_warp();
  const int number = own_lane(), count = shape.n / 2;
  Lane& lane = w.lanes[number];
  auto at = std::find_if(lane.in_flight.begin(), lane.in_flight.end(),
                         [&](const auto& x) { return d < x.d + x.count && x.d < d + count; });
  if (at == lane.in_flight.end()) {
    if (!lane.fenced) fail("wgmma: no wgmma.fence since its accumulators were last used");
    Sums& s = w.sums[lane.sums % 16];
    if (s.lanes >> number & 1) fail("wgmma: more accumulators under way than are emulated");
    s.lanes |= 1u << number;
    s.values.resize(kLanes);
    std::memcpy(s.values[static_cast<size_t>(number)].data(), d,
                static_cast<size_t>(count) * sizeof(float));
    std::memset(d, settings().unwritten, static_cast<size_t>(count) * sizeof(float));
    lane.in_flight.push_back({d, count, lane.sums++, 0});
    at = lane.in_flight.end() - 1;
  } else if (at->d != d || at->count != count) {
    fail("wgmma: accumulators of another shape overlap with some that are under way");
  }
  at->last_group = lane.groups;

  const uint64_t index = lane.products++ - w.first;
  if (index == w.products.size())
    w.products.push_back({shape, a, b, keep, at->sums, lane.groups, {}});
  Product& p = w.products[index];
  if (p.shape != shape || p.a != a || p.b != b || p.keep != keep || p.sums != at->sums ||
      p.group != lane.groups) {
    fail("wgmma: other lanes of its warp have issued another product");
  }
  p.registers[number] = registers;
}

void wgmma_fence() {
  const Quiet quiet;
  own_warp().lanes[own_lane()].fenced = true;
}

void wgmma_commit() {
  WarpProducts& w = own_warp();
  const uint64_t group = w.lanes[own_lane()].groups++;
  const uint64_t place = group * 64 + threadIdx.x / kLanes;
  if (drawn_for(place) % 2 == 0) exchange("wgmma.commit_group", {}, false, compute_committed);
}

void wgmma_wait(int pending) {
  WarpProducts& w = own_warp();
  Lane& lane = w.lanes[own_lane()];
  const uint64_t groups = lane.groups,
                 left = std::min<uint64_t>(groups, static_cast<uint64_t>(pending));
  const uint64_t end = groups - left;
  if (end > w.computed) {
    // (All lanes are at the same wait, or the exchange or the products' comparison fails.)
    pending_of_wait = static_cast<int>(left);
    exchange("wgmma.wait_group", {}, false, compute_awaited);
  }
  const Quiet quiet;
  auto kept = lane.in_flight.begin();
  for (const Lane::InFlight& x : lane.in_flight) {
    if (x.last_group >= end) {
      *kept++ = x;
      continue;
    }
    const auto* const bytes = reinterpret_cast<const unsigned char*>(x.d);
    const auto size = static_cast<size_t>(x.count) * sizeof(float);
    // As they were made when the product was issued.
    if (bytes[0] != settings().unwritten || std::memcmp(bytes, bytes + 1, size - 1) != 0)
      fail("wgmma: accumulators were written while a product with them was under way");
    Sums& s = w.sums[x.sums % 16];
    std::memcpy(x.d, s.values[static_cast<size_t>(own_lane())].data(), size);
    s.lanes &= ~(1u << own_lane());
  }
  lane.in_flight.erase(kept, lane.in_flight.end());
  lane.fenced = false;
}

}  // namespace strobe::emulator
