// strobe_mask_pack against its description in strobe.h, word by word, for all patterns of blocks of
// a small size and all intervals of a few keys; the walks that the CPU's kernels make of the lists;
// capacities; and what is refused.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cpu/walks.h"
#include "gtest/gtest.h"
#include "numeric.h"
#include "strobe/strobe.h"

namespace strobe_test {
namespace {

strobe_problem MakeProblem(int64_t seqlen_q, int64_t seqlen_k, int32_t block_q = 64,
                           int32_t block_k = 64) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.batch = 1;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.heads = 1;
  p.head_dim = 8;
  p.threads = 1;
  p.mask.kind = STROBE_MASK_PACKED;
  p.mask.block_q = block_q;
  p.mask.block_k = block_k;
  p.mask.batch = p.mask.heads = 1;
  return p;
}

struct alignas(64) Line {
  int32_t words[16];
};

// A packed mask, read by what strobe.h says of it.
class Packed {
 public:
  Packed(const strobe_problem& p, strobe_mask_args args) : p_(p) {
    size_t bytes = 0;
    EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK) << strobe_last_error();
    memory_.resize((bytes + 63) / 64);
    std::memset(static_cast<void*>(memory_.data()), 0x5A, memory_.size() * 64);
    args.struct_size = sizeof args;
    args.packed = memory_.data();
    args.packed_bytes = bytes;
    EXPECT_EQ(strobe_mask_pack(&p, &args), STROBE_OK) << strobe_last_error();
    const auto up = [](int64_t x) { return (x + 31) / 32 * 32; };
    const int32_t* const h = words();
    queries = h[3];
    keys = h[4];
    capacity = h[5];
    partial = h[6];
    const int64_t bits_words = up(partial * h[1] * h[2] / 32);
    lists = 32;
    entries = lists + up(queries * 2);
    order = entries + up(capacity * 2);
    key_lists = order + up(queries);
    key_entries = key_lists + up(keys * 2);
    key_order = key_entries + up(capacity * 4);
    bits = key_order + up(keys);
    key_bits = bits + bits_words;
    EXPECT_EQ(static_cast<size_t>(key_bits + bits_words) * 4, bytes);
  }

  const int32_t* words() const { return memory_[0].words; }
  int32_t at(int64_t n) const { return words()[n]; }
  int64_t count(int64_t list) const { return at(lists + list * 2 + 1); }
  const int32_t* entry(int64_t list, int64_t n) const {
    return words() + entries + (at(lists + list * 2) + n) * 2;
  }
  int64_t key_count(int64_t list) const { return at(key_lists + list * 2 + 1); }
  const int32_t* key_entry(int64_t list, int64_t n) const {
    return words() + key_entries + (at(key_lists + list * 2) + n) * 4;
  }
  const void* data() const { return memory_.data(); }
  std::vector<Line>& memory() { return memory_; }

  // Whether the words say that a pair of one sequence and head is seen, by queries and by keys.
  bool Sees(int64_t i, int64_t j) const {
    const int64_t q = p_.mask.block_q, k = p_.mask.block_k;
    for (int64_t n = 0; n < count(i / q); ++n) {
      const int32_t* const e = entry(i / q, n);
      if (e[0] != j / k) continue;
      if (e[1] < 0) return true;
      const int64_t row = (e[1] * q + i % q) * (k / 32), column = (e[1] * k + j % k) * (q / 32);
      const bool by_query = at(bits + row + j % k / 32) >> (j % 32) & 1;
      const bool by_key = at(key_bits + column + i % q / 32) >> (i % 32) & 1;
      EXPECT_EQ(by_query, by_key) << i << ", " << j;
      return by_query;
    }
    return false;
  }

  int64_t queries, keys, capacity, partial;
  int64_t lists, entries, order, key_lists, key_entries, key_order, bits, key_bits;

 private:
  strobe_problem p_;
  std::vector<Line> memory_;
};

using Allows = std::function<bool(int64_t, int64_t)>;

