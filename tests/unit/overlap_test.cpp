// Which tensors share memory: against all their bytes, one by one.
#include "core/overlap.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cache_fixture.h"
#include "fixture.h"
#include "gtest/gtest.h"
#include "numeric.h"

namespace {

using oracle::Rng;
using strobe::Extents;
using strobe::Memory;
using strobe::share_bytes;
using strobe_test::Strided;

constexpr int64_t kMany = int64_t{1} << 40;

// From the first element on.
std::set<int64_t> Bytes(int64_t begin, const Extents& x) {
  std::set<int64_t> bytes;
  const auto& d = x.dimensions;
  for (int64_t n = 0; n < d[0].count; ++n)
    for (int64_t b = 0; b < d[1].count; ++b)
      for (int64_t i = 0; i < d[2].count; ++i)
        for (int64_t h = 0; h < d[3].count; ++h)
          for (int64_t e = 0; e < x.run; ++e)
            bytes.insert(begin + n * d[0].stride + b * d[1].stride + i * d[2].stride +
                         h * d[3].stride + e);
  return bytes;
}

std::string ToString(int64_t begin, const Extents& x) {
  std::string s = std::to_string(begin) + ":";
  for (const auto& d : x.dimensions)
    s += " " + std::to_string(d.count) + " x " + std::to_string(d.stride);
  return s + ", runs of " + std::to_string(x.run);
}

// Strides that step over what smaller ones reach, in any order of the dimensions; or any.
Extents Draw(Rng& rng, const std::vector<int64_t>& steps) {
  Extents x = Extents::contiguous(rng.Integer(1, 6));
  for (auto& d : x.dimensions) {
    d.count = rng.Integer(1, 4);
    d.stride =
        rng.Chance(0.6)
            ? steps[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(steps.size()) - 1))]
            : rng.Integer(-60, 60);
    if (rng.Chance(0.2)) d.stride = -d.stride;
  }
  return x;
}

TEST(Overlap, AgreesWithAllBytes) {
  Rng rng(1);
  int shared = 0, apart = 0;
  for (int n = 0; n < 20000; ++n) {
    std::vector<int64_t> steps = {rng.Integer(1, 9)};
    for (int k = 0; k < 3; ++k) steps.push_back(steps.back() * rng.Integer(1, 5));
    const Extents a = Draw(rng, steps), b = Draw(rng, steps);
    const int64_t at = rng.Integer(-100, 100);
    const std::set<int64_t> of_a = Bytes(0, a), of_b = Bytes(at, b);
    bool wanted = false;
    for (const int64_t x : of_b) wanted |= of_a.count(x) > 0;
    // Lowest bytes; addresses may pass zero.
    const auto got = share_bytes(static_cast<uint64_t>(*of_a.begin()), a,
                                 static_cast<uint64_t>(*of_b.begin()), b, kMany);
    ASSERT_EQ(got, wanted) << ToString(0, a) << " and " << ToString(at, b);
    ++(wanted ? shared : apart);
    Memory memory;
    // Somewhere in the middle of all addresses, and so that intervals pass the last one.
    const uint64_t base = rng.Chance(0.5) ? uint64_t{1} << 40 : uint64_t{0} - 150;
    memory.add("a", reinterpret_cast<const void*>(base), a, true);
    memory.add("b", reinterpret_cast<const void*>(base + static_cast<uint64_t>(at)), b,
               rng.Chance(0.5));
    ASSERT_EQ(memory.check().ok(), !wanted) << ToString(0, a) << " and " << ToString(at, b);
  }
  EXPECT_GT(shared, 2000);
  EXPECT_GT(apart, 2000);
}

// What share_bytes finds within the steps that a check allows itself, at most a millisecond.
struct Two {
  const char* what;
  Extents a, b;
  int64_t distance;  // in bytes, from a's first element to b's
  bool shared;
};

