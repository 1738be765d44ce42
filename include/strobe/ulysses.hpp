// Attention over sequences that are split over ranks, by all-to-all over heads (after DeepSpeed's
// Ulysses): strobe::Ulysses. Header only, over strobe.hpp; C++20.
//
//   // As strobe::Ring (ring.hpp), with the same problem, communicator and arguments.
//   const strobe::Ulysses layer(problem);
//   layer.forward({.q = q, .k = k, .v = v, .out = out, .lse = lse, .workspace = workspace,
//                  .stream = stream}, ranks);
//
// Every rank gets all rows of some heads, computes their attention by one call, and sends the rows
// back. That sends less than a ring where sequences are short, and computes as one device does; but
// nothing is computed meanwhile, and ranks have to divide heads and heads_kv. With
// RingProblem::ulysses below the number of ranks it is both at once: so many neighbouring ranks (of
// a node) share out the heads, and a ring goes between such groups. What fails throws
// strobe::Error.
#ifndef STROBE_ULYSSES_HPP_
#define STROBE_ULYSSES_HPP_

#if __cplusplus <= 201703L
#error "ulysses.hpp needs C++20 (-std=c++20, CMAKE_CXX_STANDARD 20)"
#else

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
#include <strobe/ring_backward.hpp>
#include <strobe/ring_checks.hpp>
#include <strobe/ring_cost.hpp>
#include <strobe/ring_forward.hpp>
#include <strobe/ring_plan.hpp>
#include <strobe/ring_schedule.hpp>
#include <strobe/ring_tensors.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {
namespace internal {

// What a rank has by its rows, with all heads, and in an all-to-all by its heads, with the rows of
// its group.
struct UlyssesTensor {
  RingTensor rows, whole;
};

// The ranks of a ring between groups: of each, the one that has the same heads.
class GroupRanks final : public Communicator {
 public:
  GroupRanks(Communicator& ranks, int32_t inside) : ranks_(ranks), inside_(inside) {}

  [[nodiscard]] int32_t ranks() const override { return ranks_.ranks() / inside_; }
  [[nodiscard]] int32_t rank() const override { return ranks_.rank() / inside_; }
  void begin(int lane, std::span<const RingMessage> sends, std::span<const RingMessage> receives,
             void* stream) override {
    const Messages out = of_ranks(sends), in = of_ranks(receives);
    ranks_.begin(lane, std::span(out).first(sends.size()), std::span(in).first(receives.size()),
                 stream);
  }
  void end(int lane, void* stream) override { ranks_.end(lane, stream); }

 private:
  using Messages = std::array<RingMessage, 2>;  // of K and V, or of their gradients

  [[nodiscard]] Messages of_ranks(std::span<const RingMessage> given) const {
    Messages found = {};
    for (size_t n = 0; n < given.size(); ++n) {
      found[n] = given[n];
      found[n].rank = given[n].rank * inside_ + ranks_.rank() % inside_;
    }
    return found;
  }

  Communicator& ranks_;
  int32_t inside_;
};

// Whose rows are where, and where a launch's pieces lie in the workspace.
struct UlyssesPlan {
  explicit UlyssesPlan(const RingProblem& wanted) : ring(wanted) {
    const Problem& layer = ring.problem.layer;
    const int32_t ranks = ring.problem.ranks;
    inside = wanted.ulysses == 0 ? ranks : wanted.ulysses;
    if (inside < 1 || ranks % inside != 0) {
      throw Error(
          Status::kInvalidArgument,
          formatted("ulysses = %d, expected a divisor of %d, the number of ranks", inside, ranks));
    }
    const std::pair<const char*, int64_t> counts[] = {{"heads", layer.heads},
                                                      {"heads_kv", layer.heads_kv}};
    for (const auto& [name, count] : counts) {
      if (count % inside == 0) continue;
      throw Error(
          Status::kUnsupported,
          formatted("layer.%s = %" PRId64 " by all-to-all, expected a multiple of %d, the "
                    "number of %s: a ring needs none",
                    name, count, inside, inside == ranks ? "ranks" : "ranks that share them out"));
    }
    if (inside > 1 && !wanted.mask.empty() && !wanted.mask.all_rows) {
      throw Error(
          Status::kUnsupported,
          "mask.all_rows = 0 by all-to-all, expected 1: a rank computes rows of others, and "
          "has the mask of its own");
    }
    groups = ranks / inside;
    group = ring.problem.rank / inside;
    place = ring.problem.rank % inside;
    heads = layer.heads / inside;
    heads_kv = layer.heads_kv / inside;
    length = ring.layout.rows(group, inside);
    for (int32_t member = 0; member < inside; ++member) {
      pieces.push_back(ring_within(ring.layout, group, inside, member));
      rows.push_back(ring.layout.rows(first() + member));
      most_rows = std::max(most_rows, rows.back());
    }
    if (groups == 1) {
      plan_call();
    } else {
      plan_between();
    }
    plan_workspace();
    ring.cut.reset();
  }