// Holds a packed mask of one sequence and head against what it has to say.
void Check(const Packed& m, const strobe_problem& p, const Allows& allows) {
  const int64_t q = p.mask.block_q, k = p.mask.block_k;
  const int64_t blocks_q = (p.seqlen_q + q - 1) / q, blocks_k = (p.seqlen_k + k - 1) / k;
  ASSERT_EQ(m.at(0), STROBE_MASK_MAGIC);
  ASSERT_EQ(m.queries, blocks_q);
  ASSERT_EQ(m.keys, blocks_k);
  ASSERT_EQ(m.at(10), p.seqlen_q);
  ASSERT_EQ(m.at(11), p.seqlen_k);
  int64_t entries = 0, some_partial = 0;
  std::vector<int64_t> ranks(static_cast<size_t>(blocks_q)), seen_by(static_cast<size_t>(blocks_k));
  for (int64_t a = 0; a < blocks_q; ++a) {
    int64_t n = 0, partial = 0;
    for (int64_t b = 0; b < blocks_k; ++b) {
      bool some = false, all = true;
      for (int64_t i = a * q; i < std::min((a + 1) * q, p.seqlen_q); ++i) {
        for (int64_t j = b * k; j < std::min((b + 1) * k, p.seqlen_k); ++j) {
          some |= allows(i, j);
          all &= allows(i, j);
        }
      }
      if (!some) continue;
      ASSERT_LT(n, m.count(a));
      ASSERT_EQ(m.entry(a, n)[0], b);
      ASSERT_EQ(m.entry(a, n)[1], all ? -1 : some_partial + partial);
      const int64_t place = seen_by[static_cast<size_t>(b)]++;
      ASSERT_LT(place, m.key_count(b));
      const int32_t* const e = m.key_entry(b, place);
      ASSERT_EQ(e[0], a);
      ASSERT_EQ(e[1], m.entry(a, n)[1]);
      ASSERT_EQ(e[2], n);
      ASSERT_EQ(e[3], m.count(a));
      partial += !all;
      ++n;
    }
    ASSERT_EQ(m.count(a), n);
    ASSERT_EQ(m.at(m.lists + a * 2), entries);
    entries += n;
    some_partial += partial;
  }
  for (int64_t b = 0; b < blocks_k; ++b) ASSERT_EQ(m.key_count(b), seen_by[static_cast<size_t>(b)]);
  ASSERT_EQ(m.at(7), entries);
  ASSERT_EQ(m.at(8), some_partial);
  ASSERT_EQ(m.at(9), 0);
  for (int64_t n = 1; n < blocks_q; ++n) {
    const int32_t x = m.at(m.order + n - 1), y = m.at(m.order + n);
    ASSERT_TRUE(m.count(x) > m.count(y) || (m.count(x) == m.count(y) && x < y));
  }
  for (int64_t n = 1; n < blocks_k; ++n) {
    const int32_t x = m.at(m.key_order + n - 1), y = m.at(m.key_order + n);
    ASSERT_TRUE(m.key_count(x) > m.key_count(y) || (m.key_count(x) == m.key_count(y) && x < y));
  }
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    for (int64_t j = 0; j < p.seqlen_k; ++j)
      ASSERT_EQ(m.Sees(i, j), allows(i, j)) << i << ", " << j;
  }
}

// Every pattern of hidden, partial and full blocks: 3 x 2 of them, the last ones cut.
constexpr int64_t kQueries = 140, kKeys = 70;
bool InPattern(int64_t pattern, int64_t i, int64_t j) {
  int64_t kinds = pattern;
  for (int64_t n = i / 64 * 2 + j / 64; n > 0; --n) kinds /= 3;
  return kinds % 3 == 2 || (kinds % 3 == 1 && (i * 7 + j * 3) % 5 < 2);
}
std::vector<uint8_t> KeepOf(int64_t pattern) {
  std::vector<uint8_t> keep;
  for (int64_t i = 0; i < kQueries; ++i) {
    for (int64_t j = 0; j < kKeys; ++j) keep.push_back(InPattern(pattern, i, j) ? 255 : 0);
  }
  return keep;
}

