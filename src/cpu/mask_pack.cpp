// Packs a mask as data: strobe.h says from what, and into which words. The lists of queries are
// found side by side, each in one pass over what says who sees what. How long they are then says
// where each is written, side by side too, for which blocks that are seen in part are read again.
// The lists of keys are made from these.
#include "cpu/mask_pack.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/mask_sources.h"
#include "core/packed_mask.h"
#include "core/team.h"

namespace strobe::cpu {

namespace {

enum class Kind : uint8_t { kNone, kPartial, kFull };

// 32 x 32 bits: afterwards bit i of word j is what bit j of word i was.
void transpose(uint32_t (&x)[32]) {
  uint32_t low = 0x0000FFFF;
  for (int step = 16; step != 0; step /= 2, low ^= low << step) {
    for (int i = 0; i < 32; i = (i + step + 1) & ~step) {
      const uint32_t swapped = (x[i] >> step ^ x[i + step]) & low;
      x[i] ^= swapped << step;
      x[i + step] ^= swapped;
    }
  }
}

// Bits [begin, end) of a row of words.
void set_bits(uint32_t* words, int64_t begin, int64_t end) {
  for (; begin < end && begin % 32 != 0; ++begin) words[begin / 32] |= uint32_t{1} << begin % 32;
  for (; begin + 32 <= end; begin += 32) words[begin / 32] = ~uint32_t{0};
  for (; begin < end; ++begin) words[begin / 32] |= uint32_t{1} << begin % 32;
}

// What a block of queries sees of a block of keys.
struct Found {
  int32_t block;
  bool partial;
};

class Packer {
 public:
  Packer(const AttentionProblem& p, const MaskArgs& a)
      : p_(p),
        a_(a),
        l_(MaskLayout::of(p)),
        rows_(MaskRows::of(p, a.cu_seqlens_q, a.cu_seqlens_k)),
        words_(static_cast<int32_t*>(a.packed)),
        found_(static_cast<size_t>(l_.blocks_q)),
        entries_(found_.size() + 1),
        partial_(found_.size() + 1) {}

  void run() {
    const int64_t threads = threads_or_default(p_.threads);
    std::vector<MaskPlane> planes;
    int64_t lists = 0;
    std::vector<int64_t> begins;
    // Heads without queries may be billions.
    for (int64_t b = 0; l_.blocks_q > 0 && b < p_.mask.batch; ++b) {
      for (int64_t head = 0; head < l_.heads; ++head) {
        planes.push_back(MaskPlane::of(l_, rows_, b, head));
        begins.push_back(lists);
        lists += planes.back().blocks_q;
      }
    }
    const auto for_each_list = [&](void (ListMaker::*step)()) {
      share_out(lists, threads, [&](int64_t n) {
        const auto at = std::upper_bound(begins.begin(), begins.end(), n) - begins.begin() - 1;
        const auto i = static_cast<size_t>(at);
        ListMaker maker(*this, planes[i], n - begins[i]);
        (maker.*step)();
      });
    };
    for_each_list(&ListMaker::find);
    give_room();
    for_each_list(&ListMaker::write);
    share_out(static_cast<int64_t>(planes.size()), threads,
              [&](int64_t n) { make_key_lists(planes[static_cast<size_t>(n)]); });
    make_order(l_.lists, l_.blocks_q, words_ + l_.order);
    make_order(l_.key_lists, l_.blocks_k, words_ + l_.key_order);
  }

 private:
  // Writes the header, lists of keys that are empty as yet, and where each list of queries is,
  // those of blocks that no sequence has included: packed sequences are numbered with gaps. A list
  // that does not fit counts for those behind it all the same, so that where they are is a matter
  // of sums alone, which many threads could form.
  void give_room() {
    int64_t over = 0;
    for (size_t n = 0; n < found_.size(); ++n) {
      const auto count = static_cast<int64_t>(found_[n].size());
      const int64_t some = std::count_if(found_[n].begin(), found_[n].end(),
                                         [](const Found& x) { return x.partial; });
      entries_[n + 1] = entries_[n] + count;
      partial_[n + 1] = partial_[n] + some;
      const bool fits = (count == 0 || entries_[n + 1] <= l_.capacity) &&
                        (some == 0 || partial_[n + 1] <= l_.partial);
      int32_t* const list = words_ + l_.lists + static_cast<int64_t>(n) * 2;
      list[0] = static_cast<int32_t>(min64(entries_[n], l_.capacity));
      list[1] = fits ? static_cast<int32_t>(count) : -1;
      over += !fits;
    }
    std::memset(words_ + l_.key_lists, 0, static_cast<size_t>(l_.blocks_k) * 8);
    std::memset(words_, 0, MaskLayout::kHeader * 4);
    const int64_t header[] = {STROBE_MASK_MAGIC,
                              l_.block_q,
                              l_.block_k,
                              l_.blocks_q,
                              l_.blocks_k,
                              l_.capacity,
                              l_.partial,
                              entries_.back(),
                              partial_.back(),
                              over,
                              MaskLayout::rows_q(p_),
                              MaskLayout::rows_k(p_)};
    for (int64_t n = 0; const int64_t x : header) {
      words_[n++] = static_cast<int32_t>(min64(x, std::numeric_limits<int32_t>::max()));
    }
  }

