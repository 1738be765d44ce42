// Decoding in float32 for one instruction set; decode.h says how the work is cut, and
// decode-products-inl.h how it lies in the vectors.
#ifndef STROBE_CPU_DECODE_INL_H_
#define STROBE_CPU_DECODE_INL_H_

#include "cpu/cache-inl.h"
#include "cpu/decode-products-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/score-inl.h"
#include "cpu/walks.h"

namespace strobe::cpu::STROBE_ISA {

/// The most queries of a sequence that is decoded (InstructionSet::most_decoded). In a tile of
/// forward-inl.h, whose lanes are queries, a few of them leave most of a vector empty. Here lanes
/// are dimensions, and the sum over the lanes costs the more the fewer dimensions there are.
/// Measured with 16 lanes of float32: narrower vectors are full sooner, and of pairs a tile
/// multiplies twice as many.
static int64_t most_decoded(const AttentionProblem& p) {
  const int64_t dims = p.head_dim + p.head_dim_v;
  return kLanes < 16 || kPairs || dims < 64 ? kAlwaysDecoded : dims < 128 ? 12 : 24;
}

struct DecodeScratch {
  float* q;                    // [key head][row][dim]
  float* weights;              // [key head][row][kDecodeKeys]
  float* alpha;                // [key head][row]: what O so far is multiplied by
  Range* seen;                 // [row]: keys that the rule lets its query see
  uint64_t* shown[2];          // [key head][row]: keys that it sees of a block, and of the next
  float* bias;                 // [kDecodeKeys], of one row
  float *root, *again, *tree;  // partial results; tree: the nodes above place 0
  float* row;                  // one row of Q or O
  std::byte* no_value;         // a row of V for a key that is hidden: zeros in every type
  std::byte *k, *v;            // rows with zeros behind; as float32 where they are made so
  float *k_scales, *v_scales;  // [key head][kDecodeKeys], of a block's rows
  const std::byte **k_rows[2], **v_rows;  // of a block of keys, and K's of the next
};

/// Whether something besides rule and lengths may hide a key from a query.
STROBE_SIMD bool hides_pairs(const AttentionProblem& p) {
  return p.has_bias || p.mask.kind != STROBE_MASK_NONE;
}

STROBE_SIMD DecodeScratch carve_decode(Arena& arena, const AttentionProblem& p,
                                       const DecodeShape& shape) {
  const bool as_tiles = p.batch_invariant != 0;
  const int64_t rows = shape.heads * shape.item_rows;
  DecodeScratch s;
  s.q = arena.take<float>(rows * shape.dim);
  s.weights = arena.take<float>(rows * kDecodeKeys);
  s.alpha = arena.take<float>(as_tiles ? rows : 0);
  s.seen = arena.take<Range>(shape.item_rows);
  for (uint64_t*& shown : s.shown) shown = arena.take<uint64_t>(rows);
  s.bias = arena.take<float>(p.has_bias ? kDecodeKeys : 0);
  s.root = arena.take<float>(shape.partial_floats());
  s.again = arena.take<float>(shape.partial_floats());
  s.tree = arena.take<float>((shape.levels + 1) * shape.partial_floats());
  s.row = arena.take<float>(2 * max64(shape.dim, shape.dim_v));
  s.no_value = arena.take<std::byte>(hides_pairs(p) ? shape.dim_v * 4 : 0);
  s.k = arena.take<std::byte>((as_tiles ? kDecodeKeys : kDecodeMicroKeys) * shape.dim * 4);
  s.v = arena.take<std::byte>(kDecodeKeys * shape.dim_v * 4);
  const int64_t scales = shape.heads * kDecodeKeys;
  s.k_scales = arena.take<float>(has_scales(shape.k_dtype) ? scales : 0);
  s.v_scales = arena.take<float>(has_scales(shape.v_dtype) ? scales : 0);
  s.k_rows[0] = arena.take<const std::byte*>(kDecodeKeys);
  s.k_rows[1] = arena.take<const std::byte*>(kDecodeKeys);
  s.v_rows = arena.take<const std::byte*>(kDecodeKeys);
  return s;
}

/// Which query of which head row n of an item's partial results is.
struct DecodedRow {
  int64_t query, head;
};
STROBE_SIMD DecodedRow decoded_row(const ForwardContext& c, const DecodeItem& item, int64_t n) {
  const int64_t rows = item.rows.size(), row = item.rows.begin + n % rows;
  return {row / c.group(), (item.heads.begin + n / rows) * c.group() + row % c.group()};
}

static void decode_merge(const ForwardContext& c, const DecodeItem& item, const Partial& left,
                         const Partial& right) {
  const int64_t dim = round_up(c.problem.head_dim_v, kPair);
  for (int64_t n = 0; n < item.row_count(); ++n) {
    const ScoreOptions options = score_options(c, item.batch, decoded_row(c, item, n).head);
    const float unit = score_unit(options) * kLog2e;
    const Merging merging(set(left.max[n]), set(right.max[n]), unit);
    float* const out = left.out + n * dim;
    const float* const more = right.out + n * dim;
    for (int64_t e = 0; e < dim; e += kLanes) {
      store(merging.out(load(out + e), load(more + e)), out + e);
    }
    left.sum[n] = hn::GetLane(merging.sum(set(left.sum[n]), set(right.sum[n])));
    left.max[n] = hn::GetLane(merging.max);
  }
}

/// The result of no keys.
STROBE_SIMD void clear_partial(const DecodeItem& item, const DecodeShape& shape,
                               const Partial& result) {
  const int64_t rows = item.row_count();
  __builtin_memset(result.out, 0, static_cast<size_t>(rows * shape.dim_v) * sizeof(float));
  for (int64_t n = 0; n < rows; ++n) {
    result.max[n] = -kInfinity;
    result.sum[n] = 0;
  }
}

/// An item at work. What reads rows of K or V is a function of their element T, of which `read`
/// has those for K's and those for V's, which may be another: all else is compiled once.
struct Decode {
  const ForwardContext& c;
  const DecodeItem& item;
  const DecodeShape& shape;
  const Sequence sequence;
  const DecodeScratch& s;
  const Partial& root;
  const float weight_factor;  // of O, not of the sum
  template <typename T>
  static constexpr bool kFloats = ElementOf<T>::kValues == 1 && !ElementOf<T>::kRowScale;
  /// Whether rows get the bits that a tile of queries gives them. K and V are multiplied as floats
  /// then.
  const bool as_tiles = c.problem.batch_invariant != 0;
  const bool packed = packs_queries();
  const bool drops = drops_fetches();
  const struct Readers {
    void (Decode::*load_queries)() const;
    void (Decode::*scores)(Range keys, const std::byte* const* k_rows, Ahead& ahead) const;
    void (Decode::*values)(Range keys, const uint64_t* shown, const Partial& result,
                           Ahead& ahead) const;
  } read = readers_of(shape, as_tiles);

