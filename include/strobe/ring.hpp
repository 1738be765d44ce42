// Attention over sequences that are split over ranks (context parallelism), forward and backward:
// strobe::Ring. Header only, over strobe.hpp; C++20.
//
//   // On every rank, one GPU each; comm is an ncclComm_t.
//   strobe::NcclCommunicator ranks(comm);
//   const strobe::RingProblem problem = {
//       .layer = {.dtype = strobe::DType::kBFloat16, .device = strobe::Device::kCuda,
//                 .seqlen_q = 131072, .seqlen_k = 131072, .heads = 16, .head_dim = 128,
//                 .causal = true},
//       .ranks = ranks.ranks(), .rank = ranks.rank()};
//   const strobe::Ring ring(problem);  // problem.backward() is the backward pass's
//   // q, k, v, out: ring.rows() rows, those of ring.chunks(); workspace: ring.workspace_bytes()
//   ring.forward({.q = q, .k = k, .v = v, .out = out, .lse = lse, .workspace = workspace,
//                 .stream = stream}, ranks);
//   ranks.wait(stream, 60);
//
// Every rank holds its rows of q, k, v and out, and gets those rows of what the whole sequence's
// attention gives, exactly; docs/distributed.md draws who computes what when. What fails throws
// strobe::Error.
#ifndef STROBE_RING_HPP_
#define STROBE_RING_HPP_

#if __cplusplus <= 201703L
#error "ring.hpp needs C++20 (-std=c++20, CMAKE_CXX_STANDARD 20)"
#else

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <strobe/gpu.hpp>
#include <strobe/nccl.hpp>
#include <strobe/ring_schedule.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// What the caller wants of a ring: a layer over sequences, and which part of them is this rank's.
struct RingProblem {
  // The layer over whole sequences: seqlen_q = seqlen_k are the rows that all ranks have together.
  // Strides are those of this rank's tensors. Refused by name (kUnsupported) are dropout, attention
  // chunks, prefixes, lengths in use, signed windows, caches, masks as data, biases,
  // batch_invariant, sinks_outside_lse, accumulate, has_delta and kv_dtype. The backward pass takes
  // the forward's problem (backward()).
  Problem layer = {};
  // Of sequences that are packed end to end, each of which sees itself alone; tensors are then
  // [rows, heads, head_dim], lse is [heads, rows], and the layer's batch, seqlen_q, seqlen_k and
  // varlen stay as they are by default. Empty: not packed.
  std::vector<int64_t> lengths = {};
  int32_t ranks = 1, rank = 0;  // how many there are, and which one this is
  RingOrder order =
      RingOrder::kAuto;  // which rows a rank holds; the same for all layers of a model

  // The backward pass of this problem, as Problem::backward().
  [[nodiscard]] RingProblem backward() const {
    RingProblem problem = *this;
    problem.layer = layer.backward();
    return problem;
  }
  // The forward pass of this problem, as Problem::forward().
  [[nodiscard]] RingProblem forward() const {
    RingProblem problem = *this;
    problem.layer = layer.forward();
    return problem;
  }
};

namespace internal {

[[nodiscard]] inline int64_t ring_element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// Memory of a device: copies and zeros, in a stream or, on the CPU, at once.
class RingMemory {
 public:
  RingMemory(Device device, int32_t index) {
    if (device == Device::kCuda) gpu_.emplace(index);
  }
  void copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
            size_t lines, void* stream) const {
    if (gpu_) return gpu_->copy(to, to_pitch, from, from_pitch, bytes, lines, stream);
    for (size_t n = 0; n < lines && bytes > 0; ++n) {
      std::memcpy(static_cast<std::byte*>(to) + n * to_pitch,
                  static_cast<const std::byte*>(from) + n * from_pitch, bytes);
    }
  }
  void upload(void* to, const void* from, size_t bytes, void* stream) const {
    if (gpu_) return gpu_->upload(to, from, bytes, stream);
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void clear(void* memory, size_t bytes, void* stream) const {
    if (gpu_) return gpu_->clear(memory, bytes, stream);
    if (bytes > 0) std::memset(memory, 0, bytes);
  }

 private:
  std::optional<Gpu> gpu_;
};

// A tensor [batch, rows, heads, dim] of a rank, or a part of its rows.
struct RingTensor {
  std::byte* data = nullptr;
  int64_t batch = 0, rows = 0, heads = 0, dim = 0, size = 0;  // size: bytes of an element
  Strides strides = {};

  // given: all zero is contiguous. packed: there is no stride of a batch.
  [[nodiscard]] static RingTensor of(const void* data, int64_t batch, int64_t rows, int64_t heads,
                                     int64_t dim, DType dtype, Strides given = {},
                                     bool packed = false) {
    if (given.batch == 0 && given.seqlen == 0 && given.head == 0 && given.dim == 0)
      given = {rows * heads * dim, heads * dim, dim, 1};
    if (packed) given.batch = rows * given.seqlen;  // of one sequence; never used to go on
    return {static_cast<std::byte*>(const_cast<void*>(data)),
            batch,
            rows,
            heads,
            dim,
            ring_element_size(dtype),
            given};
  }
  [[nodiscard]] RingTensor part(const RingRows& part) const {
    RingTensor found = *this;
    if (data) found.data += part.begin * strides.seqlen * size;
    found.rows = part.size();
    return found;
  }
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(batch * rows * heads * dim * size);
  }
  // Whether all elements lie one after the other, in order.
  [[nodiscard]] bool contiguous() const {
    const auto follows = [](int64_t count, int64_t stride, int64_t wanted) {
      return count <= 1 || stride == wanted;
    };
    return follows(heads, strides.head, dim) && follows(rows, strides.seqlen, heads * dim) &&
           follows(batch, strides.batch, rows * heads * dim);
  }
  // Copies the elements to a tensor of the same extents.
  void copy_to(const RingTensor& to, const RingMemory& memory, void* stream) const {
    const auto line = [&](int64_t elements) { return static_cast<size_t>(elements * size); };
    const bool whole_rows = (heads <= 1 || (strides.head == dim && to.strides.head == dim));
    const int64_t pieces = whole_rows ? 1 : heads, width = whole_rows ? heads * dim : dim;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < pieces; ++h) {
        memory.copy(to.data + (b * to.strides.batch + h * to.strides.head) * size,
                    line(to.strides.seqlen), data + (b * strides.batch + h * strides.head) * size,
                    line(strides.seqlen), line(width), static_cast<size_t>(rows), stream);
      }
    }
  }
};

