// The walks of the CUDA kernels: which blocks a tile goes through, asked for by the mask, the
// tile's rows, and the lists of its head. Kernels go from place to place and ask the walk for the
// block (core/walk.h), so that walks of another type can stand here.
//
// The mask is that of the rule, which all heads of a sequence have (masks_differ_by_head). Lists
// are a head's own: each query head of a sequence may leave out other blocks. Three kinds of tiles
// hold more than one head:
//
//   a tile of keys    in the backward. The query heads of its item take their turns with it, each
//                     through its own walk (backward/steps.h)
//   a packed tile     of queries, for Hopper's prompts over a cache. Their time is that of the
//                     products, and the blocks of a head that are not another's would be multiplied
//                     for both: so heads are packed where they have one walk alone
//   a span            in decoding. Its time is that of reading keys, and a block is read for all
//                     heads at once: so its walk has the blocks of all of them, which are no more
//                     than their own walks would have one after the other, and a row leaves out
//                     those that are not its head's (OwnBlocks)
//
// With STROBE_RANDOM_WALKS, which tests build with, walks are lists that leave out random blocks
// (core/random_blocks.h). Else they are intervals, there are no lists, and who hands them on
// compiles to nothing.
#ifndef STROBE_CUDA_COMMON_WALKS_H_
#define STROBE_CUDA_COMMON_WALKS_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/mask.h"
#include "core/walk.h"
#include "cuda/common/params.h"
#if STROBE_RANDOM_WALKS
#include "core/list_walk.h"
#endif

namespace strobe::cuda {

#if STROBE_RANDOM_WALKS

inline constexpr bool kWalksAreLists = true;

/// The walk of a tile, of blocks of 32 rows or more, and what is needed of it to load the blocks.
template <typename Int>
using WalkOf = ListWalk<Int, 1>;
template <typename Int>
using BlocksOf = BlockList<Int, 1>;

/// What the lists of query heads of a sequence are made of. Those of several heads have the blocks
/// of all of them, and full are those that are so for each.
struct WalkLists {
  RandomBlocks blocks;
  int64_t sequence, first_query;  // what query 0 of the masks is in the sequence
  int32_t head_begin, head_end;

  STROBE_INLINE static constexpr WalkLists of(const CommonParams& p, int64_t sequence, int32_t head,
                                              int64_t first_query = 0) {
    return {p.random_blocks, sequence, first_query, head, head + 1};
  }
  STROBE_INLINE static constexpr WalkLists of_heads(const CommonParams& p, int64_t sequence,
                                                    int32_t head_begin, int32_t head_end) {
    return {p.random_blocks, sequence, 0, head_begin, head_end};
  }
  STROBE_INLINE constexpr bool hides_all(Range queries, Range keys, bool& some) const {
    bool all = true;
    for (int32_t head = head_begin; head < head_end; ++head) {
      all &= blocks.hides_all(sequence, head,
                              {queries.begin + first_query, queries.end + first_query}, keys, some);
    }
    return all;
  }
  STROBE_INLINE static constexpr int64_t rows(int64_t size) { return size; }
  STROBE_INLINE static constexpr int64_t rows(PowerOfTwo size) { return int64_t{1} << size.log2; }
};

/// Whether query heads of a sequence may have different walks.
STROBE_INLINE constexpr bool walks_differ_by_head(const CommonParams& p) {
  return p.random_blocks.seed != 0 && p.random_blocks.by_head != 0;
}

template <typename Int, typename Size>
STROBE_INLINE constexpr WalkOf<Int> key_walk(const WalkLists& lists, const BasicMask<Int>& mask,
                                             Range queries, Size size) {
  const int64_t rows = lists.rows(size);
  return WalkOf<Int>::of(key_walk(mask, queries, size), [&](int64_t block, bool& some) {
    return lists.hides_all(
        queries, {block * rows, min64((block + 1) * rows, static_cast<int64_t>(mask.seqlen_k))},
        some);
  });
}
template <typename Int, typename Size>
STROBE_INLINE constexpr WalkOf<Int> query_walk(const WalkLists& lists, const BasicMask<Int>& mask,
                                               Range keys, Size size) {
  const int64_t rows = lists.rows(size);
  return WalkOf<Int>::of(query_walk(mask, keys, size), [&](int64_t block, bool& some) {
    return lists.hides_all(
        {block * rows, min64((block + 1) * rows, static_cast<int64_t>(mask.seqlen_q))}, keys, some);
  });
}
/// A part of a list has its entries.
template <typename Int>
STROBE_INLINE constexpr WalkOf<Int> part_of_key_walk(const WalkLists& lists,
                                                     const BasicMask<Int>& mask, Range tile,
                                                     Range part, int64_t size) {
  const IntervalWalk<Int> own = key_walk(mask, part, size);
  const WalkOf<Int> all = key_walk(lists, mask, tile, size);
  WalkOf<Int> walk = all.within(own.begin, own.end).all_partial();
  for (Int place = walk.begin; place < walk.end; ++place) {
    const Int block = all.block(place);
    if (own.is_full(block)) walk.full.add(block);
  }
  return walk;
}

/// Rows one by one, of those that lie in a list's blocks: places count them.
struct ListedRows {
  WalkOf<int64_t> list;  // of blocks of `size` rows
  Range rows;
  int64_t size;
  int64_t begin, end;

