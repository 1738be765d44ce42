// Lengths in use, positions of the first query, prefixes and chunks on every CPU kernel of this
// machine: against float64 written here from the definition, and bit for bit against the same
// sequences said in other ways.
//
//   STROBE_USED_ROWS_CASES  how many random problems (default 80)
//   STROBE_USED_ROWS_SEED   of the first
#include "used_rows.h"

#include <string>
#include <utility>
#include <vector>

#include "environment.h"
#include "gtest/gtest.h"

namespace strobe_test::used_rows {
namespace {

Scenario RandomScenario(uint64_t seed) {
  Rng rng(seed * 0x9E3779B97F4A7C15u);
  Scenario s;
  s.dtype = static_cast<DType>(rng.Integer(0, 2));
  s.packed = rng.Chance(0.5);
  s.with_used_q = rng.Chance(0.7);
  s.with_used_k = rng.Chance(0.7);
  s.with_position = rng.Chance(0.5);
  s.causal = rng.Chance(0.6);
  if (rng.Chance(0.4)) {
    s.with_prefix = true;
    s.window_right = rng.Chance(0.3) ? rng.Integer(0, 40) : -1;
  } else {
    s.chunk = rng.Chance(0.4) ? rng.Integer(1, 150) : 0;
    s.window_left = rng.Chance(0.3) ? rng.Integer(0, 100) : -1;
    s.window_right = rng.Chance(0.2) ? rng.Integer(0, 60) : -1;
  }
  const int64_t largest = rng.Chance(0.2) ? 600 : 150, batch = rng.Integer(1, 4);
  for (int64_t n = 0; n < batch; ++n) {
    Sequence b{};
    b.rows_q = !s.packed && n > 0 ? s.sequences[0].rows_q : rng.Integer(n == 0, largest);
    b.rows_k = !s.packed && n > 0 ? s.sequences[0].rows_k : rng.Integer(n == 0, largest);
    b.used_q = s.with_used_q ? rng.Chance(0.2) ? 0 : rng.Integer(0, b.rows_q) : b.rows_q;
    b.used_k = s.with_used_k ? rng.Chance(0.2) ? 0 : rng.Integer(0, b.rows_k) : b.rows_k;
    const int64_t far = int64_t{1} << rng.Integer(10, 30);
    b.position = rng.Chance(0.2) ? (rng.Chance(0.5) ? far : -far)
                                 : rng.Integer(-b.used_q - 10, b.used_k + 10);
    b.prefix = rng.Integer(0, b.rows_k);
    s.sequences.push_back(b);
  }
  s.heads_kv = rng.Integer(1, 2);
  s.heads = s.heads_kv * rng.Integer(1, 3);
  s.head_dim = rng.Integer(1, 80);
  s.head_dim_v = rng.Chance(0.5) ? s.head_dim : rng.Integer(1, 80);
  if (rng.Chance(0.2)) s.softcap = 15;
  if (rng.Chance(0.3)) s.slope = 0x1p-7f;
  if (rng.Chance(0.2)) s.dropout_p = 0.3f;
  s.with_dlse = rng.Chance(0.3);
  s.deterministic = rng.Chance(0.5);
  s.batch_invariant = rng.Chance(0.3);
  s.threads = static_cast<int32_t>(rng.Integer(1, 4));
  s.pad = rng.Chance(0.4) ? rng.Integer(1, 40) : 0;
  const double held[] = {0, kNan, kInfinity, -kInfinity};
  s.unused = rng.Pick(held);
  return s;
}

/// Kernels that take the scenario's dtype.
std::vector<CpuKernel> Kernels(const Scenario& s) {
  std::vector<CpuKernel> found = CpuKernels();
  std::erase_if(found, [&](const CpuKernel& kernel) {
    return kernel.MultipliesBf16() && s.dtype != DType::kBFloat16;
  });
  return found;
}

TEST(UsedRows, RandomProblemsAgainstFloat64) {
  const uint64_t first = FromEnvironment("STROBE_USED_ROWS_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_USED_ROWS_CASES", 80);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Scenario s = RandomScenario(seed);
    const Tensors inputs(s, seed);
    const Truth truth = Solve(s, inputs);
    for (const CpuKernel& kernel : Kernels(s)) {
      Tensors t = inputs;
      ASSERT_EQ(Launch(s, kernel, t), "") << kernel.name << " seed " << seed << ": " << ToString(s);
      ASSERT_EQ(Check(s, t, truth), "") << kernel.name << " seed " << seed << ": " << ToString(s);
    }
  }
}

// What rows that are not in use hold changes no bit, nor does where the sequences lie: packed end
// to end without any such row, the results are the same.
TEST(UsedRows, BitsAreThoseOfTheSequencesAlone) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool packed : {false, true}) {
      // Under a sanitizer one layout of each type.
      if (kSanitized && packed != (dtype == DType::kBFloat16)) continue;
      Scenario s;
      s.dtype = dtype;
      s.packed = packed;
      s.heads = 4;
      s.heads_kv = 2;
      s.head_dim = 40;
      s.causal = true;
      s.threads = 3;
      s.deterministic = s.batch_invariant = true;
      for (const auto& [q, k] : {std::pair{130, 600}, {0, 90}, {333, 0}, {64, 96}, {1, 1}}) {
        s.sequences.push_back({350, 700, q, k, 0, 0});
      }
      Scenario alone = s;
      alone.packed = true;
      alone.with_used_q = alone.with_used_k = false;
      for (Sequence& b : alone.sequences) b = {b.used_q, b.used_k, b.used_q, b.used_k, 0, 0};
      for (const CpuKernel& kernel : Kernels(s)) {
        Tensors wanted(alone, 3);
        ASSERT_EQ(Launch(alone, kernel, wanted), "") << kernel.name;
        std::string first;
        for (const double unused : {0.0, kNan, kInfinity}) {
          s.unused = unused;
          Tensors t(s, 3);
          ASSERT_EQ(Launch(s, kernel, t), "") << kernel.name;
          if (first.empty()) first = t.Bits();
          EXPECT_TRUE(t.Bits() == first) << kernel.name << " with " << unused;
          for (size_t b = 0; b < s.sequences.size(); ++b) {
            const Sequence& n = s.sequences[b];
            EXPECT_TRUE(t.Bits(b, n.used_q, n.used_k) == wanted.Bits(b, n.used_q, n.used_k))
                << kernel.name << ", sequence " << b << (packed ? ", packed" : ", dense");
          }
        }
      }
    }
  }
}

