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
#include <type_traits>

#include "core/options.h"
#include "core/team.h"
#include "core/workspace.h"
#include "cpu/blocks.h"
#include "cpu/decode_items.h"
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

// FLOP that make a launch worth one more thread: waking a thread for less than about a million
// costs more than it saves.
constexpr double kFlopPerThread = 1e6;
// Work is cut finer until each thread has about this many items, so that the thread that finishes
// last is not far behind the others.
constexpr int64_t kItemsPerThread = 4;
// The items of a forward launch's last round, one for each thread, are cut into this many pieces.
// Without that, a thread that is held up in the last of four rounds costs a quarter of the launch.
constexpr int64_t kLastPieces = 4;
// A deterministic backward is cut into at least this many work items for every number of threads.
constexpr int64_t kDeterministicItems = 128;

double flop(const AttentionProblem& p) {
  const double scores = static_cast<double>(p.heads) *
                        (static_cast<double>(rows_q(p)) * static_cast<double>(p.seqlen_k));
  return scores * 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) *
         (p.direction == STROBE_FORWARD ? 1.0 : 2.5);
}

// Blocks of the same size, of whole tiles and at most `block`: 5 blocks of 410 rather than 4 of 512
// and one of 2.
int64_t even_block(int64_t length, int64_t tile, int64_t block) {
  const int64_t blocks = max64(1, ceil_div(length, block));
  return max64(tile, round_up(ceil_div(length, blocks), tile));
}

// The largest multiple of tile, at most max_block, that cuts `length` into enough blocks for
// `wanted` items.
int64_t choose_block(int64_t length, int64_t tile, int64_t max_block, int64_t others,
                     int64_t wanted) {
  int64_t block = max_block;
  while (block > tile && others * ceil_div(length, block) < wanted)
    block = round_up(block / 2, tile);
  return even_block(length, tile, block);
}

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

// packed: its sequences lie end to end, and the batch stride is not used.
Tensor tensor(const void* data, const Strides& s, bool packed, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), packed ? 0 : s.batch, s.seqlen, s.head,
          dtype};
}

Scales scales(const void* data, const Strides& s, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), s.batch, s.seqlen, s.head, dtype};
}
// Those of a sequence's key heads, in float8 attention. Null: all are 1.
Scales head_scales(const void* data, const Strides& s) {
  static const float one = 1;
  Scales made = data ? scales(data, s, STROBE_FLOAT32) : scales(&one, Strides{}, STROBE_FLOAT32);
  made.by_sequence = true;
  return made;
}

Bias bias(const void* data, const Strides& s, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), s, dtype};
}

template <typename Args>
void fill_context(const Plan& plan, const Args& args, Context& c) {
  const AttentionProblem& p = plan.problem;
  c.problem = p;
  c.q = tensor(args.q, p.q, p.varlen, p.dtype);
  c.k = tensor(args.k, p.k, p.varlen && !p.cache, p.kv_dtype);
  c.v = tensor(args.v, p.v, p.varlen && !p.cache, v_dtype_of(p));
  static_cast<Sequences&>(c.sequences) = sequences_of(p, args);
  c.alibi_slopes = p.alibi ? args.alibi_slopes : nullptr;
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (has_float8_queries(p)) {
      c.q.scales = head_scales(args.q_scale, p.q_scale);
      c.k.scales = head_scales(args.k_scale, p.k_scale);
      c.v.scales = head_scales(args.v_scale, p.v_scale);
    } else {
      if (has_scales(c.k.dtype)) c.k.scales = scales(args.k_scale, p.k_scale, p.kv_scale_dtype);
      if (has_scales(c.v.dtype)) c.v.scales = scales(args.v_scale, p.v_scale, p.kv_scale_dtype);
    }
  }
  c.sinks = p.has_sinks ? args.sinks : nullptr;
  c.sinks_in_lse = !p.sinks_outside_lse;
  if (p.mask.kind != STROBE_MASK_NONE) {
    c.mask = static_cast<const int32_t*>(args.mask);
    c.mask_layout = MaskLayout::of(p);
  }
  if (p.has_bias) c.bias = bias(args.bias, p.bias, p.bias_dtype);
  c.dropout = Dropout::of(p, args.dropout_seed, args.dropout_offset);
  c.tile_q = plan.tile_q;
  c.tile_k = plan.tile_k;
  c.block_q = plan.block_q;
  c.block_k = plan.block_k;
}

