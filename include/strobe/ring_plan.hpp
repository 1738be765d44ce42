// How a rank of a ring (ring.hpp) does its part, in both directions: a plan for each call of the
// library, and keys that travel.
#ifndef STROBE_RING_PLAN_HPP_
#define STROBE_RING_PLAN_HPP_

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/nccl.hpp>
#include <strobe/ring_masks.hpp>
#include <strobe/ring_problem.hpp>
#include <strobe/ring_schedule.hpp>
#include <strobe/ring_tensors.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

namespace internal {

// A call of the library: some blocks under one plan.
struct RingCall {
  RingRows q = {}, k = {};  // rows of the rank, and of itself or of what was received
  Plan plan = {};
  // First of its int32s among the ring's: cu_seqlens_q, cu_seqlens_k and q_position of packed
  // blocks, else q_position; and seqused_q where it adds to dsinks.
  int64_t cumulative = -1, position = -1, used = -1, used_k = -1, sequences = 0;
  std::shared_ptr<const void> mask = {};  // packed, where the tensors are
  bool dsinks = false;                    // whether its rows add to the gradient of sinks
  bool sinks = false;                     // whether it is told of them
  bool later = false;                     // forward: whether its rows have a result already
  bool closes = false;                    // forward: whether nothing comes to its rows after it
  std::vector<RingRows> rows = {};        // forward: its queries, but for final ones between blocks
};

// Of a ring between groups: how many ranks each has, and which heads of so many this one is for.
struct RingShare {
  int32_t inside = 1;
  int64_t first_head = 0, heads = 0;  // heads: 0: the problem's are all
};

// What both directions plan: calls, and a workspace that is handed out piece by piece.
struct RingPlan {
  // The problem's defaults are filled in, and its schedule is made. share: the problem's ranks are
  // groups, and its heads are this rank's.
  explicit RingPlan(const RingProblem& wanted, const RingShare& of_group = {})
      : problem(ring_checked(wanted)),
        share(of_group),
        packed(!wanted.lengths.empty() ||
               (wanted.layer.attention_chunk > 0 && wanted.layer.batch == 1 &&
                wanted.mask.blocks.data() == nullptr)),
        layout(ring_layout(wanted, of_group.inside)),
        memory(wanted.layer.device, wanted.layer.device_index) {
    Problem& layer = problem.layer;
    if (problem.order == RingOrder::kAuto)
      problem.order = layer.causal ? RingOrder::kZigzag : RingOrder::kPlain;
    if (layer.heads_kv == 0) layer.heads_kv = layer.heads;
    if (layer.head_dim_v == 0) layer.head_dim_v = layer.head_dim;
    if (share.heads == 0) share.heads = layer.heads;
    batch = packed ? 1 : layer.batch;
    RingSeen seen;
    if (!problem.mask.empty()) {
      cut.emplace(problem.mask, layout.lengths(), batch, share.heads, held(),
                  !problem.lengths.empty());
      if (problem.mask.all_rows)
        seen = [this](RingRows& q, RingRows& k) { return cut->narrow(q, k); };
    }
    check_layer();
    mask = mask_of(layer, layout.all_rows());
    schedule = ring_schedule(layout, problem.rank, mask, share.inside, seen);
    chunks = layout.chunks(problem.rank, share.inside);
    if (cut || !problem.seqused.empty()) own_rows = rows_held(nullptr);
  }

  // How many rows the rank holds.
  [[nodiscard]] int64_t rows() const noexcept { return schedule.rows; }
  // The calls that compute blocks: dropout's place is a whole call's.
  [[nodiscard]] std::vector<RingBatch> calls_of(std::span<const RingBlock> blocks) const {
    return ring_batched(blocks, packed && problem.layer.dropout_p == 0);
  }

  // Of a tensor with so many rows, of those given or contiguous.
  [[nodiscard]] Strides strides_of(int64_t count, int64_t heads, int64_t dim,
                                   const Strides& given) const {
    return RingTensor::of(nullptr, batch, count, heads, dim, DType::kFloat32, given, packed)
        .strides;
  }

  // Which rows of all sequences the keys of a step are, or those of the rank.
  [[nodiscard]] std::vector<int64_t> rows_held(const RingStep* step) const {
    return ring_rows_held(layout, step ? step->source : problem.rank, share.inside,
                          step ? &step->receives : nullptr);
  }

