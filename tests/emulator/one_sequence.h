// A sequence whose rows are computed in one way and in another, with batch_invariant.
#ifndef STROBE_TESTS_EMULATOR_ONE_SEQUENCE_H_
#define STROBE_TESTS_EMULATOR_ONE_SEQUENCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "emulated_launch.h"
#include "numeric.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// The last rows of a sequence, computed in whatever way.
class OneSequence {
 public:
  struct Options {
    uint64_t seed = 1;
    int64_t dim = 64;
    bool causal = true;
    int64_t window = -1;
    int64_t rows = 90, keys = 1300;  // the rows are the last of so many positions
    int64_t heads = 4, heads_kv = 2;
    float scale = 0, softcap = 0;  // 0: none is given
    bool slopes = false;           // whether there are ALiBi's, one of each head
    int arch = 80;                 // whose kernels compute them
  };
  /// rows [first, first + count), with so many of the sequence's keys.
  struct Way {
    // No cache: a tensor of its own for each sequence, or all of them end to end.
    static constexpr int64_t kDense = -1, kPacked = -2;

    int64_t first = 0, count = 0, keys = 0;
    int64_t page = kDense;  // or rows of a page; 0: a contiguous cache
    // Sequences that go before this one in the batch, with as many queries each; and one more
    // follows it where they are packed.
    int64_t before = 0;
  };
  struct Rows {
    int64_t heads = 0;
    std::vector<uint16_t> out;  // [row][head][dim]
    std::vector<float> lse;     // [row][head]

    bool operator==(const Rows&) const = default;
    Rows Part(int64_t first, int64_t count) const {
      const auto part = [&](const auto& x) {
        const auto row = static_cast<int64_t>(x.size() / lse.size()) * heads;
        return std::vector(x.begin() + first * row, x.begin() + (first + count) * row);
      };
      return {heads, part(out), part(lse)};
    }
  };

  explicit OneSequence(const Options& options) : rng_(options.seed), o_(options) {
    q_ = Random(o_.rows * o_.heads);
    k_ = Random(o_.keys * o_.heads_kv), v_ = Random(o_.keys * o_.heads_kv);
    for (int64_t head = 0; o_.slopes && head < o_.heads; ++head)
      slopes_.push_back(0.02f * static_cast<float>(head % 3));
  }
  OneSequence(const OneSequence&) = delete;

  int64_t rows() const { return o_.rows; }
  int64_t keys() const { return o_.keys; }
  /// The keys that a call needs whose last row is the one before `end`.
  int64_t KeysTo(int64_t end) const { return o_.causal ? o_.keys - o_.rows + end : o_.keys; }