ForwardContext forward_context(const InstructionSet& isa, const Plan& plan,
                               const ForwardArgs& args) {
  ForwardContext c{};
  fill_context(plan, args, c);
  const AttentionProblem& p = plan.problem;
  c.most_decoded = isa.most_decoded(p);
  if (p.cache) c.sequences = cached_sequences_of(p, args);
  c.out = tensor(args.out, p.out, p.varlen, p.out_dtype);
  c.lse = args.lse;
  const bool packed = p.append == STROBE_APPEND_PACKED;
  c.k_new = tensor(args.k_new, p.k_new, packed, p.dtype);
  c.v_new = tensor(args.v_new, p.v_new, packed, p.dtype);
  c.rotary_cos = static_cast<const std::byte*>(args.rotary_cos);
  c.rotary_sin = static_cast<const std::byte*>(args.rotary_sin);
  return c;
}

BackwardContext backward_context(const Plan& plan, const BackwardArgs& args, int64_t lanes) {
  const AttentionProblem& p = plan.problem;
  BackwardContext c{};
  fill_context(plan, args, c);
  c.out = tensor(args.out, p.out, p.varlen, p.out_dtype);
  c.dout = tensor(args.dout, p.dout, p.varlen, p.dtype);
  c.dq = tensor(args.dq, p.dq, p.varlen, p.grad_dtype);
  c.dk = tensor(args.dk, p.dk, p.varlen, p.grad_dtype);
  c.dv = tensor(args.dv, p.dv, p.varlen, p.grad_dtype);
  if (p.has_dbias) c.dbias = bias(args.dbias, p.dbias, p.dbias_dtype);
  c.lse = args.lse;
  c.dlse = p.has_dlse && !p.has_sinks ? args.dlse : nullptr;  // else BackwardSinks takes it off
  c.delta = p.has_delta ? args.delta : nullptr;
  c.dq_stride = round_up(p.head_dim, lanes);
  c.turn_tiles =
      p.varlen ? p.total_q / plan.tile_q + p.batch : p.batch * ceil_div(p.seqlen_q, plan.tile_q);
  return c;
}

// The shared part of a backward workspace; the threads' scratch follows.
void carve(Arena& arena, BackwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t rows = rows_q(p) * p.heads;
  if (!p.has_delta) c.delta = c.made_delta = arena.take<float>(rows);
  c.row_max = arena.take<float>(rows);
  c.row_sum = arena.take<float>(rows);
  c.dq_sum = arena.take<float>(rows * c.dq_stride);
  c.turn = arena.take<uint32_t>(p.heads * c.turn_tiles);
}

// What attention sinks add to the backward pass, around the kernels, which know of them only that
// lse has them: lse with the sinks where the caller's is without; the sinks' own gradient; and the
// gradient of lse, which is of the keys alone where the sinks are not in lse.
class BackwardSinks {
 public:
  // Replaces the context's lse where that has to be made.
  BackwardSinks(const BackwardArgs& args, Arena& arena, BackwardContext& c)
      : lse_(args.lse), dlse_(c.problem.has_dlse ? args.dlse : nullptr) {
    const AttentionProblem& p = c.problem;
    const int64_t rows = rows_q(p) * p.heads;
    if (p.sinks_outside_lse) c.lse = made_lse_ = arena.take<float>(rows);
    if (p.has_dsinks) c.sink_weight = arena.take<float>(rows);
  }

  // Before backward_delta of some queries of a head.
  void begin(const BackwardContext& c, int64_t head, int64_t lse_at, Range queries) const {
    if (!c.sinks) return;
    for (int64_t row = lse_at + queries.begin; row < lse_at + queries.end; ++row) {
      const SinkOfRow sink = of(c, head, row);
      if (made_lse_) made_lse_[row] = sink.lse;
      if (c.sink_weight) c.sink_weight[row] = sink.weight;
    }
  }