  // The list of one block of queries.
  class ListMaker {
   public:
    ListMaker(Packer& packer, const MaskPlane& plane, int64_t block)
        : k_(packer),
          plane_(plane),
          list_(plane.first_q + block),
          rows_(block_at({0, plane.rows_q}, block * packer.l_.block_q, packer.l_.block_q)) {}

    // Which blocks of keys it has.
    void find() {
      find_candidates();
      read_intervals();
      std::vector<uint32_t> bits(static_cast<size_t>(k_.l_.words_of_bits()));
      for (int64_t block = 0; block < plane_.blocks_k; ++block) {
        Kind kind = kinds_[static_cast<size_t>(block)];
        if (kind == Kind::kPartial) kind = read_block(block, bits.data());
        if (kind == Kind::kNone) continue;
        found().push_back({static_cast<int32_t>(block), kind == Kind::kPartial});
      }
    }
    // Writes its entries and bits, if there is room for them.
    void write() {
      const int32_t* const list = k_.words_ + k_.l_.lists + list_ * 2;
      if (list[1] <= 0) return;
      int32_t* entry = k_.words_ + k_.l_.entries + int64_t{list[0]} * MaskLayout::kEntry;
      int64_t place = k_.partial_[static_cast<size_t>(list_)];
      if (place < k_.partial_[static_cast<size_t>(list_ + 1)]) {
        find_candidates();
        read_intervals();
      }
      std::vector<uint32_t> bits(static_cast<size_t>(k_.l_.words_of_bits()));
      for (const Found& x : found()) {
        if (x.partial) {
          read_block(x.block, bits.data());
          write_bits(place, bits.data());
        }
        *entry++ = x.block;
        *entry++ = x.partial ? static_cast<int32_t>(place++) : -1;
      }
    }

   private:
    std::vector<Found>& found() const { return k_.found_[static_cast<size_t>(list_)]; }

    // What the lists that were given say; without them, that each block has to be looked at.
    void find_candidates() {
      const MaskArgs& a = k_.a_;
      const bool listed = a.partial_counts || a.full_counts;
      kinds_.assign(static_cast<size_t>(plane_.blocks_k), listed ? Kind::kNone : Kind::kPartial);
      if (a.partial_bits) entries_of_.resize(kinds_.size());
      const auto mark = [&](const int32_t* counts, const int32_t* blocks, int64_t columns,
                            Kind kind) {
        if (!counts || !blocks) return;
        const int64_t count = min64(max64(read_once(counts + list_), 0), columns);
        for (int64_t n = 0; n < count; ++n) {
          const int64_t block = read_once(blocks + list_ * columns + n);
          if (block < 0 || block >= plane_.blocks_k) continue;
          kinds_[static_cast<size_t>(block)] = kind;
          if (kind != Kind::kPartial || !a.partial_bits) continue;
          entries_of_[static_cast<size_t>(block)].push_back(list_ * columns + n);
        }
      };
      mark(a.partial_counts, a.partial_blocks, a.partial_columns, Kind::kPartial);
      mark(a.full_counts, a.full_blocks, a.full_columns, Kind::kFull);
    }