  // The group's first rank.
  [[nodiscard]] int32_t first() const { return group * inside; }
  [[nodiscard]] int64_t rows_of(int32_t member) const { return rows[static_cast<size_t>(member)]; }
  [[nodiscard]] size_t scratch_bytes() const {
    return between ? between->bytes : call.workspace_bytes();
  }

  // These heads, of tensors that are contiguous.
  [[nodiscard]] Problem of_heads() const {
    Problem sub = ring.problem.layer;
    sub.heads = heads;
    sub.heads_kv = heads_kv;
    sub.q = sub.k = sub.v = sub.out = sub.dout = sub.dq = sub.dk = sub.dv = {};
    return sub;
  }

  // The ring between groups.
  void plan_between() {
    RingProblem sub = ring.problem;
    sub.layer = of_heads();
    sub.ranks = groups;
    sub.rank = group;
    const RingShare share = {inside, place * heads, ring.problem.layer.heads};
    RingPlan& plan = between.emplace(sub, share);
    if (sub.layer.direction == Direction::kForward) {
      plan_ring_forward(plan);
    } else {
      plan_ring_backward(plan);
    }
  }

  // The one call: these heads of whole sequences.
  void plan_call() {
    Problem sub = of_heads();
    const bool packed = !ring.problem.lengths.empty();
    RingSequences sequences;
    if (packed) {
      sub.varlen = true;
      sub.batch = static_cast<int64_t>(ring.layout.lengths().size());
      sub.total_q = sub.total_k = length;
      sequences.q = {0};
      for (const int64_t count : ring.layout.lengths()) {
        sequences.q.push_back(sequences.q.back() + static_cast<int32_t>(count));
        sub.seqlen_q = sub.seqlen_k = std::max(sub.seqlen_q, count);
      }
      sequences.k = sequences.q;
      cumulative = ring.keep(sequences.q);
    }
    if (sub.dropout_p != 0) {
      sub.dropout_first_head = place * heads;
      sub.dropout_heads = ring.problem.layer.heads;
    }
    if (!ring.problem.seqused.empty()) {
      sub.has_seqused_q = sub.has_seqused_k = true;
      used = ring.keep({ring.problem.seqused.begin(), ring.problem.seqused.end()});
    }
    if (ring.cut) {
      const std::vector<int64_t> all = ring_rows_held(ring.layout, 0, inside);
      const RingPackedMask made = ring.cut->pack(0, all, all, packed ? &sequences : nullptr,
                                                 {place * heads, (place + 1) * heads}, sub.threads);
      sub.mask = made.shape;
      mask = ring.memory.kept(made.words);
    }
    call = Plan(sub);
  }