TEST(PackedMask, IsRightForEveryPatternOfBlocks) {
  const strobe_problem p = MakeProblem(kQueries, kKeys);
  for (int64_t pattern = 0; pattern < 729 && !HasFatalFailure(); ++pattern) {
    const std::vector<uint8_t> keep = KeepOf(pattern);
    strobe_mask_args args{};
    args.keep = keep.data();
    SCOPED_TRACE(pattern);
    Check(Packed(p, args), p, [&](int64_t i, int64_t j) { return InPattern(pattern, i, j); });
  }
}

// All pairs of intervals of numbers from before the first key to behind the last one.
TEST(PackedMask, IsRightForAllIntervalsOfFewKeys) {
  constexpr int64_t kFew = 5, kNumbers = kFew + 4;
  std::vector<int32_t> intervals;
  for (int64_t n = 0; n < kNumbers * kNumbers * kNumbers * kNumbers; ++n) {
    for (int64_t rest = n, i = 0; i < 4; ++i, rest /= kNumbers) {
      intervals.push_back(static_cast<int32_t>(rest % kNumbers - 2));
    }
  }
  const auto rows = static_cast<int64_t>(intervals.size() / 4);
  const strobe_problem p = MakeProblem(rows, kFew, 256, 64);
  strobe_mask_args args{};
  args.intervals = intervals.data();
  Check(Packed(p, args), p, [&](int64_t i, int64_t j) {
    const int32_t* const x = intervals.data() + i * 4;
    return (x[0] <= j && j < x[1]) || (x[2] <= j && j < x[3]);
  });
}