  static Readers readers_of(const DecodeShape& shape, bool as_tiles) {
    Readers readers{};
    for_element(shape.k_dtype, [&]<typename T>(T*) {
      readers.load_queries = &Decode::load_queries<T>;
      readers.scores = &Decode::scores<T>;
      if constexpr (kFloats<T>) {
        if (as_tiles) readers.scores = &Decode::scores_as_tiles<T>;
      }
    });
    for_element(shape.v_dtype, [&]<typename T>(T*) { readers.values = &Decode::values<T>; });
    return readers;
  }

  /// Whether Q stays in bf16. Queries that were rotated are no bf16 numbers any more.
  bool packs_queries() const {
#if HWY_TARGET == HWY_AVX3
    return shape.k_dtype == STROBE_BFLOAT16 && c.problem.rotary_dim == 0 && !as_tiles &&
           has_fast_bf16_products();
#else
    return false;
#endif
  }

  /// Whether rows of K, or of V, become float32 before they are multiplied.
  STROBE_INLINE bool converts_keys() const { return shape.k_dtype != c.k.dtype; }
  STROBE_INLINE bool converts_values() const { return shape.v_dtype != c.v.dtype; }
  STROBE_INLINE int64_t query(int64_t row) const { return row / c.group(); }
  STROBE_INLINE int64_t head(int64_t head_kv, int64_t row) const {
    return head_kv * c.group() + row % c.group();
  }
  STROBE_INLINE Range keys(int64_t block) const {
    const Range all = sequence.mask.kv_range({0, sequence.mask.seqlen_q});
    return intersect(all, {block * kDecodeKeys, (block + 1) * kDecodeKeys});
  }
  STROBE_INLINE Partial node(int64_t place) const {
    return place == 0 ? root : shape.partial(s.tree + (place - 1) * shape.partial_floats());
  }
  STROBE_INLINE static int64_t head_bytes(const Tensor& t) { return t.bytes(t.head_stride); }
  /// Bytes from the first head's row to where the values that the item reads of the row begin: less
  /// than 0 where the heads descend in memory.
  STROBE_INLINE int64_t run_begin(const Tensor& t) const {
    return min64(0, (item.heads.size() - 1) * head_bytes(t));
  }
  /// Bytes of these values, from the first one to the last one's end.
  STROBE_INLINE int64_t run_bytes(const Tensor& t, int64_t dim) const {
    const int64_t heads = (item.heads.size() - 1) * head_bytes(t);
    return max64(heads, -heads) + t.run(dim);
  }

  template <typename T>
  void load_queries() const {
    for (int64_t r = item.rows.begin; r < item.rows.end; ++r) {
      s.seen[r - item.rows.begin] = sequence.mask.row(query(r));
    }
    for (int64_t h = item.heads.begin, n = 0; h < item.heads.end; ++h) {
      for (int64_t r = item.rows.begin; r < item.rows.end; ++r, ++n) {
        const int64_t at = query(r);
        for (int64_t i = 0; i < shape.dim; i += kLanes) store(hn::Zero(f32), s.row + i);
        load_query_rows(c, sequence, head(h, r), {at, at + 1}, s.row, shape.dim);
        const float factor = q_factor(score_options(c, item.batch, head(h, r)));
        float* const to = s.q + n * shape.dim;
#if HWY_TARGET == HWY_AVX3
        if (packed) {
          pack_row(s.row, shape.dim, factor, to);
          continue;
        }
#endif
        if (as_tiles) {
          order_row<float>(s.row, shape.dim, factor, to);
        } else {
          order_row<T>(s.row, shape.dim, factor, to);
        }
      }
    }
  }