  void plan_workspace() {
    const Problem& layer = ring.problem.layer;
    const bool backward = layer.direction == Direction::kBackward;
    const int64_t size = ring_element_size(layer.dtype);
    const auto size_of = [&](DType dtype) {
      return ring_element_size(dtype == DType::kSame ? layer.dtype : dtype);
    };
    // Bytes of a row: of what is sent together, the most; of each of the whole tensors.
    const int64_t q = heads * layer.head_dim, o = heads * layer.head_dim_v;
    const int64_t kv = heads_kv * (layer.head_dim + layer.head_dim_v);
    const int64_t inputs = (q + kv) * size;
    const int64_t of_out = o * size_of(layer.out_dtype) + 4 * heads;
    const int64_t more = backward ? of_out + o * size + 4 * heads : 0;
    const int64_t results = backward ? (q + kv) * size_of(layer.grad_dtype) : of_out;
    // Tensors begin at multiples of kPiece.
    const int64_t piece = static_cast<int64_t>(kTensors * kPiece);
    whole = ring.take(ring.batch * length * (inputs + more + results) + 2 * piece);
    message_bytes = ring.batch * most_rows * std::max(inputs + more, results) + piece;
    messages = ring.take(inside > 1 ? 4 * message_bytes : 0);
    slopes = ring.take(layer.alibi == Alibi::kPerBatchHead ? ring.batch * heads * 4 : 0);
    numbers_at = ring.take(static_cast<int64_t>(ring.numbers.size() * sizeof(int32_t)));
    scratch = ring.take(static_cast<int64_t>(scratch_bytes()));
  }

  // So many tensors at most go together, and where they lie begins at multiples of so many bytes.
  static constexpr size_t kTensors = 8, kPiece = 256;

  RingPlan ring;                   // its problem, rows, numbers and workspace; no call
  int32_t inside = 1, groups = 1;  // how many ranks share out the heads, and how many such groups
  int32_t group = 0, place = 0;    // which one is this rank's, and which of its ranks it is
  int64_t heads = 0, heads_kv = 0, length = 0, most_rows = 0;  // length: rows of the group
  std::vector<std::vector<RingPiece> > pieces = {};            // of every rank of the group
  std::vector<int64_t> rows = {};                              // likewise
  Plan call = {};                                              // of one group
  std::optional<RingPlan> between = {};                        // of several
  int64_t cumulative = -1, used = -1;  // among the numbers: cu_seqlens, seqused
  std::shared_ptr<const void> mask = {};
  int64_t message_bytes = 0;  // of those from one rank, or to one
  // Where the workspace's pieces begin.
  size_t whole = 0, messages = 0, slopes = 0, numbers_at = 0, scratch = 0;
};

template <typename Args>
class UlyssesLaunch {
 public:
  UlyssesLaunch(const UlyssesPlan& plan, const Args& args, Communicator& ranks)
      : plan_(plan),
        layer_(plan.ring.problem.layer),
        memory_(plan.ring.memory),
        args_(args),
        ranks_(ranks),
        next_(plan.whole) {
    const std::vector<int32_t>& numbers = plan.ring.numbers;
    memory_.upload(place(plan.numbers_at), numbers.data(), numbers.size() * sizeof(int32_t),
                   args.stream);
    q_ = tensor(args.q, layer_.heads, layer_.head_dim, layer_.dtype, layer_.q);
    k_ = tensor(args.k, layer_.heads_kv, layer_.head_dim, layer_.dtype, layer_.k);
    v_ = tensor(args.v, layer_.heads_kv, layer_.head_dim_v, layer_.dtype, layer_.v);
  }

 protected:
  using Tensors = std::span<const UlyssesTensor>;

  // A tensor of the caller's, and room for it as a whole.
  [[nodiscard]] UlyssesTensor tensor(const void* data, int64_t heads, int64_t dim, DType dtype,
                                     const Strides& strides) {
    const RingPlan& ring = plan_.ring;
    const int64_t share = heads / plan_.inside;
    UlyssesTensor found;
    found.rows =
        RingTensor::of(data, ring.batch, ring.rows(), heads, dim, dtype, strides, ring.packed);
    found.whole = RingTensor::of(room(ring.batch * plan_.length * share * dim * found.rows.size),
                                 ring.batch, plan_.length, share, dim, dtype);
    return found;
  }
  // lse, or its gradient: rows lie beside each other.
  [[nodiscard]] UlyssesTensor lse(const float* data) {
    const RingPlan& ring = plan_.ring;
    const auto strides = [](int64_t heads, int64_t rows) {
      return Strides{heads * rows, 1, rows, 1};
    };
    UlyssesTensor found;
    found.rows = RingTensor::of(data, ring.batch, ring.rows(), layer_.heads, 1, DType::kFloat32,
                                strides(layer_.heads, ring.rows()));
    found.whole =
        RingTensor::of(room(ring.batch * plan_.length * plan_.heads * 4), ring.batch, plan_.length,
                       plan_.heads, 1, DType::kFloat32, strides(plan_.heads, plan_.length));
    return found;
  }
  [[nodiscard]] std::byte* place(size_t at) const { return args_.workspace.data() + at; }