    // Reads the rows' intervals, and says for each block how much of it they cover.
    void read_intervals() {
      if (!k_.a_.intervals) return;
      // Changes, from a block to the next, of how many intervals meet it, and how many rows have
      // all its keys.
      std::vector<int32_t> meet(kinds_.size() + 1), whole(kinds_.size() + 1);
      const int64_t size = k_.l_.block_k, keys = plane_.rows_k;
      const auto change = [](std::vector<int32_t>& x, int64_t begin, int64_t end) {
        if (begin >= end) return;
        ++x[static_cast<size_t>(begin)];
        --x[static_cast<size_t>(end)];
      };
      for (int64_t q = rows_.begin; q < rows_.end; ++q) {
        seen_.push_back(
            MaskIntervals::of(k_.a_.intervals + plane_.interval_row(k_.l_, k_.rows_, q) * 4, keys));
        for (const Range& r : {seen_.back().first, seen_.back().second}) {
          if (r.empty()) continue;
          change(meet, r.begin / size, ceil_div(r.end, size));
          change(whole, ceil_div(r.begin, size), r.end == keys ? plane_.blocks_k : r.end / size);
        }
      }
      int32_t meets = 0, wholes = 0;
      in_all_intervals_.resize(kinds_.size());
      for (size_t n = 0; n < kinds_.size(); ++n) {
        meets += meet[n];
        wholes += whole[n];
        in_all_intervals_[n] = wholes == rows_.size();
        if (meets == 0 && kinds_[n] == Kind::kPartial) kinds_[n] = Kind::kNone;
      }
    }

    // The pairs of a block that may be seen in part, into `bits`, and what it is.
    Kind read_block(int64_t block, uint32_t* bits) const {
      const MaskArgs& a = k_.a_;
      const int64_t width = k_.l_.block_k / 32;
      const Range keys = block_at({0, plane_.rows_k}, block * k_.l_.block_k, k_.l_.block_k);
      const bool intervals = a.intervals && !in_all_intervals_[static_cast<size_t>(block)];
      if (!intervals && !a.keep && !a.partial_bits) return Kind::kFull;
      std::memset(bits, 0, static_cast<size_t>(k_.l_.words_of_bits()) * 4);
      for (int64_t q = rows_.begin; q < rows_.end; ++q) {
        uint32_t* const row = bits + (q - rows_.begin) * width;
        if (intervals) {
          const MaskIntervals& seen = seen_[static_cast<size_t>(q - rows_.begin)];
          for (const Range& r : {seen.first, seen.second}) {
            const Range part = intersect(r, keys);
            set_bits(row, part.begin - keys.begin, part.end - keys.begin);
          }
        } else {
          set_bits(row, 0, keys.size());
        }
        if (a.keep) keep_of_row(q, keys, row);
      }
      if (a.partial_bits) keep_bits(block, bits);
      bool some = false, all = true;
      for (int64_t r = 0; r < rows_.size(); ++r) {
        for (int64_t w = 0; w < width; ++w) {
          const int64_t there = keys.size() - w * 32;  // keys of the word that there are
          const uint32_t whole = there >= 32  ? ~uint32_t{0}
                                 : there <= 0 ? 0
                                              : ~(~uint32_t{0} << there);
          some |= bits[r * width + w] != 0;
          all &= bits[r * width + w] == whole;
        }
      }
      return all ? Kind::kFull : some ? Kind::kPartial : Kind::kNone;
    }

    // Takes away what the tensor of bools hides.
    void keep_of_row(int64_t query, Range keys, uint32_t* row) const {
      const strobe_strides& s = k_.a_.keep_strides;
      const uint8_t* const first = k_.a_.keep + plane_.keep_row(s, k_.rows_, query);
      for (int64_t key = keys.begin; key < keys.end; key += 32) {
        const int64_t n = min64(32, keys.end - key);
        uint32_t kept = 0;
        for (int64_t j = 0; j < n; ++j) {
          kept |= static_cast<uint32_t>(first[(key + j) * s.dim] != 0) << j;
        }
        row[(key - keys.begin) / 32] &= kept;
      }
    }

    // Takes away what no entry of the block has in its bits.
    void keep_bits(int64_t block, uint32_t* bits) const {
      const int64_t words = k_.l_.words_of_bits(), width = k_.l_.block_k / 32;
      const std::vector<int64_t>& entries = entries_of_[static_cast<size_t>(block)];
      for (int64_t w = 0; w < rows_.size() * width; ++w) {
        uint32_t given = 0;
        for (const int64_t entry : entries) given |= k_.a_.partial_bits[entry * words + w];
        bits[w] &= given;
      }
    }

