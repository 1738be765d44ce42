// Masks as data over ranks (ring.hpp, ulysses.hpp): what each call has of one, packed.
#ifndef STROBE_RING_MASKS_HPP_
#define STROBE_RING_MASKS_HPP_

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/ring_layout.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// A mask as data over ranks, in the host's memory, which is read when a Ring or a Ulysses is made:
// intervals of keys, the bytes of pairs, or those of blocks, contiguous; one of the three, or none.
// Of packed sequences batch is 1, and keys are numbered in a row's own one.
struct RingMaskData {
  // [batch, rows, 4]: the query sees the keys [begin, end) of two: begin, end, begin, end.
  std::span<const int32_t> intervals = {};
  // [batch, heads, rows, keys], other than 0: the query sees the key. keys: of the whole sequence,
  // of packed ones those of the longest.
  std::span<const uint8_t> pairs = {};
  // [batch, heads, blocks, blocks], of all rows, other than 0: queries of the block see all keys of
  // the other. Not with lengths.
  std::span<const uint8_t> blocks = {};
  int64_t block = 0;             // of blocks: queries and keys of one
  int64_t batch = 1, heads = 1;  // 1: the same for all; intervals have no heads
  // Whether it has all rows, and is the same on every rank: what it hides whole is then neither
  // sent nor computed, and heads may be shared out. Else it has this rank's rows, in their order.
  bool all_rows = false;

  // Whether there is none.
  [[nodiscard]] bool empty() const noexcept {
    return intervals.data() == nullptr && pairs.data() == nullptr && blocks.data() == nullptr;
  }
};

namespace internal {

// A packed mask, and what a problem says of it.
struct RingPackedMask {
  MaskShape shape = {};
  std::vector<int32_t> words = {};
};

// Where packed sequences of a call begin among its queries and keys, and where the last one ends.
struct RingSequences {
  std::vector<int32_t> q = {}, k = {};
};

// A mask as data, and the parts of it that calls have. Reads what the caller gave: it does not
// outlive the plan's making.
class RingCut {
 public:
  // rows: a rank's own. Throws Error: kInvalidArgument.
  RingCut(const RingMaskData& data, std::span<const int64_t> lengths, int64_t batch, int64_t heads,
          int64_t rows, bool packed)
      : data_(data), starts_{0} {
    for (const int64_t length : lengths) starts_.push_back(starts_.back() + length);
    const int64_t all = starts_.back();
    const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    keys_ = packed ? longest : all;
    rows_ = data.all_rows ? all : rows;
    const int kinds = (data.intervals.data() != nullptr) + (data.pairs.data() != nullptr) +
                      (data.blocks.data() != nullptr);
    const auto invalid = [](const std::string& text) {
      throw Error(Status::kInvalidArgument, text);
    };
    if (kinds > 1) invalid("mask has several of intervals, pairs and blocks, expected one");
    const auto one_or = [&](const char* name, int64_t got, int64_t most) {
      if (got == 1 || got == most) return;
      invalid(formatted("mask.%s = %" PRId64 ", expected 1%s", name, got,
                        most == 1 ? "" : formatted(" or %" PRId64, most).c_str()));
    };
    one_or("batch", data.batch, batch);
    one_or("heads", data.heads, data.intervals.data() ? 1 : heads);
    const bool of_blocks = data.blocks.data() != nullptr;
    if (of_blocks ? data.block < 1 : data.block != 0) {
      invalid(formatted("mask.block = %" PRId64 ", expected %s", data.block,
                        of_blocks ? "at least 1: rows of a block" : "0 without blocks"));
    }
    if (of_blocks && !data.all_rows) {
      throw Error(Status::kUnsupported,
                  "mask.all_rows = 0 with mask.blocks, expected 1: blocks are those of all rows");
    }
    if (of_blocks && packed) {
      throw Error(Status::kUnsupported,
                  "mask.blocks with lengths is not supported over ranks: blocks are those of one "
                  "sequence");
    }
    if (of_blocks) rows_ = keys_ = (all + data.block - 1) / data.block;
    const auto size = [&](const char* name, size_t got, int64_t wanted) {
      if (static_cast<int64_t>(got) == wanted) return;
      invalid(formatted("mask.%s has %zu elements, expected %" PRId64, name, got, wanted));
    };
    const int64_t planes = data.batch * data.heads;
    if (data.intervals.data()) size("intervals", data.intervals.size(), planes * rows_ * 4);
    if (data.pairs.data()) size("pairs", data.pairs.size(), planes * rows_ * keys_);
    if (of_blocks) size("blocks", data.blocks.size(), planes * rows_ * keys_);
  }