  // The rank's heads of all rows of the group of each tensor, or back. The group's rank r exchanges
  // with its ranks r + d and r - d in step d, and packs what it sends while the step before is on
  // its way.
  void to_heads(Tensors tensors) const { exchange(tensors, true); }
  void to_rows(Tensors tensors) const { exchange(tensors, false); }

  // Arguments of the call, but for what only one direction has.
  [[nodiscard]] Args call_args() const {
    const int64_t first = plan_.place * plan_.heads;
    const auto number = [&](int64_t at) -> const int32_t* {
      return at < 0 ? nullptr : reinterpret_cast<int32_t*>(place(plan_.numbers_at)) + at;
    };
    Args a;
    a.q = q_.whole.data;
    a.k = k_.whole.data;
    a.v = v_.whole.data;
    a.cu_seqlens_q = a.cu_seqlens_k = number(plan_.cumulative);
    a.seqused_q = a.seqused_k = number(plan_.used);
    a.mask = plan_.mask.get();
    a.alibi_slopes = args_.alibi_slopes ? args_.alibi_slopes + first : nullptr;
    if (layer_.alibi == Alibi::kPerBatchHead) {
      const auto bytes = [](int64_t heads) { return static_cast<size_t>(heads) * sizeof(float); };
      memory_.copy(place(plan_.slopes), bytes(plan_.heads), a.alibi_slopes, bytes(layer_.heads),
                   bytes(plan_.heads), static_cast<size_t>(plan_.ring.batch), args_.stream);
      a.alibi_slopes = reinterpret_cast<float*>(place(plan_.slopes));
    }
    a.sinks = args_.sinks ? args_.sinks + first : nullptr;
    a.dropout_seed = args_.dropout_seed;
    a.dropout_offset = args_.dropout_offset;
    a.workspace = {place(plan_.scratch), plan_.scratch_bytes()};
    a.stream = args_.stream;
    a.interrupt = args_.interrupt;
    a.interrupt_data = args_.interrupt_data;
    return a;
  }

  const UlyssesPlan& plan_;
  const Problem& layer_;
  const RingMemory& memory_;
  const Args& args_;
  Communicator& ranks_;
  UlyssesTensor q_, k_, v_;

 private:
  using Messages = std::array<RingMessage, UlyssesPlan::kTensors>;
  using Pieces = std::array<RingTensor, UlyssesPlan::kTensors>;

  [[nodiscard]] std::byte* room(int64_t bytes) {
    std::byte* const found = place(next_);
    next_ += rounded(static_cast<size_t>(bytes));
    return found;
  }
  [[nodiscard]] static size_t rounded(size_t bytes) {
    constexpr size_t kPiece = UlyssesPlan::kPiece;
    return (bytes + kPiece - 1) / kPiece * kPiece;
  }