    void write_bits(int64_t place, const uint32_t* bits) const {
      const MaskLayout& l = k_.l_;
      auto* const words = reinterpret_cast<uint32_t*>(k_.words_);
      std::copy_n(bits, l.words_of_bits(), words + l.bits + place * l.words_of_bits());
      uint32_t* const by_key = words + l.key_bits + place * l.words_of_bits();
      const int64_t width = l.block_k / 32, height = l.block_q / 32;
      for (int64_t q = 0; q < height; ++q) {
        for (int64_t w = 0; w < width; ++w) {
          uint32_t square[32];
          for (int64_t i = 0; i < 32; ++i) square[i] = bits[(q * 32 + i) * width + w];
          transpose(square);
          for (int64_t j = 0; j < 32; ++j) by_key[(w * 32 + j) * height + q] = square[j];
        }
      }
    }

    Packer& k_;
    const MaskPlane& plane_;
    const int64_t list_;
    const Range rows_;
    std::vector<Kind> kinds_;                       // [block of keys]
    std::vector<std::vector<int64_t>> entries_of_;  // [block of keys]: where partial_bits has it
    std::vector<MaskIntervals> seen_;               // [row]
    std::vector<bool> in_all_intervals_;            // [block of keys]
  };

  // The lists of a sequence's and head's blocks of keys. Their entries lie where those of the
  // blocks of queries lie, which are as many or, beside some that do not fit, more.
  void make_key_lists(const MaskPlane& plane) const {
    int32_t* const lists = words_ + l_.key_lists + plane.first_k * 2;
    const int32_t* const by_query = words_ + l_.lists + plane.first_q * 2;
    const auto entry = [&](int64_t block, int64_t n) {
      return words_ + l_.entries + (by_query[block * 2] + n) * MaskLayout::kEntry;
    };
    for (int64_t q = 0; q < plane.blocks_q; ++q) {
      for (int64_t n = 0; n < by_query[q * 2 + 1]; ++n) ++lists[entry(q, n)[0] * 2 + 1];
    }
    int64_t at = min64(entries_[static_cast<size_t>(plane.first_q)], l_.capacity);
    for (int64_t k = 0; k < plane.blocks_k; ++k) {
      lists[k * 2] = static_cast<int32_t>(at);
      at += lists[k * 2 + 1];
      lists[k * 2 + 1] = 0;
    }
    for (int64_t q = 0; q < plane.blocks_q; ++q) {
      const int32_t count = by_query[q * 2 + 1];
      for (int32_t n = 0; n < count; ++n) {
        const int32_t* const e = entry(q, n);
        int32_t* const list = lists + e[0] * 2;
        int32_t* const to =
            words_ + l_.key_entries + (int64_t{list[0]} + list[1]++) * MaskLayout::kKeyEntry;
        to[0] = static_cast<int32_t>(q);
        to[1] = e[1];
        to[2] = n;
        to[3] = count;
      }
    }
  }

  void make_order(int64_t lists, int64_t count, int32_t* order) const {
    std::iota(order, order + count, 0);
    const auto entries = [&](int32_t n) { return max64(words_[lists + int64_t{n} * 2 + 1], 0); };
    std::stable_sort(order, order + count,
                     [&](int32_t a, int32_t b) { return entries(a) > entries(b); });
  }

  const AttentionProblem& p_;
  const MaskArgs& a_;
  const MaskLayout l_;
  const MaskRows rows_;
  int32_t* const words_;
  std::vector<std::vector<Found>> found_;   // [block of queries]
  std::vector<int64_t> entries_, partial_;  // [block of queries]: of all before it
};

}  // namespace

Status pack_mask(const AttentionProblem& p, const MaskArgs& callers) {
  // The launch reads the caller's numbers once: what is checked is what is used.
  MaskArgs a = callers;
  std::vector<int32_t> own_q, own_k;
  const auto own = [&](const int32_t*& numbers, std::vector<int32_t>& copy) {
    if (!numbers) return;
    for (int64_t b = 0; b <= p.batch; ++b) copy.push_back(read_once(numbers + b));
    numbers = copy.data();
  };
  own(a.cu_seqlens_q, own_q);
  own(a.cu_seqlens_k, own_k);
  if (a.cu_seqlens_q) {
    STROBE_RETURN_IF_ERROR(
        check_cumulative("cu_seqlens_q", "q", a.cu_seqlens_q, p.batch, p.total_q, p.seqlen_q));
  }
  if (a.cu_seqlens_k) {
    STROBE_RETURN_IF_ERROR(
        check_cumulative("cu_seqlens_k", "k", a.cu_seqlens_k, p.batch, p.total_k, p.seqlen_k));
  }
  Packer(p, a).run();
  return {};
}

}  // namespace strobe::cpu