// lse, or its gradient: [batch, heads, rows] of a rank, contiguous.
struct RingLse {
  float* data = nullptr;
  int64_t lines = 0, rows = 0;  // lines: batch * heads

  // Those of some rows, contiguous: in `room`, or where they are if these are all rows.
  [[nodiscard]] float* part(const RingRows& part, float* room, const RingMemory& memory,
                            void* stream) const {
    if (data == nullptr || part.size() == rows) return data;
    memory.copy(room, bytes(part.size()), data + part.begin, bytes(rows), bytes(part.size()),
                static_cast<size_t>(lines), stream);
    return room;
  }
  // And back, from a part that stands in room.
  void take(const RingRows& part, const float* room, const RingMemory& memory, void* stream) const {
    memory.copy(data + part.begin, bytes(rows), room, bytes(part.size()), bytes(part.size()),
                static_cast<size_t>(lines), stream);
  }
  [[nodiscard]] static size_t bytes(int64_t count) {
    return static_cast<size_t>(count) * sizeof(float);
  }
};

// K and V, or their gradients.
struct RingPair {
  RingTensor k, v;
};

// A call of the library: some blocks under one plan.
struct RingCall {
  RingRows q = {}, k = {};  // rows of the rank, and of itself or of what was received
  Plan plan = {};
  // First of its int32s among the ring's: cu_seqlens_q, cu_seqlens_k and q_position of packed
  // blocks, else q_position; and seqused_q where it adds to dsinks.
  int64_t cumulative = -1, position = -1, used = -1, sequences = 0;
  bool dsinks = false;  // whether its rows add to the gradient of sinks
  bool later = false;   // forward: whether its rows have a result already
  bool closes = false;  // forward: whether nothing comes to its rows after it
};

}  // namespace internal

// How a rank does its part: its schedule, a plan for each call, and what they need. Made once for
// shapes, and used as often as you like; by several threads at once too, each with tensors, a
// workspace and a communicator of its own.
class Ring {
 public:
  // Checks the problem and plans every call. Throws Error: kInvalidArgument names the argument,
  // kUnsupported what is not supported over ranks, or lists why each kernel declines.
  explicit Ring(const RingProblem& problem)
      : problem_(checked(problem)),
        packed_(!problem.lengths.empty()),
        lengths_(packed_ ? problem.lengths : std::vector<int64_t>{problem.layer.seqlen_q}),
        memory_(problem.layer.device, problem.layer.device_index) {
    Problem& layer = problem_.layer;
    if (problem_.order == RingOrder::kAuto)
      problem_.order = layer.causal ? RingOrder::kZigzag : RingOrder::kPlain;
    if (layer.heads_kv == 0) layer.heads_kv = layer.heads;
    if (layer.head_dim_v == 0) layer.head_dim_v = layer.head_dim;
    batch_ = packed_ ? 1 : layer.batch;
    mask_ = mask_of(layer, rows_of(lengths_));
    schedule_ = ring_schedule(lengths_, problem_.ranks, problem_.rank, problem_.order, mask_);
    check_layer();
    if (layer.direction == Direction::kForward) {
      plan_forward();
    } else {
      plan_backward();
    }
  }

  // How many rows of q, k, v and out this rank holds.
  [[nodiscard]] int64_t rows() const noexcept { return schedule_.rows; }
  // Which rows of the sequences these are, in the order in which they stand in the tensors.
  [[nodiscard]] std::vector<RingChunk> chunks() const {
    return ring_chunks(lengths_, problem_.ranks, problem_.rank, problem_.order);
  }
  // What this rank computes, sends and receives, step by step.
  [[nodiscard]] const RingSchedule& schedule() const& noexcept { return schedule_; }
  // The same of a ring that ends here.
  [[nodiscard]] RingSchedule schedule() && { return std::move(schedule_); }
  // The problem, with heads_kv, head_dim_v and the order filled in.
  [[nodiscard]] const RingProblem& problem() const& noexcept { return problem_; }
  // The same of a ring that ends here.
  [[nodiscard]] RingProblem problem() && { return std::move(problem_); }
  // What a launch needs: partial results, keys and gradients on their way, and the kernels' own.
  [[nodiscard]] size_t workspace_bytes() const noexcept { return bytes_; }

  // The plan in words: who this rank is, and for each step what is sent, received and computed by
  // which kernel.
  [[nodiscard]] std::string text() const {
    using internal::formatted;
    std::string text = formatted("rank %d of %d: %" PRId64 " of %" PRId64
                                 " rows in %s order, workspace %zu bytes\n",
                                 problem_.rank, problem_.ranks, rows(), rows_of(lengths_),
                                 problem_.order == RingOrder::kZigzag ? "zigzag" : "plain", bytes_);
    const auto told = [&](const std::vector<internal::RingCall>& calls) {
      for (const internal::RingCall& call : calls) {
        text += formatted("  rows %" PRId64 "-%" PRId64 " x %" PRId64 " keys by %s\n", call.q.begin,
                          call.q.end - 1, call.k.size(), call.plan.kernel());
      }
    };
    text += "step 0, the rank's own keys\n";
    told(own_);
    told(own_last_);
    for (size_t n = 0; n < steps_.size(); ++n) {
      const RingStep& step = schedule_.steps[n];
      if (step.sends.empty() && step.receives.empty()) continue;
      text += formatted("step %d, sends %" PRId64 " rows to rank %d, receives %" PRId64
                        " from rank %d\n",
                        step.distance, internal::ring_count(step.sends), step.target,
                        internal::ring_count(step.receives), step.source);
      told(steps_[n]);
    }
    return text;
  }

  // Runs a forward problem. Every rank calls it, in the same order among its calls.
  // Returns when the result is there (CPU) or enqueued (CUDA); allocates nothing. What is wrong
  // with the arguments is refused before anything is sent. args: workspace_bytes() of workspace,
  // 64-byte aligned; lse as in a Plan, null: not wanted. Throws Error.
  void forward(const ForwardArgs& args, Communicator& ranks) const {
    check_args(args, Direction::kForward, ranks);
    refuse({{"block_table", args.block_table},
            {"cache_batch_idx", args.cache_batch_idx},
            {"leftpad", args.leftpad},
            {"k_new", args.k_new},
            {"v_new", args.v_new},
            {"cu_seqlens_k_new", args.cu_seqlens_k_new},
            {"rotary_cos", args.rotary_cos},
            {"rotary_sin", args.rotary_sin},
            {"rotary_position", args.rotary_position}});
    need({{"out", args.out}});
    Forward(*this, args, ranks).run();
  }