  // After it: delta is dout * out. sink_weight becomes what the row adds to the sink's gradient.
  // no_key(query): whether the query sees none; then out is 0 whatever dout holds, unless lse says
  // that the sink has not all weight: the row then has keys elsewhere, in another call's part.
  template <typename NoKey>
  void end(const BackwardContext& c, int64_t head, int64_t lse_at, Range queries,
           const NoKey& no_key) const {
    if (!c.sinks) return;
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      const int64_t row = lse_at + q;
      const float dlse = dlse_ ? dlse_[row] : 0;
      if (c.sink_weight) {
        const bool empty = !(c.sink_weight[row] < 1) && no_key(q);
        const float weight = empty ? 1 : c.sink_weight[row];
        const float of_out = empty && c.made_delta ? 0 : c.delta[row];
        const float of_row = weight * ((c.sinks_in_lse ? dlse : 0) - of_out);
        c.sink_weight[row] = c.sink(head) == -kInfinity ? 0 : of_row;
      }
      if (dlse_) c.made_delta[row] -= dlse * of(c, head, row).dlse_factor;
    }
  }

  // The gradient of a head's sink, when end has been called for all queries in use.
  static void write_gradient(const BackwardContext& c, int64_t head, float* dsinks) {
    double sum = c.problem.accumulate ? static_cast<double>(dsinks[head]) : 0;
    for (int64_t batch = 0; batch < c.problem.batch; ++batch) {
      const SequenceRows s = c.sequence_rows(batch);
      const float* const of_rows = c.sink_weight + c.lse_index(s, head);
      for (int64_t q = 0; q < s.seqlen_q; ++q) sum += static_cast<double>(of_rows[q]);
    }
    dsinks[head] = static_cast<float>(sum);
  }

 private:
  SinkOfRow of(const BackwardContext& c, int64_t head, int64_t row) const {
    return SinkOfRow::of<ScalarMath>(c.sink(head), lse_[row], c.sinks_in_lse);
  }

  const float *lse_, *dlse_;  // the caller's
  float* made_lse_ = nullptr;
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
  Workspace(void* callers, size_t bytes) : data_(callers) {
    if (data_ || bytes == 0) return;
    own_.reset(std::aligned_alloc(kWorkspaceAlignment, round_up_to_alignment(bytes)));
    data_ = own_.get();
    failed_ = !data_;
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  bool failed() const { return failed_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  void* data_;
  std::unique_ptr<void, Free> own_;
  bool failed_ = false;
};

// Where each thread's scratch begins, in a workspace of which the first `shared` bytes are shared.
auto scratch_of_threads(const Plan& plan, const Workspace& workspace, size_t shared) {
  const size_t bytes = (plan.workspace_bytes - shared) / static_cast<size_t>(plan.threads) /
                       kWorkspaceAlignment * kWorkspaceAlignment;
  std::byte* const first = workspace.data() + shared;
  return [=](int thread) { return first + static_cast<size_t>(thread) * bytes; };
}

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
  const int64_t most = p.threads > 0 ? p.threads : default_threads();
  share_out(p.batch * pieces, min64(most, 1 + bytes / kAppendBytesPerThread), [&](int64_t n) {
    const CachedRows s = context.sequences.sequence_rows(n / pieces);
    const int64_t begin = s.new_begin + n % pieces * kAppendKeys;
    const Range keys{begin, min64(begin + kAppendKeys, s.seqlen_k)};
    if (!keys.empty()) isa.append(context, s.batch, keys);
  });
}

// visit(array, length) for each array of numbers that a launch carries, but for the block table.
template <typename Args, typename Visit>
void for_each_number_array(const AttentionProblem& p, Args& a, const Visit& visit) {
  if (p.varlen) visit(a.cu_seqlens_q, p.batch + 1);
  if (p.varlen && !p.cache) visit(a.cu_seqlens_k, p.batch + 1);
  for_each_array(p, a, [&](const OptionArray&, int32_t wanted, const int32_t*& numbers) {
    if (wanted) visit(numbers, p.batch);
  });
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (p.append == STROBE_APPEND_PACKED) visit(a.cu_seqlens_k_new, p.batch + 1);
    for_each_cache_array(p, a,
                         [&](const char*, const char*, int32_t wanted, const int32_t*& numbers) {
                           if (wanted) visit(numbers, p.batch);
                         });
  }
}

// The arguments with these arrays in the arena. Other threads may write to the caller's arrays
// while the launch runs, as a scheduler does that prepares the next step. How the work is divided,
// where rows lie and who waits for whom all come from these numbers and have to go together, so
// that the launch reads each number once, before it checks them, and from then on knows its own
// alone. The block table is too large for that: its entries have to go with nothing, and RowView
// checks each where it is used.
template <typename Args>
Args own_numbers(const AttentionProblem& p, Args args, Arena& arena) {
  for_each_number_array(p, args, [&](const int32_t*& numbers, int64_t length) {
    int32_t* const own = arena.take<int32_t>(length);
    for (int64_t i = 0; own && i < length; ++i) own[i] = read_once(numbers + i);
    numbers = own;
  });
  return args;
}

// Bytes of a workspace that they take.
size_t number_bytes(const AttentionProblem& p) {
  Arena arena;
  if (p.direction == STROBE_FORWARD) {
    own_numbers(p, ForwardArgs{}, arena);
  } else {
    own_numbers(p, BackwardArgs{}, arena);
  }
  return arena.used();
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

Status no_memory(size_t bytes) {
  return {STROBE_OUT_OF_MEMORY, format("a workspace of %zu bytes could not be allocated", bytes)};
}

}  // namespace

