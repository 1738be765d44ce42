// Dropout: the generator against published answers, and the same decisions in the mask, in forward
// and in backward.
#include "core/philox.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "fixture.h"
#include "gtest/gtest.h"
#include "strobe/strobe.h"

namespace strobe_test {
namespace {

// Random123's kat_vectors, philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  struct {
    uint32_t counter[4], key[2], answer[4];
  } const known[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                     {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                      {0xffffffff, 0xffffffff},
                      {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                     {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                      {0xa4093822, 0x299f31d0},
                      {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const auto& k : known) {
    const strobe::Philox4 got = strobe::philox4x32(
        {{k.counter[0], k.counter[1], k.counter[2], k.counter[3]}}, k.key[0], k.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], k.answer[i]);
  }
}

std::vector<uint8_t> Mask(int64_t batch, int64_t heads, int64_t nq, int64_t nk, float p,
                          uint64_t seed, uint64_t offset) {
  std::vector<uint8_t> mask(static_cast<size_t>(batch * heads * nq * nk), 77);
  EXPECT_EQ(strobe_dropout_mask(batch, heads, nq, nk, p, seed, offset, mask.data()), STROBE_OK);
  return mask;
}

// The oracle draws by the same definition and none of the same code.
TEST(DropoutMask, IsTheOracles) {
  for (const float p : {1e-6f, 0.17f, 0.5f, 0.9f, 0.9999999f}) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{42}, UINT64_MAX - 5}) {
      for (const uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{3} << 40 | 11}) {
        EXPECT_EQ(Mask(2, 3, 5, 21, p, seed, offset),
                  oracle::DropoutMask(2, 3, 5, 21, p, seed, offset))
            << p << ' ' << seed << ' ' << offset;
      }
    }
  }
}

TEST(DropoutMask, PartsAreThoseOfTheWhole) {
  const std::vector<uint8_t> whole = Mask(2, 3, 5, 7, 0.5f, 42, 7);
  const auto bytes = static_cast<int64_t>(whole.size());
  for (int64_t first = 0; first < bytes; ++first) {
    for (int64_t count = 0; count <= bytes - first; ++count) {
      std::vector<uint8_t> part(whole.size() + 2, 77);
      ASSERT_EQ(strobe_dropout_mask_part(2, 3, 5, 7, 0.5f, 42, 7, first, count, &part[1]),
                STROBE_OK);
      for (int64_t n = 0; n < bytes + 2; ++n) {
        const bool within = n >= 1 && n <= count;
        ASSERT_EQ(part[static_cast<size_t>(n)],
                  within ? whole[static_cast<size_t>(first + n - 1)] : 77)
            << first << ' ' << count << ' ' << n;
      }
    }
  }
}

TEST(DropoutMask, KeepsTheRightShare) {
  for (const float p : {0.0f, 1e-6f, 0.01f, 0.1f, 0.5f, 0.9f, 0.999f, 0.9999999f}) {
    const std::vector<uint8_t> mask = Mask(2, 3, 300, 500, p, 42, 7);
    double kept = 0;
    for (const uint8_t x : mask) {
      ASSERT_LE(x, 1);
      kept += x;
    }
    const double n = static_cast<double>(mask.size());
    // Five standard deviations, and half a step of 16-bit thresholds.
    EXPECT_NEAR(kept / n, 1 - static_cast<double>(p), 5 * std::sqrt(p * (1 - p) / n) + 0.5 / 65536)
        << p;
    if (p == 0) {
      EXPECT_EQ(kept, n);
    }
  }
}

// Share of equal decisions in two independent masks is p^2 + (1 - p)^2.
void ExpectIndependent(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, double p,
                       const char* what) {
  double equal = 0;
  for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i];
  const double n = static_cast<double>(a.size()), wanted = p * p + (1 - p) * (1 - p);
  EXPECT_NEAR(equal / n, wanted, 5 * std::sqrt(wanted * (1 - wanted) / n)) << what;
}

TEST(DropoutMask, EveryCoordinateMatters) {
  constexpr float kP = 0.3f;
  constexpr int64_t kRows = 256, kColumns = 256, kOne = kRows * kColumns;
  const uint64_t seed = 0x123456789ABCDEFu, offset = 5;
  const std::vector<uint8_t> mask = Mask(2, 2, kRows, kColumns, kP, seed, offset);
  const auto part = [&](int64_t bh) {
    return std::vector<uint8_t>(mask.begin() + bh * kOne, mask.begin() + (bh + 1) * kOne);
  };
  ExpectIndependent(part(0), part(1), kP, "heads");
  ExpectIndependent(part(0), part(2), kP, "batches");
  for (const uint64_t other : {seed + 1, seed ^ (uint64_t{1} << 32), seed ^ (uint64_t{1} << 63)}) {
    ExpectIndependent(part(0), Mask(1, 1, kRows, kColumns, kP, other, offset), kP, "seeds");
  }
  for (const uint64_t other : {offset + 1, offset ^ (uint64_t{1} << 31),
                               offset ^ (uint64_t{1} << 32), offset ^ (uint64_t{1} << 63)}) {
    ExpectIndependent(part(0), Mask(1, 1, kRows, kColumns, kP, seed, other), kP, "offsets");
  }
  // Neighbours within one mask.
  for (const int64_t shift : {1, 2, 4, 7, 8, 16, 64, 256, 257, 512}) {
    const std::vector<uint8_t> whole = part(0);
    const std::vector<uint8_t> moved(whole.begin() + shift, whole.end());
    ExpectIndependent(std::vector<uint8_t>(whole.begin(), whole.end() - shift), moved, kP,
                      "neighbours");
  }
}