  // Runs a backward problem, as forward(). dsinks gets this rank's part of the gradient of the
  // sinks: the sum over ranks is the whole.
  void backward(const BackwardArgs& args, Communicator& ranks) const {
    check_args(args, Direction::kBackward, ranks);
    const Problem& layer = problem_.layer;
    refuse({{"delta", args.delta},
            {"dbias", args.dbias},
            {"dlse", layer.has_dlse ? nullptr : args.dlse},
            {"dsinks", layer.has_dsinks ? nullptr : args.dsinks}});
    need({{"out", args.out},
          {"lse", args.lse},
          {"dout", args.dout},
          {"dlse", layer.has_dlse ? static_cast<const void*>(args.dlse) : kThere},
          {"dq", args.dq},
          {"dk", args.dk},
          {"dv", args.dv}});
    if (layer.has_dsinks && !args.dsinks) null("dsinks");
    Backward(*this, args, ranks).run();
  }

 private:
  using Call = internal::RingCall;
  using Calls = std::vector<Call>;
  using Tensor = internal::RingTensor;
  using Lse = internal::RingLse;
  using Pair = internal::RingPair;
  static constexpr int kKeys = 0, kGradients = 1;  // lanes
  static constexpr const void* kThere = "";        // in place of a pointer that is not asked for

  struct Pointer {
    const char* name;
    const void* pointer;
  };

  // ------------------------------------------------------------------------------------- checks

  static RingProblem checked(const RingProblem& problem) {
    using internal::formatted;
    const Problem& layer = problem.layer;
    const auto invalid = [](const std::string& text) {
      throw Error(Status::kInvalidArgument, text);
    };
    if (problem.ranks < 1) invalid(formatted("ranks = %d, expected at least 1", problem.ranks));
    if (problem.rank < 0 || problem.rank >= problem.ranks) {
      invalid(formatted("rank = %d, expected 0 to %d: a rank of %d", problem.rank,
                        problem.ranks - 1, problem.ranks));
    }
    const bool packed = !problem.lengths.empty();
    if (packed && (layer.batch != 1 || layer.seqlen_q != 0 || layer.seqlen_k != 0)) {
      invalid(formatted("layer.batch = %" PRId64 ", layer.seqlen_q = %" PRId64
                        ", layer.seqlen_k = %" PRId64
                        " with lengths, expected 1, 0 and 0: lengths say it",
                        layer.batch, layer.seqlen_q, layer.seqlen_k));
    }
    if (layer.seqlen_q != layer.seqlen_k) {
      invalid(formatted("layer.seqlen_k = %" PRId64 ", expected layer.seqlen_q = %" PRId64
                        ": the rows that all ranks have together",
                        layer.seqlen_k, layer.seqlen_q));
    }
    if (layer.seqlen_q < 0)
      invalid(formatted("layer.seqlen_q = %" PRId64 ", expected at least 0", layer.seqlen_q));
    int64_t rows = layer.seqlen_q;
    for (const int64_t length : problem.lengths) {
      if (length < 0 || length > kMostRows)
        invalid(formatted("lengths has %" PRId64 ", expected 0 to 2^30", length));
      rows += length;
      if (rows > kMostRows) break;
    }
    if (rows > kMostRows) {
      invalid(formatted("%" PRId64 " rows over all ranks, expected at most 2^30", rows));
    }
    if (packed && layer.alibi == Alibi::kPerBatchHead) {
      invalid("layer.alibi = 2 (a batch's) with lengths, expected 0 or 1: slopes of all sequences");
    }
    const struct {
      const char* name;
      const Strides& strides;
      int64_t dim;
    } sent[] = {{"k", layer.k, layer.head_dim},
                {"v", layer.v, layer.head_dim_v ? layer.head_dim_v : layer.head_dim}};
    for (const auto& x : sent) {
      if (x.strides.dim == 0 || x.strides.seqlen >= x.dim || problem.ranks == 1) continue;
      invalid(formatted("layer.%s.seqlen = %" PRId64 " elements, expected at least %" PRId64
                        ": rows that are sent lie apart from each other",
                        x.name, x.strides.seqlen, x.dim));
    }
    const struct {
      const char* name;
      bool given;
    } options[] = {{"dropout_p", layer.dropout_p != 0},
                   {"attention_chunk", layer.attention_chunk != 0},
                   {"has_seqused_q", layer.has_seqused_q},
                   {"has_seqused_k", layer.has_seqused_k},
                   {"has_q_position", layer.has_q_position},
                   {"has_prefix", layer.has_prefix},
                   {"window_signed", layer.window_signed},
                   {"varlen", layer.varlen},
                   {"total_q", layer.total_q != 0},
                   {"total_k", layer.total_k != 0},
                   {"kv_dtype", layer.kv_dtype != DType::kSame && layer.kv_dtype != layer.dtype},
                   {"cache", layer.cache != Cache::kNone},
                   {"append", layer.append != Append::kNone},
                   {"rotary_dim", layer.rotary_dim != 0},
                   {"mask", layer.mask.kind != STROBE_MASK_NONE},
                   {"has_bias", layer.has_bias},
                   {"has_dbias", layer.has_dbias},
                   {"batch_invariant", layer.batch_invariant},
                   {"sinks_outside_lse", layer.sinks_outside_lse},
                   {"accumulate", layer.accumulate},
                   {"has_delta", layer.has_delta}};
    for (const auto& option : options) {
      if (!option.given) continue;
      throw Error(Status::kUnsupported,
                  formatted("layer.%s over ranks, expected its default: a call there has a part of "
                            "the keys, and this is meant for all of them together",
                            option.name));
    }
    return problem;
  }

