#include "mask_case.h"

#include <algorithm>
#include <limits>

namespace strobe_test {

using oracle::Rng;

MaskChoice PickMaskChoice(Rng& rng, bool varlen) {
  static constexpr int32_t kBlocks[] = {64, 64, 128, 256};
  static constexpr double kDensities[] = {0, 0.05, 0.3, 0.6, 0.9, 1};
  MaskChoice c;
  c.there = true;
  c.block_q = rng.Pick(kBlocks);
  c.block_k = rng.Pick(kBlocks);
  c.of_each_sequence = varlen || rng.Chance(0.4);
  c.of_each_head = rng.Chance(0.4);
  c.density = rng.Pick(kDensities);
  const double u = rng.Uniform();
  c.keep = u < 0.35 || rng.Chance(0.1);
  c.intervals = (0.3 < u && u < 0.7) || rng.Chance(0.1);
  c.partial = u > 0.65;
  c.full = rng.Chance(c.partial ? 0.5 : 0.1);
  c.bits = c.partial && rng.Chance(0.5);
  c.hostile = rng.Chance(0.4);
  c.exact = rng.Chance(0.6);
  c.global = c.keep && !c.intervals && !c.partial && !c.full && rng.Chance(0.5);
  if (c.global) {
    c.block_q = c.block_k = rng.Chance(0.7) ? 128 : 64;
    c.of_each_sequence = varlen;
    c.of_each_head = false;
  }
  return c;
}

strobe_mask MaskChoice::Shape(int64_t batch, int64_t heads) const {
  strobe_mask shape{};
  shape.kind = STROBE_MASK_PACKED;
  shape.block_q = block_q;
  shape.block_k = block_k;
  shape.batch = of_each_sequence ? batch : 1;
  shape.heads = of_each_head ? heads : 1;
  return shape;
}

std::string ToString(const MaskChoice& c) {
  if (!c.there) return "";
  std::string text = ", mask of blocks " + std::to_string(c.block_q) + " x " +
                     std::to_string(c.block_k) + (c.of_each_sequence ? ", of each sequence" : "") +
                     (c.of_each_head ? ", of each head" : "") + ", from";
  const std::pair<bool, const char*> parts[] = {
      {c.keep, " keep"},   {c.intervals, " intervals"}, {c.partial, " partial"},
      {c.bits, " bits"},   {c.full, " full"},           {c.hostile, " hostile"},
      {c.exact, " exact"}, {c.global, " global"}};
  for (const auto& [there, name] : parts) text += there ? name : "";
  return text + " density " + std::to_string(c.density);
}

MaskData::MaskData(const MaskChoice& choice, const strobe_problem& problem,
                   const std::vector<int32_t>& cu_q, const std::vector<int32_t>& cu_k,
                   uint64_t seed)
    : choice_(choice), problem_(problem) {
  const strobe_mask& m = problem.mask;
  const int64_t size = m.block_q;
  if (problem.varlen) {
    cu_q_ = cu_q;
    cu_k_ = cu_k;
    rows_ = m.heads * problem.total_q;
    lists_ = m.heads * (problem.total_q / size + problem.batch);
  } else {
    rows_ = m.batch * m.heads * problem.seqlen_q;
    lists_ = m.batch * m.heads * ((problem.seqlen_q + size - 1) / size);
  }
  Rng rng(seed ^ 0x3A5C);
  if (choice.keep) FillKeep(rng);
  if (choice.intervals) FillIntervals(rng);
  if (choice.partial) FillList(rng, partial_counts_, partial_blocks_, partial_columns_);
  if (choice.full) FillList(rng, full_counts_, full_blocks_, full_columns_);
  if (choice.bits) {
    bits_.resize(static_cast<size_t>(lists_ * partial_columns_ * m.block_q * (m.block_k / 32) + 1));
    for (uint32_t& word : bits_) {
      word = static_cast<uint32_t>(rng.Next());
      if (rng.Chance(0.3)) word = 0;
      if (rng.Chance(0.3)) word = ~0u;
    }
  }
}

int64_t MaskData::Row(int64_t sequence, int64_t head, int64_t query) const {
  const strobe_mask& m = problem_.mask;
  if (m.heads == 1) head = 0;
  if (problem_.varlen)
    return head * problem_.total_q + cu_q_[static_cast<size_t>(sequence)] + query;
  return ((m.batch == 1 ? 0 : sequence) * m.heads + head) * problem_.seqlen_q + query;
}

int64_t MaskData::List(int64_t sequence, int64_t head, int64_t query) const {
  const strobe_mask& m = problem_.mask;
  const int64_t size = m.block_q;
  if (m.heads == 1) head = 0;
  if (problem_.varlen) {
    return head * (problem_.total_q / size + problem_.batch) +
           cu_q_[static_cast<size_t>(sequence)] / size + sequence + query / size;
  }
  return ((m.batch == 1 ? 0 : sequence) * m.heads + head) *
             ((problem_.seqlen_q + size - 1) / size) +
         query / size;
}

// Regions of 48 x 80 pairs that are seen, hidden or mixed, so that blocks of all kinds come.
void MaskData::FillKeep(Rng& rng) {
  const int64_t keys = problem_.seqlen_k;
  const int64_t pad = rng.Chance(0.5) ? 0 : rng.Integer(1, 9), row = keys + pad;
  const int64_t rows = problem_.varlen ? problem_.total_q : problem_.seqlen_q;
  const int64_t heads = problem_.mask.heads;
  if (rng.Chance(0.3) && pad == 0) {
    keep_strides_ = {};
  } else {
    keep_strides_ = {heads * rows * row, row, rows * row, 1};
  }
  keep_.assign(static_cast<size_t>(rows_ * row) + 1, 1);
  if (choice_.global) {
    FillGlobal(rng, row);
    return;
  }
  const uint64_t seed = rng.Next();
  for (int64_t n = 0; n < rows_; ++n) {
    for (int64_t j = 0; j < keys; ++j) {
      Rng region(seed + static_cast<uint64_t>(n / 48 * 1000003 + j / 80));
      const double u = region.Uniform(), half = (1 - choice_.density) / 2;
      const bool seen = u < half ? false : u > 1 - choice_.density / 2 ? true : rng.Chance(0.5);
      keep_[static_cast<size_t>(n * row + j)] =
          static_cast<uint8_t>(seen ? rng.Integer(1, 255) : 0);
    }
  }
}

void MaskData::FillGlobal(Rng& rng, int64_t row) {
  const int64_t keys = problem_.seqlen_k, size = problem_.mask.block_k;
  const int64_t seen_block = rng.Integer(0, keys / size), seeing_block = rng.Integer(0, 3);
  const bool one_sees_all = rng.Chance(0.5), all_see_neighbours = rng.Chance(0.3);
  for (int64_t n = 0; n < rows_; ++n) {
    const int64_t query = problem_.varlen ? n : n % problem_.seqlen_q;
    const bool sees_more = query / size == seeing_block;
    for (int64_t j = 0; j < keys; ++j) {
      const bool is_near = query - j < 30 && j - query < 30;
      keep_[static_cast<size_t>(n * row + j)] = j / size == seen_block ||
                                                (sees_more && one_sees_all) ||
                                                (is_near && (sees_more || all_see_neighbours));
    }
  }
}

void MaskData::FillIntervals(Rng& rng) {
  const int64_t keys = problem_.seqlen_k;
  // Runs of queries see about the same, as documents do.
  int64_t begin = 0, end = 0;
  for (int64_t n = 0; n < rows_; ++n) {
    if (n % 37 == 0 || rng.Chance(0.01)) {
      begin = rng.Integer(0, keys);
      end = begin + static_cast<int64_t>(choice_.density * static_cast<double>(keys));
      if (rng.Chance(0.2)) begin = 0, end = keys;
    }
    int64_t numbers[4] = {begin, std::min(end, keys), 0, 0};
    if (rng.Chance(0.3)) {
      numbers[2] = rng.Integer(0, keys);
      numbers[3] = rng.Integer(0, keys);
      if (rng.Chance(0.3)) numbers[2] = numbers[1];  // they touch
    }
    if (choice_.hostile && rng.Chance(0.1)) {
      static constexpr int64_t kHostile[] = {std::numeric_limits<int32_t>::min(), -1, -100,
                                             std::numeric_limits<int32_t>::max(), 100000};
      numbers[rng.Integer(0, 3)] = rng.Pick(kHostile);
    }
    if (rng.Chance(0.1)) std::swap(numbers[0], numbers[2]), std::swap(numbers[1], numbers[3]);
    for (const int64_t x : numbers) intervals_.push_back(static_cast<int32_t>(x));
  }
  intervals_.push_back(0);  // there is a pointer, whatever the lengths are
}

void MaskData::FillList(Rng& rng, std::vector<int32_t>& counts, std::vector<int32_t>& blocks,
                        int64_t& columns) {
  const int64_t there = (problem_.seqlen_k + problem_.mask.block_k - 1) / problem_.mask.block_k;
  columns = rng.Integer(1, there + 3);
  for (int64_t list = 0; list < lists_; ++list) {
    int64_t count = 0;
    std::vector<int32_t> row(static_cast<size_t>(columns), -7);
    for (int64_t n = 0; n < there && count < columns; ++n) {
      if (rng.Chance(choice_.density)) row[static_cast<size_t>(count++)] = static_cast<int32_t>(n);
    }
    if (choice_.hostile) {
      while (count < columns && rng.Chance(0.4)) {
        static constexpr int32_t kHostile[] = {-1, 1 << 20, std::numeric_limits<int32_t>::min(),
                                               std::numeric_limits<int32_t>::max()};
        row[static_cast<size_t>(count++)] =
            rng.Chance(0.5) ? rng.Pick(kHostile) : static_cast<int32_t>(rng.Integer(0, there));
      }
      for (int64_t n = count - 1; n > 0; --n) {
        std::swap(row[static_cast<size_t>(n)], row[static_cast<size_t>(rng.Integer(0, n))]);
      }
      if (count == columns && rng.Chance(0.3)) count += rng.Integer(1, 1000);
      if (count == 0 && rng.Chance(0.5)) count = -3;
    }
    counts.push_back(static_cast<int32_t>(count));
    blocks.insert(blocks.end(), row.begin(), row.end());
  }
  counts.push_back(0);
  blocks.push_back(0);
}

bool MaskData::Allows(int64_t sequence, int64_t head, int64_t query, int64_t key) const {
  const strobe_mask& m = problem_.mask;
  const int64_t list = List(sequence, head, query);
  const auto visit = [&](const std::vector<int32_t>& counts, const std::vector<int32_t>& blocks,
                         int64_t columns, const auto& entry) {
    if (counts.empty()) return;
    const int64_t count = std::min<int64_t>(counts[static_cast<size_t>(list)], columns);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = list * columns + n;
      if (blocks[static_cast<size_t>(at)] == key / m.block_k) entry(at);
    }
  };
  bool full = false, listed = !choice_.partial && !choice_.full;
  visit(full_counts_, full_blocks_, full_columns_, [&](int64_t) { full = true; });
  if (full) return true;
  visit(partial_counts_, partial_blocks_, partial_columns_, [&](int64_t at) {
    const int64_t width = m.block_k / 32;
    const int64_t word = (at * m.block_q + query % m.block_q) * width + key % m.block_k / 32;
    listed |= bits_.empty() || (bits_[static_cast<size_t>(word)] >> (key % 32) & 1);
  });
  if (!listed) return false;
  const int64_t row = Row(sequence, head, query);
  if (!intervals_.empty()) {
    const int32_t* const x = intervals_.data() + row * 4;
    if (!(x[0] <= key && key < x[1]) && !(x[2] <= key && key < x[3])) return false;
  }
  if (!keep_.empty()) {
    const int64_t width = keep_strides_.seqlen ? keep_strides_.seqlen : problem_.seqlen_k;
    if (!keep_[static_cast<size_t>(row * width + key)]) return false;
  }
  return true;
}