TEST(Overlap, LayoutsThatAreInUse) {
  const auto of = [](int64_t batch, int64_t rows, int64_t heads, int64_t dim, strobe_strides s) {
    return Extents::of(batch, rows, heads, dim, s, 2);
  };
  // q, k and v in one tensor of 4096 x 100,000 x (32 + 8 + 8) x 128.
  const strobe_strides packed = {100000 * 6144, 6144, 128, 1};
  const Extents q = of(4096, 100000, 32, 128, packed), k = of(4096, 100000, 8, 128, packed);
  // K and V of a million pages, side by side in each page, or head by head.
  const strobe_strides pages = {2 * 16 * 8 * 128, 8 * 128, 128, 1};
  const strobe_strides by_head = {2 * 16 * 8 * 128, 128, 2 * 16 * 128, 1};
  const Extents pool = of(1000000, 16, 8, 128, pages);
  const Extents heads = of(1000000, 16, 8, 128, by_head);
  // Rows of float32 in the padding of rows.
  const Extents padded = of(8, 5000, 16, 96, {5000 * 16 * 100, 16 * 100, 100, 1});
  const Extents rows = Extents::of(8, 5000, 16, 1, {5000 * 16 * 50, 16 * 50, 50, 1}, 4);
  // Rows that step in unlike ways through one matrix.
  const Extents wide = of(1, 3000, 1, 16, {0, 1024, 0, 1});
  const Extents skew = of(1, 3000, 1, 16, {0, 1040, 0, 1});
  const Two all[] = {
      {"q and k", q, k, 2 * 32 * 128, false},
      {"k and v", k, k, 2 * 8 * 128, false},
      {"k and v, an element too near", k, k, 2 * 8 * 128 - 2, true},
      {"q and k, an element too near", q, k, 2 * 32 * 128 - 2, true},
      {"v and q of the next row", k, q, 2 * 8 * 128, false},
      {"v and q of the next row, an element too near", k, q, 2 * 8 * 128 - 2, true},
      {"a pool", pool, pool, 2 * 16 * 8 * 128, false},
      {"a pool, an element too near", pool, pool, 2 * 16 * 8 * 128 - 2, true},
      {"a pool, the next page's", pool, pool, 2 * 2 * 16 * 8 * 128 * int64_t{999999}, true},
      {"a pool by heads", heads, heads, 2 * 16 * 128, false},
      {"a pool by heads and one by rows", heads, pool, 2 * 16 * 128, true},
      {"padding", padded, rows, 2 * 96, false},
      {"padding, a value too near", padded, rows, 2 * 96 - 4, true},
      {"unlike rows", wide, skew, 32, true},
      {"unlike rows, broadcast", wide, of(5, 1, 7, 16, {0, 0, 0, 1}), 2 * 1024 * 7 + 32, false},
      {"the same", q, q, 0, true},
  };
  for (const Two& two : all) {
    EXPECT_EQ(
        share_bytes(1 << 20, two.a, static_cast<uint64_t>((1 << 20) + two.distance), two.b, 200),
        two.shared)
        << two.what;
    EXPECT_EQ(
        share_bytes(static_cast<uint64_t>((1 << 20) + two.distance), two.b, 1 << 20, two.a, 200),
        two.shared)
        << two.what << ", the other way";
  }
}

// Millions of rows that step in unlike ways and hardly miss each other.
TEST(Overlap, WhatTakesTooLongIsSaidToBe) {
  const Extents a = {{{1, 0}, {1, 0}, {4000000, 2000006}, {4000000, 3000009}}, 1};
  const Extents b = {{{1, 0}, {1, 0}, {4000000, 2999999}, {4000000, 4000036}}, 1};
  EXPECT_EQ(share_bytes(0, a, 1, b, 10), std::nullopt);
  Memory memory;
  memory.add("a", reinterpret_cast<const void*>(uintptr_t{1} << 40), a, true);
  memory.add("b", reinterpret_cast<const void*>((uintptr_t{1} << 40) + 1), b, false);
  const strobe::Status status = memory.check();
  EXPECT_EQ(status.code(), STROBE_INVALID_ARGUMENT);
}

// A pointer among a launch's arguments, and the place in bytes of an element that is drawn.
struct Argument {
  const char* name;
  size_t field;  // its offset in the struct
  int64_t place;

  template <typename Args>
  uintptr_t address(const Args& args) const {
    uintptr_t address;
    std::memcpy(&address, reinterpret_cast<const char*>(&args) + field, sizeof address);
    return address;
  }
};

Argument Of(const char* name, size_t field, const Strided& t, Rng& rng) {
  const int64_t element = t.Index(rng.Integer(0, t.batch - 1), rng.Integer(0, t.rows - 1),
                                  rng.Integer(0, t.heads - 1), rng.Integer(0, t.dim - 1));
  return {name, field, (element - t.origin) * oracle::ElementSize(t.dtype)};
}
Argument Of(const char* name, size_t field, int64_t count, Rng& rng) {
  return {name, field, 4 * rng.Integer(0, count - 1)};
}

strobe_status Launch(const strobe_plan& plan, const strobe_forward_args& args) {
  return strobe_forward(&plan, &args);
}
strobe_status Launch(const strobe_plan& plan, const strobe_backward_args& args) {
  return strobe_backward(&plan, &args);
}

