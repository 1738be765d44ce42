// Masks as data under arbitrary input: whatever the lists, intervals, bits and bools hold that a
// mask is packed from, packing stays within its memory, the mask allows what a look at these
// numbers pair by pair says, and launches with it are within theirs. Other words in a packed mask
// are refused before anything is written, or are a mask all the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_mask.h"
#include "core/problem.h"
#include "input.h"
#include "strobe/strobe.h"
#include "tensor.h"

namespace {

using strobe::HeadMask;
using strobe::MaskLayout;

// A block of memory of this very size, at an address that is a multiple of 64.
struct Free {
  void operator()(void* block) const { std::free(block); }
};
using Block = std::unique_ptr<void, Free>;
Block allocate(size_t bytes) {
  void* block = nullptr;
  REQUIRE(posix_memalign(&block, 64, std::max<size_t>(bytes, 1)) == 0);
  std::memset(block, 0x5A, bytes);
  return Block(block);
}

// Numbers of all kinds: mostly near 0 to `most`.
std::vector<int32_t> take_numbers(Input& in, int64_t count, int64_t most) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  const bool any = in.take<uint8_t>() % 4 == 0;
  for (int32_t& x : numbers) {
    x = any && in.flag() ? in.take<int32_t>()
                         : static_cast<int32_t>(in.take<int8_t>() % (most + 2));
  }
  numbers.shrink_to_fit();
  return numbers;
}

struct Source {
  int64_t rows, lists;  // of the mask
  std::vector<uint8_t> keep;
  std::vector<int32_t> intervals, partial_counts, partial_blocks, full_counts, full_blocks;
  std::vector<uint32_t> bits;
  int64_t partial_columns = 0, full_columns = 0;

  Source(Input& in, const strobe_problem& p) {
    const strobe_mask& m = p.mask;
    const int64_t planes = m.batch * m.heads, keys = (p.seqlen_k + m.block_k - 1) / m.block_k;
    rows = planes * p.seqlen_q;
    lists = planes * ((p.seqlen_q + m.block_q - 1) / m.block_q);
    const uint8_t parts = in.take<uint8_t>();
    if (parts & 1) {
      keep.resize(static_cast<size_t>(rows * p.seqlen_k));
      for (size_t n = 0; n < keep.size();) {  // runs
        const auto value = in.take<uint8_t>();
        for (int64_t run = in.range(1, 200); run > 0 && n < keep.size(); --run) {
          keep[n++] = value % 3 == 0 ? 0 : value;
        }
      }
    }
    if (parts & 2) {
      for (int64_t n = 0; n < rows; ++n) {  // some queries alike
        if (n % 8 != 0 && in.take<uint8_t>() % 4 != 0) {
          intervals.insert(intervals.end(), intervals.end() - 4, intervals.end());
          continue;
        }
        const std::vector<int32_t> four = take_numbers(in, 4, p.seqlen_k);
        intervals.insert(intervals.end(), four.begin(), four.end());
      }
    }
    if (parts & 4) {
      partial_columns = in.range(0, keys + 2);
      partial_counts = take_numbers(in, lists, partial_columns);
      partial_blocks = take_numbers(in, lists * partial_columns, keys);
      if (parts & 8) {
        bits.resize(static_cast<size_t>(lists * partial_columns * m.block_q * (m.block_k / 32)));
        const auto step = in.take<uint32_t>();
        for (size_t n = 0; n < bits.size(); ++n) {
          bits[n] = n % 64 == 0 ? in.take<uint32_t>() : bits[n - 1] * 5 + step;
        }
      }
    }
    if (parts & 16) {
      full_columns = in.range(0, keys + 2);
      full_counts = take_numbers(in, lists, full_columns);
      full_blocks = take_numbers(in, lists * full_columns, keys);
    }
  }

  strobe_mask_args args() const {
    const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
    strobe_mask_args a{};
    a.struct_size = sizeof a;
    a.keep = pointer(keep);
    a.intervals = pointer(intervals);
    a.partial_counts = pointer(partial_counts);
    a.partial_blocks = pointer(partial_blocks);
    a.partial_bits = pointer(bits);
    a.full_counts = pointer(full_counts);
    a.full_blocks = pointer(full_blocks);
    a.partial_columns = partial_columns;
    a.full_columns = full_columns;
    return a;
  }

  bool allows(const strobe_problem& p, int64_t plane, int64_t i, int64_t j) const {
    const strobe_mask& m = p.mask;
    const int64_t list = plane * ((p.seqlen_q + m.block_q - 1) / m.block_q) + i / m.block_q;
    const int64_t row = plane * p.seqlen_q + i;
    const auto any = [&](const std::vector<int32_t>& counts, const std::vector<int32_t>& blocks,
                         int64_t columns, const auto& good) {
      if (counts.empty()) return false;
      for (int64_t n = 0; n < std::min<int64_t>(counts[static_cast<size_t>(list)], columns); ++n) {
        const int64_t at = list * columns + n;
        if (blocks[static_cast<size_t>(at)] == j / m.block_k && good(at)) return true;
      }
      return false;
    };
    if (any(full_counts, full_blocks, full_columns, [](int64_t) { return true; })) return true;
    const bool listed = any(partial_counts, partial_blocks, partial_columns, [&](int64_t at) {
      if (bits.empty()) return true;
      const int64_t word = (at * m.block_q + i % m.block_q) * (m.block_k / 32) + j % m.block_k / 32;
      return (bits[static_cast<size_t>(word)] >> (j % 32) & 1) != 0;
    });
    if (!listed && !(partial_counts.empty() && full_counts.empty())) return false;
    if (!keep.empty() && keep[static_cast<size_t>(row * p.seqlen_k + j)] == 0) return false;
    if (intervals.empty()) return true;
    const int32_t* const x = intervals.data() + row * 4;
    return (x[0] <= j && j < x[1]) || (x[2] <= j && j < x[3]);
  }
};