  // RingSeen, of a mask of all rows. Keys begin at a multiple of 8 of their sequence, if those
  // given do: kernels draw dropout's bits for so many at a time.
  [[nodiscard]] bool narrow(RingRows& q, RingRows& k) const {
    const int64_t start = *(std::upper_bound(starts_.begin(), starts_.end(), q.begin) - 1);
    const int64_t begin = k.begin - start, end = k.end - start;
    const int64_t side = side_of_blocks();
    RingRows of_q = {q.end, q.begin}, of_k = {end, begin};
    const auto see = [&](int64_t row, int64_t first, int64_t last) {
      of_q = {std::min(of_q.begin, row * side), std::max(of_q.end, (row + 1) * side)};
      of_k = {std::min(of_k.begin, first * side), std::max(of_k.end, last * side)};
    };
    for (int64_t row = q.begin / side; row * side < q.end; ++row) {
      for (int64_t plane = 0; plane < data_.batch * data_.heads; ++plane) {
        if (data_.intervals.data()) {
          const int32_t* const ends = data_.intervals.data() + (plane * rows_ + row) * 4;
          for (const int n : {0, 2}) {
            const int64_t first = std::max<int64_t>(ends[n], begin);
            const int64_t last = std::min<int64_t>(ends[n + 1], end);
            if (first < last) see(row, first, last);
          }
          continue;
        }
        const uint8_t* const line = bytes() + (plane * rows_ + row) * keys_;
        int64_t first = begin / side, last = (end + side - 1) / side;
        while (first < last && line[first] == 0) ++first;
        while (first < last && line[last - 1] == 0) --last;
        if (first < last) see(row, first, last);
      }
    }
    if (of_q.size() <= 0) return false;
    q = {std::max(q.begin, of_q.begin), std::min(q.end, of_q.end)};
    k = {std::max(k.begin, start + of_k.begin / 8 * 8), std::min(k.end, start + of_k.end)};
    return true;
  }

  // What a call has of it: queries are the rank's (or the group's) rows from `first` on, and all[]
  // of these rows and of the keys are rows of all sequences; sequences: of packed ones, null: there
  // is one; heads: which of all these are.
  [[nodiscard]] RingPackedMask pack(int64_t first, std::span<const int64_t> queries,
                                    std::span<const int64_t> keys, const RingSequences* sequences,
                                    RingRows heads, int32_t threads) const {
    std::vector<int64_t> rows(queries.begin(), queries.end());
    if (!data_.all_rows)
      for (size_t n = 0; n < rows.size(); ++n) rows[n] = first + static_cast<int64_t>(n);
    std::vector<int64_t> numbers;
    for (const int64_t key : keys)
      numbers.push_back(key - *(std::upper_bound(starts_.begin(), starts_.end(), key) - 1));
    if (data_.heads == 1) heads = {0, 1};
    Problem p = {.batch = data_.batch,
                 .seqlen_q = static_cast<int64_t>(rows.size()),
                 .seqlen_k = static_cast<int64_t>(numbers.size()),
                 .heads = heads.size(),
                 .head_dim = 1};
    p.threads = threads;
    MaskArgs args = {};
    std::vector<RingRows> spans = {{0, p.seqlen_k}};  // keys of each sequence
    std::vector<int64_t> ends = {p.seqlen_q};         // and where its queries end
    if (sequences) {
      p.varlen = true;
      p.batch = static_cast<int64_t>(sequences->q.size()) - 1;
      p.total_q = p.seqlen_q;
      p.total_k = p.seqlen_k;
      p.seqlen_q = p.seqlen_k = 0;
      spans.clear();
      ends.clear();
      for (size_t n = 0; n + 1 < sequences->q.size(); ++n) {
        spans.push_back({sequences->k[n], sequences->k[n + 1]});
        ends.push_back(sequences->q[n + 1]);
        p.seqlen_q = std::max<int64_t>(p.seqlen_q, sequences->q[n + 1] - sequences->q[n]);
        p.seqlen_k = std::max(p.seqlen_k, spans.back().size());
      }
      args.cu_seqlens_q = sequences->q.data();
      args.cu_seqlens_k = sequences->k.data();
    }
    std::vector<int32_t> intervals, counts, lists;
    std::vector<uint8_t> pairs;
    MaskShape shape = {};
    shape.kind = STROBE_MASK_PACKED;
    shape.block_q = shape.block_k = 128;
    shape.batch = sequences ? p.batch : data_.batch;
    shape.heads = heads.size();
    const std::optional<int32_t> side_q = side_of(rows), side_k = side_of(numbers);
    if (data_.intervals.data()) {
      cut_intervals(rows, numbers, spans, ends, intervals);
      args.intervals = intervals.data();
    } else if (data_.blocks.data() && side_q && side_k && !sequences) {
      shape.block_q = *side_q;
      shape.block_k = *side_k;
      args.full_columns = cut_blocks(rows, numbers, heads, shape, counts, lists);
      args.full_counts = counts.data();
      args.full_blocks = lists.data();
    } else {
      cut_pairs(rows, numbers, spans, ends, heads, p.seqlen_k, pairs);
      args.keep = pairs.data();
    }
    return packed(p, shape, args);
  }

 private:
  [[nodiscard]] int64_t side_of_blocks() const { return data_.blocks.data() ? data_.block : 1; }
  [[nodiscard]] const uint8_t* bytes() const {
    return data_.blocks.data() ? data_.blocks.data() : data_.pairs.data();
  }

