#include "core/validate_mask.h"

#include <cinttypes>

#include "core/checks.h"
#include "core/packed_mask.h"

namespace strobe {

namespace {

// The sides of a block.
Status check_block(const char* name, int64_t got) {
  if (got == 64 || got == 128 || got == 256) return {};
  return invalid(format("%s = %" PRId64 ", expected 64, 128 or 256", name, got));
}

// One of the two sizes that the dimension of a mask may have.
Status check_shared(const char* name, int64_t got, const char* whole_name, int64_t whole,
                    bool may_be_one) {
  if (got == whole || (got == 1 && may_be_one)) return {};
  return invalid(format("%s = %" PRId64 ", expected %s%s = %" PRId64, name, got,
                        may_be_one ? "1 or " : "", whole_name, whole));
}

}  // namespace

Status check_mask(const AttentionProblem& p) {
  const strobe_mask& m = p.mask;
  STROBE_RETURN_IF_ERROR(check_integer("mask.kind", m.kind, STROBE_MASK_NONE, STROBE_MASK_PACKED));
  STROBE_RETURN_IF_ERROR(check_integer("mask.reserved", m.reserved, 0, 0));
  if (m.kind == STROBE_MASK_NONE) {
    const struct {
      const char* name;
      int64_t got;
    } fields[] = {{"mask.block_q", m.block_q},   {"mask.block_k", m.block_k},
                  {"mask.batch", m.batch},       {"mask.heads", m.heads},
                  {"mask.capacity", m.capacity}, {"mask.partial_capacity", m.partial_capacity}};
    for (const auto& [name, got] : fields) {
      if (got == 0) continue;
      return invalid(format("%s = %" PRId64 " with mask.kind = 0 (none), expected 0", name, got));
    }
    return {};
  }
  STROBE_RETURN_IF_ERROR(check_block("mask.block_q", m.block_q));
  STROBE_RETURN_IF_ERROR(check_block("mask.block_k", m.block_k));
  // Packed sequences have rows of their own.
  STROBE_RETURN_IF_ERROR(check_shared("mask.batch", m.batch, "batch", p.batch, !p.varlen));
  STROBE_RETURN_IF_ERROR(check_shared("mask.heads", m.heads, "heads", p.heads, true));
  STROBE_RETURN_IF_ERROR(check_integer("mask.capacity", m.capacity, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("mask.partial_capacity", m.partial_capacity, 0,
                                       m.capacity > 0 ? m.capacity : kMaxLength));
  AttentionProblem resolved = p;
  resolve_defaults(resolved);
  const MaskLayout layout = MaskLayout::of(resolved);
  // All of these are counted in 32 bits.
  if (max64(layout.blocks_q, layout.blocks_k) > kMaxLength) {
    return invalid(format("mask: %" PRId64 " blocks of queries and %" PRId64
                          " of keys, expected less than 2^31 of each",
                          layout.blocks_q, layout.blocks_k));
  }
  if (layout.capacity > kMaxLength) {
    return invalid(format("mask.capacity = 0 (room for all: %" PRId64
                          " entries), expected 1 to 2^31 - 1 for these lengths",
                          layout.capacity));
  }
  return {};
}

void resolve_mask(AttentionProblem& p) {
  strobe_mask& m = p.mask;
  if (m.kind == STROBE_MASK_NONE) return;
  if (m.capacity == 0) {
    const int64_t lists = min64(MaskLayout::of(p).blocks_q, int64_t{1} << 31);  // no more counts
    m.capacity = max64(1, lists * ceil_div(p.seqlen_k, m.block_k));
  }
  if (m.partial_capacity == 0) m.partial_capacity = m.capacity;
}

std::array<MaskPointer, 10> mask_pointers(const AttentionProblem& p, int64_t seqlen_k,
                                          const MaskArgs& a) {
  const MaskLayout layout = MaskLayout::of(p);
  const int64_t batch = p.varlen ? 1 : p.mask.batch, heads = p.mask.heads;
  const int64_t rows = p.varlen ? p.total_q : p.seqlen_q;
  const strobe_strides& s = a.keep_strides;
  const auto array = [](const char* name, const void* pointer, int64_t count) -> MaskPointer {
    return {name, pointer, Extents::contiguous(4 * count), false};
  };
  const int64_t partial = layout.blocks_q * a.partial_columns;
  // keep's dimensions in an order of Extents: its keys are the "heads", so that they may have a
  // stride; its heads are the parts.
  const Extents keep =
      Extents::of(batch, rows, seqlen_k, 1, {s.batch, s.seqlen, s.dim, 1}, 1, heads, s.head);
  return {MaskPointer{"keep", a.keep, keep, false},
          array("intervals", a.intervals, batch * heads * rows * 4),
          array("partial_counts", a.partial_counts, layout.blocks_q),
          array("partial_blocks", a.partial_blocks, partial),
          array("partial_bits", a.partial_bits, partial * layout.words_of_bits()),
          array("full_counts", a.full_counts, layout.blocks_q),
          array("full_blocks", a.full_blocks, layout.blocks_q * a.full_columns),
          array("cu_seqlens_q", a.cu_seqlens_q, p.batch + 1),
          array("cu_seqlens_k", a.cu_seqlens_k, p.batch + 1),
          MaskPointer{"packed", a.packed, Extents::contiguous(layout.end * 4), true}};
}

Status check_mask_args(const AttentionProblem& p, int64_t seqlen_k, MaskArgs& a) {
  const MaskLayout layout = MaskLayout::of(p);
  const int64_t batch = p.varlen ? 1 : p.mask.batch, heads = p.mask.heads;
  const int64_t rows = p.varlen ? p.total_q : p.seqlen_q;
  const bool lists = a.partial_counts || a.full_counts;
  if (!a.keep && !a.intervals && !lists) {
    return invalid("keep, intervals, partial_counts and full_counts = NULL, expected at least one");
  }
  const struct {
    const char *name, *counts_name, *columns_name;
    const int32_t *counts, *blocks;
    int64_t columns;
  } both[] = {
      {"partial_blocks", "partial_counts", "partial_columns", a.partial_counts, a.partial_blocks,
       a.partial_columns},
      {"full_blocks", "full_counts", "full_columns", a.full_counts, a.full_blocks, a.full_columns}};
  for (const auto& list : both) {
    STROBE_RETURN_IF_ERROR(check_integer(list.columns_name, list.columns, 0, kMaxLength));
    STROBE_RETURN_IF_ERROR(check_pointer(list.counts_name, list.counts, list.columns > 0, 4));
    STROBE_RETURN_IF_ERROR(check_pointer(list.name, list.blocks, list.columns > 0, 4));
    if (list.blocks && !list.counts) {
      return invalid(format("%s = NULL with %s, expected a pointer", list.counts_name, list.name));
    }
  }
  if (a.partial_bits && !a.partial_blocks) {
    return invalid("partial_bits is given with partial_blocks = NULL, expected NULL");
  }
  const bool packed_k = p.varlen && !p.cache;
  const struct {
    const char* name;
    const void* pointer;
    bool wanted;
  } starts[] = {{"cu_seqlens_q", a.cu_seqlens_q, p.varlen != 0},
                {"cu_seqlens_k", a.cu_seqlens_k, packed_k}};
  for (const auto& [name, pointer, wanted] : starts) {
    STROBE_RETURN_IF_ERROR(check_pointer(name, pointer, wanted, 4));
    if (pointer && !wanted) {
      return invalid(
          format("%s is given with %s, expected NULL", name, p.varlen ? "a cache" : "varlen = 0"));
    }
  }
  STROBE_RETURN_IF_ERROR(check_pointer("intervals", a.intervals, false, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("partial_bits", a.partial_bits, false, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("packed", a.packed, true, kMaskAlignment));
  const auto bytes = static_cast<size_t>(layout.end * 4);
  if (a.packed_bytes < bytes) {
    return invalid(format("packed_bytes = %zu, expected at least %zu (strobe_mask_bytes)",
                          a.packed_bytes, bytes));
  }

  strobe_strides& s = a.keep_strides;
  if (unset(s)) s = {heads * rows * seqlen_k, seqlen_k, rows * seqlen_k, 1};
  int64_t room = kMaxOffset;
  const struct {
    const char* name;
    int64_t size, stride;
  } extents[] = {{"batch", batch, s.batch},
                 {"seqlen", rows, s.seqlen},
                 {"head", heads, s.head},
                 {"dim", seqlen_k, s.dim}};
  for (const auto& e : extents) {
    if (!a.keep || e.size <= 1) continue;
    const int64_t magnitude = e.stride < 0 ? -(e.stride + 1) : e.stride;
    if (magnitude >= room / (e.size - 1)) {
      return invalid(format("keep_strides.%s = %" PRId64 " bytes with %" PRId64
                            " entries: offsets pass 2^58",
                            e.name, e.stride, e.size));
    }
    room -= magnitude * (e.size - 1);
  }

  Memory memory;
  for (const MaskPointer& x : mask_pointers(p, seqlen_k, a))
    memory.add(x.name, x.pointer, x.extents, x.written);
  return memory.check();
}

namespace {

Status not_packed(const std::string& what) {
  return invalid("mask: " + what + ": expected what strobe_mask_pack wrote for this problem");
}

// The rows that the sequences of a mask have.
struct SidesOfSequence {
  const AttentionProblem& p;
  const int32_t *cu_q, *cu_k;  // null: dense

  SequenceRows rows(int64_t b) const {
    SequenceRows s{};
    s.batch = b;
    s.q_row = cu_q ? cu_q[b] : 0;
    s.k_row = cu_k ? cu_k[b] : 0;
    s.rows_q = cu_q ? cu_q[b + 1] - cu_q[b] : p.seqlen_q;
    s.rows_k = cu_k ? cu_k[b + 1] - cu_k[b] : p.seqlen_k;
    return s;
  }
};

// The lists of one side of one sequence and head: `lists` of them, of blocks below `others`. total:
// their entries are added to it.
Status check_lists(const BlockLists& lists, const char* name, int64_t count, int64_t others,
                   const MaskLayout& l, int64_t& total) {
  for (int64_t list = 0; list < count; ++list) {
    const int32_t* const at = lists.lists + (lists.first + list) * 2;
    if (at[0] < 0 || at[1] < -1 || int64_t{at[0]} + at[1] > l.capacity) {
      return not_packed(
          format("%s %" PRId64 " has %d entries from %d on", name, list, at[1], at[0]));
    }
    int64_t before = -1;
    for (int64_t n = 0; n < lists.count(list); ++n) {
      const BlockLists::Entry e = lists.entry(list, n);
      if (e.block <= before || e.block >= others || e.bits < -1 || e.bits >= l.partial) {
        return not_packed(format("entry %" PRId64 " of %s %" PRId64 " is {%" PRId64 ", %" PRId64
                                 "}",
                                 n, name, list, e.block, e.bits));
      }
      before = e.block;
    }
    total += lists.count(list);
  }
  return {};
}

}  // namespace

Status check_packed_mask(const AttentionProblem& p, const int32_t* words, const int32_t* cu_q,
                         const int32_t* cu_k) {
  const MaskLayout l = MaskLayout::of(p);
  const struct {
    int place;
    const char* name;
    int64_t wanted;
  } header[] = {
      {0, "its first word", STROBE_MASK_MAGIC},
      {1, "block_q", l.block_q},
      {2, "block_k", l.block_k},
      {10, p.varlen ? "total_q" : "seqlen_q", MaskLayout::rows_q(p)},
      {11, p.varlen && !p.cache ? "total_k" : "seqlen_k", MaskLayout::rows_k(p)},
      {3, "blocks of queries", l.blocks_q},
      {4, "blocks of keys", l.blocks_k},
      {5, "capacity", l.capacity},
      {6, "partial_capacity", l.partial},
  };
  for (const auto& [place, name, wanted] : header) {
    const int32_t got = words[place];
    if (got == static_cast<int32_t>(min64(wanted, INT32_MAX))) continue;
    return not_packed(format("%s is %d, not %" PRId64, name, got, wanted));
  }
  const SidesOfSequence sides{p, cu_q, cu_k};
  for (int64_t b = 0; b < p.mask.batch; ++b) {
    for (int64_t head = 0; head < p.mask.heads; ++head) {
      const SequenceRows rows = sides.rows(b);
      const HeadMask m = HeadMask::of(words, l, rows, head);
      const int64_t blocks_q = ceil_div(rows.rows_q, l.block_q),
                    blocks_k = ceil_div(rows.rows_k, l.block_k);
      int64_t total = 0;
      STROBE_RETURN_IF_ERROR(check_lists(m.queries, "list", blocks_q, blocks_k, l, total));
      int64_t total_by_key = 0;
      STROBE_RETURN_IF_ERROR(check_lists(m.keys, "key list", blocks_k, blocks_q, l, total_by_key));
      // As many, and each stands for one of the others, which no two do: so they are the same.
      bool same = total == total_by_key;
      for (int64_t list = 0; same && list < blocks_k; ++list) {
        for (int64_t n = 0; same && n < m.keys.count(list); ++n) {
          const BlockLists::Entry e = m.keys.entry(list, n);
          const int64_t rank = m.queries.find(e.block, list);
          if (rank == m.queries.count(e.block)) {
            same = false;
          } else {
            const BlockLists::Entry other = m.queries.entry(e.block, rank);
            same = other.block == list && other.bits == e.bits;
          }
        }
      }
      if (!same) return not_packed("its lists and key lists differ");
    }
  }
  return {};
}

std::string mask_text(const AttentionProblem& p) {
  const strobe_mask& m = p.mask;
  if (m.kind == STROBE_MASK_NONE) return {};
  std::string s = format(", mask of blocks %d x %d", m.block_q, m.block_k);
  if (m.batch > 1) s += ", of each sequence";
  if (m.heads > 1) s += ", of each head";
  if (m.capacity > 0)
    s += format(", capacity %" PRId64 "/%" PRId64, m.capacity, m.partial_capacity);
  return s;
}

}  // namespace strobe