  /// The bits of [begin, end), of 64.
  STROBE_INLINE static uint64_t bits_of(Range keys) {
    static_assert(kDecodeKeys == 64);
    return keys.empty() ? 0 : (~uint64_t{0} >> (64 - keys.size())) << keys.begin;
  }
  /// From the first key that is shown to behind the last one.
  STROBE_INLINE static Range range_of(uint64_t shown) {
    return shown == 0 ? Range{0, 0} : Range{__builtin_ctzll(shown), 64 - __builtin_clzll(shown)};
  }
  /// Which keys of a block each row sees by rule, lengths and a mask as data, to `shown`: bit j is
  /// the block's key j of those that the item reads. Returns whether some row sees one.
  bool see(int64_t block, uint64_t* shown) const {
    const Range keys = this->keys(block);
    uint64_t some = 0;
    // Rows of one list of the mask follow each other.
    int64_t list = -1, list_head = -1;
    PairBits pair{};
    for (int64_t h = item.heads.begin, n = 0; h < item.heads.end; ++h) {
      for (int64_t r = item.rows.begin; r < item.rows.end; ++r, ++n) {
        const Range seen = intersect(s.seen[r - item.rows.begin], keys);
        const int64_t at = query(r), own = head(h, r);
        uint64_t bits = 0;
        if (!seen.empty() && !leaves_out(sequence, own, at, keys)) {
          bits = bits_of({seen.begin - keys.begin, seen.end - keys.begin});
        }
        if (c.mask && bits != 0) {
          const HeadMask mask = c.mask_of(sequence, own);
          const int64_t its_head = c.mask_layout.heads == 1 ? 0 : own;
          if (at / mask.block_q() != list || its_head != list_head) {
            list = at / mask.block_q();
            list_head = its_head;
            pair = mask.pair(at, keys.begin);
          }
          bits &= shown_by(mask, pair, at, keys.begin);
        }
        shown[n] = bits;
        some |= bits;
      }
    }
    return some != 0;
  }
  /// The keys from `key` to the end of its block that a mask as data shows to a query. The mask's
  /// blocks are whole ones of these. pair: of the mask's blocks that hold the two.
  STROBE_INLINE static uint64_t shown_by(const HeadMask& mask, const PairBits& pair, int64_t query,
                                         int64_t key) {
    if (!pair.some) return 0;
    if (!pair.bits) return ~uint64_t{0};
    const uint32_t* const words = mask.words(pair, query, key / kDecodeKeys * kDecodeKeys);
    return (words[0] | uint64_t{words[1]} << 32) >> key % kDecodeKeys;
  }
  /// The first block from this one on that some row sees a key of, where a mask as data leaves
  /// blocks out; else this one. What its rows see is in `shown` then.
  int64_t first_shown(int64_t block, uint64_t* shown) const {
    while (block < item.blocks.end && !see(block, shown) && c.mask) ++block;
    return block;
  }

  /// Where the rows of a block of keys lie in a tensor, for the item's first key head; rounded up
  /// to whole steps with the last row.
  void find_rows(const Tensor& t, Range keys, const std::byte** rows) const {
    const RowView view = c.key_rows(t, sequence, item.heads.begin);
    const int64_t n = keys.size();
    for (int64_t j = 0; j < n;) {
      const int64_t end = view.run_end(keys.begin + j, keys.end) - keys.begin;
      const std::byte* row = view.row(keys.begin + j);
      for (; j < end; ++j, row += view.row_bytes) rows[j] = row;
    }
    for (int64_t j = n; j < round_up(n, kDecodeMicroKeys); ++j) rows[j] = rows[n - 1];
  }

  /// The scales of a block's rows, for each of the item's key heads: to[head][kDecodeKeys], as they
  /// multiply codes; zeros behind the last row.
  void find_scales(const Tensor& t, Range keys, float* to) const {
    const RowView view = c.key_rows(t, sequence, item.heads.begin);
    const VF unit = set(code_unit(t.dtype));
    const int64_t n = keys.size(), head = t.scales.bytes(t.scales.head_stride);
    const bool half = t.scales.dtype == STROBE_FLOAT16;
    for (int64_t h = 0; h < item.heads.size(); ++h, to += kDecodeKeys) {
      HWY_ALIGN uint16_t halves[kDecodeKeys] = {};
      HWY_ALIGN float floats[kDecodeKeys] = {};
      for (int64_t j = 0; j < n;) {
        const int64_t end = view.run_end(keys.begin + j, keys.end) - keys.begin;
        const std::byte* at = view.scale(keys.begin + j) + h * head;
        if (half) {
          for (; j < end; ++j, at += view.scales.row_bytes) __builtin_memcpy(halves + j, at, 2);
        } else {
          for (; j < end; ++j, at += view.scales.row_bytes) __builtin_memcpy(floats + j, at, 4);
        }
      }
      for (int64_t j = 0; j < kDecodeKeys; j += kLanes) {
        const VF scale = half ? load_as_float(reinterpret_cast<const hwy::float16_t*>(halves + j))
                              : load(floats + j);
        store(hn::Mul(usable_scales(scale), unit), to + j);
      }
    }
  }

