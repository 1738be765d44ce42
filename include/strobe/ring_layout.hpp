// Who holds what, when sequences are split over ranks: which rows of which sequence are whose, in
// plain numbers. It is that of Python's strobe.distributed (python/strobe/_layout.py), rank for
// rank and row for row: a test compares them. ring_schedule.hpp, which includes this, makes of it
// who computes what and what travels.
#ifndef STROBE_RING_LAYOUT_HPP_
#define STROBE_RING_LAYOUT_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// Which rows of a sequence that is cut a rank holds.
enum class RingOrder : int32_t {
  kAuto,   // kZigzag if causal, else kPlain
  kPlain,  // rank r of n: the r-th n-th of the rows
  kZigzag  // rank r of n: of 2n chunks those numbered r and 2n - 1 - r, so that under a causal mask
           // all ranks have as much to compute
};

// Which packed sequences, documents, a rank holds.
enum class RingDocuments : int32_t {
  kAuto,   // the longest split, as few as it takes for the others to be dealt out evenly
  kWhole,  // each is on one rank
  kSplit   // each is split over all ranks
};

// Rows of a tensor, begin to end - 1.
struct RingRows {
  int64_t begin = 0, end = 0;  // the first one, and the one behind the last
  // How many.
  [[nodiscard]] constexpr int64_t size() const noexcept { return end - begin; }
  // By where they begin, then by where they end.
  constexpr auto operator<=>(const RingRows&) const noexcept = default;
};

// Rows of a rank that are neighbours in a sequence.
struct RingChunk {
  int64_t row = 0;             // the rank's first of them
  int64_t begin = 0, end = 0;  // where they are among the rows of all sequences, end to end
  int64_t sequence = 0;        // which sequence they are of
  // Whether all numbers are equal.
  constexpr bool operator==(const RingChunk&) const noexcept = default;
};

// Which rows every rank holds of sequences of some lengths; one that is not packed is one of one.
//
// With kAuto the longest documents are split over all ranks. The others are dealt out whole, from
// the longest on, to the rank that has the fewest pairs of queries and keys so far; where that one
// has no room left, to the one with most; and those for which no rank has room fill up what is
// left, cut between neighbours. So all ranks have as many rows, give or take one, and some 2 % more
// pairs than the mean at most; if too few documents are whole for that, all are split, and ranks
// may differ by a few rows. All of this follows from lengths, ranks and order, and not from a
// layer's window or its attention chunks, since the rows of a model's layers are the same.
//
// Of documents that are split the ranks take turns: r stands for r + s in the sequence s (modulo
// n), so that the odd rows of short ones do not all fall to one rank.
//
// A rank's rows lie end to end: first what it has of sequences of which others have a part too, and
// behind them the sequences that it has whole, both in the order of the sequences.
class RingLayout {
 public:
  // lengths: of the sequences, none negative; ranks: at least 1; order: not kAuto.
  RingLayout(std::span<const int64_t> lengths, int32_t ranks, RingOrder order,
             RingDocuments documents = RingDocuments::kAuto)
      : lengths_(lengths.begin(), lengths.end()),
        ranks_(ranks),
        zigzag_(order == RingOrder::kZigzag),
        dealt_(static_cast<size_t>(ranks)) {
    starts_.push_back(0);
    for (const int64_t length : lengths_) starts_.push_back(starts_.back() + length);
    deal(documents);
  }

  // Of the sequences.
  [[nodiscard]] const std::vector<int64_t>& lengths() const noexcept { return lengths_; }
  // Where each begins among the rows of all, and at last how many rows there are.
  [[nodiscard]] const std::vector<int64_t>& starts() const noexcept { return starts_; }
  // How many ranks there are.
  [[nodiscard]] int32_t ranks() const noexcept { return ranks_; }
  // All ranks together.
  [[nodiscard]] int64_t all_rows() const noexcept { return starts_.back(); }