  // What a Plan of the whole layer would refuse is refused by its names, on all ranks alike.
  void check_layer() const {
    Problem whole = problem_.layer;
    // A rank without rows answers as one with a row: strides of nothing mean nothing.
    const int64_t some = std::max<int64_t>(rows(), 1);
    whole.seqlen_q = whole.seqlen_k = some;
    if (rows() == 0) {
      for (Strides* s : {&whole.q, &whole.k, &whole.v, &whole.out}) *s = {};
      for (Strides* s : {&whole.dout, &whole.dq, &whole.dk, &whole.dv}) *s = {};
    }
    if (packed_) {
      whole.varlen = true;
      whole.total_q = whole.total_k = some;
    }
    (void)Plan(whole);
  }

  [[noreturn]] static void null(const char* name) {
    throw Error(Status::kInvalidArgument,
                internal::formatted("%s = NULL, expected a pointer", name));
  }
  static void refuse(std::initializer_list<Pointer> pointers) {
    for (const Pointer& p : pointers) {
      if (p.pointer == nullptr) continue;
      throw Error(
          Status::kInvalidArgument,
          internal::formatted("%s of a ring, expected null: its problem does not have it", p.name));
    }
  }
  // Pointers that a rank with rows has.
  void need(std::initializer_list<Pointer> pointers) const {
    for (const Pointer& p : pointers) {
      if (p.pointer == nullptr && rows() > 0 && batch_ > 0) null(p.name);
    }
  }

  template <typename Args>
  void check_args(const Args& args, Direction direction, const Communicator& ranks) const {
    using internal::formatted;
    const Problem& layer = problem_.layer;
    if (layer.direction != direction) {
      throw Error(
          Status::kInvalidArgument,
          formatted("layer.direction = %d, expected %d: a ring of the backward pass is made "
                    "from problem.backward()",
                    static_cast<int>(layer.direction), static_cast<int>(direction)));
    }
    if (ranks.ranks() != problem_.ranks || ranks.rank() != problem_.rank) {
      throw Error(Status::kInvalidArgument,
                  formatted("the communicator's rank %d of %d, expected the problem's %d of %d",
                            ranks.rank(), ranks.ranks(), problem_.rank, problem_.ranks));
    }
    const auto at = reinterpret_cast<uintptr_t>(args.workspace.data());
    if (args.workspace.size() < bytes_ || at % 64 != 0) {
      throw Error(
          Status::kInvalidArgument,
          formatted("workspace has %zu bytes at %p, expected at least %zu, 64-byte aligned: "
                    "a ring allocates nothing",
                    args.workspace.size(), static_cast<void*>(args.workspace.data()), bytes_));
    }
    refuse({{"cu_seqlens_q", args.cu_seqlens_q},
            {"cu_seqlens_k", args.cu_seqlens_k},
            {"seqused_q", args.seqused_q},
            {"seqused_k", args.seqused_k},
            {"q_position", args.q_position},
            {"prefix", args.prefix},
            {"mask", args.mask},
            {"bias", args.bias},
            {"sinks", layer.has_sinks ? nullptr : args.sinks},
            {"alibi_slopes", layer.alibi == Alibi::kNone ? args.alibi_slopes : nullptr}});
    need({{"q", args.q},
          {"k", args.k},
          {"v", args.v},
          {"sinks", layer.has_sinks ? static_cast<const void*>(args.sinks) : kThere},
          {"alibi_slopes",
           layer.alibi == Alibi::kNone ? kThere : static_cast<const void*>(args.alibi_slopes)}});
  }

  // -------------------------------------------------------------------------------------- plans

  static int64_t rows_of(const std::vector<int64_t>& lengths) {
    int64_t rows = 0;
    for (const int64_t length : lengths) rows += length;
    return rows;
  }
  static RingMask mask_of(const Problem& layer, int64_t rows) {
    // A limit beyond the sequence's end is none.
    const auto limit = [&](int64_t x) { return x < 0 || x >= rows ? int64_t{-1} : x; };
    return {.left = limit(layer.window_left),
            .right = layer.causal ? 0 : limit(layer.window_right),
            .by_distance = layer.alibi != Alibi::kNone};
  }

  // Where the blocks' keys lie: with the rank's own, or received, contiguous.
  Call plan_call(const internal::RingBatch& batch, Problem sub, int64_t keys, bool own) {
    const Problem& layer = problem_.layer;
    Call call;
    call.q = internal::ring_queries(batch);
    call.k = internal::ring_keys(batch);
    bool masked = false;
    for (const RingBlock& block : batch) masked = masked || block.masked;
    sub.window_left = masked ? mask_.left : -1;
    sub.causal = masked && mask_.right == 0;
    sub.window_right = masked && !sub.causal ? mask_.right : -1;
    const auto strides = [&](int64_t rows, int64_t heads, int64_t dim, const Strides& given) {
      return Tensor::of(nullptr, batch_, rows, heads, dim, DType::kFloat32, given, packed_).strides;
    };
    sub.q = strides(rows(), layer.heads, layer.head_dim, layer.q);
    sub.k = strides(keys, layer.heads_kv, layer.head_dim, own ? layer.k : Strides{});
    sub.v = strides(keys, layer.heads_kv, layer.head_dim_v, own ? layer.v : Strides{});
    sub.seqlen_q = call.q.size();
    sub.seqlen_k = call.k.size();
    const bool placed = masked || mask_.by_distance;
    if (packed_) {
      pack(batch, placed, sub, call);
    } else if (placed && batch[0].position != call.k.size() - call.q.size()) {
      sub.has_q_position = true;
      call.position = static_cast<int64_t>(numbers_.size());
      numbers_.insert(numbers_.end(), static_cast<size_t>(batch_),
                      static_cast<int32_t>(batch[0].position));
    }
    call.dsinks = sub.has_dsinks;
    call.plan = Plan(sub);
    scratch_bytes_ = std::max(scratch_bytes_, call.plan.workspace_bytes());
    most_queries_ = std::max(most_queries_, call.q.size());
    return call;
  }