  STROBE_INLINE static constexpr ListedRows of(const WalkOf<int64_t>& list, Range rows,
                                               int64_t size) {
    ListedRows r{list, rows, size, 0, 0};
    for (int64_t place = list.begin; place < list.end; ++place) r.end += r.part(place).size();
    return r;
  }
  STROBE_INLINE constexpr bool empty() const { return end <= begin; }
  STROBE_INLINE constexpr int64_t block(int64_t place) const {
    int64_t at = list.begin;
    for (; place >= part(at).size(); ++at) place -= part(at).size();
    return part(at).begin + place;
  }

 private:
  STROBE_INLINE constexpr Range part(int64_t place) const {
    const int64_t first = list.block(place) * size;
    return intersect(rows, {first, first + size});
  }
};
using RowWalk = ListedRows;

STROBE_INLINE constexpr RowWalk keys_one_by_one(const WalkLists& lists, const Mask& mask,
                                                Range queries) {
  return ListedRows::of(key_walk(lists, mask, queries, lists.blocks.keys), mask.kv_range(queries),
                        lists.blocks.keys);
}
STROBE_INLINE constexpr RowWalk single_keys(const WalkLists& lists, const Mask& mask,
                                            int64_t query) {
  return keys_one_by_one(lists, mask, {query, query + 1});
}
STROBE_INLINE constexpr RowWalk single_queries(const WalkLists& lists, const Mask& mask,
                                               int64_t key) {
  const Range keys{key, key + 1};
  return ListedRows::of(query_walk(lists, mask, keys, lists.blocks.queries), mask.q_range(keys),
                        lists.blocks.queries);
}
STROBE_INLINE constexpr bool visits_before(const WalkLists& lists, const Mask& mask, Range queries,
                                           const int32_t& end, int64_t size) {
  const WalkOf<int64_t> walk = key_walk(lists, mask, queries, size);
  return !walk.empty() && walk.block(walk.begin) * size < end;
}

/// A row of a tile that goes through the blocks of several heads: which of these are its head's.
struct OwnBlocks {
  WalkLists lists;
  int64_t query;