  // What a rank holds, or, where inside is above 1, the group with that number of so many
  // neighbouring ranks; without chunks of no rows; neighbours are one chunk.
  [[nodiscard]] std::vector<RingChunk> chunks(int32_t rank, int32_t inside = 1) const {
    std::vector<Part> parts;
    for (int32_t n = 0; n < inside; ++n) {
      const int32_t member = rank * inside + n;
      const std::vector<Part>& dealt = dealt_[static_cast<size_t>(member)];
      parts.insert(parts.end(), dealt.begin(), dealt.end());
      for (const int64_t sequence : split_) add_split(sequence, member, parts);
    }
    std::sort(parts.begin(), parts.end());
    std::vector<Part> joined;
    for (const Part& part : parts) {
      if (!joined.empty() && joined.back().sequence == part.sequence &&
          joined.back().end == part.begin) {
        joined.back().end = part.end;
      } else {
        joined.push_back(part);
      }
    }
    std::stable_partition(joined.begin(), joined.end(), [&](const Part& part) {
      return part.end - part.begin < length_of(part.sequence);
    });
    std::vector<RingChunk> found;
    int64_t row = 0;
    for (const Part& part : joined) {
      const int64_t start = starts_[static_cast<size_t>(part.sequence)];
      found.push_back({row, start + part.begin, start + part.end, part.sequence});
      row += part.end - part.begin;
    }
    return found;
  }

  // How many rows a rank holds, or a group.
  [[nodiscard]] int64_t rows(int32_t rank, int32_t inside = 1) const {
    int64_t count = 0;
    for (const RingChunk& chunk : chunks(rank, inside)) count += chunk.end - chunk.begin;
    return count;
  }

 private:
  // A rank has at most one so-many-th more pairs than the mean, where documents are whole.
  static constexpr int64_t kPairsWithin = 50;

  // Rows of a sequence, counted in it.
  struct Part {
    int64_t sequence = 0, begin = 0, end = 0;
    constexpr auto operator<=>(const Part&) const noexcept = default;
  };
  // Heaps whose first is the rank with the least load, and of several the one with the least
  // number.
  using Load = std::pair<int64_t, int32_t>;

  [[nodiscard]] int64_t length_of(int64_t sequence) const {
    return lengths_[static_cast<size_t>(sequence)];
  }
  // Into how many chunks a sequence is cut over all ranks.
  [[nodiscard]] int64_t pieces() const { return int64_t{ranks_} * (zigzag_ ? 2 : 1); }

  // What a rank has of a sequence that is cut over all.
  void add_split(int64_t sequence, int32_t member, std::vector<Part>& parts) const {
    const int64_t length = length_of(sequence), place = (member + sequence) % ranks_;
    const auto add = [&](int64_t n) {
      const Part part = {sequence, n * length / pieces(), (n + 1) * length / pieces()};
      if (part.begin < part.end) parts.push_back(part);
    };
    add(place);
    if (zigzag_) add(pieces() - 1 - place);
  }

  // Takes what every rank has of one from the room that it has.
  void take_split(int64_t sequence, std::vector<int64_t>& rooms) const {
    std::vector<int64_t> edges;
    for (int64_t n = 0; n <= pieces(); ++n) edges.push_back(n * length_of(sequence) / pieces());
    const auto size = [&](size_t n) { return edges[n + 1] - edges[n]; };
    const size_t last = edges.size() - 2;
    auto place = static_cast<size_t>(sequence % ranks_);
    for (int64_t& room : rooms) {
      room -= size(place) + (zigzag_ ? size(last - place) : 0);
      if (++place == rooms.size()) place = 0;
    }
  }