  /// body(at) for a place in each page that the rows of some blocks touch. bytes: of a row.
  template <typename Body>
  void for_pages(const Tensor& t, Range blocks, int64_t bytes, const Body& body) const {
    blocks = intersect(blocks, item.blocks);
    if (blocks.empty()) return;
    const Range range{keys(blocks.begin).begin, keys(blocks.end - 1).end};
    const RowView view = c.key_rows(t, sequence, item.heads.begin);
    for (int64_t j = range.begin, end; j < range.end; j = end) {
      end = view.run_end(j, range.end);
      const std::byte* row = view.row(j) + run_begin(t);
      // Of rows that share a page one place is enough.
      const bool dense = 0 < view.row_bytes && view.row_bytes < kPageBytes;
      const int64_t rows = dense ? 1 : end - j;
      const int64_t reach = dense ? (end - j - 1) * view.row_bytes + bytes : bytes;
      for (int64_t n = 0; n < rows; ++n, row += view.row_bytes) {
        for (int64_t at = 0; at < reach; at += kPageBytes) body(row + at);
      }
    }
  }
  void open_pages(Range blocks, int64_t k_bytes, int64_t v_bytes) const {
    for_pages(c.k, blocks, k_bytes, open_page);
    for_pages(c.v, blocks, v_bytes, open_page);
    if (c.mask) return;  // which may leave out the blocks behind these
    // The lines that will be loaded the next time, where pages are large.
    const Range next{blocks.end, blocks.end + blocks.size()};
    const auto fetch = [](const std::byte* at) { __builtin_prefetch(at, 0, 2); };
    for_pages(c.k, next, k_bytes, fetch);
    for_pages(c.v, next, v_bytes, fetch);
  }

  /// values: of a row of K.
  template <int kRows, typename T>
  STROBE_INLINE void score(const float* q, int64_t values,
                           const std::byte* const (&k)[kDecodeMicroKeys], float* to) const {
#if HWY_TARGET == HWY_AVX3
    if constexpr (std::is_same_v<T, hwy::bfloat16_t>) {
      if (packed) return score_packed_keys<kRows>(q, shape.dim, values, k, to);
    }
#endif
    score_keys<kRows, T>(q, shape.dim, values, k, to);
  }

  template <typename T>
  void scores(Range keys, const std::byte* const* k_rows, Ahead& ahead) const {
    const int64_t rows = item.rows.size(), dim = c.problem.head_dim;
    const int64_t bytes = head_bytes(c.k);
    const bool copies = !kLoadsParts<T> && dim != shape.dim;
    const int64_t values = copies ? shape.dim : dim;
    // Three quarters of V, and the rest of it while weights are computed.
    const int64_t steps = ceil_div(keys.size(), kDecodeMicroKeys) * item.heads.size();
    const int64_t lines = ceil_div(ahead.lines() * 3 / 4, steps);
    for (int64_t j = 0; j < keys.size(); j += kDecodeMicroKeys) {
      for (int64_t h = 0; h < item.heads.size(); ++h) {
        const std::byte* k[kDecodeMicroKeys];
        for (int i = 0; i < kDecodeMicroKeys; ++i) {
          k[i] = k_rows[j + i] + h * bytes;
          if (!copies) continue;
          std::byte* const copy = s.k + c.k.bytes(i * shape.dim);
          __builtin_memcpy(copy, k[i], static_cast<size_t>(c.k.bytes(dim)));
          k[i] = copy;
        }
        ahead.fetch(lines);
        if (drops && j + kAgainKeys < keys.size()) {
          for (int i = 0; i < kDecodeMicroKeys; ++i) {
            fetch_again(k_rows[j + kAgainKeys + i] + h * bytes, c.k.run(dim));
          }
        }
        for (int64_t r = 0; r < rows; r += kDecodeMicroRows) {
          const int64_t at = h * rows + r;
          for_rows(
              rows - r, [&]<typename R>(R) __attribute__((always_inline)) {
                score<R::value, T>(s.q + at * shape.dim, values, k,
                                   s.weights + at * kDecodeKeys + j);
              });
        }
      }
    }
  }