TEST(DropoutMask, DoesNotDependOnTheShape) {
  const std::vector<uint8_t> large = Mask(1, 2, 50, 70, 0.4f, 9, 9),
                             small = Mask(1, 2, 20, 33, 0.4f, 9, 9);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = 0; j < 33; ++j) {
        ASSERT_EQ(small[static_cast<size_t>((h * 20 + i) * 33 + j)],
                  large[static_cast<size_t>((h * 50 + i) * 70 + j)]);
      }
    }
  }
}

Case DropoutCase(oracle::DType dtype, int64_t nq, int64_t nk, int64_t dv, bool varlen,
                 int32_t threads) {
  Case c;
  c.seed = 3;
  c.dtype = dtype;
  c.heads = 4;
  c.heads_kv = 2;
  c.head_dim = 16;
  c.head_dim_v = dv;
  c.varlen = varlen;
  c.seqlens_q = {nq, varlen ? nq / 2 : nq};
  c.seqlens_k = {nk, varlen ? nk - 3 : nk};
  c.scale = 1;
  c.dropout_p = 0.25f;
  c.dropout_seed = 0xFEDCBA9876543210u;
  c.dropout_offset = 0x1122334455667788u;
  c.threads = threads;
  return c;
}

// With q = 0 all weights of a row are alike; with v = 1 at (key j, column j - first) out shows them
// one by one.
TEST(Dropout, ForwardDropsWhatTheMaskSays) {
  for (const oracle::DType dtype :
       {oracle::DType::kFloat32, oracle::DType::kBFloat16, oracle::DType::kFloat16}) {
    for (const bool varlen : {false, true}) {
      for (const int64_t first : {int64_t{0}, int64_t{200}}) {
        const Case c = DropoutCase(dtype, 77, 390, 190, varlen, first ? 2 : 1);
        Fixture f(c);
        const std::vector<oracle::Sequence> sequences = Sequences(c);
        f.q.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { f.q.Set(e, 0); });
        for (const oracle::Sequence& s : sequences) {
          f.v.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) {
            const int64_t j = row - s.k_begin;
            if (j >= 0 && j < s.k_length) f.v.Set(e, j - first == d ? 1 : 0);
          });
        }
        ASSERT_EQ(f.Forward(), "");
        const oracle::Problem p = f.OracleProblem();
        const oracle::Tensor out = f.out.Read(), lse = f.ReadLse();
        for (size_t b = 0; b < sequences.size(); ++b) {
          const oracle::Sequence& s = sequences[b];
          for (int64_t i = 0; i < s.q_length; ++i) {
            for (int64_t h = 0; h < c.heads; ++h) {
              ASSERT_NEAR(*lse.at(s.q_begin + i, h), std::log(static_cast<double>(s.k_length)),
                          1e-5);
              for (int64_t d = 0; d < c.head_dim_v && first + d < s.k_length; ++d) {
                const bool keep = Keeps(p, static_cast<int64_t>(b), h, i, first + d);
                const double weight = keep / 0.75 / static_cast<double>(s.k_length);
                ASSERT_NEAR(out.at(s.q_begin + i, h)[d], weight, 0.01 * weight)
                    << "sequence " << b << ", head " << h << ", query " << i << ", key "
                    << first + d;
              }
            }
          }
        }
      }
    }
  }
}

// With dout = 1 at (query i, column i) each row of dv shows the weights of its key; one query head
// per key head.
TEST(Dropout, BackwardDropsTheSame) {
  for (const oracle::DType dtype :
       {oracle::DType::kFloat32, oracle::DType::kBFloat16, oracle::DType::kFloat16}) {
    for (const int32_t threads : {1, 3}) {
      Case c = DropoutCase(dtype, 150, 300, 150, false, threads);
      c.heads_kv = c.heads;
      Fixture f(c);
      f.q.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { f.q.Set(e, 0); });
      f.dout.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) {
        f.dout.Set(e, row % 150 == d ? 1 : 0);
      });
      ASSERT_EQ(f.Forward(), "");
      ASSERT_EQ(f.Backward(), "");
      const oracle::Problem p = f.OracleProblem();
      const oracle::Tensor dv = f.dv.Read();
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < c.heads; ++h) {
          for (int64_t j = 0; j < 300; ++j) {
            for (int64_t i = 0; i < 150; ++i) {
              const double weight = Keeps(p, b, h, i, j) / 0.75 / 300;
              ASSERT_NEAR(dv.at(b * 300 + j, h)[i], weight, 0.01 * weight)
                  << "batch " << b << ", head " << h << ", query " << i << ", key " << j;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace strobe_test