  // The blocks' keys are among the rank's own (step is null), or received, contiguous.
  RingCall plan_call(const RingBatch& blocks, Problem sub, int64_t keys, const RingStep* step) {
    const Problem& layer = problem.layer;
    RingCall call;
    call.q = ring_queries(blocks);
    call.k = ring_keys(blocks);
    bool masked = false;
    for (const RingBlock& block : blocks) masked = masked || block.masked;
    sub.window_left = masked ? mask.left : -1;
    sub.causal = masked && mask.right == 0;
    sub.attention_chunk = 0;  // blocks end where chunks do
    sub.window_right = masked && !sub.causal ? mask.right : -1;
    sub.q = strides_of(rows(), layer.heads, layer.head_dim, layer.q);
    sub.k = strides_of(keys, layer.heads_kv, layer.head_dim, step ? Strides{} : layer.k);
    sub.v = strides_of(keys, layer.heads_kv, layer.head_dim_v, step ? Strides{} : layer.v);
    sub.seqlen_q = call.q.size();
    sub.seqlen_k = call.k.size();
    if (layer.dropout_p != 0) {
      const RingPlace place = ring_place(layout, chunks, call.q.begin);
      sub.dropout_first_query = place.row;
      sub.dropout_first_key = place.row - blocks[0].position;
      sub.dropout_first_head = place.sequence * share.heads + share.first_head;
      sub.dropout_heads = share.heads;
    }
    const bool placed = masked || mask.by_distance;
    RingSequences sequences;
    std::vector<const RingBlock*> of_sequences = {&blocks[0]};
    // Without a position, the last query in use stands at the last key in use.
    const bool aligned =
        problem.seqused.empty() && blocks[0].position == call.k.size() - call.q.size();
    if (packed) {
      pack(blocks, placed, sub, call, sequences, of_sequences);
    } else if (placed && !aligned) {
      sub.has_q_position = true;
      call.position = keep(std::vector<int32_t>(static_cast<size_t>(batch),
                                                static_cast<int32_t>(blocks[0].position)));
    }
    if (cut || !problem.seqused.empty()) {
      const std::vector<int64_t> of_keys = step ? rows_held(step) : own_rows;
      if (!problem.seqused.empty()) use(of_sequences, of_keys, sub, call);
      if (cut) mask_call(of_keys, sequences, sub, call);
    }
    call.dsinks = sub.has_dsinks;
    call.sinks = sub.has_sinks;
    call.plan = Plan(sub);
    scratch_bytes = std::max(scratch_bytes, call.plan.workspace_bytes());
    most_queries = std::max(most_queries, call.q.size());
    return call;
  }

  // Makes each block a packed sequence, and what lies between two of them sequences without keys or
  // without queries. Gives where these begin, and the block of each, null: none.
  void pack(const RingBatch& blocks, bool placed, Problem& sub, RingCall& call,
            RingSequences& begins, std::vector<const RingBlock*>& of) {
    std::vector<int32_t>&q = begins.q, &k = begins.k, position, used;
    q = k = {0};
    of.clear();
    const auto add = [&](int64_t end_q, int64_t end_k, const RingBlock* block) {
      const int64_t size_q = end_q - q.back(), size_k = end_k - k.back();
      sub.seqlen_q = std::max(sub.seqlen_q, size_q);
      sub.seqlen_k = std::max(sub.seqlen_k, size_k);
      q.push_back(static_cast<int32_t>(end_q));
      k.push_back(static_cast<int32_t>(end_k));
      position.push_back(static_cast<int32_t>(block ? block->position : 0));
      used.push_back(static_cast<int32_t>(block ? size_q : 0));
      of.push_back(block);
    };
    sub.seqlen_q = sub.seqlen_k = 0;
    bool gaps = false;
    for (const RingBlock& block : blocks) {
      const int64_t begin_q = block.q.begin - call.q.begin, begin_k = block.k.begin - call.k.begin;
      if (q.back() < begin_q) {
        gaps = true;
        add(begin_q, k.back(), nullptr);
      }
      if (k.back() < begin_k) add(begin_q, begin_k, nullptr);
      add(begin_q + block.q.size(), begin_k + block.k.size(), &block);
    }
    sub.varlen = true;
    if (sub.alibi == Alibi::kPerBatchHead) sub.alibi = Alibi::kPerHead;  // those of the one batch
    sub.batch = call.sequences = static_cast<int64_t>(position.size());
    sub.total_q = call.q.size();
    sub.total_k = call.k.size();
    call.cumulative = keep(q);
    (void)keep(k);
    if (placed) {
      sub.has_q_position = true;
      call.position = keep(position);
    }
    if (sub.has_dsinks && gaps) {
      // Rows that are no block's count for the gradient of sinks elsewhere.
      sub.has_seqused_q = true;
      call.used = keep(used);
    }
  }