  /// As `scores`, by sums over ascending dimensions.
  template <typename T>
  void scores_as_tiles(Range keys, const std::byte* const* k_rows, Ahead& ahead) const {
    constexpr int kGroups = kLanes < kDecodeKeys / 2 ? kDecodeKeys / 2 / kLanes : 1;
    constexpr int64_t kKeys = kGroups * kLanes;  // that are multiplied together
    const int64_t rows = item.rows.size(), dim = c.problem.head_dim, count = keys.size();
    const int64_t bytes = head_bytes(c.k), row_size = c.k.bytes(shape.dim);
    const int64_t steps = ceil_div(count, kKeys) * item.heads.size() * (shape.dim / kLanes);
    const int64_t lines = ceil_div(ahead.lines() * 3 / 4, steps);
    for (int64_t h = 0; h < item.heads.size(); ++h) {
      // What is multiplied and fetched past the last key is that key.
      const std::byte* k[kDecodeKeys + kKeys];
      if (converts_keys()) {
        auto* const floats = reinterpret_cast<float*>(s.k);
        load_input_rows(c.key_rows(c.k, sequence, item.heads.begin + h), keys, dim, floats,
                        shape.dim);
        for (int64_t j = 0; j < count; ++j)
          k[j] = reinterpret_cast<const std::byte*>(floats + j * shape.dim);
      } else {
        for (int64_t j = 0; j < count; ++j) {
          k[j] = k_rows[j] + h * bytes;
          if (dim == shape.dim) continue;
          std::byte* const copy = s.k + j * row_size;
          __builtin_memcpy(copy, k[j], static_cast<size_t>(c.k.bytes(dim)));
          k[j] = copy;
        }
      }
      for (int64_t j = count; j < kDecodeKeys + kKeys; ++j) k[j] = k[count - 1];
      for (int64_t j = 0; j < count; j += kKeys) {
        const bool again = drops && !converts_keys() && j + kKeys < count;
        const auto fetch = [&](int64_t i) __attribute__((always_inline)) {
          ahead.fetch(lines);
          const int64_t at = bytes_of<T>(i);
          if (!again || at % 64 != 0) return;
          for (int64_t n = j + kKeys; n < j + 2 * kKeys; ++n) __builtin_prefetch(k[n] + at, 0, 2);
        };
        score_in_order<kGroups, T>(s.q + h * rows * shape.dim, rows, shape.dim, k + j,
                                   s.weights + h * rows * kDecodeKeys + j, fetch);
      }
    }
  }

  /// The weights of one row, its maximum and its sum. shown: the keys of the block that it sees;
  /// bias: null: none.
  template <bool kLinear>
  void weigh(const ScoreOptions& options, int64_t position, int64_t first_key, int64_t count,
             uint64_t shown, const float* bias, float* row, float& max_out, float& sum_out) const {
    VF sum;
    weigh_lanes<kLinear>(options, position, first_key, count, shown, bias, weight_factor,
                         -kInfinity, row, max_out, sum);
    sum_out = sum_lanes(sum);
  }
  /// As `weigh`, in the order of a tile of queries: the maximum takes in the one so far, and alpha
  /// becomes what the old sum and O have to be multiplied by. add_weights has still to be called.
  template <bool kLinear>
  void weigh_as_tiles(const ScoreOptions& options, int64_t position, int64_t first_key,
                      int64_t count, uint64_t shown, float* row, float& max, float& alpha) const {
    const float old = max;
    VF unordered;
    weigh_lanes<kLinear>(options, position, first_key, count, shown, nullptr, 1, old, row, max,
                         unordered);
    const float unit = score_unit(options) * kLog2e, reference = max == -kInfinity ? 0 : max;
    alpha = hn::GetLane(exp2(set(old - reference), unit));
  }
  /// The sums of the rows' weights, each over ascending keys; then the weights are multiplied by
  /// weight_factor. Of several rows at a time, since an addition waits for the one before.
  void add_weights(int64_t count, const Partial& result) const {
    constexpr int64_t kRows = 4;
    const int64_t rows = item.row_count();
    for (int64_t n = 0; n < rows; n += kRows) {
      const float* row[kRows];
      float own[kRows] = {};
      for (int64_t i = 0; i < kRows; ++i) row[i] = s.weights + min64(n + i, rows - 1) * kDecodeKeys;
      for (int64_t j = 0; j < count; ++j) {
        STROBE_UNROLL for (int64_t i = 0; i < kRows; ++i) own[i] += row[i][j];
      }
      for (int64_t i = 0; i < kRows && n + i < rows; ++i) {
        float& sum = result.sum[n + i];
        sum = hn::GetLane(hn::MulAdd(set(sum), set(s.alpha[n + i]), set(own[i])));
      }
    }
    for (int64_t n = 0; weight_factor != 1 && n < rows; ++n)
      scale_row(s.weights + n * kDecodeKeys, round_up(count, kLanes), weight_factor);
  }
  template <bool kLinear>
  STROBE_INLINE void weigh_lanes(const ScoreOptions& options, int64_t position, int64_t first_key,
                                 int64_t count, uint64_t shown, const float* bias, float factor,
                                 float old_max, float* row, float& max_out, VF& sum_out) const {
    const Scorer score{options};
    const VI at = same(position);
    VF max = set(old_max);
    for (int64_t j = 0; j < count; j += kLanes) {
      VF x = load(row + j);
      if constexpr (!kLinear) {
        x = score(x, at, count_from(first_key + j)).value;
        if (bias) x = add_bias(x, load(bias + j));
      }
      x = hn::IfThenElse(lanes_of(shown, j), x, set(-kInfinity));
      store(x, row + j);
      max = hn::Max(x, max);  // the second operand where x is NaN, which the sum shows
    }
    const float largest = hn::GetLane(hn::MaxOfLanes(f32, max));
    const VF reference = set(largest == -kInfinity ? 0 : largest);
    const float unit = score_unit(options) * kLog2e;
    VF sum = hn::Zero(f32);
    for (int64_t j = 0; j < count; j += kLanes) {
      const VF w = exp2(hn::Sub(load(row + j), reference), unit);
      sum = hn::Add(sum, w);
      store(hn::Mul(w, set(factor)), row + j);
    }
    max_out = largest;
    sum_out = sum;
  }