  // Deals out the documents that are not split over all ranks, and finds those that are.
  void deal(RingDocuments documents) {
    std::vector<int64_t> longest;  // those that have rows, from the longest on
    for (size_t n = 0; n < lengths_.size(); ++n)
      if (lengths_[n] > 0) longest.push_back(static_cast<int64_t>(n));
    std::stable_sort(longest.begin(), longest.end(),
                     [&](int64_t a, int64_t b) { return length_of(a) > length_of(b); });
    if (ranks_ == 1 || documents == RingDocuments::kWhole) {
      (void)deal_whole(longest, {}, 0);
      return;
    }
    size_t count = longest.size();  // of those that are split
    if (documents == RingDocuments::kAuto) count = longest_split(longest);
    split_.assign(longest.begin(), longest.begin() + static_cast<std::ptrdiff_t>(count));
  }

  // How many of the longest are split, if the others can be dealt out evenly, which it does.
  size_t longest_split(const std::vector<int64_t>& longest) {
    int64_t squares = 0;
    for (const int64_t n : longest) squares += length_of(n) * length_of(n);
    const int64_t most = (squares + squares / kPairsWithin) / ranks_;
    size_t count = 0, taken = 0, tried = 0;
    while (count < longest.size()) {
      const int64_t length = length_of(longest[count]);
      if (length <= all_rows() / ranks_ && length * length <= most) break;
      ++count;
    }
    std::vector<int64_t> rooms;
    for (int64_t rank = 0; rank < ranks_; ++rank)
      rooms.push_back((rank + 1) * all_rows() / ranks_ - rank * all_rows() / ranks_);
    while (count < longest.size()) {
      for (; taken < count; ++taken) take_split(longest[taken], rooms);
      const bool room = *std::min_element(rooms.begin(), rooms.end()) >= 0;
      if (room && deal_whole(std::span(longest).subspan(count), rooms, squares)) return count;
      const size_t step = std::max<size_t>(1, tried / 2);
      tried += step;
      count += step;
    }
    return longest.size();
  }

  // Deals documents, the longest first, out to ranks that have room for so many rows, or (none)
  // for any number. Whether pairs are balanced; else nothing is dealt out. squares: of the lengths
  // of all documents, those that are split too.
  bool deal_whole(std::span<const int64_t> documents, const std::vector<int64_t>& rooms,
                  int64_t squares) {
    std::vector<std::vector<Part>> parts(static_cast<size_t>(ranks_));
    std::vector<int64_t> left = rooms, pairs(static_cast<size_t>(ranks_));
    int64_t most = 0;  // pairs of a rank
    for (const int64_t n : documents) most += length_of(n) * length_of(n);
    if (!rooms.empty()) most = (most + squares / kPairsWithin) / ranks_;
    std::vector<Load> by_pairs, by_room;
    for (int32_t rank = 0; rank < ranks_; ++rank) by_pairs.push_back({0, rank});
    const auto give = [&](int64_t n, int32_t rank) {
      const auto owner = static_cast<size_t>(rank);
      if (!rooms.empty()) left[owner] -= length_of(n);
      pairs[owner] += length_of(n) * length_of(n);
      parts[owner].push_back({n, 0, length_of(n)});
      return pairs[owner] <= most;
    };
    size_t at = 0;
    for (; at < documents.size(); ++at) {
      const int32_t rank = by_pairs.front().second;
      const auto owner = static_cast<size_t>(rank);
      if (!rooms.empty() && length_of(documents[at]) > left[owner]) break;
      if (!give(documents[at], rank)) return false;
      replace(by_pairs, {pairs[owner], rank});
    }
    for (int32_t rank = 0; rank < ranks_ && !rooms.empty(); ++rank)
      by_room.push_back({-left[static_cast<size_t>(rank)], rank});
    std::make_heap(by_room.begin(), by_room.end(), std::greater<>());
    std::vector<int64_t> cut;
    for (; at < documents.size(); ++at) {
      const int32_t rank = by_room.front().second;
      const auto owner = static_cast<size_t>(rank);
      if (length_of(documents[at]) > left[owner]) {
        cut.push_back(documents[at]);
        continue;
      }
      if (!give(documents[at], rank)) return false;
      replace(by_room, {-left[owner], rank});
    }
    size_t rank = 0;
    for (const int64_t n : cut) {
      int64_t before = 0, front = 0;
      for (const int64_t length = length_of(n); before < length;) {
        while (left[rank] == 0) ++rank;
        const int64_t rows = std::min(length - before, left[rank]);
        left[rank] -= rows;
        pairs[rank] += rows * length;
        // In zigzag order half of a rank's rows are from the front and half from the back, so that
        // its pairs go with its rows.
        const int64_t behind = before + rows, next = zigzag_ ? behind / 2 : behind;
        const Part edges[] = {{n, front, next},
                              {n, length - behind + next, length - before + front}};
        for (const Part& part : std::span(edges).first(zigzag_ ? 2 : 1))
          if (part.begin < part.end) parts[rank].push_back(part);
        before = behind;
        front = next;
      }
    }
    if (*std::max_element(pairs.begin(), pairs.end()) > most) return false;
    dealt_ = std::move(parts);
    return true;
  }
  static void replace(std::vector<Load>& heap, const Load& load) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.back() = load;
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }

  std::vector<int64_t> lengths_, starts_ = {};
  int32_t ranks_;
  bool zigzag_;
  std::vector<int64_t> split_ = {};       // documents that are cut over all ranks
  std::vector<std::vector<Part>> dealt_;  // what each rank has of the others
};