// Moves each output to where one of its elements is one of another tensor's, and launches: nothing
// may be written, as the memory is not there.
template <typename Args>
void ExpectRefused(const strobe_problem& problem, const Args& good,
                   const std::vector<Argument>& outputs, const std::vector<Argument>& inputs) {
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  ASSERT_EQ(strobe_plan_make(&problem, &plan), STROBE_OK) << strobe_last_error();
  std::vector<Argument> others = outputs;
  others.insert(others.end(), inputs.begin(), inputs.end());
  for (const Argument& output : outputs) {
    for (const Argument& other : others) {
      if (output.field == other.field || other.address(good) == 0) continue;
      Args args = good;
      const uintptr_t address = other.address(good) + static_cast<uintptr_t>(other.place) -
                                static_cast<uintptr_t>(output.place);
      std::memcpy(reinterpret_cast<char*>(&args) + output.field, &address, sizeof address);
      if (address % 4 != 0) continue;  // of unlike element sizes: refused, but not for this
      EXPECT_EQ(Launch(plan, args), STROBE_INVALID_ARGUMENT) << output.name << " on " << other.name;
      // It may lie on a third one as well.
      const std::string text = strobe_last_error();
      EXPECT_NE(text.find(" shares memory with "), std::string::npos) << text;
      EXPECT_NE(
          (" " + text)
              .find(std::string(" ") + output.name + (text.find(output.name) == 0 ? " " : ",")),
          std::string::npos)
          << output.name << " on " << other.name << ": " << text;
    }
  }
}

#define STROBE_TENSOR(args, name) Of(#name, offsetof(args, name), f.name, rng)

TEST(Overlap, NoOutputOfALaunchMayLieOnAnotherTensor) {
  int launches = 0;
  for (uint64_t seed = 1; seed < 120; ++seed) {
    const strobe_test::Case c = strobe_test::GenerateCase(seed);
    Rng rng(seed);
    if (c.rows_q() == 0 || c.rows_k() == 0) continue;
    const strobe_test::Fixture f(c);
    SCOPED_TRACE(ToString(c));
    using F = strobe_forward_args;
    using B = strobe_backward_args;
    const int64_t lse = c.rows_q() * c.heads;
    const auto lse_of = [&](size_t field) { return Of("lse", field, lse, rng); };
    const int64_t starts = c.batch() + 1;
    ExpectRefused(f.MakeProblem(STROBE_FORWARD), f.ForwardArgs(),
                  {STROBE_TENSOR(F, out), lse_of(offsetof(F, lse))},
                  {STROBE_TENSOR(F, q), STROBE_TENSOR(F, k), STROBE_TENSOR(F, v),
                   Of("cu_seqlens_q", offsetof(F, cu_seqlens_q), starts, rng),
                   Of("cu_seqlens_k", offsetof(F, cu_seqlens_k), starts, rng),
                   Of("seqused_q", offsetof(F, seqused_q), c.batch(), rng),
                   Of("prefix", offsetof(F, prefix), c.batch(), rng),
                   Of("alibi_slopes", offsetof(F, alibi_slopes), c.heads, rng)});
    std::vector<Argument> written = {STROBE_TENSOR(B, dq), STROBE_TENSOR(B, dk),
                                     STROBE_TENSOR(B, dv)};
    std::vector<Argument> read = {
        STROBE_TENSOR(B, q),
        STROBE_TENSOR(B, k),
        STROBE_TENSOR(B, v),
        c.has_delta ? Of("delta", offsetof(B, delta), lse, rng) : STROBE_TENSOR(B, out),
        STROBE_TENSOR(B, dout),
        lse_of(offsetof(B, lse)),
        Of("seqused_k", offsetof(B, seqused_k), c.batch(), rng)};
    if (c.has_bias) read.push_back(STROBE_TENSOR(B, bias));
    if (c.has_dbias) written.push_back(STROBE_TENSOR(B, dbias));
    ExpectRefused(f.MakeProblem(STROBE_BACKWARD), f.BackwardArgs(), written, read);
    ++launches;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(launches, 80);
}

TEST(Overlap, NoCacheThatIsAppendedToMayLieOnAnotherTensor) {
  int appends = 0;
  for (uint64_t seed = 1; seed < 400; ++seed) {
    const strobe_test::CacheCase c = strobe_test::GenerateCacheCase(seed);
    Rng rng(seed);
    const strobe_test::CacheFixture f(c);
    const strobe_problem problem = f.Problem();
    if (f.q.empty() || f.k.empty()) continue;
    SCOPED_TRACE("seed " + std::to_string(seed));
    using F = strobe_forward_args;
    std::vector<Argument> outputs = {STROBE_TENSOR(F, out)};
    std::vector<Argument> inputs = {STROBE_TENSOR(F, q)};
    std::vector<Argument>& caches = problem.append ? outputs : inputs;
    caches.push_back(STROBE_TENSOR(F, k));
    caches.push_back(STROBE_TENSOR(F, v));
    if (problem.append && !f.k_new.empty()) {
      inputs.push_back(STROBE_TENSOR(F, k_new));
      inputs.push_back(STROBE_TENSOR(F, v_new));
      ++appends;
    }
    const int64_t columns = problem.pages_per_sequence;
    if (columns > 0) inputs.push_back(Of("block_table", offsetof(F, block_table), columns, rng));
    inputs.push_back(Of("seqused_k", offsetof(F, seqused_k), problem.batch, rng));
    ExpectRefused(problem, f.Args(), outputs, inputs);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(appends, 50);
}

}  // namespace