  // Puts numbers among those of the calls: where the first one is.
  int64_t keep(const std::vector<int32_t>& some) {
    const auto at = static_cast<int64_t>(numbers.size());
    numbers.insert(numbers.end(), some.begin(), some.end());
    return at;
  }

  // Whether a row of all sequences is in use, in the sequence b of a batch.
  [[nodiscard]] bool in_use(int64_t row, int64_t b) const {
    if (problem.lengths.empty()) return row < problem.seqused[static_cast<size_t>(b)];
    const std::vector<int64_t>& starts = layout.starts();
    const auto next = std::upper_bound(starts.begin(), starts.end() - 1, row);
    return row - *(next - 1) < problem.seqused[static_cast<size_t>(next - starts.begin() - 1)];
  }

  // Rows in use are the first ones of each block's, as they are of each sequence's.
  void use(const std::vector<const RingBlock*>& of, const std::vector<int64_t>& of_keys,
           Problem& sub, RingCall& call) {
    std::vector<int32_t> q, k;
    const auto count = [&](const std::vector<int64_t>& held, const RingRows& rows, int64_t b) {
      const auto found = std::count_if(held.begin() + rows.begin, held.begin() + rows.end,
                                       [&](int64_t row) { return in_use(row, b); });
      return static_cast<int32_t>(found);
    };
    for (const RingBlock* block : of) {
      for (int64_t b = 0; b < batch; ++b) {
        q.push_back(block ? count(own_rows, block->q, b) : 0);
        k.push_back(block ? count(of_keys, block->k, b) : 0);
      }
    }
    sub.has_seqused_q = sub.has_seqused_k = true;
    call.used = keep(q);
    call.used_k = keep(k);
  }

  // Of these rows.
  void find_unused(const std::vector<RingRows>& rows) {
    for (int64_t b = 0; b < batch; ++b) {
      for (const RingRows& part : rows) {
        for (int64_t row = part.begin; row < part.end; ++row) {
          if (in_use(own_rows[static_cast<size_t>(row)], b)) continue;
          if (!unused.empty() && unused.back().first == b && unused.back().second.end == row) {
            ++unused.back().second.end;
          } else {
            unused.push_back({b, {row, row + 1}});
          }
        }
      }
    }
  }

  // The call's part of the mask as data.
  void mask_call(const std::vector<int64_t>& of_keys, const RingSequences& sequences, Problem& sub,
                 RingCall& call) const {
    const auto part = [](const std::vector<int64_t>& held, const RingRows& rows) {
      return std::span(held).subspan(static_cast<size_t>(rows.begin),
                                     static_cast<size_t>(rows.size()));
    };
    const RingRows heads = {share.first_head, share.first_head + problem.layer.heads};
    const RingPackedMask made =
        cut->pack(call.q.begin, part(own_rows, call.q), part(of_keys, call.k),
                  packed ? &sequences : nullptr, heads, problem.layer.threads);
    sub.mask = made.shape;
    call.mask = memory.kept(made.words);
  }

  // Of each step: those of what is received. prepare(rows) is called first, with how many rows that
  // are.
  template <typename Prepare>
  void plan_steps(const Problem& sub, const Prepare& prepare) {
    for (const RingStep& step : schedule.steps) {
      const int64_t keys = ring_count(step.receives);
      most_received = std::max(most_received, keys);
      most_sent = std::max(most_sent, ring_count(step.sends));
      prepare(keys);
      std::vector<RingCall>& calls = steps.emplace_back();
      for (const RingBatch& blocks : calls_of(step.blocks))
        calls.push_back(plan_call(blocks, sub, keys, &step));
    }
  }