void fill_unused(const ForwardContext& c, const SequenceRows& s, int64_t head, Range queries) {
  if (queries.empty()) return;
  fill_with_zeros(c.query_rows(c.out, s, head), queries, c.out.bytes(c.problem.head_dim_v));
  if (!c.lse) return;
  float* const lse = c.lse + c.lse_index(s, head);
  std::fill(lse + queries.begin, lse + queries.end, -kInfinity);
}

namespace {

// What a forward or a backward launch is cut into, where work items are blocks of rows.
int64_t rows_to_cut(const AttentionProblem& p) {
  return p.direction == STROBE_FORWARD ? p.seqlen_q : p.seqlen_k;
}
int64_t tile_to_cut(const AttentionProblem& p, const Tiles& tiles) {
  return p.direction == STROBE_FORWARD ? tiles.tile_q : tiles.tile_k;
}

// Whether a block of keys has to be the same whatever the problem's lengths are: how many rows a
// sequence is given beyond those that it uses, its neighbours decide.
bool has_any_length(const AttentionProblem& p) {
  return p.direction == STROBE_BACKWARD && p.batch_invariant && (p.varlen || p.has_seqused_k);
}
// What the plan has of a choice's block.
int64_t chosen_block(const AttentionProblem& p, int64_t tile, int64_t block) {
  return has_any_length(p) ? block : even_block(rows_to_cut(p), tile, block);
}

Tiles tiles_of(const InstructionSet& isa, const AttentionProblem& p) {
  return p.direction == STROBE_FORWARD ? isa.forward_tiles(p) : isa.backward_tiles(p);
}

// Why a choice's block is none for the problem; empty where it is one.
std::string block_declines(const InstructionSet& isa, const AttentionProblem& p, int64_t block) {
  if (DecodeUse(isa, p).all) {
    if (block == 0) return {};
    return format("choice.block = %" PRId64 ", expected 0 (few queries: items are of keys)", block);
  }
  const Tiles tiles = tiles_of(isa, p);
  const int64_t tile = tile_to_cut(p, tiles);
  if (tile <= block && block <= tiles.max_block && block % tile == 0) return {};
  return format("choice.block = %" PRId64 ", expected a multiple of %" PRId64 " up to %" PRId64,
                block, tile, tiles.max_block);
}

}  // namespace

std::string fill_plan(const InstructionSet& isa, Plan& plan, const Choice* choice) {
  const AttentionProblem& p = plan.problem;
  if (choice) {
    if (std::string reason = block_declines(isa, p, choice->block); !reason.empty()) return reason;
  }
  const int64_t threads = p.threads > 0 ? p.threads : default_threads();
  const int64_t useful = min64(threads, 1 + static_cast<int64_t>(flop(p) / kFlopPerThread));
  const int64_t wanted = useful == 1 ? 1 : threads * kItemsPerThread;  // work items
  const bool forward = p.direction == STROBE_FORWARD;
  const Tiles tiles = tiles_of(isa, p);
  plan.tile_q = tiles.tile_q;
  plan.tile_k = tiles.tile_k;
  plan.work_items = 0;
  size_t scratch = 0, shared = number_bytes(p);
  const DecodeUse decode(isa, p);
  if (decode.some) {
    const DecodePlan split(isa, p, useful);
    plan.work_items = split.work_items;
    plan.block_k = min64(split.item_blocks * kDecodeKeys, p.seqlen_k);
    plan.tile_q = split.shape.heads * split.shape.item_rows;
    plan.tile_k = kDecodeKeys;
    shared += split.bytes;
    scratch = isa.decode->scratch(forward_context(isa, plan, {}));
  }
  if (forward && !decode.all) {
    plan.tile_q = tiles.tile_q;
    plan.tile_k = tiles.tile_k;
    plan.block_q =
        choice ? chosen_block(p, plan.tile_q, choice->block)
               : choose_block(p.seqlen_q, plan.tile_q, tiles.max_block, p.batch * p.heads, wanted);
    plan.work_items += Blocks::of_queries(p, nullptr, plan.block_q).count();
    scratch = std::max(scratch, isa.forward_scratch(forward_context(isa, plan, {})));
  } else if (!forward) {
    if (choice) {
      plan.block_k = chosen_block(p, plan.tile_k, choice->block);
    } else if (has_any_length(p)) {
      plan.block_k = tiles.max_block;
    } else {
      plan.block_k = choose_block(p.seqlen_k, plan.tile_k, tiles.max_block,
                                  p.batch_invariant ? p.heads_kv : p.batch * p.heads_kv,
                                  p.deterministic ? kDeterministicItems : wanted);
    }
    plan.work_items = Blocks::of_keys(p, nullptr, plan.block_k).count();
    BackwardContext context = backward_context(plan, {}, isa.lanes);
    Arena arena;
    carve(arena, context);
    BackwardSinks(BackwardArgs{}, arena, context);
    shared += arena.used();
    scratch = isa.backward_scratch(context);
  }
  plan.threads = static_cast<int32_t>(max64(1, min64(useful, plan.work_items)));
  plan.workspace_bytes =
      shared + static_cast<size_t>(plan.threads) * round_up_to_alignment(scratch);
  return {};
}