  // The largest block of a packed mask such that none has rows of two of these; none is: nothing.
  [[nodiscard]] std::optional<int32_t> side_of(std::span<const int64_t> rows) const {
    for (const int32_t side : {256, 128, 64}) {
      bool fits = data_.blocks.data() != nullptr;
      for (size_t n = 0; n < rows.size() && fits; ++n) {
        const size_t begin = n / static_cast<size_t>(side) * static_cast<size_t>(side);
        fits = rows[n] / data_.block == rows[begin] / data_.block;
      }
      if (fits) return side;
    }
    return std::nullopt;
  }

  void cut_intervals(std::span<const int64_t> rows, std::span<const int64_t> numbers,
                     std::span<const RingRows> spans, std::span<const int64_t> ends,
                     std::vector<int32_t>& found) const {
    for (int64_t b = 0; b < data_.batch; ++b) {
      size_t s = 0;
      for (size_t n = 0; n < rows.size(); ++n) {
        while (static_cast<int64_t>(n) >= ends[s]) ++s;
        const auto keys = numbers.subspan(static_cast<size_t>(spans[s].begin),
                                          static_cast<size_t>(spans[s].size()));
        for (int64_t e = 0; e < 4; ++e) {
          const int64_t wanted =
              data_.intervals[static_cast<size_t>((b * rows_ + rows[n]) * 4 + e)];
          found.push_back(static_cast<int32_t>(std::lower_bound(keys.begin(), keys.end(), wanted) -
                                               keys.begin()));
        }
      }
    }
  }
  void cut_pairs(std::span<const int64_t> rows, std::span<const int64_t> numbers,
                 std::span<const RingRows> spans, std::span<const int64_t> ends, RingRows heads,
                 int64_t width, std::vector<uint8_t>& found) const {
    const int64_t side = side_of_blocks();
    for (int64_t b = 0; b < data_.batch; ++b) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        size_t s = 0;
        for (size_t n = 0; n < rows.size(); ++n) {
          while (static_cast<int64_t>(n) >= ends[s]) ++s;
          const uint8_t* const line =
              bytes() + ((b * data_.heads + h) * rows_ + rows[n] / side) * keys_;
          for (int64_t k = 0; k < width; ++k) {
            found.push_back(k < spans[s].size()
                                ? line[numbers[static_cast<size_t>(spans[s].begin + k)] / side]
                                : uint8_t{0});
          }
        }
      }
    }
    if (found.empty()) found.push_back(0);  // of no pairs; it is never read
  }
  // Returns the columns of the lists.
  [[nodiscard]] int64_t cut_blocks(std::span<const int64_t> rows, std::span<const int64_t> numbers,
                                   RingRows heads, const MaskShape& shape,
                                   std::vector<int32_t>& counts,
                                   std::vector<int32_t>& lists) const {
    const auto blocks_of = [](std::span<const int64_t> all, int64_t side) {
      return (static_cast<int64_t>(all.size()) + side - 1) / side;
    };
    const auto number = [&](std::span<const int64_t> all, int64_t block, int64_t side) {
      return all[static_cast<size_t>(block * side)] / data_.block;
    };
    const int64_t columns = std::max<int64_t>(1, blocks_of(numbers, shape.block_k));
    for (int64_t b = 0; b < data_.batch; ++b) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t i = 0; i < blocks_of(rows, shape.block_q); ++i) {
          const uint8_t* const line =
              bytes() + ((b * data_.heads + h) * rows_ + number(rows, i, shape.block_q)) * keys_;
          const size_t first = lists.size();
          for (int64_t j = 0; j < blocks_of(numbers, shape.block_k); ++j) {
            if (line[number(numbers, j, shape.block_k)]) lists.push_back(static_cast<int32_t>(j));
          }
          counts.push_back(static_cast<int32_t>(lists.size() - first));
          lists.resize(first + static_cast<size_t>(columns));
        }
      }
    }
    return columns;
  }

  // With as much room as there has to be, which the header of a smaller one says.
  [[nodiscard]] static RingPackedMask packed(Problem& p, const MaskShape& shape, MaskArgs args) {
    RingPackedMask found{shape, {}};
    found.shape.capacity = found.shape.partial_capacity = 1;
    for (;;) {
      p.mask = found.shape;
      found.words.assign((mask_bytes(p) + 3) / 4, 0);
      args.packed = found.words.data();
      args.packed_bytes = found.words.size() * sizeof(int32_t);
      pack_mask(p, args);
      const int64_t entries = found.words[7], partial = found.words[8];
      if (entries <= found.shape.capacity && partial <= found.shape.partial_capacity) return found;
      found.shape.capacity = std::max<int64_t>(1, entries);
      found.shape.partial_capacity = std::max<int64_t>(1, partial);
    }
  }

  RingMaskData data_;
  std::vector<int64_t> starts_;  // of the sequences among all rows
  int64_t rows_ = 0, keys_ = 0;  // of the data
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_MASKS_HPP_