  // Dropout's bits are drawn for eight keys at a time, and kernels on GPUs begin with whole ones:
  // refuses, on all ranks alike, what would have a call of some rank begin elsewhere.
  void check_eights() const {
    if (problem.layer.dropout_p == 0 || problem.layer.device != Device::kCuda) return;
    for (int32_t rank = 0; rank < problem.ranks; ++rank) {
      const RingSchedule theirs = ring_schedule(layout, rank, mask, share.inside);
      const std::vector<RingChunk> held = layout.chunks(rank, share.inside);
      const auto check = [&](const std::vector<RingBlock>& blocks) {
        for (const RingBlock& block : blocks) {
          const RingPlace place = ring_place(layout, held, block.q.begin);
          const int64_t key = place.row - block.position;
          if (key % 8 == 0) continue;
          throw Error(
              Status::kUnsupported,
              formatted(
                  "layer.dropout_p over ranks, where rank %d has a call with keys "
                  "from %" PRId64 " on, expected a multiple of 8 on GPUs: sequences "
                  "of multiples of %d rows and windows of multiples of 8 have it, "
                  "and packed ones that are whole (documents) without attention chunks "
                  "do not need it",
                  rank, key,
                  problem.ranks * share.inside * (problem.order == RingOrder::kZigzag ? 16 : 8)));
        }
      };
      for (const std::vector<RingBlock>* blocks : theirs.of_own_keys()) check(*blocks);
      for (const RingStep& step : theirs.steps) check(step.blocks);
    }
  }

  // For each step what is sent, received and computed by which kernel. Of groups, their numbers.
  [[nodiscard]] std::string steps_text() const {
    std::string text;
    const auto told = [&](const std::vector<RingCall>& calls) {
      for (const RingCall& call : calls) {
        text += formatted("  rows %" PRId64 "-%" PRId64 " x %" PRId64 " keys by %s\n", call.q.begin,
                          call.q.end - 1, call.k.size(), call.plan.kernel());
      }
    };
    const char* const whom = share.inside == 1 ? "rank" : "group";
    text += formatted("step 0, the %s's own keys\n", whom);
    for (const auto* calls : {&final, &edges, &own, &own_last, &final_last}) told(*calls);
    for (size_t n = 0; n < steps.size(); ++n) {
      const RingStep& step = schedule.steps[n];
      if (step.sends.empty() && step.receives.empty()) continue;
      text +=
          formatted("step %d, sends %" PRId64 " rows to %s %d, receives %" PRId64 " from %s %d\n",
                    step.distance, ring_count(step.sends), whom, step.target,
                    ring_count(step.receives), whom, step.source);
      told(steps[n]);
    }
    return text;
  }

