#include "cpu/launch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "core/team.h"
#include "core/workspace.h"
#include "cpu/backward_sinks.h"
#include "cpu/blocks.h"
#include "cpu/contexts.h"
#include "cpu/decode_items.h"
#include "cpu/fill_plan.h"
#include "cpu/own_numbers.h"
#include "cpu/score.h"
#include "cpu/turnstile.h"
#include "cpu/walks.h"

namespace strobe::cpu {

namespace {

// Whether the caller wants the launch to end early. The caller's own thread asks the caller's
// function now and then, between items.
class Interrupt {
 public:
  template <typename Args>
  explicit Interrupt(const Args& args) : ask_(args.interrupt), data_(args.interrupt_data) {
    if (ask_) next_ = Clock::now() + kPeriod;
  }

  // Called before each item. True: no more items.
  bool operator()(int thread) {
    if (!ask_) return false;
    if (thread == 0 && !stopped_.load(std::memory_order_relaxed) && Clock::now() >= next_) {
      if (ask_(data_) != 0) stopped_.store(true, std::memory_order_relaxed);
      next_ = Clock::now() + kPeriod;
    }
    return stopped_.load(std::memory_order_relaxed);
  }

  Status status() const {
    if (!stopped_.load(std::memory_order_relaxed)) return {};
    return {STROBE_INTERRUPTED, "stopped by args.interrupt: the outputs are incomplete"};
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Soon enough for a user, and seldom enough for a caller in Python, which may have to wait 5 ms
  // for the interpreter each time.
  static constexpr std::chrono::milliseconds kPeriod{100};

  int32_t (*const ask_)(void*);
  void* const data_;
  Clock::time_point next_;  // the calling thread's
  std::atomic<bool> stopped_{false};
};

// The items of a forward launch's last round, one for each thread, are cut into this many pieces.
// Without that, a thread that is held up in the last of four rounds costs a quarter of the launch.
constexpr int64_t kLastPieces = 4;

// The items of a forward launch in the order in which they are handed out. The last queries come
// first: under a causal mask they see the most keys, and the longest work should not start last.
// The last few items are cut into pieces of whole tiles, so that results do not depend on the cut.
class ForwardItems {
 public:
  ForwardItems(const Plan& plan, const int32_t* cu_q)
      : blocks_(Blocks::of_queries(plan.problem, cu_q, plan.block_q)),
        block_(plan.block_q),
        piece_(round_up(ceil_div(plan.block_q, kLastPieces), plan.tile_q)),
        pieces_(ceil_div(block_, piece_)),
        whole_(plan.threads > 1 ? max64(0, blocks_.count() - plan.threads) : blocks_.count()),
        count_(whole_ + (blocks_.count() - whole_) * pieces_) {}

  int64_t count() const { return count_; }

  // The item's end may lie past the sequence's last row.
  ForwardItem operator[](int64_t n) const {
    const bool whole = n < whole_;
    const int64_t item = whole ? n : whole_ + (n - whole_) / pieces_;
    const Blocks::Block b = blocks_[blocks_.count() - 1 - item];
    if (whole) return {b.batch, b.head, b.begin, b.begin + block_};
    const int64_t offset = (n - whole_) % pieces_ * piece_;
    return {b.batch, b.head, b.begin + offset, b.begin + min64(offset + piece_, block_)};
  }

 private:
  Blocks blocks_;
  int64_t block_, piece_, pieces_, whole_, count_;
};

// The rows of a sequence in a block of `size` rows from `begin` on. The sequence has `rows` rows,
// of which the first `used_rows` are in use.
struct BlockRows {
  Range used;    // what the kernels compute
  Range unused;  // never read; filled here