strobe_mask_args MaskData::Args() const {
  const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
  strobe_mask_args a{};
  a.struct_size = sizeof a;
  a.keep = pointer(keep_);
  a.keep_strides = keep_strides_;
  a.intervals = pointer(intervals_);
  a.partial_counts = pointer(partial_counts_);
  a.partial_blocks = pointer(partial_blocks_);
  a.partial_columns = partial_columns_;
  a.partial_bits = pointer(bits_);
  a.full_counts = pointer(full_counts_);
  a.full_blocks = pointer(full_blocks_);
  a.full_columns = full_columns_;
  a.cu_seqlens_q = problem_.varlen ? cu_q_.data() : nullptr;
  a.cu_seqlens_k = problem_.varlen ? cu_k_.data() : nullptr;
  return a;
}

std::string MaskData::Pack(bool exact, const std::function<strobe_problem()>& problem,
                           strobe_mask& shape,
                           const std::function<Guarded*(int64_t)>& allocate) const {
  Guarded* packed = nullptr;
  std::string wrong;
  for (int pass = 0; pass < (exact ? 2 : 1); ++pass) {
    if (pass == 1) {
      const auto* const header = reinterpret_cast<const int32_t*>(packed->bytes());
      shape.capacity = std::max(header[7], 1);
      shape.partial_capacity = std::max(header[8], 1);
    }
    const strobe_problem here = problem();
    size_t bytes = 0;
    if (strobe_mask_bytes(&here, &bytes) != STROBE_OK)
      return std::string("strobe_mask_bytes: ") + strobe_last_error();
    Guarded* const memory = allocate(static_cast<int64_t>(bytes / 4));
    memory->Seal();
    strobe_mask_args args = Args();
    args.packed = memory->bytes();
    args.packed_bytes = bytes;
    if (strobe_mask_pack(&here, &args) != STROBE_OK)
      return std::string("strobe_mask_pack: ") + strobe_last_error();
    wrong = memory->CheckZones("strobe_mask_pack");
    packed = memory;
  }
  return wrong;
}

}  // namespace strobe_test