  STROBE_INLINE static hn::Mask<F> lanes_of(uint64_t shown, int64_t first) {
    return bit_lanes(static_cast<uint32_t>(shown >> first));
  }
  /// row[j] *= by[j] for the keys that are shown, and 0 for others, up to a whole vector.
  STROBE_INLINE static void multiply(float* row, const float* by, int64_t count, uint64_t shown) {
    for (int64_t j = 0; j < count; j += kLanes) {
      store(hn::IfThenElseZero(lanes_of(shown, j), hn::Mul(load(row + j), load(by + j))), row + j);
    }
  }
  /// A row's bias, to s.bias; the keys that it hides are shown no more.
  STROBE_INLINE void add_bias_row(int64_t head, int64_t query, Range keys, uint64_t& shown) const {
    load_bias(c.bias.row(sequence.batch, head, query), keys, s.bias);
    for (int64_t j = 0; j < keys.size(); ++j) {
      shown &= ~(uint64_t{s.bias[j] == -kInfinity} << j);
    }
  }

  void weights(Range keys, uint64_t* shown, const Partial& result, Ahead& ahead) const {
    const int64_t rows = item.rows.size(), count = keys.size();
    const int64_t lines = ceil_div(ahead.lines() / 4, item.row_count());
    for (int64_t h = 0, n = 0; h < item.heads.size(); ++h) {
      for (int64_t r = 0; r < rows; ++r, ++n) {
        const int64_t at = item.rows.begin + r, own_head = head(item.heads.begin + h, at);
        const ScoreOptions options = score_options(c, item.batch, own_head);
        const int64_t position = sequence.mask.position(query(at));
        float* const row = s.weights + n * kDecodeKeys;
        const float* const bias = c.bias.data ? s.bias : nullptr;
        if (bias) add_bias_row(own_head, query(at), keys, shown[n]);
        ahead.fetch(lines);
        if (has_scales(shape.k_dtype)) {
          multiply(row, s.k_scales + h * kDecodeKeys, count, shown[n]);
        }
        if (as_tiles) {
          const auto weigh_row =
              options.linear ? &Decode::weigh_as_tiles<true> : &Decode::weigh_as_tiles<false>;
          (this->*weigh_row)(options, position, keys.begin, count, shown[n], row, result.max[n],
                             s.alpha[n]);
        } else if (options.linear) {
          weigh<true>(options, position, keys.begin, count, shown[n], bias, row, result.max[n],
                      result.sum[n]);
        } else {
          weigh<false>(options, position, keys.begin, count, shown[n], bias, row, result.max[n],
                       result.sum[n]);
        }
        if (has_scales(shape.v_dtype)) {
          multiply(row, s.v_scales + h * kDecodeKeys, count, shown[n]);
        }
      }
    }
    if (as_tiles) add_weights(count, result);
  }

