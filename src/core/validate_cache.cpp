#include "core/validate_cache.h"

#include <cinttypes>

#include "core/checks.h"

namespace strobe {

namespace {

// Fields that ask for something, and whether this problem may ask for it.
struct Field {
  const char* name;
  int64_t got;
};

Status check_zero(std::initializer_list<Field> fields, const char* with) {
  for (const Field& field : fields) {
    if (field.got != 0) {
      return invalid(format("%s = %" PRId64 " with %s, expected 0", field.name, field.got, with));
    }
  }
  return {};
}

Status check_unset(const char* name, const Strides& s) {
  if (unset(s)) return {};
  return invalid(format("%s has strides with append = 0 (none), expected zeros", name));
}

Status check_contiguous(const AttentionProblem& p) {
  STROBE_RETURN_IF_ERROR(check_zero({{"pages", p.pages},
                                     {"page_size", p.page_size},
                                     {"pages_per_sequence", p.pages_per_sequence},
                                     {"block_table_stride", p.block_table_stride}},
                                    "cache = 1 (contiguous)"));
  STROBE_RETURN_IF_ERROR(check_integer("cache_batch", p.cache_batch, 0, kMaxLength));
  if (!p.has_cache_batch_idx && p.cache_batch != 0 && p.cache_batch < p.batch) {
    return invalid(format("cache_batch = %" PRId64 ", expected at least batch = %" PRId64
                          " (or has_cache_batch_idx = 1)",
                          p.cache_batch, p.batch));
  }
  return {};
}

Status check_paged(const AttentionProblem& p) {
  STROBE_RETURN_IF_ERROR(
      check_zero({{"cache_batch", p.cache_batch}, {"has_cache_batch_idx", p.has_cache_batch_idx}},
                 "cache = 2 (paged)"));
  STROBE_RETURN_IF_ERROR(check_integer("pages", p.pages, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("page_size", p.page_size, 1, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("pages_per_sequence", p.pages_per_sequence, 0,
                                       min64(kMaxLength, kMaxOffset / p.batch)));
  if (p.block_table_stride != 0) {
    STROBE_RETURN_IF_ERROR(check_integer("block_table_stride", p.block_table_stride,
                                         p.pages_per_sequence, kMaxOffset / p.batch));
  }
  if (p.seqlen_k > p.pages_per_sequence * p.page_size) {
    return invalid(format("seqlen_k = %" PRId64
                          ", expected at most pages_per_sequence * page_size = %" PRId64
                          " * %" PRId64,
                          p.seqlen_k, p.pages_per_sequence, p.page_size));
  }
  return {};
}

Status check_append(const AttentionProblem& p) {
  const bool packed = p.append == STROBE_APPEND_PACKED;
  if (p.append == STROBE_APPEND_NONE) {
    STROBE_RETURN_IF_ERROR(check_zero({{"seqlen_new", p.seqlen_new}, {"total_new", p.total_new}},
                                      "append = 0 (none)"));
    STROBE_RETURN_IF_ERROR(check_unset("k_new", p.k_new));
    return check_unset("v_new", p.v_new);
  }
  if (!p.has_seqused_k) {
    return invalid(
        format("append = %d with has_seqused_k = 0, expected has_seqused_k = 1 (where new "
               "keys go)",
               p.append));
  }
  STROBE_RETURN_IF_ERROR(check_integer("seqlen_new", p.seqlen_new, 0, kMaxLength));
  if (!packed && p.seqlen_new > p.seqlen_k) {
    return invalid(format("seqlen_new = %" PRId64 ", expected 0 to seqlen_k = %" PRId64
                          " (the most rows that a sequence may reach, new ones included)",
                          p.seqlen_new, p.seqlen_k));
  }
  if (packed) {
    STROBE_RETURN_IF_ERROR(check_integer("total_new", p.total_new, 0, kMaxLength));
  } else {
    STROBE_RETURN_IF_ERROR(check_zero({{"total_new", p.total_new}}, "append = 1 (dense)"));
  }
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads;
  const int64_t rows = packed ? p.total_new : p.seqlen_new;
  STROBE_RETURN_IF_ERROR(
      check_strides("k_new", p.k_new, p.batch, rows, heads_kv, p.head_dim, packed, false));
  return check_strides("v_new", p.v_new, p.batch, rows, heads_kv,
                       p.head_dim_v ? p.head_dim_v : p.head_dim, packed, false);
}

// What rows of codes and their scales are.
Status check_quantised(const AttentionProblem& p) {
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads;
  const int32_t v_dtype = v_dtype_of(p);
  const char* const v_name = p.v_dtype == STROBE_SAME_DTYPE ? "kv_dtype" : "v_dtype";
  const struct {
    const char* name;
    int64_t got;
    const char* dtype_name;
    int32_t dtype;
  } dims[] = {{"head_dim", p.head_dim, "kv_dtype", p.kv_dtype},
              // Where it is 0, it is head_dim.
              {p.head_dim_v ? "head_dim_v" : "head_dim", p.head_dim_v ? p.head_dim_v : p.head_dim,
               v_name, v_dtype}};
  for (const auto& dim : dims) {
    if (has_blocks(dim.dtype) && dim.got % kBlockValues != 0) {
      return invalid(format("%s = %" PRId64 " with %s = %d (%s), expected a multiple of 32",
                            dim.name, dim.got, dim.dtype_name, dim.dtype, dtype_name(dim.dtype)));
    }
  }
  if (has_float8_queries(p)) {
    if (p.kv_scale != STROBE_KV_SCALE_NONE && p.kv_scale != STROBE_KV_SCALE_BATCH_HEAD) {
      return invalid(
          format("kv_scale = %d with dtype = %d (%s), expected 0 (none) or 4 (of batch "
                 "and head)",
                 p.kv_scale, p.dtype, dtype_name(p.dtype)));
    }
    if (p.kv_scale_dtype != STROBE_FLOAT32) {
      return invalid(format("kv_scale_dtype = %d with dtype = %d (%s), expected 0 (fp32)",
                            p.kv_scale_dtype, p.dtype, dtype_name(p.dtype)));
    }
  } else {
    if (p.kv_scale == STROBE_KV_SCALE_BATCH_HEAD) {
      return invalid(
          format("kv_scale = 4 (of batch and head) with dtype = %d (%s), expected dtype "
                 "3 (float8 e4m3), or kv_scale 1 (tensor), 2 (head) or 3 (row)",
                 p.dtype, dtype_name(p.dtype)));
    }
    if (p.has_q_scale) {
      return invalid(
          format("has_q_scale = 1 with dtype = %d (%s), expected 0 (queries of float8 "
                 "e4m3 alone have scales)",
                 p.dtype, dtype_name(p.dtype)));
    }
    // Those of one of the two, where the other has none.
    const bool by_v = has_scales(v_dtype) && !has_scales(p.kv_dtype);
    STROBE_RETURN_IF_ERROR(check_scale_kind(by_v ? v_name : "kv_dtype", by_v ? v_dtype : p.kv_dtype,
                                            p.kv_scale, p.kv_scale_dtype));
  }
  const bool of_sequences = p.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
  const int64_t entries = of_sequences ? p.batch : kv_entries(p);
  const int64_t rows = of_sequences ? 1 : kv_rows(p);
  const struct {
    const char* name;
    const Strides& strides;
    const char* dtype_name;
    int32_t dtype;
  } scales[] = {{"k_scale", p.k_scale, "kv_dtype", p.kv_dtype},
                {"v_scale", p.v_scale, v_name, v_dtype}};
  for (const auto& s : scales) {
    const int32_t kind = scale_kind(p, s.dtype);
    const bool some = s.strides.batch || s.strides.seqlen || s.strides.head;
    if (some && kind != p.kv_scale) {  // which is that of the other one
      return invalid(format("%s has strides with %s = %d (%s), expected 0: it has no scales",
                            s.name, s.dtype_name, s.dtype,
                            s.dtype < 0 ? "that of q" : dtype_name(s.dtype)));
    }
    // Those of rows an append makes; all others it reads.
    const bool written = p.append != 0 && kind == STROBE_KV_SCALE_ROW;
    STROBE_RETURN_IF_ERROR(
        check_scale_strides(s.name, s.strides, kind, entries, rows, heads_kv, written));
  }
  if (!p.has_q_scale) return {};
  return check_scale_strides("q_scale", p.q_scale, STROBE_KV_SCALE_BATCH_HEAD, p.batch, 1, heads_kv,
                             false);
}

Status check_rotary(const AttentionProblem& p) {
  if (p.rotary_dim == 0) {
    return check_zero({{"rotary_rows", p.rotary_rows},
                       {"rotary_interleaved", p.rotary_interleaved},
                       {"has_rotary_position", p.has_rotary_position}},
                      "rotary_dim = 0 (none)");
  }
  STROBE_RETURN_IF_ERROR(check_integer("rotary_dim", p.rotary_dim, 0, p.head_dim));
  if (p.rotary_dim % 2 != 0) {
    return invalid(format("rotary_dim = %" PRId64 ", expected an even number", p.rotary_dim));
  }
  STROBE_RETURN_IF_ERROR(check_integer("rotary_rows", p.rotary_rows, 0, kMaxLength));
  return check_flag("rotary_interleaved", p.rotary_interleaved);
}

}  // namespace

Status check_cache(const AttentionProblem& p) {
  STROBE_RETURN_IF_ERROR(check_integer("cache", p.cache, STROBE_CACHE_NONE, STROBE_CACHE_PAGED));
  STROBE_RETURN_IF_ERROR(
      check_integer("append", p.append, STROBE_APPEND_NONE, STROBE_APPEND_PACKED));
  if (p.cache == STROBE_CACHE_NONE) {
    STROBE_RETURN_IF_ERROR(check_zero({{"append", p.append},
                                       {"cache_batch", p.cache_batch},
                                       {"pages", p.pages},
                                       {"page_size", p.page_size},
                                       {"pages_per_sequence", p.pages_per_sequence},
                                       {"block_table_stride", p.block_table_stride},
                                       {"rotary_dim", p.rotary_dim},
                                       {"has_cache_batch_idx", p.has_cache_batch_idx},
                                       {"has_leftpad", p.has_leftpad}},
                                      "cache = 0 (none)"));
  } else if (p.direction != STROBE_FORWARD) {
    return invalid(
        format("cache = %d with direction backward, expected direction forward", p.cache));
  } else if (p.dropout_p > 0) {
    return invalid(format("dropout_p = %g with cache = %d, expected 0",
                          static_cast<double>(p.dropout_p), p.cache));
  } else {
    STROBE_RETURN_IF_ERROR(p.cache == STROBE_CACHE_PAGED ? check_paged(p) : check_contiguous(p));
  }
  STROBE_RETURN_IF_ERROR(check_append(p));
  STROBE_RETURN_IF_ERROR(check_quantised(p));
  return check_rotary(p);
}

namespace {

// Sequence b's new keys.
int64_t new_keys(const AttentionProblem& p, const ForwardArgs& a, int64_t b) {
  if (p.append == STROBE_APPEND_DENSE) return p.seqlen_new;
  if (p.append == STROBE_APPEND_NONE) return 0;
  return int64_t{a.cu_seqlens_k_new[b + 1]} - a.cu_seqlens_k_new[b];
}

Status check_number(const char* name, int64_t b, int64_t got, int64_t most, const char* because) {
  if (0 <= got && got <= most) return {};
  return invalid(format("%s[%" PRId64 "] = %" PRId64 ", expected 0 to %" PRId64 "%s", name, b, got,
                        most, because));
}

// The numbers of sequence b, as CachedSequences reads them: here they have to be right.
Status check_sequence(const AttentionProblem& p, const ForwardArgs& a, int64_t b) {
  const int64_t added = new_keys(p, a, b);
  if (added > p.seqlen_k) {
    return invalid(format("cu_seqlens_k_new: sequence %" PRId64 " has length %" PRId64
                          ", expected at most seqlen_k = %" PRId64,
                          b, added, p.seqlen_k));
  }
  const int64_t used = p.has_seqused_k ? a.seqused_k[b] : p.seqlen_k;
  STROBE_RETURN_IF_ERROR(
      check_number("seqused_k", b, used, p.seqlen_k - added,
                   added > 0 ? " (seqlen_k less the sequence's new keys)" : " (seqlen_k)"));
  const int64_t pad = p.has_leftpad ? a.leftpad[b] : 0;
  STROBE_RETURN_IF_ERROR(check_number("leftpad", b, pad, used, " (the sequence's seqused_k)"));
  if (p.has_cache_batch_idx) {
    STROBE_RETURN_IF_ERROR(
        check_number("cache_batch_idx", b, a.cache_batch_idx[b], p.cache_batch - 1, ""));
  }
  if (p.cache == STROBE_CACHE_PAGED && pad < used + added) {
    const int32_t* const row = a.block_table + b * p.block_table_stride;
    for (int64_t n = pad / p.page_size; n * p.page_size < used + added; ++n) {
      const int32_t page = read_once(row + n);
      if (0 <= page && page < p.pages) continue;
      if (p.pages == 0) {
        return invalid(format("block_table[%" PRId64 "][%" PRId64
                              "] = %d, but pages = 0: the pool has no pages",
                              b, n, page));
      }
      return invalid(format("block_table[%" PRId64 "][%" PRId64 "] = %d, expected 0 to %" PRId64, b,
                            n, page, p.pages - 1));
    }
  }
  return {};
}

// Where no array has a number for each sequence, the first stands for all: a batch without rows may
// be of any size.
int64_t sequences_to_check(const AttentionProblem& p) {
  const bool differ = p.varlen || p.has_seqused_q || p.has_seqused_k || p.has_leftpad ||
                      p.has_cache_batch_idx || p.has_rotary_position || p.pages_per_sequence > 0;
  return differ ? p.batch : 1;
}

// The positions that the embedding looks up.
Status check_positions(const AttentionProblem& p, const ForwardArgs& a) {
  const CachedSequences sequences = cached_sequences_of(p, a);
  for (int64_t b = 0; b < sequences_to_check(p); ++b) {
    const CachedRows s = sequences.sequence_rows(b);
    if (s.in_range) continue;  // all other numbers are known to be
    if (p.has_rotary_position) {
      return invalid(format("rotary_position[%" PRId64 "] = %d, expected positions from 0 to "
                            "rotary_rows - 1 = %" PRId64 " for all its queries and new keys",
                            b, a.rotary_position[b], p.rotary_rows - 1));
    }
    return invalid(format("rotary_rows = %" PRId64 ", expected more: sequence %" PRId64
                          " has queries or new keys past position %" PRId64,
                          p.rotary_rows, b, p.rotary_rows - 1));
  }
  return {};
}

}  // namespace

Status check_cache_numbers(const AttentionProblem& p, const ForwardArgs& a) {
  if (p.append == STROBE_APPEND_PACKED) {
    STROBE_RETURN_IF_ERROR(check_cumulative("cu_seqlens_k_new", "new", a.cu_seqlens_k_new, p.batch,
                                            p.total_new, p.seqlen_new));
  }
  for (int64_t b = 0; b < sequences_to_check(p); ++b) {
    STROBE_RETURN_IF_ERROR(check_sequence(p, a, b));
  }
  return p.rotary_dim > 0 ? check_positions(p, a) : Status();
}

std::string cache_text(const AttentionProblem& p) {
  std::string s;
  if (p.cache == STROBE_CACHE_CONTIGUOUS) {
    s += format(", cache of %" PRId64 " entries", kv_entries(p));
  } else if (p.cache == STROBE_CACHE_PAGED) {
    s += format(", cache of %" PRId64 " pages of %" PRId64 ", at most %" PRId64 " a sequence",
                p.pages, p.page_size, p.pages_per_sequence);
  }
  constexpr const char* kScales[] = {"", " of all", " of heads", " of rows", " of batch and heads"};
  if (p.kv_scale) {
    s += format(", scales%s in %s", kScales[p.kv_scale], dtype_name(p.kv_scale_dtype));
  }
  if (p.append == STROBE_APPEND_DENSE) s += format(", append %" PRId64, p.seqlen_new);
  if (p.append == STROBE_APPEND_PACKED) {
    s += format(", append %" PRId64 " at most, total %" PRId64, p.seqlen_new, p.total_new);
  }
  if (p.rotary_dim > 0) {
    s += format(", rotary %" PRId64 " %s of %" PRId64 " positions", p.rotary_dim,
                p.rotary_interleaved ? "interleaved" : "in halves", p.rotary_rows);
  }
  return s;
}

}  // namespace strobe