  // Makes each block a packed sequence, and what lies between two of them sequences without keys or
  // without queries.
  void pack(const internal::RingBatch& batch, bool placed, Problem& sub, Call& call) {
    std::vector<int32_t> q = {0}, k = {0}, position, used;
    const auto add = [&](int64_t end_q, int64_t end_k, int64_t where, bool computed) {
      const int64_t size_q = end_q - q.back(), size_k = end_k - k.back();
      sub.seqlen_q = std::max(sub.seqlen_q, size_q);
      sub.seqlen_k = std::max(sub.seqlen_k, size_k);
      q.push_back(static_cast<int32_t>(end_q));
      k.push_back(static_cast<int32_t>(end_k));
      position.push_back(static_cast<int32_t>(where));
      used.push_back(static_cast<int32_t>(computed ? size_q : 0));
    };
    sub.seqlen_q = sub.seqlen_k = 0;
    bool gaps = false;
    for (const RingBlock& block : batch) {
      const int64_t begin_q = block.q.begin - call.q.begin, begin_k = block.k.begin - call.k.begin;
      if (q.back() < begin_q) {
        gaps = true;
        add(begin_q, k.back(), 0, false);
      }
      if (k.back() < begin_k) add(begin_q, begin_k, 0, false);
      add(begin_q + block.q.size(), begin_k + block.k.size(), block.position, true);
    }
    sub.varlen = true;
    sub.batch = call.sequences = static_cast<int64_t>(position.size());
    sub.total_q = call.q.size();
    sub.total_k = call.k.size();
    const auto keep = [&](const std::vector<int32_t>& some) {
      const auto at = static_cast<int64_t>(numbers_.size());
      numbers_.insert(numbers_.end(), some.begin(), some.end());
      return at;
    };
    call.cumulative = keep(q);
    keep(k);
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

  // Of each step: those of what is received. prepare(rows) is called first, with how many rows that
  // are.
  template <typename Prepare>
  void plan_steps(const Problem& sub, const Prepare& prepare) {
    for (const RingStep& step : schedule_.steps) {
      const int64_t keys = internal::ring_count(step.receives);
      most_received_ = std::max(most_received_, keys);
      most_sent_ = std::max(most_sent_, internal::ring_count(step.sends));
      prepare(keys);
      Calls& calls = steps_.emplace_back();
      for (const internal::RingBatch& batch : internal::ring_batched(step.blocks, packed_))
        calls.push_back(plan_call(batch, sub, keys, false));
    }
  }

  void plan_forward() {
    const Problem& layer = problem_.layer;
    const auto own = internal::ring_batched(schedule_.own, packed_);
    size_t calls = own.size();
    for (const RingStep& step : schedule_.steps)
      calls += internal::ring_batched(step.blocks, packed_).size();
    alone_ = calls == 1;  // there is nothing to merge
    Problem sub = layer;
    sub.out = Tensor::of(nullptr, batch_, rows(), layer.heads, layer.head_dim_v, DType::kFloat32,
                         alone_ ? layer.out : Strides{}, packed_)
                  .strides;
    if (!alone_) {
      sub.out_dtype = DType::kFloat32;
      sub.has_sinks = false;  // they enter a row with its last merge
    }
    for (const internal::RingBatch& batch : own)
      own_.push_back(plan_call(batch, sub, rows(), true));
    plan_steps(sub, [](int64_t) {});
    std::vector<Call*> all;
    for (Call& call : own_) all.push_back(&call);
    for (Calls& calls_of_step : steps_) {
      for (Call& call : calls_of_step) all.push_back(&call);
    }
    std::vector<RingRows> written, closed;
    for (size_t n = 0; n < all.size(); ++n) {
      Call& call = *all[n];
      // Either all of these rows have a result, as their block on the diagonal came first, or this
      // is that block.
      for (const RingRows& rows : written)
        call.later = call.later || (rows.begin <= call.q.begin && call.q.end <= rows.end);
      if (!call.later) {
        written.push_back(call.q);
        written = internal::ring_joined(std::move(written));
      }
      call.closes = std::all_of(
          all.begin() + static_cast<std::ptrdiff_t>(n) + 1, all.end(), [&](const Call* after) {
            return after->q.end <= call.q.begin || call.q.end <= after->q.begin;
          });
      if (call.closes && call.later) closed.push_back(call.q);
    }
    if (!alone_) single_ = internal::ring_without(rows(), std::move(closed));

    const int64_t heads = batch_ * layer.heads;
    const int64_t halves = alone_ ? 0 : 2;
    outs_ = take(halves * rows() * heads * layer.head_dim_v * 4);
    lses_ = take(2 * rows() * heads * 4);
    lse_part_ = take(most_queries_ * heads * 4);
    take_messages();
    finish_workspace();
  }

  void plan_backward() {
    const Problem& layer = problem_.layer;
    Problem sub = layer;
    const auto strides_of = [&](int64_t heads, int64_t dim, const Strides& given) {
      return Tensor::of(nullptr, batch_, rows(), heads, dim, DType::kFloat32, given, packed_)
          .strides;
    };
    sub.out = strides_of(layer.heads, layer.head_dim_v, layer.out);
    sub.dout = strides_of(layer.heads, layer.head_dim_v, layer.dout);
    const auto own = internal::ring_batched(schedule_.own, packed_);
    alone_ = problem_.ranks == 1 && own.size() == 1;
    if (alone_) {
      sub.dq = strides_of(layer.heads, layer.head_dim, layer.dq);
      sub.dk = strides_of(layer.heads_kv, layer.head_dim, layer.dk);
      sub.dv = strides_of(layer.heads_kv, layer.head_dim_v, layer.dv);
      own_.push_back(plan_call(own[0], sub, rows(), true));
      finish_workspace();
      return;
    }
    sub.grad_dtype = DType::kFloat32;
    sub.accumulate = true;
    sub.dq = strides_of(layer.heads, layer.head_dim, {});
    const auto gradients = [&](int64_t keys) {
      sub.dk = Tensor::of(nullptr, batch_, keys, layer.heads_kv, layer.head_dim, DType::kFloat32,
                          {}, packed_)
                   .strides;
      sub.dv = Tensor::of(nullptr, batch_, keys, layer.heads_kv, layer.head_dim_v, DType::kFloat32,
                          {}, packed_)
                   .strides;
    };
    gradients(rows());
    const auto plan_own = [&](const std::vector<RingBlock>& blocks) {
      // A row adds to the gradient of sinks once, where its own key is among the keys.
      std::vector<RingBlock> counted, others;
      for (const RingBlock& block : blocks) {
        const bool with_own = block.k.begin <= block.q.begin && block.q.end <= block.k.end;
        (with_own && layer.has_dsinks ? counted : others).push_back(block);
      }
      Calls calls;
      for (const auto* some : {&counted, &others}) {
        sub.has_dsinks = sub.has_sinks = some == &counted;
        for (const internal::RingBatch& batch : internal::ring_batched(*some, packed_))
          calls.push_back(plan_call(batch, sub, rows(), true));
      }
      return calls;
    };
    own_ = plan_own(schedule_.own_first);
    own_last_ = plan_own(schedule_.own_last);
    sub.has_dsinks = sub.has_sinks = false;  // lse has them
    plan_steps(sub, gradients);
    const int64_t heads = batch_ * layer.heads;
    const int64_t kv = batch_ * layer.heads_kv * (layer.head_dim + layer.head_dim_v);
    sums_bytes_ = static_cast<size_t>(4 * rows() * (heads * layer.head_dim + kv));
    sums_ = take(static_cast<int64_t>(sums_bytes_));
    lse_part_ = take(most_queries_ * heads * 4);
    dlse_part_ = take(layer.has_dlse ? most_queries_ * heads * 4 : 0);
    computed_bytes_ = 4 * most_received_ * kv;
    computed_ = take(2 * computed_bytes_);  // being computed, and on its way
    returned_ = take(4 * most_sent_ * kv);
    take_messages();
    finish_workspace();
  }

  size_t take(int64_t bytes) {
    const size_t at = bytes_;
    bytes_ += (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  // K and V: of the step that computes and of the next, and those that are sent where their rows do
  // not lie end to end.
  void take_messages() {
    const Problem& layer = problem_.layer;
    const int64_t row = batch_ * layer.heads_kv * (layer.head_dim + layer.head_dim_v) *
                        internal::ring_element_size(layer.dtype);
    received_bytes_ = most_received_ * row;
    received_ = take(2 * received_bytes_);
    sent_ = take(most_sent_ * row);
  }
  void finish_workspace() {
    numbers_at_ = take(static_cast<int64_t>(numbers_.size() * sizeof(int32_t)));
    scratch_ = take(static_cast<int64_t>(scratch_bytes_));
  }

  // ----------------------------------------------------------------------------------- launches

  // What both directions do: the tensors of a launch, and keys that travel.
  template <typename Args>
  class Launch {
   public:
    Launch(const Ring& ring, const Args& args, Communicator& ranks)
        : ring_(ring), layer_(ring.problem_.layer), args_(args), ranks_(ranks) {
      q_ = tensor(args.q, layer_.heads, layer_.head_dim, layer_.dtype, layer_.q);
      k_ = tensor(args.k, layer_.heads_kv, layer_.head_dim, layer_.dtype, layer_.k);
      v_ = tensor(args.v, layer_.heads_kv, layer_.head_dim_v, layer_.dtype, layer_.v);
    }

   protected:
    // [batch, rows, heads, dim] of this rank.
    [[nodiscard]] Tensor tensor(const void* data, int64_t heads, int64_t dim, DType dtype,
                                const Strides& strides) const {
      return Tensor::of(data, ring_.batch_, ring_.rows(), heads, dim, dtype, strides,
                        ring_.packed_);
    }
    // One behind the other in the workspace: contiguous, of so many rows.
    [[nodiscard]] Pair pair(size_t at, int64_t rows, DType dtype) const {
      Pair found;
      found.k = Tensor::of(place(at), ring_.batch_, rows, layer_.heads_kv, layer_.head_dim, dtype);
      found.v = Tensor::of(place(at) + found.k.bytes(), ring_.batch_, rows, layer_.heads_kv,
                           layer_.head_dim_v, dtype);
      return found;
    }
    [[nodiscard]] Lse lse(const float* data) const {
      return {const_cast<float*>(data), ring_.batch_ * layer_.heads, ring_.rows()};
    }
    [[nodiscard]] std::byte* place(size_t at) const { return args_.workspace.data() + at; }
    [[nodiscard]] float* floats(size_t at) const { return reinterpret_cast<float*>(place(at)); }

    void upload_numbers() const {
      ring_.memory_.upload(place(ring_.numbers_at_), ring_.numbers_.data(),
                           ring_.numbers_.size() * sizeof(int32_t), args_.stream);
    }

    // Arguments of a call, but for what only one direction has.
    [[nodiscard]] Args call_args(const Call& call, const Tensor& k, const Tensor& v) const {
      const auto number = [&](int64_t at) -> const int32_t* {
        return at < 0 ? nullptr : reinterpret_cast<int32_t*>(place(ring_.numbers_at_)) + at;
      };
      Args a;
      a.q = q_.part(call.q).data;
      a.k = k.part(call.k).data;
      a.v = v.part(call.k).data;
      a.cu_seqlens_q = number(call.cumulative);
      a.cu_seqlens_k = call.cumulative < 0 ? nullptr : number(call.cumulative + call.sequences + 1);
      a.q_position = number(call.position);
      a.seqused_q = number(call.used);
      a.alibi_slopes = args_.alibi_slopes;
      a.workspace = {place(ring_.scratch_), ring_.scratch_bytes_};
      a.stream = args_.stream;
      a.interrupt = args_.interrupt;
      a.interrupt_data = args_.interrupt_data;
      return a;
    }

    // Starts step n's exchange of keys, if there is such a step.
    void ask(size_t n) const {
      if (n >= ring_.schedule_.steps.size()) return;
      const RingStep& step = ring_.schedule_.steps[n];
      std::array<RingMessage, 2> sends = {}, receives = {};
      if (!step.sends.empty()) {
        const Pair sent = pair(ring_.sent_, internal::ring_count(step.sends), layer_.dtype);
        sends = {message(k_, step.sends, sent.k, step.target),
                 message(v_, step.sends, sent.v, step.target)};
      }
      if (!step.receives.empty()) {
        const Pair got = received(n);
        receives = {RingMessage{got.k.data, got.k.bytes(), step.source},
                    RingMessage{got.v.data, got.v.bytes(), step.source}};
      }
      begin(kKeys, sends, receives);
    }
    // Waits for step n's keys, and starts the exchange of the next.
    void next(size_t n) const {
      const RingStep& step = ring_.schedule_.steps[n];
      if (travels(step)) ranks_.end(kKeys, args_.stream);
      ask(n + 1);
    }
    [[nodiscard]] Pair received(size_t n) const {
      return pair(ring_.received_ + n % 2 * static_cast<size_t>(ring_.received_bytes_),
                  internal::ring_count(ring_.schedule_.steps[n].receives), layer_.dtype);
    }
    // Whether a message with elements goes either way.
    [[nodiscard]] bool travels(const RingStep& step) const {
      return ring_.batch_ * layer_.heads_kv > 0 && (!step.sends.empty() || !step.receives.empty());
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

    const Ring& ring_;
    const Problem& layer_;
    const Args& args_;
    Communicator& ranks_;
    Tensor q_, k_, v_;

   private:
    // Rows of x, piece after piece: where they are, if they lie so; else in `room`.
    [[nodiscard]] RingMessage message(const Tensor& x, const std::vector<RingRows>& pieces,
                                      const Tensor& room, int32_t rank) const {
      if (pieces.size() == 1) {
        const Tensor piece = x.part(pieces[0]);
        if (piece.contiguous()) return {piece.data, piece.bytes(), rank};
      }
      int64_t row = 0;
      for (const RingRows& piece : pieces) {
        x.part(piece).copy_to(room.part({row, row + piece.size()}), ring_.memory_, args_.stream);
        row += piece.size();
      }
      return {room.data, room.bytes(), rank};
    }
  };

  // Partial results are float32, and are merged as they come. The first result of a row is written
  // to the first half of `outs`; what follows to the second, and merged into the first; and the
  // last merge of a row writes out.
  class Forward : Launch<ForwardArgs> {
   public:
    Forward(const Ring& ring, const ForwardArgs& args, Communicator& ranks)
        : Launch(ring, args, ranks) {
      out_ = tensor(args.out, layer_.heads, layer_.head_dim_v, out_dtype(), layer_.out);
      const int64_t row = ring.batch_ * layer_.heads * ring.rows();
      for (size_t half = 0; half < 2; ++half) {
        lses_[half] = lse(floats(ring.lses_) + static_cast<int64_t>(half) * row);
        if (ring.alone_) continue;
        outs_[half] =
            tensor(floats(ring.outs_) + static_cast<int64_t>(half) * row * layer_.head_dim_v,
                   layer_.heads, layer_.head_dim_v, DType::kFloat32, {});
      }
    }

    void run() {
      upload_numbers();
      ask(0);
      for (const Call& call : ring_.own_) add(call, k_, v_);
      for (size_t n = 0; n < ring_.steps_.size(); ++n) {
        next(n);
        const Pair got = received(n);
        for (const Call& call : ring_.steps_[n]) add(call, got.k, got.v);
      }
      for (const RingRows& rows : ring_.single_) merge_parts(rows, 1, true);
      if (args_.lse) {
        const Lse& all = lses_[0];
        ring_.memory_.copy(args_.lse, 0, all.data, 0, Lse::bytes(all.lines * all.rows), 1,
                           args_.stream);
      }
    }

   private:
    [[nodiscard]] DType out_dtype() const {
      return layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype;
    }
    void add(const Call& call, const Tensor& k, const Tensor& v) {
      const size_t half = call.later ? 1 : 0;
      ForwardArgs a = call_args(call, k, v);
      a.out = (ring_.alone_ ? out_ : outs_[half]).part(call.q).data;
      if (ring_.alone_) a.sinks = args_.sinks;
      const Lse& of_half = lses_[half];
      const bool all = call.q.size() == ring_.rows();
      a.lse = all ? of_half.data : floats(ring_.lse_part_);
      call.plan.forward(a);
      if (!all) of_half.take(call.q, a.lse, ring_.memory_, args_.stream);
      if (call.later) merge_parts(call.q, 2, call.closes);
    }
    // Of one half, or of both.
    void merge_parts(const RingRows& rows, int64_t parts, bool closes) const {
      const Tensor whole = (closes ? out_ : outs_[0]).part(rows);
      MergeArgs a = {.device = layer_.device, .device_index = layer_.device_index};
      a.out_dtype = closes ? out_dtype() : DType::kFloat32;
      a.threads = layer_.threads;
      a.parts = parts;
      a.batch = whole.batch;
      a.seqlen_q = rows.size();
      a.heads = layer_.heads;
      a.head_dim_v = layer_.head_dim_v;
      a.outs = reinterpret_cast<const float*>(outs_[0].part(rows).data);
      a.outs_strides = outs_[0].strides;
      a.outs_part = static_cast<int64_t>(outs_[0].bytes() / sizeof(float));
      a.lses = a.lse = lses_[0].data + rows.begin;
      a.lses_strides = a.lse_strides = {layer_.heads * ring_.rows(), 1, ring_.rows(), 1};
      a.lses_part = lses_[0].lines * lses_[0].rows;
      a.out = whole.data;
      a.out_strides = whole.strides;
      a.stream = args_.stream;
      if (closes) a.sinks = args_.sinks;
      merge(a);
    }

    Tensor out_;
    std::array<Tensor, 2> outs_ = {};
    std::array<Lse, 2> lses_ = {};
  };

  // The lse of all keys is there, so that a step needs nothing of the others. dK and dV of somebody
  // else's keys are computed in float32 and sent home, where they are added up in float32, in the
  // order of the steps.
  class Backward : Launch<BackwardArgs> {
   public:
    Backward(const Ring& ring, const BackwardArgs& args, Communicator& ranks)
        : Launch(ring, args, ranks), lse_(lse(args.lse)), dlse_(lse(args.dlse)) {
      out_ = tensor(args.out, layer_.heads, layer_.head_dim_v,
                    layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype, layer_.out);
      dout_ = tensor(args.dout, layer_.heads, layer_.head_dim_v, layer_.dtype, layer_.dout);
      if (ring.alone_) return;
      dq_ = tensor(place(ring.sums_), layer_.heads, layer_.head_dim, DType::kFloat32, {});
      sums_ = pair(ring.sums_ + dq_.bytes(), ring.rows(), DType::kFloat32);
    }

    void run() {
      upload_numbers();
      const internal::RingMemory& memory = ring_.memory_;
      if (ring_.alone_) {
        const Call& call = ring_.own_[0];
        const auto of = [&](void* data, int64_t heads, int64_t dim, const Strides& strides) {
          return tensor(data, heads, dim, grad_dtype(), strides);
        };
        dq_ = of(args_.dq, layer_.heads, layer_.head_dim, layer_.dq);
        sums_ = {of(args_.dk, layer_.heads_kv, layer_.head_dim, layer_.dk),
                 of(args_.dv, layer_.heads_kv, layer_.head_dim_v, layer_.dv)};
        return add_to(call, k_, v_, sums_);
      }
      if (layer_.has_dsinks) {
        memory.clear(args_.dsinks, Lse::bytes(layer_.heads), args_.stream);
      }
      ask(0);
      memory.clear(place(ring_.sums_), ring_.sums_bytes_, args_.stream);
      for (const Call& call : ring_.own_) add_to(call, k_, v_, sums_);
      const std::vector<RingStep>& steps = ring_.schedule_.steps;
      for (size_t n = 0; n < steps.size(); ++n) {
        next(n);
        const Pair got = received(n);
        const Pair computed =
            pair(ring_.computed_ + n % 2 * static_cast<size_t>(ring_.computed_bytes_), got.k.rows,
                 DType::kFloat32);
        memory.clear(computed.k.data, computed.k.bytes() + computed.v.bytes(), args_.stream);
        for (const Call& call : ring_.steps_[n]) add_to(call, got.k, got.v, computed);
        if (n > 0) take(steps[n - 1]);
        give(steps[n], computed);
      }
      for (const Call& call : ring_.own_last_) add_to(call, k_, v_, sums_);
      if (!steps.empty()) take(steps.back());
      round_to(args_.dq, dq_, layer_.dq);
      round_to(args_.dk, sums_.k, layer_.dk);
      round_to(args_.dv, sums_.v, layer_.dv);
    }

   private:
    [[nodiscard]] DType grad_dtype() const {
      return layer_.grad_dtype == DType::kSame ? layer_.dtype : layer_.grad_dtype;
    }
    void add_to(const Call& call, const Tensor& k, const Tensor& v, const Pair& gradients) const {
      BackwardArgs a = call_args(call, k, v);
      a.out = out_.part(call.q).data;
      a.dout = dout_.part(call.q).data;
      a.lse = lse_.part(call.q, floats(ring_.lse_part_), ring_.memory_, args_.stream);
      a.dlse = dlse_.part(call.q, floats(ring_.dlse_part_), ring_.memory_, args_.stream);
      a.dq = dq_.part(call.q).data;
      a.dk = gradients.k.part(call.k).data;
      a.dv = gradients.v.part(call.k).data;
      // The sinks are in lse; they themselves matter for their gradient alone.
      if (call.dsinks || ring_.alone_) a.sinks = args_.sinks;
      if (call.dsinks) a.dsinks = args_.dsinks;
      call.plan.backward(a);
    }
    // Sends dK and dV home, and asks for those of the rank's own keys.
    void give(const RingStep& step, const Pair& computed) const {
      const Pair mine = returned(step);
      const std::array<RingMessage, 2> sends = {
          RingMessage{computed.k.data, computed.k.bytes(), step.source},
          RingMessage{computed.v.data, computed.v.bytes(), step.source}};
      const std::array<RingMessage, 2> receives = {
          RingMessage{mine.k.data, mine.k.bytes(), step.target},
          RingMessage{mine.v.data, mine.v.bytes(), step.target}};
      begin(kGradients, sends, receives);
    }
    void take(const RingStep& step) const {
      if (!travels(step)) return;
      ranks_.end(kGradients, args_.stream);
      const Pair mine = returned(step);
      int64_t row = 0;
      for (const RingRows& rows : step.sends) {
        const RingRows part = {row, row + rows.size()};
        add_rows(mine.k.part(part), sums_.k.part(rows), DType::kFloat32, true);
        add_rows(mine.v.part(part), sums_.v.part(rows), DType::kFloat32, true);
        row = part.end;
      }
    }
    [[nodiscard]] Pair returned(const RingStep& step) const {
      return pair(ring_.returned_, internal::ring_count(step.sends), DType::kFloat32);
    }
    void round_to(void* data, const Tensor& sums, const Strides& strides) const {
      add_rows(sums, tensor(data, sums.heads, sums.dim, grad_dtype(), strides), grad_dtype(),
               false);
    }
    void add_rows(const Tensor& x, const Tensor& to, DType dtype, bool accumulate) const {
      AddArgs a = {.device = layer_.device, .device_index = layer_.device_index};
      a.out_dtype = dtype;
      a.threads = layer_.threads;
      a.accumulate = accumulate;
      a.batch = x.batch;
      a.seqlen = x.rows;
      a.heads = x.heads;
      a.head_dim = x.dim;
      a.x = reinterpret_cast<const float*>(x.data);
      a.out = to.data;
      a.x_strides = x.strides;
      a.out_strides = to.strides;
      a.stream = args_.stream;
      strobe::add(a);
    }

    Lse lse_, dlse_;
    Tensor out_, dout_, dq_;
    Pair sums_ = {};  // of dK and dV of the rank's own keys
  };

  static constexpr size_t kAlignment = 256;               // of a piece of the workspace
  static constexpr int64_t kMostRows = int64_t{1} << 30;  // positions of queries go that far

  RingProblem problem_;
  bool packed_;
  std::vector<int64_t> lengths_;
  internal::RingMemory memory_;
  int64_t batch_ = 1;
  RingMask mask_ = {};
  RingSchedule schedule_ = {};
  Calls own_ = {}, own_last_ = {};  // forward: own_ alone
  std::vector<Calls> steps_ = {};
  std::vector<RingRows> single_ = {};  // forward: rows with one result
  bool alone_ = false;                 // one call computes everything
  std::vector<int32_t> numbers_ = {};  // arrays of the calls
  int64_t most_queries_ = 0, most_received_ = 0, most_sent_ = 0;
  int64_t received_bytes_ = 0, computed_bytes_ = 0;
  size_t scratch_bytes_ = 0, sums_bytes_ = 0;
  // Where the workspace's pieces begin, and where it ends.
  size_t outs_ = 0, lses_ = 0, lse_part_ = 0, dlse_part_ = 0, received_ = 0, sent_ = 0, sums_ = 0,
         computed_ = 0, returned_ = 0, numbers_at_ = 0, scratch_ = 0, bytes_ = 0;
};

}  // namespace v0
}  // namespace strobe

#endif  // C++20
#endif  // STROBE_RING_HPP_