  // Contiguous tensors for messages of so many rows and this rank's, or the other rank's, heads,
  // one behind the other in one of the workspace's four places for messages.
  [[nodiscard]] Pieces pieces(Tensors tensors, int64_t rows, size_t which) const {
    Pieces found;
    size_t at = plan_.messages + which * static_cast<size_t>(plan_.message_bytes);
    for (size_t n = 0; n < tensors.size(); ++n) {
      RingTensor piece = tensors[n].whole;
      const bool beside = piece.dim == 1 && piece.strides.seqlen == 1;
      piece.rows = rows;
      const int64_t width = piece.heads * piece.dim;
      piece.strides =
          beside ? Strides{rows * width, 1, rows, 1} : Strides{rows * width, width, piece.dim, 1};
      piece.data = place(at);
      at += rounded(piece.bytes());
      found[n] = piece;
    }
    return found;
  }
  // Copies a rank's rows of a whole tensor to rows that lie end to end, or back.
  void copy_chunks(int32_t member, const RingTensor& whole, const RingTensor& rows,
                   bool to_whole) const {
    if (rows.data == nullptr) return;  // lse that this rank does not want
    for (const RingPiece& piece : plan_.pieces[static_cast<size_t>(member)]) {
      const RingTensor a = whole.part(piece.of_group), b = rows.part(piece.of_rank);
      (to_whole ? b : a).copy_to(to_whole ? a : b, memory_, args_.stream);
    }
  }
  // Of the tensor that a rank has by rows: the heads of another one.
  [[nodiscard]] static RingTensor heads_of(int32_t member, const UlyssesTensor& x) {
    return x.rows.of_heads(member * x.whole.heads, x.whole.heads);
  }

  void exchange(Tensors tensors, bool to_heads) const {
    const int32_t ranks = plan_.inside, rank = plan_.place;
    bool travels = false;  // the step before's
    for (int32_t d = 1; d < ranks; ++d) {
      const bool begun = begin(tensors, to_heads, d);
      if (d == 1) {
        for (const UlyssesTensor& x : tensors)
          copy_chunks(rank, x.whole, heads_of(rank, x), to_heads);
      } else if (travels) {
        end(tensors, to_heads, d - 1);
      }
      travels = begun;
    }
    if (ranks == 1) {
      for (const UlyssesTensor& x : tensors)
        copy_chunks(rank, x.whole, heads_of(rank, x), to_heads);
    } else if (travels) {
      end(tensors, to_heads, ranks - 1);
    }
  }
  // Whether there is a message with elements.
  [[nodiscard]] bool begin(Tensors tensors, bool to_heads, int32_t d) const {
    const int32_t ranks = plan_.inside, rank = plan_.place;
    const int32_t target = (rank + d) % ranks, source = (rank + ranks - d) % ranks;
    const auto lane = static_cast<size_t>(d % Communicator::kLanes);
    const int64_t mine = plan_.ring.rows();
    const Pieces sent = pieces(tensors, to_heads ? mine : plan_.rows_of(target), 2 * lane);
    const Pieces received = pieces(tensors, to_heads ? plan_.rows_of(source) : mine, 2 * lane + 1);
    Messages sends = {}, receives = {};
    size_t sends_count = 0, receives_count = 0;
    for (size_t n = 0; n < tensors.size(); ++n) {
      if (to_heads) {
        heads_of(target, tensors[n]).copy_to(sent[n], memory_, args_.stream);
      } else {
        copy_chunks(target, tensors[n].whole, sent[n], false);
      }
      // Messages without bytes are none, as the other side knows.
      if (sent[n].bytes() > 0)
        sends[sends_count++] = {sent[n].data, sent[n].bytes(), plan_.first() + target};
      if (received[n].bytes() > 0)
        receives[receives_count++] = {received[n].data, received[n].bytes(),
                                      plan_.first() + source};
    }
    if (sends_count + receives_count == 0) return false;
    ranks_.begin(static_cast<int>(lane), std::span(sends).first(sends_count),
                 std::span(receives).first(receives_count), args_.stream);
    return true;
  }
  void end(Tensors tensors, bool to_heads, int32_t d) const {
    const int32_t ranks = plan_.inside, rank = plan_.place;
    const int32_t source = (rank + ranks - d) % ranks;
    const auto lane = static_cast<size_t>(d % Communicator::kLanes);
    ranks_.end(static_cast<int>(lane), args_.stream);
    const Pieces received =
        pieces(tensors, to_heads ? plan_.rows_of(source) : plan_.ring.rows(), 2 * lane + 1);
    for (size_t n = 0; n < tensors.size(); ++n) {
      if (to_heads) {
        copy_chunks(source, tensors[n].whole, received[n], true);
      } else if (tensors[n].rows.data) {
        received[n].copy_to(heads_of(source, tensors[n]), memory_, args_.stream);
      }
    }
  }