  Rows Solve(const Way& way) {
    const bool packed = way.page == Way::kPacked;
    const int64_t at = way.before, batch = at + 1 + (packed ? 1 : 0);
    const int64_t page = way.page, columns = page > 0 ? (o_.keys + page - 1) / page : 1;
    const int64_t entries = batch * columns, rows = page > 0 ? page : o_.keys;
    const int64_t row = o_.heads_kv * o_.dim;
    std::vector<int32_t> table(static_cast<size_t>(entries)), used, positions, index;
    std::vector<int32_t> begin_q{0}, begin_k{0};
    for (size_t i = 0; i < table.size(); ++i)
      table[i] = static_cast<int32_t>((i * 7 + 3) % table.size());
    if (entries % 7 == 0) std::iota(table.begin(), table.end(), 0);
    for (int64_t b = 0; b < batch; ++b) {
      const bool own = b == at;
      used.push_back(static_cast<int32_t>(own ? way.keys : rng_.Integer(1, o_.keys)));
      positions.push_back(
          static_cast<int32_t>(own ? o_.keys - o_.rows + way.first : rng_.Integer(0, o_.keys)));
      index.push_back(static_cast<int32_t>(b));
      const int64_t queries = own || !packed ? way.count : rng_.Integer(1, 2 * way.count);
      begin_q.push_back(begin_q.back() + static_cast<int32_t>(queries));
      begin_k.push_back(begin_k.back() + used.back());
    }
    const int64_t key_rows = packed ? begin_k.back() : entries * rows;
    std::vector<uint16_t> q = Random(begin_q.back() * o_.heads), k = Random(key_rows * o_.heads_kv),
                          v = Random(key_rows * o_.heads_kv);
    const int64_t first = begin_q[static_cast<size_t>(at)];
    std::copy_n(q_.begin() + way.first * o_.heads * o_.dim, way.count * o_.heads * o_.dim,
                q.begin() + first * o_.heads * o_.dim);
    for (int64_t n = 0; n < way.keys; ++n) {
      const int64_t entry = page > 0 ? table[static_cast<size_t>(at * columns + n / page)] : at;
      const int64_t to =
          packed ? begin_k[static_cast<size_t>(at)] + n : entry * rows + (page > 0 ? n % page : n);
      std::copy_n(k_.begin() + n * row, row, k.begin() + to * row);
      std::copy_n(v_.begin() + n * row, row, v.begin() + to * row);
    }
    strobe_problem p;
    EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
    p.direction = STROBE_FORWARD, p.dtype = STROBE_BFLOAT16, p.batch_invariant = 1;
    p.batch = batch, p.seqlen_q = way.count, p.seqlen_k = o_.keys;
    p.heads = o_.heads, p.heads_kv = o_.heads_kv, p.head_dim = o_.dim;
    p.causal = o_.causal, p.window_left = o_.window;
    p.softcap = o_.softcap;
    if (o_.slopes) p.alibi = STROBE_ALIBI_PER_HEAD;
    if (o_.scale != 0) p.scale = o_.scale;
    p.has_q_position = 1, p.has_seqused_k = !packed;
    if (packed) {
      p.varlen = 1, p.seqlen_q = 2 * way.count;
      p.total_q = begin_q.back(), p.total_k = begin_k.back();
    } else if (page > 0) {
      p.cache = STROBE_CACHE_PAGED, p.pages = entries, p.page_size = page;
      p.pages_per_sequence = columns, p.seqlen_k = columns * page;
    } else if (page == 0) {
      p.cache = STROBE_CACHE_CONTIGUOUS, p.cache_batch = entries, p.has_cache_batch_idx = 1;
    }
    std::vector<uint16_t> out(q.size());
    std::vector<float> lse(static_cast<size_t>(begin_q.back() * o_.heads));
    strobe_forward_args args{};
    args.struct_size = sizeof args;
    args.q = q.data(), args.k = k.data(), args.v = v.data();
    args.out = out.data(), args.lse = lse.data();
    args.q_position = positions.data();
    if (o_.slopes) args.alibi_slopes = slopes_.data();
    if (!packed) args.seqused_k = used.data();
    if (packed) args.cu_seqlens_q = begin_q.data(), args.cu_seqlens_k = begin_k.data();
    if (page > 0) args.block_table = table.data();
    if (page == 0) args.cache_batch_idx = index.data();
    EXPECT_EQ(ThroughTheEmulator(WorkspaceHolds::kNaN, o_.arch)(p, args), STROBE_OK);
    Rows own{o_.heads, {}, {}};
    own.out.assign(out.begin() + first * o_.heads * o_.dim,
                   out.begin() + (first + way.count) * o_.heads * o_.dim);
    for (int64_t n = first; n < first + way.count; ++n) {
      for (int64_t head = 0; head < o_.heads; ++head) {
        const int64_t place =
            packed ? head * begin_q.back() + n : (at * o_.heads + head) * way.count + n - first;
        own.lse.push_back(lse[static_cast<size_t>(place)]);
      }
    }
    return own;
  }

 private:
  std::vector<uint16_t> Random(int64_t rows) {
    std::vector<uint16_t> values(static_cast<size_t>(rows * o_.dim));
    for (uint16_t& x : values) {
      const auto value = static_cast<float>(rng_.Uniform(-2, 2));
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      x = static_cast<uint16_t>(bits >> 16);  // bfloat16
    }
    return values;
  }

  oracle::Rng rng_;
  Options o_;
  std::vector<uint16_t> q_, k_, v_;
  std::vector<float> slopes_;
};

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_ONE_SEQUENCE_H_