  template <typename T>
  void values(Range keys, const uint64_t* shown, const Partial& result, Ahead& ahead) const {
    const int64_t rows = item.rows.size(), dim = c.problem.head_dim_v;
    constexpr int64_t kColumns = kDecodeMicroPairs * kPair;
    const int64_t columns = ceil_div(shape.dim_v, kColumns);
    // The values of a row of V as it is read.
    const int64_t values = kLoadsParts<T> && !converts_values() ? dim : shape.dim_v;
    const int64_t lines = ceil_div(ahead.bytes, 64 * item.heads.size() * columns);
    for (int64_t h = 0; h < item.heads.size(); ++h) {
      const std::byte* const* v = s.v_rows;
      int64_t offset = h * head_bytes(c.v);
      const std::byte* copies[kDecodeKeys];
      if (converts_values()) {
        const RowView view = c.key_rows(c.v, sequence, item.heads.begin + h);
        auto* const floats = reinterpret_cast<float*>(s.v);
        load_input_rows(view, keys, dim, floats, shape.dim_v);
        for (int64_t j = 0; j < keys.size(); ++j) {
          copies[j] = reinterpret_cast<const std::byte*>(floats + j * shape.dim_v);
        }
        v = copies;
        offset = 0;
      } else if (dim != values) {
        for (int64_t j = 0; j < keys.size(); ++j) {
          std::byte* const copy = s.v + c.v.bytes(j * shape.dim_v);
          __builtin_memcpy(copy, v[j] + offset, static_cast<size_t>(c.v.bytes(dim)));
          copies[j] = copy;
        }
        v = copies;
        offset = 0;
      }
      for (int64_t r = 0; r < rows;) {
        // Rows that see the same keys of the block share the values. No row touches others: they
        // might hold NaN.
        const int64_t at = h * rows + r;
        const Range seen = range_of(shown[at]);
        int64_t some = 1;
        while (some < kDecodeMicroRows && r + some < rows && shown[at + some] == shown[at]) ++some;
        const std::byte* seen_values[kDecodeKeys];
        const std::byte* const* own_v = v;
        int64_t own_offset = offset;
        if (shown[at] != bits_of(seen)) {
          for (int64_t j = seen.begin; j < seen.end; ++j) {
            seen_values[j] = shown[at] >> j & 1 ? v[j] + offset : s.no_value;
          }
          own_v = seen_values;
          own_offset = 0;
        }
        for_rows(
            some, [&]<typename R>(R) __attribute__((always_inline)) {
              const float* const weights = s.weights + at * kDecodeKeys;
              float* const out = result.out + at * shape.dim_v;
              const float* const alpha = as_tiles ? s.alpha + at : nullptr;
              const bool again = drops && r == 0 && lines > 0 && !converts_values();
              const auto weigh_pairs = [&]<int kPairs>(Rows<kPairs>, int64_t e)
                  __attribute__((always_inline)) {
                const int64_t part = values - e - (kPairs - 1) * kPair;
                const auto weigh = [&]<bool kPart>(std::bool_constant<kPart>)
                    __attribute__((always_inline)) {
                  weigh_values<R::value, kPairs, T, kPart>(weights, own_v, own_offset, e, part,
                                                           seen, out + e, shape.dim_v, alpha, ahead,
                                                           r == 0 ? lines : 0, again);
                };
                if constexpr (kLoadsParts<T>) {
                  if (part < kPair) return weigh(std::true_type());
                }
                weigh(std::false_type());
              };
              int64_t e = 0;
              for (; e + kColumns <= shape.dim_v; e += kColumns)
                weigh_pairs(Rows<kDecodeMicroPairs>(), e);
              for (; e < shape.dim_v; e += kPair) weigh_pairs(Rows<1>(), e);
            });
        r += some;
      }
    }
  }