  BlockRows(int64_t begin, int64_t size, int64_t used_rows, int64_t rows)
      : used{begin, min64(begin + size, used_rows)},
        unused{max64(begin, used_rows), min64(begin + size, rows)} {}
};

// Rows of out or of a gradient that are not in use: zeros.
void fill_with_zeros(const RowView& view, Range rows, int64_t bytes) {
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    std::memset(view.row(i), 0, static_cast<size_t>(bytes));
  }
}

// dq of queries that are not in use or see no key; dk and dv of keys that are not in use. Their
// gradients are 0, and what is added up stays as it is.
void clear_dq(const BackwardContext& c, const SequenceRows& s, int64_t head, Range queries) {
  if (c.problem.accumulate) return;
  fill_with_zeros(c.query_rows(c.dq, s, head), queries, c.dq.bytes(c.problem.head_dim));
}
void fill_unused_keys(const BackwardContext& c, const SequenceRows& s, int64_t head_kv,
                      Range keys) {
  if (c.problem.accumulate) return;
  fill_with_zeros(c.key_rows(c.dk, s, head_kv), keys, c.dk.bytes(c.problem.head_dim));
  fill_with_zeros(c.key_rows(c.dv, s, head_kv), keys, c.dv.bytes(c.problem.head_dim_v));
}

// The pieces that dbias is cut into.
class DbiasItems {
 public:
  explicit DbiasItems(const AttentionProblem& p)
      : problem_(p),
        rows_(ceil_div(p.bias_seqlen_q, kDbiasTile)),
        keys_(ceil_div(p.seqlen_k, kDbiasTile)) {}

  int64_t count() const {
    return problem_.has_dbias ? problem_.bias_batch * problem_.bias_heads * rows_ * keys_ : 0;
  }
  // The last queries come first, as under a causal mask they see the most keys.
  DbiasItem operator[](int64_t n) const {
    const int64_t keys = n % keys_ * kDbiasTile, plane = n / keys_ / rows_;
    const int64_t rows = (rows_ - 1 - n / keys_ % rows_) * kDbiasTile;
    return {plane / problem_.bias_heads,
            plane % problem_.bias_heads,
            {rows, min64(rows + kDbiasTile, problem_.bias_seqlen_q)},
            {keys, min64(keys + kDbiasTile, problem_.seqlen_k)}};
  }

 private:
  const AttentionProblem& problem_;
  int64_t rows_, keys_;
};
// Whether a query's block is over the mask's capacity: its list is not there, and its rows are NaN.
bool is_over_capacity(const Context& c, const SequenceRows& s, int64_t head, int64_t query) {
  return c.mask && c.mask_of(s, head).queries.over_capacity(query / c.mask_layout.block_q);
}
// visit(rows) for the queries among these of which that is so.
template <typename Visit>
void for_each_over_capacity(const Context& c, const SequenceRows& s, int64_t head, Range queries,
                            const Visit& visit) {
  while (c.mask && !queries.empty()) {
    const Range rows = block_at(queries, queries.begin, c.mask_layout.block_q);
    if (is_over_capacity(c, s, head, rows.begin)) visit(rows);
    queries.begin = rows.end;
  }
}
void fill_with_nan(const RowView& view, Range rows, int64_t dim) {
  const uint32_t nan = view.dtype == STROBE_FLOAT32   ? 0x7FC00000
                       : view.dtype == STROBE_FLOAT16 ? 0x7E00
                                                      : 0x7FC0;
  const auto size = static_cast<size_t>(element_size(view.dtype));
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    for (int64_t e = 0; e < dim; ++e) {
      std::memcpy(view.row(i) + static_cast<size_t>(e) * size, &nan, size);
    }
  }
}

// Rows of packed tensors past the end of the last sequence, which are nobody's: as rows that are
// not in use.
Range past_end(const int32_t* begins, int64_t batch, int64_t total) {
  return {begins ? end_of_last(begins, static_cast<int32_t>(batch), total) : total, total};
}
// The caller's workspace, or one of our own for the time of a call.
class Workspace {
 public:
  // Of `bytes`, for what all threads share and nothing else.
  Workspace(void* callers, size_t bytes) : bytes_(bytes) { take(callers); }

