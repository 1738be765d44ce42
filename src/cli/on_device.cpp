#include "cli/on_device.h"

#include <type_traits>

#include "check/guarded.h"
#include "cli/mirror.h"

namespace strobe::cli {

strobe_problem OnDevice::On(strobe_problem problem) const {
  problem.device = static_cast<int32_t>(device_);
  problem.device_index = static_cast<int32_t>(device_index_);
  if (threads_ > 0) problem.threads = static_cast<int32_t>(threads_);
  return problem;
}

bool OnDevice::Takes(strobe_problem problem) const {
  problem = On(problem);
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  return strobe_plan_make(&problem, &plan) != STROBE_UNSUPPORTED;
}

strobe_status OnDevice::MakePlan(const strobe_problem& problem, strobe_plan* plan) {
  if (!every_choice_) return strobe_plan_make(&problem, plan);
  std::vector<strobe_choice> choices;
  strobe_choice choice{};
  choice.struct_size = sizeof choice;
  while (strobe_plan_choice(&problem, static_cast<int32_t>(choices.size()), &choice) == STROBE_OK)
    choices.push_back(choice);
  if (choices.empty()) return strobe_plan_make(&problem, plan);  // which says why
  return strobe_plan_make_chosen(&problem, &choices[turn_++ % choices.size()], plan);
}

std::string OnDevice::Run(const std::vector<std::span<std::byte>>& memory, strobe_problem problem,
                          strobe_forward_args args) {
  return RunWith(memory, On(problem), args, strobe_forward);
}

std::string OnDevice::Run(const std::vector<std::span<std::byte>>& memory, strobe_problem problem,
                          strobe_backward_args args) {
  return RunWith(memory, On(problem), args, strobe_backward);
}

template <typename Args, typename Launch>
std::string OnDevice::RunWith(const std::vector<std::span<std::byte>>& memory,
                              const strobe_problem& problem, Args args, Launch launch) {
  constexpr bool kForward = std::is_same_v<Args, strobe_forward_args>;
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  if (MakePlan(problem, &plan) != STROBE_OK) return strobe_last_error();
  ++kernels_[plan.kernel];
  unpacks_first_ = plan.unpacks_first != 0;
  strobe_test::Guarded workspace(static_cast<int64_t>(plan.workspace_bytes), 1);
  workspace.Seal();

  Mirror mirror(device_, device_index_);
  // All of it is copied back, so that a byte that should not have been written shows.
  for (const auto& all : memory) (void)mirror.Out(all);
  (void)mirror.Out(workspace.whole());
  const auto tensor = [&](auto*& pointer) {
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(mirror.Counterpart(pointer));
  };
  tensor(args.q), tensor(args.k), tensor(args.v), tensor(args.out), tensor(args.lse);
  tensor(args.bias), tensor(args.mask);
  const auto array = [&](auto*& pointer, int64_t count) {
    pointer = mirror.In(pointer, static_cast<size_t>(count));
  };
  const int64_t batch = problem.batch;
  array(args.cu_seqlens_q, batch + 1);
  array(args.cu_seqlens_k, batch + 1);
  array(args.alibi_slopes, problem.heads * (problem.alibi == STROBE_ALIBI_PER_HEAD ? 1 : batch));
  tensor(args.sinks);
  array(args.seqused_q, batch);
  array(args.seqused_k, batch);
  array(args.q_position, batch);
  array(args.prefix, batch);
  if constexpr (kForward) {
    tensor(args.k_new), tensor(args.v_new), tensor(args.rotary_cos), tensor(args.rotary_sin);
    tensor(args.q_scale), tensor(args.k_scale), tensor(args.v_scale);
    const int64_t stride =
        problem.block_table_stride ? problem.block_table_stride : problem.pages_per_sequence;
    array(args.block_table, batch * stride);
    array(args.cache_batch_idx, batch);
    array(args.leftpad, batch);
    array(args.rotary_position, batch);
    array(args.cu_seqlens_k_new, batch + 1);
  } else {
    tensor(args.dout), tensor(args.dlse), tensor(args.delta);
    tensor(args.dq), tensor(args.dk), tensor(args.dv), tensor(args.dsinks), tensor(args.dbias);
  }
  args.workspace = mirror.Counterpart(workspace.bytes());
  args.workspace_bytes = plan.workspace_bytes;
  if (launch(&plan, &args) != STROBE_OK) return strobe_last_error();
  mirror.Fetch();
  return workspace.CheckZones("workspace");
}

}  // namespace strobe::cli