  // Room for so many bytes: where it begins.
  size_t take(int64_t count) {
    const size_t at = bytes;
    bytes += (static_cast<size_t>(count) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  // K and V: of the step that computes and of the next, and those that are sent where their rows do
  // not lie end to end.
  void take_messages() {
    const Problem& layer = problem.layer;
    const int64_t row = batch * layer.heads_kv * (layer.head_dim + layer.head_dim_v) *
                        ring_element_size(layer.dtype);
    received_bytes = most_received * row;
    received = take(2 * received_bytes);
    sent = take(most_sent * row);
  }
  void finish_workspace() {
    numbers_at = take(static_cast<int64_t>(numbers.size() * sizeof(int32_t)));
    scratch = take(static_cast<int64_t>(scratch_bytes));
  }

  RingProblem problem;
  RingShare share;
  // Whether a call has many blocks, as sequences of no batch: of packed sequences, and of the
  // attention chunks of one sequence.
  bool packed;
  RingLayout layout;
  RingMemory memory;
  int64_t batch = 1;
  RingMask mask = {};
  RingSchedule schedule = {};
  // Of the making of calls: the mask as data, and which rows of all sequences the rank's are.
  std::optional<RingCut> cut = {};
  std::vector<int64_t> own_rows = {};
  std::vector<RingChunk> chunks = {};  // the rank's
  RingRoom room = {};                  // for float32 results, which are merged or summed up
  // As the schedule has them; forward: final and own alone; backward final is final_first, and own
  // own_first.
  std::vector<RingCall> final = {}, edges = {}, own = {}, own_last = {}, final_last = {};
  std::vector<std::vector<RingCall>> steps = {};
  std::vector<RingRows> single = {};                   // forward: rows with one result, in float32
  std::vector<RingRows> summed_q = {}, summed_k = {};  // backward: the schedule's
  // Forward, with sinks: rows that are not in use, of each sequence of a batch.
  std::vector<std::pair<int64_t, RingRows>> unused = {};
  std::vector<int32_t> numbers = {};  // arrays of the calls
  int64_t most_queries = 0, most_received = 0, most_sent = 0;
  int64_t received_bytes = 0, computed_bytes = 0;
  size_t scratch_bytes = 0, sums_bytes = 0;
  // Where the workspace's pieces begin, and where it ends.
  size_t outs = 0, lses = 0, lse_part = 0, dlse_part = 0, received = 0, sent = 0, sums = 0,
         computed = 0, returned = 0, dsinks = 0, numbers_at = 0, scratch = 0, bytes = 0;

 private:
  static constexpr size_t kAlignment = 256;  // of a piece of the workspace

  static RingMask mask_of(const Problem& layer, int64_t rows) {
    // A limit beyond the sequence's end is none.
    const auto limit = [&](int64_t x) { return x < 0 || x >= rows ? int64_t{-1} : x; };
    return {.left = limit(layer.window_left),
            .right = layer.causal ? 0 : limit(layer.window_right),
            .by_distance = layer.alibi != Alibi::kNone || layer.dropout_p != 0,
            .attention_chunk = layer.attention_chunk};
  }

  // What a Plan of the whole layer would refuse is refused by its names, on all ranks alike.
  void check_layer() const {
    Problem all = problem.layer;
    // A rank without rows answers as one with a row: strides of nothing mean nothing.
    const int64_t some = std::max<int64_t>(held(), 1);
    all.seqlen_q = all.seqlen_k = some;
    if (held() == 0) {
      for (Strides* s : {&all.q, &all.k, &all.v, &all.out}) *s = {};
      for (Strides* s : {&all.dout, &all.dq, &all.dk, &all.dv}) *s = {};
    }
    if (!problem.lengths.empty()) {
      all.varlen = true;
      all.total_q = all.total_k = some;
    }
    all.has_seqused_q = all.has_seqused_k = !problem.seqused.empty();
    if (cut) {
      all.mask.kind = STROBE_MASK_PACKED;
      all.mask.block_q = all.mask.block_k = 128;
      all.mask.batch = all.mask.heads = all.mask.capacity = 1;
    }
    (void)Plan(all);
  }

  // How many rows the rank has.
  [[nodiscard]] int64_t held() const { return layout.rows(problem.rank, share.inside); }
};

// What both directions do: the tensors of a launch, and keys that travel.
template <typename Args>
class RingLaunch {
 public:
  RingLaunch(const RingPlan& plan, const Args& args, Communicator& ranks)
      : plan_(plan), layer_(plan.problem.layer), args_(args), ranks_(ranks) {
    q_ = tensor(args.q, layer_.heads, layer_.head_dim, layer_.dtype, layer_.q);
    k_ = tensor(args.k, layer_.heads_kv, layer_.head_dim, layer_.dtype, layer_.k);
    v_ = tensor(args.v, layer_.heads_kv, layer_.head_dim_v, layer_.dtype, layer_.v);
  }

 protected:
  static constexpr int kKeys = 0, kGradients = 1;  // lanes

  // [batch, rows, heads, dim] of this rank.
  [[nodiscard]] RingTensor tensor(const void* data, int64_t heads, int64_t dim, DType dtype,
                                  const Strides& strides) const {
    return RingTensor::of(data, plan_.batch, plan_.rows(), heads, dim, dtype, strides,
                          plan_.packed);
  }
  // In float32, contiguous, of the room's rows.
  [[nodiscard]] RingTensor partial(const void* data, int64_t heads, int64_t dim) const {
    return RingTensor::of(data, plan_.batch, plan_.room.size(), heads, dim, DType::kFloat32, {},
                          plan_.packed);
  }
  // One behind the other in the workspace: contiguous, of so many rows.
  [[nodiscard]] RingPair pair(size_t at, int64_t rows, DType dtype) const {
    RingPair found;
    found.k = RingTensor::of(place(at), plan_.batch, rows, layer_.heads_kv, layer_.head_dim, dtype);
    found.v = RingTensor::of(place(at) + found.k.bytes(), plan_.batch, rows, layer_.heads_kv,
                             layer_.head_dim_v, dtype);
    return found;
  }
  [[nodiscard]] RingLse lse(const float* data) const {
    return {const_cast<float*>(data), plan_.batch * layer_.heads, plan_.rows()};
  }
  [[nodiscard]] std::byte* place(size_t at) const { return args_.workspace.data() + at; }
  [[nodiscard]] float* floats(size_t at) const { return reinterpret_cast<float*>(place(at)); }

  void upload_numbers() const {
    plan_.memory.upload(place(plan_.numbers_at), plan_.numbers.data(),
                        plan_.numbers.size() * sizeof(int32_t), args_.stream);
  }

  // Arguments of a call, but for what only one direction has.
  [[nodiscard]] Args call_args(const RingCall& call, const RingTensor& k,
                               const RingTensor& v) const {
    const auto number = [&](int64_t at) -> const int32_t* {
      return at < 0 ? nullptr : reinterpret_cast<int32_t*>(place(plan_.numbers_at)) + at;
    };
    Args a;
    a.q = q_.part(call.q).data;
    a.k = k.part(call.k).data;
    a.v = v.part(call.k).data;
    a.cu_seqlens_q = number(call.cumulative);
    a.cu_seqlens_k = call.cumulative < 0 ? nullptr : number(call.cumulative + call.sequences + 1);
    a.q_position = number(call.position);
    a.seqused_q = number(call.used);
    a.seqused_k = number(call.used_k);
    a.mask = call.mask.get();
    a.alibi_slopes = args_.alibi_slopes;
    a.dropout_seed = args_.dropout_seed;
    a.dropout_offset = args_.dropout_offset;
    a.workspace = {place(plan_.scratch), plan_.scratch_bytes};
    a.stream = args_.stream;
    a.interrupt = args_.interrupt;
    a.interrupt_data = args_.interrupt_data;
    return a;
  }

  // Starts step n's exchange of keys, if there is such a step.
  void ask(size_t n) const {
    if (n >= plan_.schedule.steps.size()) return;
    const RingStep& step = plan_.schedule.steps[n];
    std::array<RingMessage, 2> sends = {}, receives = {};
    if (!step.sends.empty()) {
      const RingPair sent = pair(plan_.sent, ring_count(step.sends), layer_.dtype);
      sends = {message(k_, step.sends, sent.k, step.target),
               message(v_, step.sends, sent.v, step.target)};
    }
    if (!step.receives.empty()) {
      const RingPair got = received(n);
      receives = {RingMessage{got.k.data, got.k.bytes(), step.source},
                  RingMessage{got.v.data, got.v.bytes(), step.source}};
    }
    begin(kKeys, sends, receives);
  }
  // Waits for step n's keys, and starts the exchange of the next.
  void next(size_t n) const {
    const RingStep& step = plan_.schedule.steps[n];
    if (travels(step)) ranks_.end(kKeys, args_.stream);
    ask(n + 1);
  }
  [[nodiscard]] RingPair received(size_t n) const {
    return pair(plan_.received + n % 2 * static_cast<size_t>(plan_.received_bytes),
                ring_count(plan_.schedule.steps[n].receives), layer_.dtype);
  }
  // Whether a message with elements goes either way.
  [[nodiscard]] bool travels(const RingStep& step) const {
    return plan_.batch * layer_.heads_kv > 0 && (!step.sends.empty() || !step.receives.empty());
  }
  // Messages without bytes are none, as the other side knows.
  void begin(int lane, std::span<const RingMessage> sends,
             std::span<const RingMessage> receives) const {
    const auto some = [](std::span<const RingMessage> messages) {
      return messages[0].bytes > 0 ? messages : std::span<const RingMessage>();
    };
    if (sends[0].bytes == 0 && receives[0].bytes == 0) return;
    ranks_.begin(lane, some(sends), some(receives), args_.stream);
  }

  const RingPlan& plan_;
  const Problem& layer_;
  const Args& args_;
  Communicator& ranks_;
  RingTensor q_, k_, v_;

 private:
  // Rows of x, piece after piece: where they are, if they lie so; else in `room`.
  [[nodiscard]] RingMessage message(const RingTensor& x, const std::vector<RingRows>& pieces,
                                    const RingTensor& room, int32_t rank) const {
    if (pieces.size() == 1) {
      const RingTensor piece = x.part(pieces[0]);
      if (piece.contiguous()) return {piece.data, piece.bytes(), rank};
    }
    int64_t row = 0;
    for (const RingRows& piece : pieces) {
      x.part(piece).copy_to(room.part({row, row + piece.size()}), plan_.memory, args_.stream);
      row += piece.size();
    }
    return {room.data, room.bytes(), rank};
  }
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_PLAN_HPP_
