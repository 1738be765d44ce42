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

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/gpu.hpp>
#include <strobe/nccl.hpp>
#include <strobe/ring_backward.hpp>
#include <strobe/ring_checks.hpp>
#include <strobe/ring_forward.hpp>
#include <strobe/ring_plan.hpp>
#include <strobe/ring_schedule.hpp>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// How a rank does its part: its schedule, a plan for each call, and what they need. Made once for
// shapes, and used as often as you like; by several threads at once too, each with tensors, a
// workspace and a communicator of its own.
class Ring {
 public:
  // Checks the problem and plans every call. Throws Error: kInvalidArgument names the argument,
  // kUnsupported what is not supported over ranks, or lists why each kernel declines.
  explicit Ring(const RingProblem& problem) : plan_(problem) {
    if (problem.ulysses != 0 && problem.ulysses != 1) {
      throw Error(Status::kInvalidArgument,
                  internal::formatted("ulysses = %d of a Ring, expected 0 or 1: strobe::Ulysses "
                                      "(ulysses.hpp) has groups",
                                      problem.ulysses));
    }
    if (plan_.problem.layer.direction == Direction::kForward) {
      internal::plan_ring_forward(plan_);
    } else {
      internal::plan_ring_backward(plan_);
    }
    plan_.cut.reset();
  }

  // How many rows of q, k, v and out this rank holds.
  [[nodiscard]] int64_t rows() const noexcept { return plan_.schedule.rows; }
  // Which rows of the sequences these are, in the order in which they stand in the tensors.
  [[nodiscard]] std::vector<RingChunk> chunks() const {
    return plan_.layout.chunks(plan_.problem.rank);
  }
  // What this rank computes, sends and receives, step by step.
  [[nodiscard]] const RingSchedule& schedule() const& noexcept { return plan_.schedule; }
  // The same of a ring that ends here.
  [[nodiscard]] RingSchedule schedule() && { return std::move(plan_.schedule); }
  // The problem, with heads_kv, head_dim_v and the order filled in; what a mask was made of is not
  // needed any more, and may be gone.
  [[nodiscard]] const RingProblem& problem() const& noexcept { return plan_.problem; }
  // The same of a ring that ends here.
  [[nodiscard]] RingProblem problem() && { return std::move(plan_.problem); }
  // What a launch needs: partial results, keys and gradients on their way, and the kernels' own.
  [[nodiscard]] size_t workspace_bytes() const noexcept { return plan_.bytes; }

  // The plan in words: who this rank is, and for each step what is sent, received and computed by
  // which kernel.
  [[nodiscard]] std::string text() const {
    using internal::formatted;
    const std::string text = formatted(
        "rank %d of %d: %" PRId64 " of %" PRId64 " rows in %s order, workspace %zu bytes\n",
        plan_.problem.rank, plan_.problem.ranks, rows(), plan_.layout.all_rows(),
        plan_.problem.order == RingOrder::kZigzag ? "zigzag" : "plain", plan_.bytes);
    return text + plan_.steps_text();
  }

  // Runs a forward problem. Every rank calls it, in the same order among its calls.
  // Returns when the result is there (CPU) or enqueued (CUDA); allocates nothing. What is wrong
  // with the arguments is refused before anything is sent. args: workspace_bytes() of workspace,
  // 64-byte aligned; lse as in a Plan, null: not wanted. Throws Error.
  void forward(const ForwardArgs& args, Communicator& ranks) const {
    internal::RingCheck(plan_.problem, plan_.rows(), plan_.bytes).forward(args, ranks);
    internal::RingForward(plan_, args, ranks).run();
  }

  // Runs a backward problem, as forward(). dsinks gets this rank's part of the gradient of the
  // sinks: the sum over ranks is the whole.
  void backward(const BackwardArgs& args, Communicator& ranks) const {
    internal::RingCheck(plan_.problem, plan_.rows(), plan_.bytes).backward(args, ranks);
    internal::RingBackward(plan_, args, ranks).run();
  }

 private:
  internal::RingPlan plan_;
};

}  // namespace v0
}  // namespace strobe

#endif  // C++20
#endif  // STROBE_RING_HPP_
