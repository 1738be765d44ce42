// Seeded random problems of attention over a KV cache.
#ifndef STROBE_CHECK_CACHE_CASE_H_
#define STROBE_CHECK_CACHE_CASE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/random_blocks.h"
#include "mask_case.h"
#include "numeric.h"
#include "problem_gen.h"
#include "quantised.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// How the cache lies in memory.
enum class CacheLayout {
  kRowsFirst,    // [entries, rows, heads, dim], K and V apart
  kHeadsFirst,   // [entries, heads, rows, dim]
  kInterleaved,  // one pool [entries, K and V, rows, heads, dim]
  kDescending    // [entries, rows, heads, dim], K and V apart, the last head first in memory
};

/// A tensor's place in memory, of a cache besides its layout. Each tensor of a case has its own:
/// kernels choose by what the least aligned of those that they look at allows.
struct Spacing {
  int64_t shift = 0;                                 // elements off 64-byte alignment
  int64_t pad_batch = 0, pad_row = 0, pad_head = 0;  // unused elements after each entry
  bool heads_first = false;                          // not of a cache
  int64_t odd_stride = 0;  // of dimensions with one entry, whose stride means nothing; 0: the true
};

/// One sequence.
struct CacheSequence {
  int64_t queries = 0, used_queries = 0;     // rows of q, and those of them that are in use
  int64_t leftpad = 0, used = 0, added = 0;  // rows of the cache, as leftpad, seqused_k count; new
  int64_t q_position = 0, prefix = 0, rotary_position = 0;
  int64_t entry = 0;           // contiguous
  std::vector<int32_t> pages;  // paged: the row of the table
};

struct CacheCase {
  uint64_t seed = 0;
  oracle::DType dtype = oracle::DType::kFloat32, out_dtype = oracle::DType::kFloat32;
  int64_t heads = 1, heads_kv = 1, head_dim = 8, head_dim_v = 8;
  bool paged = false;
  CacheLayout layout = CacheLayout::kRowsFirst;
  int64_t entries = 1, rows = 1;  // of the cache: its entries or pages, and the rows of each
  int64_t columns = 0, table_stride = 0;  // paged
  int64_t most_rows = 0;                  // seqlen_k
  int32_t append = STROBE_APPEND_NONE;
  int64_t past_q = 0, past_new = 0;  // packed: rows past the end of the last sequence
  bool varlen = false, with_used_q = false, with_lengths = true, with_leftpad = false;
  bool with_entries = false, with_q_position = false, with_prefix = false;
  std::vector<CacheSequence> sequences;

  bool causal = false;
  int64_t window_left = -1, window_right = -1, chunk = 0;
  bool window_signed = false;
  float softcap = 0;
  int32_t alibi = STROBE_ALIBI_NONE;
  bool with_sinks = false, sinks_outside_lse = false;
  int64_t rotary_dim = 0, rotary_rows = 0;
  bool interleaved = false, with_rotary_position = false;
  oracle::Form form = oracle::Form::kNone;  // of the cache's rows
  std::optional<oracle::Form> form_v;       // of those of values, where it is not that of keys
  int32_t scale_kind = STROBE_KV_SCALE_NONE;
  oracle::DType scale_dtype = oracle::DType::kFloat32;
  bool hostile = false;  // codes and scales of all bits, NaN among them
  // Float8 attention: q is e4m3, the cache's form one of float8, and dtype that of out.
  bool float8 = false, with_q_scale = false;
  bool with_lse = true, batch_invariant = false;
  int32_t threads = 1;
  strobe::RandomBlocks random_blocks;  // as Case has them (problem_gen.h)
  MaskChoice mask;
  bool has_bias = false;
  BiasCase bias;  // whose layout is `bias_place`, but for the step from key to key
  Spacing bias_place;
  Spacing q, k, v, k_new, v_new, out;  // of an interleaved pool that of k
  Spacing k_scale, v_scale;
  int64_t shift_lse = 0, shift_cos = 0, shift_sin = 0;  // these are contiguous

  int64_t batch() const { return static_cast<int64_t>(sequences.size()); }
  oracle::DType bias_dtype() const {
    return !bias.same_dtype ? bias.dtype : float8 ? out_dtype : dtype;
  }
  oracle::Form value_form() const { return form_v.value_or(form); }
  int64_t queries() const;  // of all sequences, in use or not, and those past their end
  int64_t added() const;
  int64_t longest_queries() const;
  int64_t longest_added() const;
  /// Whether a query's position in the rotary tables moves with it.
  bool QueriesMove() const {
    return causal || window_signed || window_left >= 0 || window_right >= 0 || chunk > 0;
  }
  /// The row of the cache [entries, rows] that holds row n of a sequence.
  int64_t Entry(const CacheSequence& s, int64_t n) const;
  int64_t Row(int64_t n) const { return paged ? n % rows : n; }
};

CacheCase GenerateCacheCase(uint64_t seed);
/// The same over a quantised cache; masked: under a mask as data.
CacheCase GenerateQuantisedCase(uint64_t seed, bool masked = false);
/// Float8 attention over a cache; masked: as GenerateMaskedCacheCase.
CacheCase GenerateFloat8CacheCase(uint64_t seed, bool masked = false);
/// The same under a mask as data, most of which are several blocks long.
CacheCase GenerateMaskedCacheCase(uint64_t seed);
/// The same problem with a bias.
CacheCase WithBias(CacheCase c);
/// The same with a bias, half of them under a mask as data too. Without batch_invariant, which no
/// GPU takes with either.
CacheCase GenerateBiasedCacheCase(uint64_t seed);
/// Keys and values of two dtypes, of which one may be that of the queries.
CacheCase GenerateMixedCacheCase(uint64_t seed);
std::string ToString(const CacheCase& c);

}  // namespace strobe_test

#endif  // STROBE_CHECK_CACHE_CASE_H_