  STROBE_INLINE static constexpr OwnBlocks of(const CommonParams& p, int64_t sequence, int32_t head,
                                              int64_t query) {
    return {WalkLists::of(p, sequence, head), query};
  }
  STROBE_INLINE constexpr bool have(int64_t key) const {
    bool some = false;
    return !lists.hides_all({query, query + 1}, {key, key + 1}, some);
  }
  STROBE_INLINE constexpr bool meet(Range keys) const {
    bool some = false;
    return !keys.empty() && !lists.hides_all({query, query + 1}, keys, some);
  }
};

#else

inline constexpr bool kWalksAreLists = false;

template <typename Int>
using WalkOf = IntervalWalk<Int>;
template <typename Int>
using BlocksOf = BlockInterval<Int>;
using RowWalk = IntervalWalk<int64_t>;

/// The lists of a query head of a sequence, or of several heads together: none. first_query: what
/// query 0 of the masks is in the sequence.
struct WalkLists {
  STROBE_INLINE static constexpr WalkLists of(const CommonParams&, int64_t /*sequence*/,
                                              int32_t /*head*/, int64_t /*first_query*/ = 0) {
    return {};
  }
  STROBE_INLINE static constexpr WalkLists of_heads(const CommonParams&, int64_t /*sequence*/,
                                                    int32_t /*head_begin*/, int32_t /*head_end*/) {
    return {};
  }
};
/// Whether query heads of a sequence may have different walks.
STROBE_INLINE constexpr bool walks_differ_by_head(const CommonParams&) { return false; }

/// Walk of a tile of queries: blocks of `size` keys that some of the queries see. Size: int64_t, or
/// PowerOfTwo.
template <typename Int, typename Size>
STROBE_INLINE constexpr WalkOf<Int> key_walk(WalkLists, const BasicMask<Int>& mask, Range queries,
                                             Size size) {
  return key_walk(mask, queries, size);
}
/// Walk of a tile of keys: blocks of `size` queries that see some of the keys.
template <typename Int, typename Size>
STROBE_INLINE constexpr WalkOf<Int> query_walk(WalkLists, const BasicMask<Int>& mask, Range keys,
                                               Size size) {
  return query_walk(mask, keys, size);
}
/// Walk of a part of a tile's queries, whose places are those of the walk of the tile.
template <typename Int>
STROBE_INLINE constexpr WalkOf<Int> part_of_key_walk(WalkLists, const BasicMask<Int>& mask,
                                                     Range /*tile*/, Range part, int64_t size) {
  return key_walk(mask, part, size);
}
/// Walk of a tile of queries through the single keys that some of them see.
STROBE_INLINE constexpr RowWalk keys_one_by_one(WalkLists, const Mask& mask, Range queries) {
  return key_walk(mask, queries, 1);
}
/// Walk of one query through the single keys that it sees, and of one key through the queries that
/// see it: what computes a row again from its pairs goes through these.
STROBE_INLINE constexpr RowWalk single_keys(WalkLists, const Mask& mask, int64_t query) {
  return single_keys(mask, query);
}
STROBE_INLINE constexpr RowWalk single_queries(WalkLists, const Mask& mask, int64_t key) {
  return single_queries(mask, key);
}
/// Whether the walk of a tile of queries, in blocks of `size` keys, has a block before key `end`.
STROBE_INLINE constexpr bool visits_before(WalkLists, const Mask& mask, Range queries,
                                           const int32_t& end, int64_t /*size*/) {
  const Range keys = mask.kv_range(queries);
  return !keys.empty() && keys.begin < end;
}

/// A row of a tile that goes through the blocks of several heads: which of these are its head's.
struct OwnBlocks {
  STROBE_INLINE static constexpr OwnBlocks of(const CommonParams&, int64_t /*sequence*/,
                                              int32_t /*head*/, int64_t /*query*/) {
    return {};
  }
  /// Whether they have the one that a key is in.
  STROBE_INLINE constexpr bool have(int64_t /*key*/) const { return true; }
  /// Whether some of these keys, which the mask lets the row see, are in one of them.
  STROBE_INLINE constexpr bool meet(Range keys) const { return !keys.empty(); }
};

#endif

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_WALKS_H_