// Intervals at all places around the borders of blocks.
TEST(PackedMask, IsRightForIntervalsAtBorders) {
  static constexpr int32_t kPlaces[] = {0, 1, 63, 64, 65, 127, 128, 129, 190};
  for (const int32_t a : kPlaces) {
    for (const int32_t b : kPlaces) {
      for (const int32_t c : kPlaces) {
        for (const int32_t d : kPlaces) {
          const strobe_problem p = MakeProblem(2, 190);
          const int32_t intervals[] = {a, b, c, d, 0, 190, 0, 0};
          strobe_mask_args args{};
          args.intervals = intervals;
          Check(Packed(p, args), p, [&](int64_t i, int64_t j) {
            return i == 1 || (a <= j && j < b) || (c <= j && j < d);
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The walks of tiles and blocks of several sizes, of both sides, by rules of both kinds.
TEST(PackedMask, WalksVisitWhatTheListsHave) {
  strobe_problem p = MakeProblem(kQueries, kKeys);
  p.mask.capacity = p.mask.partial_capacity = 6;
  p.heads_kv = 1;
  for (int64_t pattern = 0; pattern < 729 && !HasFatalFailure(); ++pattern) {
    const std::vector<uint8_t> keep = KeepOf(pattern);
    strobe_mask_args args{};
    args.keep = keep.data();
    const Packed m(p, args);
    strobe::cpu::Context c{};
    c.problem = p;
    c.mask = m.words();
    c.mask_layout = strobe::MaskLayout::of(p);
    for (const bool causal : {false, true}) {
      strobe::MaskRule rule;
      rule.causal = causal;
      strobe::Sequence s{};
      s.rows_q = s.seqlen_q = kQueries;
      s.rows_k = s.seqlen_k = kKeys;
      s.mask = strobe::Mask::make(rule, kQueries, kKeys, 0, 0);
      const auto listed = [&](int64_t a, int64_t b) {  // blocks of the mask
        for (int64_t n = 0; n < m.count(a); ++n) {
          if (m.entry(a, n)[0] == b) return m.entry(a, n)[1] < 0 ? 2 : 1;
        }
        return 0;
      };
      for (const int64_t tile : {32, 64, 128, 140}) {
        for (const int64_t size : {32, 64, 96, 128}) {
          for (const bool by_key : {false, true}) {
            const int64_t rows = by_key ? kKeys : kQueries, others = by_key ? kQueries : kKeys;
            for (int64_t begin = 0; begin < rows; begin += tile) {
              const strobe::Range range{begin, std::min(begin + tile, rows)};
              const auto walk = by_key ? strobe::cpu::queries_of(c, s, 0, range, size)
                                       : strobe::cpu::keys_of(c, s, 0, range, size);
              std::vector<int64_t> wanted, got;
              for (int64_t n = walk.rule.begin; n < walk.rule.end; ++n) {
                bool some = false, full = walk.rule.is_full(n);
                for (int64_t a = range.begin / 64; a * 64 < range.end; ++a) {
                  for (int64_t b = n * size / 64; b * 64 < std::min((n + 1) * size, others); ++b) {
                    const int kind = by_key ? listed(b, a) : listed(a, b);
                    some |= kind > 0;
                    full &= kind == 2;
                  }
                }
                EXPECT_EQ(walk.visits(n), some);
                if (!some) continue;
                wanted.push_back(n);
                EXPECT_EQ(walk.is_full(n), full);
              }
              for (int64_t n = walk.begin; n < walk.end; n = walk.after(n)) {
                EXPECT_EQ(walk.places_before(n), static_cast<int64_t>(got.size()));
                got.push_back(n);
              }
              ASSERT_EQ(got, wanted) << pattern << (causal ? " causal" : "") << " tile " << tile
                                     << " size " << size << (by_key ? " by key" : "");
              EXPECT_EQ(walk.empty(), wanted.empty());
            }
          }
        }
      }
    }
  }
}

struct Launch {
  std::vector<float> q, k, v, out, lse, dout, dq, dk, dv;
  explicit Launch(const strobe_problem& p) {
    oracle::Rng rng(1);
    const auto fill = [&](std::vector<float>& x, int64_t rows) {
      x.resize(static_cast<size_t>(rows * p.heads * p.head_dim));
      for (float& e : x) e = static_cast<float>(rng.Normal());
    };
    for (auto* x : {&q, &out, &dout, &dq}) fill(*x, p.seqlen_q);
    for (auto* x : {&k, &v, &dk, &dv}) fill(*x, p.seqlen_k);
    lse.resize(static_cast<size_t>(p.seqlen_q * p.heads));
  }
  strobe_status Forward(const strobe_problem& p, const void* mask) {
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    if (const strobe_status s = strobe_plan_make(&p, &plan)) return s;
    auto a = Args<strobe_forward_args>(mask);
    a.out = out.data();
    a.lse = lse.data();
    return strobe_forward(&plan, &a);
  }
  strobe_status Backward(strobe_problem p, const void* mask) {
    p.direction = STROBE_BACKWARD;
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    if (const strobe_status s = strobe_plan_make(&p, &plan)) return s;
    auto a = Args<strobe_backward_args>(mask);
    a.out = out.data();
    a.lse = lse.data();
    a.dout = dout.data();
    a.dq = dq.data();
    a.dk = dk.data();
    a.dv = dv.data();
    return strobe_backward(&plan, &a);
  }

 private:
  // What both directions read.
  template <typename A>
  A Args(const void* mask) const {
    A a{};
    a.struct_size = sizeof a;
    a.q = q.data();
    a.k = k.data();
    a.v = v.data();
    a.mask = mask;
    return a;
  }
};

// Blocks of queries need 1, 3, 1 and 2 blocks of keys, and of these 1, 2, 1 and 0 in part. Where
// there is room for three in part, or for five in all, that is too little for the third or for the
// last one: its rows of out, lse and dq are NaN, and all others have the bits that they have with
// room for all.
class OverCapacity : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(PackedMask, OverCapacity, testing::Bool());
TEST_P(OverCapacity, RowsAreNan) {
  const bool of_entries = GetParam();
  strobe_problem p = MakeProblem(200, 190);
  std::vector<int32_t> intervals;
  for (int32_t i = 0; i < 200; ++i) {
    const bool wide = 64 <= i && i < 128, whole = i >= 192;
    const int32_t begin = wide ? 3 : whole ? 0 : 10, end = wide ? 180 : whole ? 128 : 60;
    for (const int32_t x : {begin, end, 0, 0}) intervals.push_back(x);
  }
  strobe_mask_args args{};
  args.intervals = intervals.data();
  const Packed all(p, args);
  p.mask.capacity = of_entries ? 5 : 7;
  p.mask.partial_capacity = of_entries ? 5 : 3;
  const Packed few(p, args);
  EXPECT_EQ(few.at(7), 7);
  EXPECT_EQ(few.at(8), 4);
  EXPECT_EQ(few.at(9), 1);
  EXPECT_EQ(few.count(of_entries ? 3 : 2), -1);
  const auto is_over = [&](size_t i) { return of_entries ? i >= 192 : 128 <= i && i < 192; };
  Launch wanted(p), got(p), without(p);
  ASSERT_EQ(got.Forward(p, few.data()), STROBE_OK) << strobe_last_error();
  ASSERT_EQ(got.Backward(p, few.data()), STROBE_OK) << strobe_last_error();
  p.mask.capacity = p.mask.partial_capacity = 0;
  ASSERT_EQ(wanted.Forward(p, all.data()), STROBE_OK) << strobe_last_error();
  ASSERT_EQ(wanted.Backward(p, all.data()), STROBE_OK) << strobe_last_error();
  for (size_t i = 0; i < 200; ++i) {
    EXPECT_EQ(std::isnan(got.lse[i]), is_over(i)) << i;
    for (size_t e = i * 8; e < i * 8 + 8; ++e) {
      EXPECT_EQ(std::isnan(got.out[e]), is_over(i)) << i;
      EXPECT_EQ(std::isnan(got.dq[e]), is_over(i)) << i;
      if (is_over(i)) continue;
      EXPECT_EQ(got.out[e], wanted.out[e]) << i;
      EXPECT_EQ(got.dq[e], wanted.dq[e]) << i;
    }
  }
  // dk and dv are those of a mask in which these rows see nothing.
  for (size_t i = 0; i < 200; ++i) {
    if (is_over(i)) intervals[i * 4 + 1] = 0;
  }
  const Packed none(p, args);
  ASSERT_EQ(without.Forward(p, none.data()), STROBE_OK) << strobe_last_error();
  ASSERT_EQ(without.Backward(p, none.data()), STROBE_OK) << strobe_last_error();
  EXPECT_EQ(got.dk, without.dk);
  EXPECT_EQ(got.dv, without.dv);
}

// Any word that is another one: refused before anything is written, or a mask all the same.
TEST(PackedMask, OtherWordsAreRefused) {
  const strobe_problem p = MakeProblem(300, 260);
  std::vector<uint8_t> keep;
  oracle::Rng rng(3);
  for (int64_t n = 0; n < 300 * 260; ++n) {
    keep.push_back(n / 260 / 64 % 2 != n % 260 / 64 % 2 && rng.Chance(0.5));
  }
  strobe_mask_args args{};
  args.keep = keep.data();
  Packed m(p, args);
  Launch launch(p);
  int refused = 0;
  for (int n = 0; n < 400; ++n) {
    const int64_t at = n < 7 ? n : rng.Integer(0, m.bits - 1);
    int32_t& word = m.memory()[static_cast<size_t>(at / 16)].words[at % 16];
    const int32_t before = word;
    static constexpr int32_t kOthers[] = {INT32_MIN, -2, -1, 0, 1, 2, 3, 4, 1 << 20, INT32_MAX};
    word = rng.Pick(kOthers);
    if (word == before) word ^= 0x40;
    std::fill(launch.out.begin(), launch.out.end(), 7.0f);
    const strobe_status forward = launch.Forward(p, m.data());
    if (forward != STROBE_OK) {
      EXPECT_EQ(forward, STROBE_INVALID_ARGUMENT);
      EXPECT_EQ(std::string(strobe_last_error()).rfind("mask: ", 0), 0u) << strobe_last_error();
      EXPECT_EQ(std::count(launch.out.begin(), launch.out.end(), 7.0f), 300 * 8);
      ++refused;
    }
    EXPECT_EQ(launch.Backward(p, m.data()), forward);
    EXPECT_TRUE(n >= 7 || forward != STROBE_OK) << n;
    word = before;
  }
  EXPECT_GT(refused, 50);
  EXPECT_EQ(launch.Forward(p, m.data()), STROBE_OK);
}

std::string Refusal(const std::function<void(strobe_problem&, strobe_mask_args&)>& change) {
  strobe_problem p = MakeProblem(100, 100);
  std::vector<uint8_t> keep(10000, 1);
  std::vector<Line> memory(1000);
  strobe_mask_args a{};
  a.struct_size = sizeof a;
  a.keep = keep.data();
  a.packed = memory.data();
  a.packed_bytes = memory.size() * 64;
  change(p, a);
  return strobe_mask_pack(&p, &a) == STROBE_OK ? "" : strobe_last_error();
}

TEST(PackedMask, RefusesWhatIsWrong) {
  using P = strobe_problem;
  using A = strobe_mask_args;
  EXPECT_EQ(Refusal([](P&, A&) {}), "");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.block_q = 32; }),
            "mask.block_q = 32, expected 64, 128 or 256");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.kind = 2; }), "mask.kind = 2, expected 0 to 1");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.kind = 0; }),
            "mask.block_q = 64 with mask.kind = 0 (none), expected 0");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask = {}; }), "mask.kind = 0 (none), expected 1 (packed)");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.batch = 2; }), "mask.batch = 2, expected 1 or batch = 1");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.heads = 3; }), "mask.heads = 3, expected 1 or heads = 1");
  EXPECT_EQ(Refusal([](P& p, A&) { p.mask.capacity = -1; }).rfind("mask.capacity = -1, ", 0), 0u);
  EXPECT_EQ(Refusal([](P& p, A&) {
              p.mask.capacity = 2;
              p.mask.partial_capacity = 3;
            }),
            "mask.partial_capacity = 3, expected 0 to 2");
  EXPECT_EQ(Refusal([](P&, A& a) { a.keep = nullptr; }),
            "keep, intervals, partial_counts and full_counts = NULL, expected at least one");
  EXPECT_EQ(Refusal([](P&, A& a) { a.packed = nullptr; }), "packed = NULL, expected a pointer");
  EXPECT_EQ(Refusal([](P&, A& a) { a.packed_bytes = 64; }).rfind("packed_bytes = 64, ", 0), 0u);
  EXPECT_EQ(Refusal([](P&, A& a) { a.full_columns = 1; }),
            "full_counts = NULL, expected a pointer");
  EXPECT_EQ(Refusal([](P&, A& a) { a.partial_bits = reinterpret_cast<const uint32_t*>(a.keep); }),
            "partial_bits is given with partial_blocks = NULL, expected NULL");
  EXPECT_EQ(Refusal([](P&, A& a) { a.cu_seqlens_q = reinterpret_cast<const int32_t*>(a.packed); }),
            "cu_seqlens_q is given with varlen = 0, expected NULL");
  EXPECT_EQ(Refusal([](P&, A& a) {
              a.keep = static_cast<const uint8_t*>(a.packed) + 100;
            }).find("packed"),
            0u);
  EXPECT_EQ(
      Refusal([](P& p, A&) { p.seqlen_q = p.seqlen_k = INT32_MAX; }),
      "mask.capacity = 0 (room for all: 1125899906842624 entries), expected 1 to 2^31 - 1 for "
      "these lengths");
  strobe_problem p = MakeProblem(10, 10);
  Launch launch(p);
  EXPECT_EQ(launch.Forward(p, nullptr), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(strobe_last_error()), "mask = NULL, expected a pointer");
  p.mask = {};
  EXPECT_EQ(launch.Forward(p, launch.q.data()), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(strobe_last_error()),
            "mask is given with mask.kind = 0 (none), expected NULL");
}

}  // namespace
}  // namespace strobe_test
