#include "cpu/decode_items.h"

#include <algorithm>
#include <bit>

#include "core/machine.h"

namespace strobe::cpu {

namespace {

// Items of a launch for each thread. The thread that ends last is then at most so much behind.
constexpr int64_t kItemsPerThread = 16;
// An item reads at least so many bytes of K and V, so that handing it out and merging its result
// cost little.
constexpr int64_t kLeastBytes = 128 * 1024;

// Blocks of an item, a power of 2, where there are `blocks` of all sets together.
int64_t item_blocks(int64_t blocks, int64_t least, int64_t threads) {
  if (threads == 1) return int64_t{1} << 40;  // nothing is split
  const int64_t each = max64(least, ceil_div(blocks, threads * kItemsPerThread));
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(each)));
}

}  // namespace

bool has_fast_bf16_products() { return cpu_features().avx512_bf16 && cpu_features().amd; }
bool drops_fetches() { return cpu_features().amd; }

DecodePlan::DecodePlan(const InstructionSet& isa, const AttentionProblem& p, int64_t threads)
    : kernel(*isa.decode(p)),
      leaf(kernel.leaf_blocks(p)),
      shape(decode_shape(p, isa.most_decoded(p), kernel.width, leaf)) {
  const int64_t block_bytes =
      kDecodeKeys * shape.heads *
      (row_bytes(p.kv_dtype, p.head_dim) + row_bytes(v_dtype_of(p), p.head_dim_v));
  blocks = max64(leaf, ceil_div(kLeastBytes, block_bytes));
  const int64_t sequence = ceil_div(p.seqlen_k, kDecodeKeys), sets = p.batch * shape.sets();
  item_blocks = cpu::item_blocks(sets * sequence, blocks, threads);
  const int64_t splits = max64(1, ceil_div(sequence, item_blocks));
  work_items = sets * splits;
  // A sequence is split where it has more blocks than an item. Its first and its last item may be
  // short, so that it has at most three times as many items as its blocks would fill.
  slots = threads == 1 ? 0 : min64(3 * kItemsPerThread * threads, sets * (sequence + 1));
  Arena arena;
  DecodeItems::carve(arena, p, *this);
  bytes = arena.used();
}

DecodeItems::Memory DecodeItems::carve(Arena& arena, const AttentionProblem& p,
                                       const DecodePlan& plan) {
  Memory m{};
  m.first_item = arena.take<int64_t>(p.batch + 1);
  m.first_slot = arena.take<int64_t>(p.batch + 1);
  m.done = arena.take<int64_t>(p.batch * plan.shape.sets());
  m.slots = arena.take<float>(plan.slots * plan.shape.partial_floats());
  return m;
}

DecodeItems::DecodeItems(const InstructionSet& isa, const ForwardContext& context, int64_t threads,
                         Arena& arena)
    : context_(context), plan_(isa, context.problem, threads), use_(isa, context.problem) {
  memory_ = carve(arena, context.problem, plan_);
  const int64_t batch = context.problem.batch, sets = plan_.shape.sets();
  const auto blocks_of = [&](int64_t b, bool& decoded) {
    const Sequence s = context.sequence_of_all_heads(b);
    decoded = s.rows_q > 0 && use_.decoded(s.mask.seqlen_q);
    return decoded ? decode_blocks(s.mask) : Range{0, 0};
  };
  int64_t total = 0;
  bool decoded = false;
  for (int64_t b = 0; b < batch; ++b) total += sets * blocks_of(b, decoded).size();
  item_blocks_ = item_blocks(total, plan_.blocks, threads);
  level_ = std::countr_zero(static_cast<uint64_t>(item_blocks_ / plan_.leaf));
  int64_t items = 0, slots = 0;
  for (int64_t b = 0; b < batch; ++b) {
    memory_.first_item[b] = items;
    memory_.first_slot[b] = slots;
    const Range blocks = blocks_of(b, decoded);
    if (!decoded) continue;
    const int64_t n = splits(blocks);
    items += sets * n;
    if (n > 1) slots += sets * n;
  }
  memory_.first_item[batch] = items;
  for (int64_t i = 0; i < batch * sets; ++i) memory_.done[i] = 0;
}

void DecodeItems::run(int64_t n, std::byte* scratch) const {
  // The sequence: the last one whose first item does not come after this item.
  const int64_t* const first_items = memory_.first_item;
  const int64_t b =
      std::upper_bound(first_items, first_items + context_.problem.batch, n) - first_items - 1;
  const Sequence s = context_.sequence_of_all_heads(b);
  const int64_t sets = plan_.shape.sets();
  const Range blocks = decode_blocks(s.mask);
  const int64_t count = splits(blocks), place = n - first_items[b];
  const int64_t set = place / count, split = place % count;
  DecodeItem item =
      plan_.shape.item(set, context_.problem.heads_kv, s.mask.seqlen_q * context_.group());
  item.batch = b;
  if (split == 0 && set % plan_.shape.row_sets == 0) {
    const int64_t group = context_.group();
    for (int64_t h = item.heads.begin * group; h < item.heads.end * group; ++h) {
      fill_unused(context_, s, h, {s.mask.seqlen_q, s.rows_q});
    }
  }
  if (item.rows.empty()) return;
  if (count == 1) {
    item.blocks = blocks;
    plan_.kernel.blocks(context_, item, nullptr, scratch);
    return;
  }
  const int64_t first = blocks.begin / item_blocks_;  // of the tree's nodes at level_
  item.blocks =
      intersect(blocks, {(first + split) * item_blocks_, (first + split + 1) * item_blocks_});
  float* const slots =
      memory_.slots + (memory_.first_slot[b] + set * count) * plan_.shape.partial_floats();
  const auto slot = [&](int64_t i) {
    return plan_.shape.partial(slots + i * plan_.shape.partial_floats());
  };
  const Partial result = slot(split);
  plan_.kernel.blocks(context_, item, &result, scratch);
  int64_t* const done = memory_.done + b * sets + set;
  if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < count) return;

  // Place i of the tree's stack is the slot of the i-th node on it.
  int64_t at[64];
  KeyTree tree;
  const auto merge = [&](int64_t i) {
    plan_.kernel.merge(context_, item, slot(at[i]), slot(at[i + 1]));
  };
  for (int64_t i = 0; i < count; ++i) {
    at[tree.top()] = i;
    tree.add(level_, first + i, merge);
  }
  tree.end(merge);
  item.blocks = blocks;
  plan_.kernel.finish(context_, item, slot(0), scratch);
}

}  // namespace strobe::cpu