namespace internal {

// A row of a rank: which sequence it is of, and which row of it.
struct RingPlace {
  int64_t sequence = 0, row = 0;
};
// held: the rank's chunks.
[[nodiscard]] inline RingPlace ring_place(const RingLayout& layout,
                                          const std::vector<RingChunk>& held, int64_t row) {
  const auto next =
      std::upper_bound(held.begin(), held.end(), row,
                       [](int64_t at, const RingChunk& chunk) { return at < chunk.row; });
  if (next == held.begin()) return {};
  const RingChunk& chunk = *(next - 1);
  const int64_t start = layout.starts()[static_cast<size_t>(chunk.sequence)];
  return {chunk.sequence, chunk.begin + row - chunk.row - start};
}

// Rows of a rank, and which rows of its group's they are.
struct RingPiece {
  RingRows of_rank = {}, of_group = {};
};
// Where the rows of a group's rank number `place` stand among those of the group.
[[nodiscard]] inline std::vector<RingPiece> ring_within(const RingLayout& layout, int32_t rank,
                                                        int32_t inside, int32_t place) {
  std::vector<RingChunk> of_group = layout.chunks(rank, inside);
  const auto earlier = [](const RingChunk& a, const RingChunk& b) { return a.begin < b.begin; };
  std::sort(of_group.begin(), of_group.end(), earlier);
  std::vector<RingPiece> found;
  for (const RingChunk& mine : layout.chunks(rank * inside + place)) {
    const RingChunk& whole =
        *(std::upper_bound(of_group.begin(), of_group.end(), mine, earlier) - 1);
    const int64_t size = mine.end - mine.begin;
    const int64_t first = whole.row + mine.begin - whole.begin;
    found.push_back({{mine.row, mine.row + size}, {first, first + size}});
  }
  return found;
}

// Which rows of all sequences a rank or a group holds, or of these pieces those in them.
[[nodiscard]] inline std::vector<int64_t> ring_rows_held(
    const RingLayout& layout, int32_t rank, int32_t inside,
    const std::vector<RingRows>* pieces = nullptr) {
  std::vector<int64_t> held;
  for (const RingChunk& chunk : layout.chunks(rank, inside))
    for (int64_t row = chunk.begin; row < chunk.end; ++row) held.push_back(row);
  if (pieces == nullptr) return held;
  std::vector<int64_t> found;
  for (const RingRows& piece : *pieces)
    found.insert(found.end(), held.begin() + piece.begin, held.begin() + piece.end);
  return found;
}

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_LAYOUT_HPP_