// The same problem said with the new arguments and without them.
TEST(UsedRows, ArgumentsThatSayWhatHoldsAnywayChangeNoBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Scenario s;
    s.dtype = dtype;
    s.causal = true;
    s.with_used_q = s.with_used_k = false;
    s.deterministic = true;
    s.sequences = {{200, 300, 200, 300, 100, 0}, {200, 300, 200, 300, 100, 0}};
    Scenario said = s;
    said.with_used_q = said.with_used_k = said.with_position = said.with_prefix = true;
    for (const CpuKernel& kernel : Kernels(s)) {
      Tensors without(s, 4), with(said, 4);
      ASSERT_EQ(Launch(s, kernel, without), "") << kernel.name;
      ASSERT_EQ(Launch(said, kernel, with), "") << kernel.name;
      EXPECT_TRUE(without.Bits() == with.Bits()) << kernel.name;
    }
  }
}

// Forward's bits depend on the thread count for no mask, nor do a deterministic backward's. Under
// chunks a tile that sees few keys may stand between tiles that see many.
TEST(UsedRows, BitsDoNotDependOnTheThreadCount) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Scenario s;
    s.dtype = dtype;
    s.causal = true;
    s.deterministic = true;
    s.heads = s.heads_kv = 1;
    s.head_dim = s.head_dim_v = 64;
    s.sequences = {{900, 900, 850, 870, 0, 0}};
    for (const int64_t chunk : {0, 33, 128, 256}) {
      if (kSanitized && chunk != 33) continue;  // one is enough for memory and threads
      s.chunk = chunk;
      s.with_prefix = chunk == 0;
      s.sequences[0].prefix = 77;
      for (const CpuKernel& kernel : Kernels(s)) {
        std::string first;
        for (const int32_t threads : {1, 2, 3, 7}) {
          s.threads = threads;
          Tensors t(s, 5);
          ASSERT_EQ(Launch(s, kernel, t), "") << kernel.name;
          if (first.empty()) first = t.Bits();
          EXPECT_TRUE(t.Bits() == first)
              << kernel.name << ", chunk " << chunk << ", threads " << threads;
        }
      }
    }
  }
}

// A dtype of tomorrow is not read as one of today's.
TEST(Kernels, DeclineADtypeThatTheyDoNotKnow) {
  for (const CpuKernel& kernel : CpuKernels()) {
    strobe_problem p;
    strobe_problem_init(&p, sizeof p);
    p.dtype = STROBE_Q4_0 + 1;
    p.batch = p.heads = p.heads_kv = p.seqlen_q = p.seqlen_k = 1;
    p.head_dim = p.head_dim_v = 8;
    EXPECT_FALSE(kernel.Takes(p)) << kernel.name;
  }
}

}  // namespace
}  // namespace strobe_test::used_rows