  // A plan's. Where there is no memory for all of its threads (they may be many, and the threads of
  // earlier launches have stacks), fewer of them do the work.
  Workspace(const InstructionSet& isa, const Plan& plan, void* callers)
      : bytes_(plan.workspace_bytes), threads_(plan.threads) {
    take(callers);
    while (failed() && threads_ > 1) {
      const size_t shared = shared_bytes(isa, plan, plan.threads);
      threads_ /= 2;
      bytes_ = shared + static_cast<size_t>(threads_) * scratch_bytes(plan, shared);
      take(nullptr);
    }
  }

  std::byte* data() const { return data_; }
  // Of the plan's threads, those that there is scratch for.
  int32_t threads() const { return threads_; }
  // The smallest that was tried was too large.
  bool failed() const { return !data_ && bytes_ != 0; }
  Status status() const {
    if (!failed()) return {};
    return {STROBE_OUT_OF_MEMORY,
            format("a workspace of %zu bytes could not be allocated", bytes_)};
  }

  // Where each thread's scratch begins, behind the bytes that all share.
  auto scratch(const Plan& plan, size_t shared) const {
    std::byte* const first = data_ + shared;
    const size_t bytes = scratch_bytes(plan, shared);
    return [=](int thread) { return first + static_cast<size_t>(thread) * bytes; };
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  static size_t scratch_bytes(const Plan& plan, size_t shared) {
    return (plan.workspace_bytes - shared) / static_cast<size_t>(plan.threads) /
           kWorkspaceAlignment * kWorkspaceAlignment;
  }
  void take(void* callers) {
    data_ = static_cast<std::byte*>(callers);
    if (data_ || bytes_ == 0) return;
    own_.reset(std::aligned_alloc(kWorkspaceAlignment, round_up_to_alignment(bytes_)));
    data_ = static_cast<std::byte*>(own_.get());
  }

  size_t bytes_;
  int32_t threads_ = 1;
  std::byte* data_ = nullptr;
  std::unique_ptr<void, Free> own_;
};

// Bytes of new keys and values that are worth one more thread.
constexpr int64_t kAppendBytesPerThread = 128 * 1024;
// New keys that a thread takes at a time.
constexpr int64_t kAppendKeys = 16;

// Writes the new keys and values to the cache. All are there before any is read.
void append(const InstructionSet& isa, const Plan& plan, const ForwardContext& context) {
  const AttentionProblem& p = plan.problem;
  const bool packed = p.append == STROBE_APPEND_PACKED;
  const int64_t rows = packed ? p.total_new : p.batch * p.seqlen_new;
  const int64_t bytes = rows * p.heads_kv * (p.head_dim + p.head_dim_v) * element_size(p.dtype);
  const int64_t pieces = ceil_div(p.seqlen_new, kAppendKeys);
  const int64_t most = threads_or_default(p.threads);
  share_out(p.batch * pieces, min64(most, 1 + bytes / kAppendBytesPerThread), [&](int64_t n) {
    const CachedRows s = context.sequences.sequence_rows(n / pieces);
    const int64_t begin = s.new_begin + n % pieces * kAppendKeys;
    const Range keys{begin, min64(begin + kAppendKeys, s.seqlen_k)};
    if (!keys.empty()) isa.append(context, s.batch, keys);
  });
}

// Fills rows past the end, some of a head at a time. fill(head, rows).
template <typename Fill>
void fill_past_end(Range all, int64_t heads, int64_t threads, Interrupt& interrupt,
                   const Fill& fill) {
  constexpr int64_t kRows = 1024;
  const int64_t pieces = ceil_div(all.size(), kRows), items = heads * pieces;
  if (items == 0) return;
  share_out(items, min64(threads, items), interrupt, [&](int64_t n, int) {
    const int64_t begin = all.begin + n % pieces * kRows;
    fill(n / pieces, Range{begin, min64(begin + kRows, all.end)});
  });
}

}  // namespace

void fill_unused(const ForwardContext& c, const SequenceRows& s, int64_t head, Range queries) {
  if (queries.empty()) return;
  fill_with_zeros(c.query_rows(c.out, s, head), queries, c.out.bytes(c.problem.head_dim_v));
  if (!c.lse) return;
  float* const lse = c.lse + c.lse_index(s, head);
  std::fill(lse + queries.begin, lse + queries.end, -kInfinity);
}

Status forward(const InstructionSet& isa, const Plan& plan, const ForwardArgs& callers) {
  const AttentionProblem& p = plan.problem;
  const bool some_q = rows_q(p) > 0;
  const Workspace workspace = some_q ? Workspace(isa, plan, callers.workspace)
                                     : Workspace(callers.workspace, number_bytes(p));
  STROBE_RETURN_IF_ERROR(workspace.status());
  Arena arena(workspace.data());
  const ForwardArgs args = own_numbers(p, callers, arena);
  STROBE_RETURN_IF_ERROR(check_numbers(p, args));
  const ForwardContext context = forward_context(isa, plan, args);
  if (p.append) append(isa, plan, context);
  if (!some_q) return {};
  const DecodeUse use(isa, p);
  std::optional<DecodeItems> decoded;
  if (use.some) decoded.emplace(isa, context, plan.threads, arena);
  const int64_t decode_items = decoded ? decoded->count() : 0;
  const int64_t threads = workspace.threads();
  const auto scratch = workspace.scratch(plan, arena.used());
  std::optional<ForwardItems> tiled;
  if (!use.all) tiled.emplace(plan, context.sequences.cu_q);
  Interrupt interrupt(args);
  const int64_t items = decode_items + (tiled ? tiled->count() : 0);
  share_out(items, threads, interrupt, [&](int64_t n, int thread) {
    if (n < decode_items) return decoded->run(n, scratch(thread));
    ForwardItem item = (*tiled)[n - decode_items];
    const SequenceRows s = context.sequence_rows(item.batch);
    if (use.decoded(s.seqlen_q)) return;
    const BlockRows queries(item.q_begin, item.q_end - item.q_begin, s.seqlen_q, s.rows_q);
    if (!queries.used.empty()) {
      item.q_end = queries.used.end;
      isa.forward_block(context, item, scratch(thread));
      for_each_over_capacity(context, s, item.head, queries.used, [&](Range rows) {
        fill_with_nan(context.query_rows(context.out, s, item.head), rows, p.head_dim_v);
        if (!context.lse) return;
        float* const lse = context.lse + context.lse_index(s, item.head);
        std::fill(lse + rows.begin, lse + rows.end, std::numeric_limits<float>::quiet_NaN());
      });
    }
    fill_unused(context, s, item.head, queries.unused);
  });
  STROBE_RETURN_IF_ERROR(interrupt.status());
  fill_past_end(
      past_end(context.sequences.cu_q, p.batch, p.total_q), p.heads, threads, interrupt,
      [&](int64_t head, Range rows) { fill_unused(context, SequenceRows{}, head, rows); });
  return interrupt.status();
}

Status backward(const InstructionSet& isa, const Plan& plan, const BackwardArgs& callers) {
  const AttentionProblem& p = plan.problem;
  const Workspace workspace(isa, plan, callers.workspace);
  STROBE_RETURN_IF_ERROR(workspace.status());
  Arena arena(workspace.data());
  const BackwardArgs args = own_numbers(p, callers, arena);
  STROBE_RETURN_IF_ERROR(check_numbers(p, args));
  BackwardContext context = backward_context(plan, args, isa.lanes);
  carve(arena, context);
  const BackwardSinks sinks(args, arena, context);
  const int64_t threads = workspace.threads();
  const auto scratch = workspace.scratch(plan, arena.used());

  // Rows of delta that an item makes: whole query tiles, for the dq of those that no key block
  // visits is cleared here.
  const int64_t delta_rows = round_up(256, plan.tile_q);
  const Blocks delta_blocks = Blocks::of_queries(p, context.sequences.cu_q, delta_rows);
  Interrupt interrupt(args);
  share_out(delta_blocks.count(), threads, interrupt, [&](int64_t i, int thread) {
    const auto [batch, own_head, begin] = delta_blocks[i];
    const int64_t head = own_head;  // lambdas may not use names of a structured binding
    const Sequence s = context.sequence(batch, head);
    const BlockRows queries(begin, delta_rows, s.mask.seqlen_q, s.rows_q);
    for (int64_t q = begin; q < queries.used.end; q += plan.tile_q) {
      *turn_of(context, batch, head, q) = 0;
      const Range tile{q, min64(q + plan.tile_q, queries.used.end)};
      if (keys_of(context, s, head, tile, plan.block_k).empty()) clear_dq(context, s, head, tile);
    }
    if (!queries.used.empty()) {
      const int64_t lse_at = context.lse_index(s, head);
      sinks.begin(context, head, lse_at, queries.used);
      isa.backward_delta(context, {batch, head, begin, queries.used.end}, scratch(thread));
      sinks.end(context, head, lse_at, queries.used, [&](int64_t q) {
        if (is_over_capacity(context, s, head, q)) return false;  // what is not known is not none
        const BlockWalk walk = keys_of(context, s, head, {q, q + 1}, plan.block_k);
        if (sees_none(context, s, head, walk, q, plan.block_k)) return true;
        // A bias may hide all that the mask shows. Only 0 times what is not finite tells.
        return std::isnan(context.delta[lse_at + q]) &&
               bias_hides_all(context, s, head, walk, q, plan.block_k);
      });
    }
    clear_dq(context, s, head, queries.unused);
  });
  STROBE_RETURN_IF_ERROR(interrupt.status());
  if (p.has_dsinks) {
    share_out(p.heads, min64(threads, p.heads), interrupt, [&](int64_t head, int) {
      BackwardSinks::write_gradient(context, head, args.dsinks);
    });
    STROBE_RETURN_IF_ERROR(interrupt.status());
  }

  // turnstile.h demands that key blocks come in ascending order. Under a causal mask the longest
  // work then also comes first.
  const Blocks blocks = Blocks::of_keys(p, context.sequences.cu_k, plan.block_k, plan.threads);
  share_out(blocks.count(), threads, interrupt, [&](int64_t i, int thread) {
    const auto [batch, head, begin] = blocks[i];
    const SequenceRows s = context.sequence_rows(batch);
    const BlockRows keys(begin, plan.block_k, s.seqlen_k, s.rows_k);
    if (!keys.used.empty()) {
      isa.backward_block(context, {batch, head, begin, keys.used.end}, scratch(thread));
    }
    fill_unused_keys(context, s, head, keys.unused);
  });
  STROBE_RETURN_IF_ERROR(interrupt.status());
  const DbiasItems pieces(p);
  share_out(pieces.count(), threads, interrupt,
            [&](int64_t i, int thread) { isa.dbias_block(context, pieces[i], scratch(thread)); });
  STROBE_RETURN_IF_ERROR(interrupt.status());
  // When no key block adds to a tile any more, which may have a block's rows beside others.
  for (int64_t i = 0; context.mask && i < delta_blocks.count(); ++i) {
    const auto [batch, head, begin] = delta_blocks[i];
    const SequenceRows s = context.sequence_rows(batch);
    const RowView dq = context.query_rows(context.dq, s, head);
    for_each_over_capacity(context, s, head, {begin, min64(begin + delta_rows, s.seqlen_q)},
                           [&](Range rows) { fill_with_nan(dq, rows, p.head_dim); });
  }
  fill_past_end(past_end(context.sequences.cu_q, p.batch, p.total_q), p.heads, threads, interrupt,
                [&](int64_t head, Range rows) { clear_dq(context, SequenceRows{}, head, rows); });
  fill_past_end(
      past_end(context.sequences.cu_k, p.batch, p.total_k), p.heads_kv, threads, interrupt,
      [&](int64_t head, Range rows) { fill_unused_keys(context, SequenceRows{}, head, rows); });
  return interrupt.status();
}

}  // namespace strobe::cpu
