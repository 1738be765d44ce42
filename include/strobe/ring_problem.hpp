// What the caller wants of a ring (ring.hpp) or of an all-to-all (ulysses.hpp), and what of it is
// refused.
#ifndef STROBE_RING_PROBLEM_HPP_
#define STROBE_RING_PROBLEM_HPP_

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/ring_layout.hpp>
#include <strobe/ring_masks.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// What the caller wants of a ring: a layer over sequences, and which part of them is this rank's.
struct RingProblem {
  // The layer over whole sequences: seqlen_q = seqlen_k are the rows that all ranks have together.
  // Strides are those of this rank's tensors. Refused by name (kUnsupported) are
  // prefixes, signed windows, caches, biases, batch_invariant, sinks_outside_lse, accumulate,
  // has_delta, kv_dtype and v_dtype; has_seqused_q, has_seqused_k and mask stay as they are by
  // default: what they are for is said below. The backward pass takes the forward's problem
  // (backward()).
  Problem layer = {};
  // Of sequences that are packed end to end, each of which sees itself alone; tensors are then
  // [rows, heads, head_dim], lse is [heads, rows], and the layer's batch, seqlen_q, seqlen_k and
  // varlen stay as they are by default. Empty: not packed.
  std::vector<int64_t> lengths = {};
  int32_t ranks = 1, rank = 0;  // how many there are, and which one this is
  RingOrder order =
      RingOrder::kAuto;  // which rows a rank holds; the same for all layers of a model
  // With lengths: which of the sequences; likewise.
  RingDocuments documents = RingDocuments::kAuto;
  // Of each sequence of the batch, or of lengths, so many rows are in use, the first ones, the same
  // on every rank. Empty: all of all.
  std::vector<int64_t> seqused = {};
  // A mask as data: a pair is seen if it and all of the layer's rule allow it. Each call's part is
  // packed when a Ring or a Ulysses is made, which keeps it where the tensors are.
  RingMaskData mask = {};
  // Of a Ulysses: so many neighbouring ranks share out the heads by an all-to-all, and a ring goes
  // between such groups. It divides ranks, heads and heads_kv. 0: all ranks do; 1: a ring alone.
  int32_t ulysses = 0;

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

inline constexpr int64_t kRingMostRows = int64_t{1} << 30;  // positions of queries go that far

// The problem, if a ring can be made of it.
[[nodiscard]] inline RingProblem ring_checked(const RingProblem& problem) {
  const Problem& layer = problem.layer;
  const auto invalid = [](const std::string& text) { throw Error(Status::kInvalidArgument, text); };
  if (problem.ranks < 1) invalid(formatted("ranks = %d, expected at least 1", problem.ranks));
  if (problem.rank < 0 || problem.rank >= problem.ranks) {
    invalid(formatted("rank = %d, expected 0 to %d: a rank of %d", problem.rank, problem.ranks - 1,
                      problem.ranks));
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
    if (length < 0 || length > kRingMostRows)
      invalid(formatted("lengths has %" PRId64 ", expected 0 to 2^30", length));
    rows += length;
    if (rows > kRingMostRows) break;
  }
  if (rows > kRingMostRows) {
    invalid(formatted("%" PRId64 " rows over all ranks, expected at most 2^30", rows));
  }
  const size_t sequences =
      packed ? problem.lengths.size() : static_cast<size_t>(std::max<int64_t>(layer.batch, 0));
  if (!problem.seqused.empty() && problem.seqused.size() != sequences) {
    invalid(formatted("seqused has %zu numbers, expected %zu: one of each sequence",
                      problem.seqused.size(), sequences));
  }
  for (size_t n = 0; n < problem.seqused.size(); ++n) {
    const int64_t used = problem.seqused[n], most = packed ? problem.lengths[n] : layer.seqlen_q;
    if (used >= 0 && used <= most) continue;
    invalid(formatted("seqused has %" PRId64 ", expected 0 to %" PRId64 ": the sequence's", used,
                      most));
  }
  if (!packed && problem.documents != RingDocuments::kAuto) {
    invalid(
        formatted("documents = %d without lengths, expected 0 (kAuto): there is one sequence, "
                  "which is split",
                  static_cast<int>(problem.documents)));
  }
  if (static_cast<int>(problem.documents) < 0 || static_cast<int>(problem.documents) > 2) {
    invalid(formatted("documents = %d, expected 0, 1 or 2: kAuto, kWhole or kSplit",
                      static_cast<int>(problem.documents)));
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
  } options[] = {{"dropout_first_query", layer.dropout_first_query != 0},
                 {"dropout_first_key", layer.dropout_first_key != 0},
                 {"dropout_first_head", layer.dropout_first_head != 0},
                 {"dropout_heads", layer.dropout_heads != 0},
                 {"has_q_position", layer.has_q_position},
                 {"has_prefix", layer.has_prefix},
                 {"window_signed", layer.window_signed},
                 {"varlen", layer.varlen},
                 {"total_q", layer.total_q != 0},
                 {"total_k", layer.total_k != 0},
                 {"kv_dtype", layer.kv_dtype != DType::kSame && layer.kv_dtype != layer.dtype},
                 {"v_dtype", layer.v_dtype != DType::kSame && layer.v_dtype != layer.dtype},
                 {"cache", layer.cache != Cache::kNone},
                 {"append", layer.append != Append::kNone},
                 {"rotary_dim", layer.rotary_dim != 0},
                 {"has_bias", layer.has_bias},
                 {"has_dbias", layer.has_dbias},
                 {"batch_invariant", layer.batch_invariant},
                 {"sinks_outside_lse", layer.sinks_outside_lse},
                 {"accumulate", layer.accumulate},
                 {"has_delta", layer.has_delta}};
  const std::pair<const char*, bool> said[] = {{"has_seqused_q", layer.has_seqused_q},
                                               {"has_seqused_k", layer.has_seqused_k},
                                               {"mask", layer.mask.kind != STROBE_MASK_NONE}};
  for (const auto& [name, given] : said) {
    if (!given) continue;
    throw Error(Status::kUnsupported,
                formatted("layer.%s over ranks, expected its default: seqused and mask of the "
                          "RingProblem say it",
                          name));
  }
  for (const auto& option : options) {
    if (!option.given) continue;
    throw Error(Status::kUnsupported,
                formatted("layer.%s over ranks, expected its default: a call there has a part of "
                          "the keys, and this is meant for all of them together",
                          option.name));
  }
  return problem;
}

// Which rows every rank holds. inside: how many neighbouring ranks are one of the layout's.
[[nodiscard]] inline RingLayout ring_layout(const RingProblem& problem, int32_t inside) {
  RingOrder order = problem.order;
  if (order == RingOrder::kAuto)
    order = problem.layer.causal ? RingOrder::kZigzag : RingOrder::kPlain;
  const int64_t one[] = {problem.layer.seqlen_q};
  const bool packed = !problem.lengths.empty();
  return RingLayout(packed ? std::span<const int64_t>(problem.lengths) : one,
                    problem.ranks * inside, order,
                    packed ? problem.documents : RingDocuments::kSplit);
}

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_PROBLEM_HPP_
