// A mask as data, packed: where its lists and bits lie, and how they are asked. strobe.h describes
// the words that strobe_mask_pack writes (core/mask_pack.cpp); all that read them ask here.
//
// The same mask is there twice: the lists of blocks of queries, with the blocks of keys that each
// sees, and the lists of blocks of keys, with the blocks of queries that see each. The bits of a
// block that is seen in part are there twice as well, by queries and by keys.
#ifndef STROBE_CORE_PACKED_MASK_H_
#define STROBE_CORE_PACKED_MASK_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/mask.h"
#include "core/sequence.h"

namespace strobe {

/// Where the sections of a packed mask lie. All sizes and places are in words.
struct MaskLayout {
  static constexpr int64_t kHeader = 32, kAlignment = 32;
  static constexpr int64_t kEntry = 2, kKeyEntry = 4;

  int64_t block_q, block_k;
  int64_t blocks_q, blocks_k;  // of all sequences and heads
  int64_t heads;
  int64_t per_sequence_q, per_sequence_k;  // blocks of one sequence and head; of packed rows: -1
  bool one_for_all_sequences;
  int64_t capacity, partial;  // of all lists together
  int64_t lists, entries, order, key_lists, key_entries, key_order, bits, key_bits, end;

  /// p: resolved, with a mask: AttentionProblem, which kernels' headers do without.
  template <typename Problem>
  STROBE_INLINE static constexpr MaskLayout of(const Problem& p) {
    const auto& m = p.mask;
    MaskLayout l{};
    l.block_q = m.block_q;
    l.block_k = m.block_k;
    l.heads = m.heads;
    l.one_for_all_sequences = m.batch == 1;
    l.capacity = m.capacity;
    l.partial = m.partial_capacity;
    const bool packed_k = p.varlen && !p.cache;
    l.per_sequence_q = p.varlen ? -1 : ceil_div(p.seqlen_q, l.block_q);
    l.per_sequence_k = packed_k ? -1 : ceil_div(p.seqlen_k, l.block_k);
    l.blocks_q =
        m.heads * (p.varlen ? p.total_q / l.block_q + p.batch : m.batch * l.per_sequence_q);
    l.blocks_k =
        m.heads * (packed_k ? p.total_k / l.block_k + p.batch : m.batch * l.per_sequence_k);
    int64_t at = kHeader;
    const auto section = [&](int64_t words) {
      const int64_t begin = at;
      at += round_up(words, kAlignment);
      return begin;
    };
    l.lists = section(l.blocks_q * 2);
    l.entries = section(l.capacity * kEntry);
    l.order = section(l.blocks_q);
    l.key_lists = section(l.blocks_k * 2);
    l.key_entries = section(l.capacity * kKeyEntry);
    l.key_order = section(l.blocks_k);
    l.bits = section(l.partial * l.words_of_bits());
    l.key_bits = section(l.partial * l.words_of_bits());
    l.end = at;
    return l;
  }
  /// The rows that a mask is packed for: of each sequence, or of all packed ones.
  template <typename Problem>
  STROBE_INLINE static constexpr int64_t rows_q(const Problem& p) {
    return p.varlen ? p.total_q : p.seqlen_q;
  }
  template <typename Problem>
  STROBE_INLINE static constexpr int64_t rows_k(const Problem& p) {
    return p.varlen && !p.cache ? p.total_k : p.seqlen_k;
  }
  /// Of one block, in either order.
  STROBE_INLINE constexpr int64_t words_of_bits() const { return block_q * (block_k / 32); }
  /// The number of the first block of a sequence and head. row: where the sequence begins in packed
  /// rows.
  STROBE_INLINE constexpr int64_t first_q(int64_t batch, int64_t head, int64_t row) const {
    return first(batch, head, row, per_sequence_q, blocks_q, block_q);
  }
  STROBE_INLINE constexpr int64_t first_k(int64_t batch, int64_t head, int64_t row) const {
    return first(batch, head, row, per_sequence_k, blocks_k, block_k);
  }
  /// From first_k of a head to that of the next one.
  STROBE_INLINE constexpr int64_t head_step_k() const {
    return heads == 1 ? 0 : per_sequence_k < 0 ? blocks_k / heads : per_sequence_k;
  }