  size_t next_;  // where the next whole tensor begins
};

class UlyssesForward : UlyssesLaunch<ForwardArgs> {
 public:
  using UlyssesLaunch::UlyssesLaunch;

  void run() {
    to_heads(std::array{q_, k_, v_});
    const UlyssesTensor out =
        tensor(args_.out, layer_.heads, layer_.head_dim_v,
               layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype, layer_.out);
    const UlyssesTensor lses = lse(args_.lse);
    ForwardArgs a = call_args();
    a.out = out.whole.data;
    a.lse = reinterpret_cast<float*>(lses.whole.data);
    if (plan_.between) {
      GroupRanks groups(ranks_, plan_.inside);
      RingForward(*plan_.between, a, groups).run();
    } else {
      plan_.call.forward(a);
    }
    to_rows(std::array{out, lses});
  }
};

class UlyssesBackward : UlyssesLaunch<BackwardArgs> {
 public:
  using UlyssesLaunch::UlyssesLaunch;

  void run() {
    const DType out_dtype = layer_.out_dtype == DType::kSame ? layer_.dtype : layer_.out_dtype;
    const UlyssesTensor out =
        tensor(args_.out, layer_.heads, layer_.head_dim_v, out_dtype, layer_.out);
    const UlyssesTensor dout =
        tensor(args_.dout, layer_.heads, layer_.head_dim_v, layer_.dtype, layer_.dout);
    const UlyssesTensor lses = lse(args_.lse);
    const std::array<UlyssesTensor, 7> given = {
        q_, k_, v_, out, dout, lses, layer_.has_dlse ? lse(args_.dlse) : lses};
    to_heads(std::span(given).first(layer_.has_dlse ? 7 : 6));
    const DType grad = layer_.grad_dtype == DType::kSame ? layer_.dtype : layer_.grad_dtype;
    const std::array<UlyssesTensor, 3> found = {
        tensor(args_.dq, layer_.heads, layer_.head_dim, grad, layer_.dq),
        tensor(args_.dk, layer_.heads_kv, layer_.head_dim, grad, layer_.dk),
        tensor(args_.dv, layer_.heads_kv, layer_.head_dim_v, grad, layer_.dv)};
    BackwardArgs a = call_args();
    a.out = out.whole.data;
    a.dout = dout.whole.data;
    a.lse = reinterpret_cast<float*>(lses.whole.data);
    a.dlse = layer_.has_dlse ? reinterpret_cast<float*>(given[6].whole.data) : nullptr;
    a.dq = found[0].whole.data;
    a.dk = found[1].whole.data;
    a.dv = found[2].whole.data;
    if (layer_.has_dsinks) {
      memory_.clear(args_.dsinks, RingLse::bytes(layer_.heads), args_.stream);
      a.dsinks = args_.dsinks + plan_.place * plan_.heads;
    }
    if (plan_.between) {
      GroupRanks groups(ranks_, plan_.inside);
      RingBackward(*plan_.between, a, groups).run();
    } else {
      plan_.call.backward(a);
    }
    to_rows(found);
  }
};

// Of a problem whose `ulysses` is not asked.
[[nodiscard]] inline RingChoice ring_choice(const RingProblem& problem) {
  RingProblem open = problem;
  open.ulysses = 0;
  const RingPlan plan(open);
  const Problem& layer = plan.problem.layer;
  // A rank that has the mask of its own rows alone computes no rows of others.
  if (!problem.mask.empty() && !problem.mask.all_rows)
    return {1, "a rank has its own rows of the mask alone"};
  return ring_choice(plan.layout, plan.mask,
                     {.batch = problem.lengths.empty() ? layer.batch : 1,
                      .heads = layer.heads,
                      .heads_kv = layer.heads_kv,
                      .head_dim = layer.head_dim,
                      .head_dim_v = layer.head_dim_v,
                      .element = ring_element_size(layer.dtype)});
}

}  // namespace internal

