// What a launch over ranks (ring.hpp, ulysses.hpp) looks at before anything is sent.
#ifndef STROBE_RING_CHECKS_HPP_
#define STROBE_RING_CHECKS_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <strobe/formatted.hpp>
#include <strobe/nccl.hpp>
#include <strobe/ring_plan.hpp>
#include <strobe/strobe.hpp>

namespace strobe {
inline namespace v0 {
namespace internal {

// Refuses arguments that are not those of a problem, whose rank has so many rows, and which needs
// so many bytes of workspace.
class RingCheck {
 public:
  RingCheck(const RingProblem& problem, int64_t rows, size_t bytes)
      : problem_(problem), rows_(rows), bytes_(bytes) {}

  void forward(const ForwardArgs& args, const Communicator& ranks) const {
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
  }
  void backward(const BackwardArgs& args, const Communicator& ranks) const {
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
  }

 private:
  static constexpr const void* kThere = "";  // in place of a pointer that is not asked for

  struct Pointer {
    const char* name;
    const void* pointer;
  };

  [[noreturn]] static void null(const char* name) {
    throw Error(Status::kInvalidArgument, formatted("%s = NULL, expected a pointer", name));
  }
  static void refuse(std::initializer_list<Pointer> pointers) {
    for (const Pointer& p : pointers) {
      if (p.pointer == nullptr) continue;
      throw Error(Status::kInvalidArgument,
                  formatted("%s of a ring, expected null: its problem does not have it", p.name));
    }
  }
  // Pointers that a rank with rows has.
  void need(std::initializer_list<Pointer> pointers) const {
    for (const Pointer& p : pointers) {
      if (p.pointer == nullptr && rows_ > 0 && problem_.layer.batch > 0) null(p.name);
    }
  }

  template <typename Args>
  void check_args(const Args& args, Direction direction, const Communicator& ranks) const {
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

  const RingProblem& problem_;
  int64_t rows_;
  size_t bytes_;
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_CHECKS_HPP_