std::vector<int64_t> blocks_to_choose(const InstructionSet& isa, const AttentionProblem& p) {
  if (DecodeUse(isa, p).all) return {0};
  const Tiles tiles = tiles_of(isa, p);
  const int64_t tile = tile_to_cut(p, tiles);
  std::vector<int64_t> blocks;
  for (int64_t most = tiles.max_block;; most = round_up(most / 2, tile)) {
    const int64_t block = chosen_block(p, tile, most);
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
    if (most <= tile) return blocks;
  }
}

Status forward(const InstructionSet& isa, const Plan& plan, const ForwardArgs& callers) {
  const AttentionProblem& p = plan.problem;
  const bool some_q = rows_q(p) > 0;
  const size_t bytes = some_q ? plan.workspace_bytes : number_bytes(p);
  const Workspace workspace(callers.workspace, bytes);
  if (workspace.failed()) return no_memory(bytes);
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
  const auto scratch = scratch_of_threads(plan, workspace, arena.used());
  std::optional<ForwardItems> tiled;
  if (!use.all) tiled.emplace(plan, context.sequences.cu_q);
  Interrupt interrupt(args);
  const int64_t items = decode_items + (tiled ? tiled->count() : 0);
  share_out(items, plan.threads, interrupt, [&](int64_t n, int thread) {
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
      past_end(context.sequences.cu_q, p.batch, p.total_q), p.heads, plan.threads, interrupt,
      [&](int64_t head, Range rows) { fill_unused(context, SequenceRows{}, head, rows); });
  return interrupt.status();
}

Status backward(const InstructionSet& isa, const Plan& plan, const BackwardArgs& callers) {
  const AttentionProblem& p = plan.problem;
  const Workspace workspace(callers.workspace, plan.workspace_bytes);
  if (workspace.failed()) return no_memory(plan.workspace_bytes);
  Arena arena(workspace.data());
  const BackwardArgs args = own_numbers(p, callers, arena);
  STROBE_RETURN_IF_ERROR(check_numbers(p, args));
  BackwardContext context = backward_context(plan, args, isa.lanes);
  carve(arena, context);
  const BackwardSinks sinks(args, arena, context);
  const auto scratch = scratch_of_threads(plan, workspace, arena.used());

  // Rows of delta that an item makes: whole query tiles, for the dq of those that no key block
  // visits is cleared here.
  const int64_t delta_rows = round_up(256, plan.tile_q);
  const Blocks delta_blocks = Blocks::of_queries(p, context.sequences.cu_q, delta_rows);
  Interrupt interrupt(args);
  share_out(delta_blocks.count(), plan.threads, interrupt, [&](int64_t i, int thread) {
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
    share_out(p.heads, min64(plan.threads, p.heads), interrupt, [&](int64_t head, int) {
      BackwardSinks::write_gradient(context, head, args.dsinks);
    });
    STROBE_RETURN_IF_ERROR(interrupt.status());
  }

  // turnstile.h demands that key blocks come in ascending order. Under a causal mask the longest
  // work then also comes first.
  const Blocks blocks = Blocks::of_keys(p, context.sequences.cu_k, plan.block_k);
  share_out(blocks.count(), plan.threads, interrupt, [&](int64_t i, int thread) {
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
  share_out(pieces.count(), plan.threads, interrupt,
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
  fill_past_end(past_end(context.sequences.cu_q, p.batch, p.total_q), p.heads, plan.threads,
                interrupt,
                [&](int64_t head, Range rows) { clear_dq(context, SequenceRows{}, head, rows); });
  fill_past_end(
      past_end(context.sequences.cu_k, p.batch, p.total_k), p.heads_kv, plan.threads, interrupt,
      [&](int64_t head, Range rows) { fill_unused_keys(context, SequenceRows{}, head, rows); });
  return interrupt.status();
}

}  // namespace strobe::cpu