// How many ranks share out the heads where a rank then loses the least time beside its attention,
// by what is known of GPUs and their links (docs/distributed.md): 1 is a ring alone, and ranks an
// all-to-all alone. Shapes and ranks decide, so that all ranks agree. For RingProblem::ulysses,
// whose value here does not count. Throws Error, as a Ring of the problem.
[[nodiscard]] inline int32_t ulysses_ranks(const RingProblem& problem) {
  return internal::ring_choice(problem).inside;
}

// What ulysses_ranks() chooses and why, in the words of Python's plan: what a rank loses by each of
// the ways. Throws Error, as that.
[[nodiscard]] inline std::string ulysses_reason(const RingProblem& problem) {
  const internal::RingChoice found = internal::ring_choice(problem);
  std::string way = "ring";
  if (found.inside > 1) {
    way = found.inside == problem.ranks
              ? "ulysses"
              : internal::formatted("ring of %d groups, each of which is %d ranks by all-to-all",
                                    problem.ranks / found.inside, found.inside);
  }
  return way + ", because " + found.reason;
}

// How a rank does its part by all-to-all. Made once for shapes, and used as often as you like; by
// several threads at once too, each with tensors, a workspace and a communicator of its own.
class Ulysses {
 public:
  // Checks the problem, which is a Ring's, and plans the call. Throws Error: kInvalidArgument names
  // the argument, kUnsupported what is not supported over ranks, or lists why each kernel declines.
  explicit Ulysses(const RingProblem& problem) : plan_(problem) {}

  // How many rows of q, k, v and out this rank holds.
  [[nodiscard]] int64_t rows() const noexcept { return plan_.ring.rows(); }
  // Which rows of the sequences these are, in the order in which they stand in the tensors: those
  // that a Ring of the same order has.
  [[nodiscard]] std::vector<RingChunk> chunks() const {
    const RingProblem& p = plan_.ring.problem;
    return plan_.ring.layout.chunks(p.rank);
  }
  // The problem, with heads_kv, head_dim_v and the order filled in.
  [[nodiscard]] const RingProblem& problem() const& noexcept { return plan_.ring.problem; }
  // The same of an object that ends here.
  [[nodiscard]] RingProblem problem() && { return std::move(plan_.ring.problem); }
  // What a launch needs: tensors of all rows and some heads, messages, and the kernel's own.
  [[nodiscard]] size_t workspace_bytes() const noexcept { return plan_.ring.bytes; }

  // The plan in words.
  [[nodiscard]] std::string text() const {
    const RingProblem& p = plan_.ring.problem;
    std::string text = internal::formatted(
        "rank %d of %d: %" PRId64 " of %" PRId64
        " rows, workspace %zu bytes\nby all-to-all %" PRId64 " of %" PRId64 " heads, %" PRId64
        " of %" PRId64 " of keys",
        p.rank, p.ranks, rows(), plan_.ring.layout.all_rows(), workspace_bytes(), plan_.heads,
        p.layer.heads, plan_.heads_kv, p.layer.heads_kv);
    if (!plan_.between) return text + ": all rows by " + plan_.call.kernel() + "\n";
    return text +
           internal::formatted(" in groups of %d ranks: %" PRId64 " rows, and a ring of groups\n",
                               plan_.inside, plan_.length) +
           plan_.between->steps_text();
  }

  // Runs a forward problem, as Ring::forward().
  void forward(const ForwardArgs& args, Communicator& ranks) const {
    check().forward(args, ranks);
    internal::UlyssesForward(plan_, args, ranks).run();
  }
  // Runs a backward problem, as Ring::backward(). dsinks gets the gradients of this rank's heads,
  // and 0 for the others: the sum over ranks is the whole.
  void backward(const BackwardArgs& args, Communicator& ranks) const {
    check().backward(args, ranks);
    internal::UlyssesBackward(plan_, args, ranks).run();
  }

 private:
  [[nodiscard]] internal::RingCheck check() const {
    return {plan_.ring.problem, rows(), workspace_bytes()};
  }

  internal::UlyssesPlan plan_;
};

}  // namespace v0
}  // namespace strobe

#endif  // C++20
#endif  // STROBE_ULYSSES_HPP_