 private:
  STROBE_INLINE constexpr int64_t first(int64_t batch, int64_t head, int64_t row,
                                        int64_t per_sequence, int64_t blocks, int64_t size) const {
    if (heads == 1) head = 0;
    if (per_sequence < 0) return head * (blocks / heads) + row / size + batch;
    return ((one_for_all_sequences ? 0 : batch) * heads + head) * per_sequence;
  }
};

/// The lists of one side of a packed mask: of blocks of queries, or of blocks of keys. Numbers of a
/// list are cut to the room that there is, since on a device nobody has checked them.
struct BlockLists {
  const int32_t *lists, *entries;  // of all; null: there is no mask as data
  int64_t width;                   // words of an entry
  int64_t own, other;              // rows of a block of this side, and of those in the entries
  int64_t first;                   // number of the sequence's and head's first list
  int64_t capacity;                // entries that there is room for

  struct Entry {
    int64_t block;
    int64_t bits;  // place of its bits; -1: it is full
  };

  STROBE_INLINE constexpr int64_t count(int64_t list) const {
    return min64(max64(lists[(first + list) * 2 + 1], 0), capacity - place(list));
  }
  STROBE_INLINE constexpr bool over_capacity(int64_t list) const {
    return lists[(first + list) * 2 + 1] < 0;
  }
  STROBE_INLINE constexpr Entry entry(int64_t list, int64_t n) const {
    const int32_t* const e = words(list, n);
    return {e[0], e[1]};
  }
  /// Those of an entry.
  STROBE_INLINE constexpr const int32_t* words(int64_t list, int64_t n) const {
    return entries + (place(list) + n) * width;
  }
  /// The place of a list's first entry among all.
  STROBE_INLINE constexpr int64_t place(int64_t list) const {
    return min64(max64(lists[(first + list) * 2], 0), capacity);
  }
  /// The first entry whose block is not before `block`.
  STROBE_INLINE constexpr int64_t find(int64_t list, int64_t block) const {
    return find(words(list, 0), width, count(list), block);
  }
  /// The same of `count` entries that lie there, of `width` words each.
  STROBE_INLINE static constexpr int64_t find(const int32_t* entries, int64_t width, int64_t count,
                                              int64_t block) {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (entries[middle * width] < block) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

/// What a packed mask says of a block pair.
struct PairBits {
  bool some;               // some pair is allowed
  const uint32_t* bits;    // [query][key / 32] of the pair of blocks; null: all pairs are allowed
  const uint32_t* by_key;  // [key][query / 32]
};

/// The packed mask of one head of a sequence. Without a mask as data it allows everything, and
/// nobody asks it more than `there`.
struct HeadMask {
  BlockLists queries, keys;
  const uint32_t *bits, *key_bits;  // of the whole mask
  int64_t words_of_bits, partial;   // partial: blocks that there is room for

  STROBE_INLINE constexpr bool there() const { return queries.lists != nullptr; }
  /// Whether the query's block is over capacity: its rows are NaN.
  STROBE_INLINE constexpr bool lacks_room(int64_t query) const {
    return queries.over_capacity(query / block_q());
  }
  STROBE_INLINE constexpr int64_t block_q() const { return queries.own; }
  STROBE_INLINE constexpr int64_t block_k() const { return queries.other; }

  STROBE_INLINE static constexpr HeadMask of(const int32_t* words, const MaskLayout& l,
                                             const SequenceRows& s, int64_t head) {
    if (!words) return {};
    const auto* const bits = reinterpret_cast<const uint32_t*>(words);
    return {{words + l.lists, words + l.entries, MaskLayout::kEntry, l.block_q, l.block_k,
             l.first_q(s.batch, head, s.q_row), l.capacity},
            {words + l.key_lists, words + l.key_entries, MaskLayout::kKeyEntry, l.block_k,
             l.block_q, l.first_k(s.batch, head, s.k_row), l.capacity},
            bits + l.bits,
            bits + l.key_bits,
            l.words_of_bits(),
            l.partial};
  }

  STROBE_INLINE constexpr PairBits at(BlockLists::Entry e) const {
    if (e.bits < 0) return {true, nullptr, nullptr};
    const int64_t first = min64(e.bits, partial - 1) * words_of_bits;
    return {true, bits + first, key_bits + first};
  }
  /// Of the pair of blocks that holds this query and this key.
  STROBE_INLINE constexpr PairBits pair(int64_t query, int64_t key) const {
    const int64_t list = query / block_q(), block = key / block_k();
    const int64_t n = queries.find(list, block);
    if (n == queries.count(list)) return {};
    const BlockLists::Entry e = queries.entry(list, n);
    return e.block == block ? at(e) : PairBits{};
  }
  /// The 32 keys from `key` on, a multiple of 32, that a query is allowed, of a pair of blocks.
  STROBE_INLINE constexpr uint32_t keys_of(const PairBits& pair, int64_t query, int64_t key) const {
    if (!pair.some) return 0;
    return pair.bits ? *words(pair, query, key) : ~uint32_t{0};
  }
  /// The words of a query's bits from that on which has the key; of a pair that has bits.
  STROBE_INLINE constexpr const uint32_t* words(const PairBits& pair, int64_t query,
                                                int64_t key) const {
    return pair.bits + query % block_q() * (block_k() / 32) + key % block_k() / 32;
  }
  /// The 32 queries from `query` on, a multiple of 32, that are allowed a key.
  STROBE_INLINE constexpr uint32_t queries_of(const PairBits& pair, int64_t query,
                                              int64_t key) const {
    if (!pair.some) return 0;
    return pair.by_key ? *key_words(pair, query, key) : ~uint32_t{0};
  }
  /// The words of a key's bits from that on which has the query; of a pair that has bits.
  STROBE_INLINE constexpr const uint32_t* key_words(const PairBits& pair, int64_t query,
                                                    int64_t key) const {
    return pair.by_key + key % block_k() * (block_q() / 32) + query % block_q() / 32;
  }
  STROBE_INLINE constexpr bool allows(int64_t query, int64_t key) const {
    return keys_of(pair(query, key), query, key / 32 * 32) >> (key % 32) & 1;
  }

  /// visit(first key, bits) for runs of 32 keys in which the query sees some, ascending, until it
  /// returns true. seen: the keys that rule and lengths let the query see. Returns whether it did.
  template <typename Visit>
  STROBE_INLINE constexpr bool any_keys(int64_t query, Range seen, const Visit& visit) const {
    const int64_t list = query / block_q();
    return any_runs(queries, list, seen, visit,
                    [&](const PairBits& pair, int64_t key) { return keys_of(pair, query, key); });
  }
  /// The same for the queries that see a key.
  template <typename Visit>
  STROBE_INLINE constexpr bool any_queries(int64_t key, Range seeing, const Visit& visit) const {
    const int64_t list = key / block_k();
    return any_runs(keys, list, seeing, visit, [&](const PairBits& pair, int64_t query) {
      return queries_of(pair, query, key);
    });
  }
  STROBE_INLINE constexpr bool sees_some(int64_t query, Range seen) const {
    return any_keys(query, seen, [](int64_t, uint32_t) { return true; });
  }

 private:
  template <typename Visit, typename Word>
  STROBE_INLINE constexpr bool any_runs(const BlockLists& lists, int64_t list, Range range,
                                        const Visit& visit, const Word& word) const {
    if (range.empty()) return false;
    const int64_t count = lists.count(list);
    for (int64_t n = lists.find(list, range.begin / lists.other); n < count; ++n) {
      const BlockLists::Entry e = lists.entry(list, n);
      const Range rows = intersect({e.block * lists.other, (e.block + 1) * lists.other}, range);
      if (rows.empty()) return false;
      for (int64_t row = rows.begin / 32 * 32; row < rows.end; row += 32) {
        uint32_t some = word(at(e), row);
        if (row < rows.begin) some &= ~uint32_t{0} << (rows.begin - row);
        if (rows.end - row < 32) some &= ~(~uint32_t{0} << (rows.end - row));
        if (some != 0 && visit(row, some)) return true;
      }
    }
    return false;
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_PACKED_MASK_H_