  void run() const {
    (this->*read.load_queries)();
    if (c.problem.head_dim != shape.dim) {
      const int64_t keys = as_tiles ? kDecodeKeys : kDecodeMicroKeys;
      __builtin_memset(s.k, 0, static_cast<size_t>(keys * shape.dim) * 4);
    }
    if (c.problem.head_dim_v != shape.dim_v) {
      __builtin_memset(s.v, 0, static_cast<size_t>(kDecodeKeys * shape.dim_v) * 4);
    }
    if (hides_pairs(c.problem)) {
      __builtin_memset(s.no_value, 0, static_cast<size_t>(shape.dim_v) * 4);
    }
    KeyTree tree;
    const int64_t leaf = leaf_blocks(c.problem);
    const auto merge = [&](int64_t place) { decode_merge(c, item, node(place), node(place + 1)); };
    const int64_t k_bytes = run_bytes(c.k, c.problem.head_dim);
    const int64_t v_bytes = run_bytes(c.v, c.problem.head_dim_v);
    const int64_t opened =
        c.mask ? 1 : max64(1, kOpenBytes / (kDecodeKeys * max64(k_bytes, v_bytes)));
    int64_t block = first_shown(item.blocks.begin, s.shown[0]);
    if (block == item.blocks.end) return clear_partial(item, shape, root);
    if (drops) open_pages({block, block + 1}, k_bytes, v_bytes);
    find_rows(c.k, keys(block), s.k_rows[0]);
    for (int64_t n = 0, next; block < item.blocks.end; block = next, ++n) {
      uint64_t* const shown = s.shown[n % 2];
      next = first_shown(block + 1, s.shown[(n + 1) % 2]);
      const Range now = keys(block), then = keys(next);
      if (drops && n % opened == 0) open_pages({next, next + opened}, k_bytes, v_bytes);
      const Partial result = node(tree.top());
      if (as_tiles && (n == 0 || block % leaf == 0)) clear_partial(item, shape, result);
      find_rows(c.v, now, s.v_rows);
      // While K is read, V of the same keys is fetched; while V is read, K of the next.
      Ahead v{s.v_rows, now.size(), v_bytes};
      (this->*read.scores)(now, s.k_rows[n % 2], v);
      if (has_scales(shape.k_dtype)) find_scales(c.k, now, s.k_scales);
      if (has_scales(shape.v_dtype)) find_scales(c.v, now, s.v_scales);
      weights(now, shown, result, v);
      Ahead k{s.k_rows[(n + 1) % 2], 0, k_bytes};
      if (next < item.blocks.end) {
        k.count = then.size();
        find_rows(c.k, then, s.k_rows[(n + 1) % 2]);
      }
      (this->*read.values)(now, shown, result, k);
      const bool ends = (block + 1) % leaf == 0 || block + 1 == item.blocks.end;
      if (ends) tree.add(0, block / leaf, merge);
      for (int64_t hidden = block + 1; hidden < next; ++hidden) tree.leave_out(0, hidden, merge);
    }
    tree.end(merge);
  }
};

STROBE_SIMD DecodeShape shape_of(const ForwardContext& c) {
  return decode_shape(c.problem, c.most_decoded, kPair, leaf_blocks(c.problem));
}

static size_t decode_scratch(const ForwardContext& context) {
  Arena arena;
  carve_decode(arena, context.problem, shape_of(context));
  return arena.used();
}

static int64_t decode_leaf(const AttentionProblem& p) { return leaf_blocks(p); }

/// The tree of the item's blocks, with O times `factor`.
static void decode_tree(const ForwardContext& c, const DecodeItem& item, float factor,
                        const Partial& root, const DecodeScratch& s, const DecodeShape& shape) {
  if (item.blocks.empty()) return clear_partial(item, shape, root);
  Decode{c, item, shape, c.sequence_of_all_heads(item.batch), s, root, factor}.run();
}

/// to[0, n) = the row of O in the order of the dimensions.
STROBE_SIMD void restore_row(int32_t dtype, const float* from, int64_t n, float* to) {
  for_element(
      dtype, [&]<typename T>(T*) __attribute__((always_inline)) { restore_row<T>(from, n, to); });
}

/// Before the division a row of O may have overflowed although the mean that it becomes is finite.
/// This computes the item again with smaller weights, and replaces what is not finite in the output
/// of the rows whose sum is finite.
static void mend_decoded(const ForwardContext& c, const DecodeItem& item, const Partial& result,
                         const DecodeScratch& s, const DecodeShape& shape) {
  const SequenceRows sequence = c.sequence_rows(item.batch);
  // No node of the tree has a sum of weights above its number of keys: over this it stays below
  // 1/2.
  const auto most = static_cast<float>(2 * kDecodeKeys * item.blocks.size());
  float power = 2;
  while (power < most) power *= 2;
  const Partial again = shape.partial(s.again);
  decode_tree(c, item, 1 / power, again, s, shape);
  for (int64_t n = 0; n < item.row_count(); ++n) {
    if (!(result.sum[n] > 0 && result.sum[n] < kInfinity)) continue;
    const auto [query, head] = decoded_row(c, item, n);
    const RowView out = c.query_rows(c.out, sequence, head);
    restore_row(shape.v_dtype, again.out + n * shape.dim_v, shape.dim_v, s.row);
    const RowEnd end = row_end(c, score_options(c, item.batch, head), head, again.max[n], false);
    scale_row(s.row, shape.dim_v, end.factor(again.sum[n], power));
    mend_row(out, query, c.problem.head_dim_v, s.row, s.row + shape.dim_v);
  }
}

static void finish_decoded(const ForwardContext& c, const DecodeItem& item, const Partial& result,
                           const DecodeScratch& s, const DecodeShape& shape) {
  const Sequence sequence = c.sequence_of_all_heads(item.batch);
  for (int64_t n = 0; n < item.row_count(); ++n) {
    const auto [query, head] = decoded_row(c, item, n);
    const BlockWalk walk = keys_of(c, sequence, head, {query, query + 1}, kDecodeKeys);
    const RowEnd end =
        row_end(c, score_options(c, item.batch, head), head, result.max[n],
                cpu::sees_none(c, sequence, head, walk, query, kDecodeKeys, result.sum[n]));
    // A row of a block that is over the mask's capacity is NaN.
    const bool lost = c.mask && c.mask_of(sequence, head).lacks_room(query);
    const float known = lost ? __builtin_nanf("") : 1;
    restore_row(shape.v_dtype, result.out + n * shape.dim_v, shape.dim_v, s.row);
    if (c.problem.batch_invariant) drop_signs_of_zeros(s.row, shape.dim_v);
    store_row(c.query_rows(c.out, sequence, head), query, c.problem.head_dim_v, s.row,
              end.factor(result.sum[n]) * known);
    if (c.lse) c.lse[c.lse_index(sequence, head) + query] = end.lse(result.sum[n]) * known;
  }
  if (any_nonfinite(result.out, item.row_count(), shape.dim_v, shape.dim_v)) {
    mend_decoded(c, item, result, s, shape);
  }
}

static void decode_finish(const ForwardContext& c, const DecodeItem& item, const Partial& result,
                          std::byte* scratch) {
  const DecodeShape shape = shape_of(c);
  Arena arena(scratch);
  finish_decoded(c, item, result, carve_decode(arena, c.problem, shape), shape);
}

static void decode_blocks(const ForwardContext& c, const DecodeItem& item, const Partial* result,
                          std::byte* scratch) {
  const DecodeShape shape = shape_of(c);
  Arena arena(scratch);
  const DecodeScratch s = carve_decode(arena, c.problem, shape);
  const Partial root = result ? *result : shape.partial(s.root);
  decode_tree(c, item, 1, root, s, shape);
  if (!result) finish_decoded(c, item, root, s, shape);
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_DECODE_INL_H_