strobe_problem take_problem(Input& in) {
  static constexpr int32_t kSides[] = {64, 128, 256};
  strobe_problem p;
  REQUIRE(strobe_problem_init(&p, sizeof p) == STROBE_OK);
  p.batch = in.range(1, 2);
  p.seqlen_q = in.range(0, 150);
  p.seqlen_k = in.range(0, 200);
  p.heads = in.range(1, 2);
  p.head_dim = in.range(1, 9);
  p.causal = in.flag();
  p.threads = 1;
  p.mask.kind = STROBE_MASK_PACKED;
  p.mask.block_q = kSides[in.take<uint8_t>() % 3];
  p.mask.block_k = kSides[in.take<uint8_t>() % 3];
  p.mask.batch = in.flag() ? p.batch : 1;
  p.mask.heads = in.flag() ? p.heads : 1;
  if (in.flag()) {
    p.mask.capacity = in.range(1, 12);
    p.mask.partial_capacity = in.range(0, p.mask.capacity);
  }
  return p;
}

// Forward and backward. Returns what both said, which is the same.
strobe_status launch(strobe_problem p, const void* mask) {
  const strobe_strides contiguous = {0, 0, 0, 0};
  const auto rows = [&](int64_t n) { return static_cast<size_t>(p.batch * n * p.heads); };
  std::vector<float> q(rows(p.seqlen_q) * static_cast<size_t>(p.head_dim), 0.5F), out(q.size(), 7),
      dq(q.size(), 7), k(rows(p.seqlen_k) * static_cast<size_t>(p.head_dim), 0.25F),
      dk(k.size(), 7), dv(k.size(), 7), lse(rows(p.seqlen_q), 7);
  const auto is_written = [](const std::vector<float>& x) {
    return std::any_of(x.begin(), x.end(), [](float e) { return e != 7; });
  };
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  p.q = p.k = p.v = p.out = contiguous;
  REQUIRE(strobe_plan_make(&p, &plan) == STROBE_OK);
  strobe_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.q = q.data(), forward.k = forward.v = k.data(), forward.out = out.data();
  forward.lse = lse.data(), forward.mask = mask;
  const strobe_status status = strobe_forward(&plan, &forward);
  require_documented(status);
  REQUIRE(status == STROBE_OK || (!is_written(out) && !is_written(lse)));
  p.direction = STROBE_BACKWARD;
  REQUIRE(strobe_plan_make(&p, &plan) == STROBE_OK);
  strobe_backward_args backward{};
  backward.struct_size = sizeof backward;
  backward.q = q.data(), backward.k = backward.v = k.data(), backward.out = out.data();
  backward.lse = lse.data(), backward.dout = q.data(), backward.mask = mask;
  backward.dq = dq.data(), backward.dk = dk.data(), backward.dv = dv.data();
  REQUIRE(strobe_backward(&plan, &backward) == status);
  REQUIRE(status == STROBE_OK || (!is_written(dq) && !is_written(dk) && !is_written(dv)));
  return status;
}

void check(Input& in) {
  strobe_problem p = take_problem(in);
  const Source source(in, p);
  size_t bytes = 0;
  REQUIRE(strobe_mask_bytes(&p, &bytes) == STROBE_OK);
  if (bytes > size_t{1} << 24) return;
  const Block packed = allocate(bytes);
  strobe_mask_args args = source.args();
  args.packed = packed.get();
  args.packed_bytes = bytes;
  const strobe_status status = strobe_mask_pack(&p, &args);
  require_documented(status);
  if (status != STROBE_OK) return;  // there is nothing that it is made of
  auto* const words = static_cast<int32_t*>(packed.get());

  strobe::AttentionProblem resolved = p;
  strobe::resolve_defaults(resolved);
  const MaskLayout layout = MaskLayout::of(resolved);
  for (int64_t b = 0; b < p.mask.batch; ++b) {
    for (int64_t head = 0; head < p.mask.heads; ++head) {
      strobe::SequenceRows rows{};
      rows.batch = b;
      const HeadMask mask = HeadMask::of(words, layout, rows, head);
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        const bool over = mask.queries.over_capacity(i / p.mask.block_q);
        for (int64_t j = 0; j < p.seqlen_k; ++j) {
          const bool wanted = !over && source.allows(p, b * p.mask.heads + head, i, j);
          REQUIRE(mask.allows(i, j) == wanted);
        }
      }
    }
  }
  // With what it says that it needs it has room for all.
  if (words[9] > 0) {
    strobe_problem enough = p;
    enough.mask.capacity = words[7];
    enough.mask.partial_capacity = std::max(words[8], 1);
    REQUIRE(strobe_mask_bytes(&enough, &bytes) == STROBE_OK);
    const Block all = allocate(bytes);
    args.packed = all.get();
    args.packed_bytes = bytes;
    REQUIRE(strobe_mask_pack(&enough, &args) == STROBE_OK);
    REQUIRE(static_cast<int32_t*>(all.get())[9] == 0);
    REQUIRE(launch(enough, all.get()) == STROBE_OK);
  }
  REQUIRE(launch(p, words) == STROBE_OK);
  const int64_t changes = in.range(0, 3);
  if (changes == 0) return;
  for (int64_t n = 0; n < changes; ++n) {
    int32_t& word = words[in.range(0, std::min<int64_t>(layout.bits, 65536) - 1)];
    word = in.flag() ? in.take<int32_t>() : word + in.take<int8_t>();
  }
  launch(p, words);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  check(in);
  return 0;
}
