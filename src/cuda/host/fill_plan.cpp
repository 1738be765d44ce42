#include "cuda/host/fill_plan.h"

#include <type_traits>

#include "cuda/common/static_order.cuh"
#include "cuda/host/features_of.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/widened_queries.h"

namespace strobe::cuda {

namespace {

template <typename Instance>
const Instance* instance_at(const Plan& plan, int32_t number, int arch) {
  const Entry<Instance>* const entry = entry_of<Instance>(number);
  if (!entry) return nullptr;
  const auto& c = entry->instance->config;
  const AttentionProblem& p = plan.problem;
  bool takes_dtypes = has_dtypes(c, p);
  if constexpr (std::is_same_v<Instance, CachedInstance>) takes_dtypes |= takes_unpacked(c, p);
  const bool fits =
      c.arch == arch && takes_dtypes && c.width >= p.head_dim && c.width_v >= p.head_dim_v;
  return fits ? entry->instance : nullptr;
}

}  // namespace

template <typename Instance>
const Instance* instance_of(const Plan& plan, int arch) {
  return instance_at<Instance>(plan, plan.instance, arch);
}
template const ForwardInstance* instance_of<ForwardInstance>(const Plan&, int);
template const BackwardInstance* instance_of<BackwardInstance>(const Plan&, int);
template const CachedInstance* instance_of<CachedInstance>(const Plan&, int);

bool is_cached(const Plan& plan) {
  return plan.problem.cache != STROBE_CACHE_NONE || entry_of<CachedInstance>(plan.instance);
}

template <typename Instance>
const Instance* instance_for_unaligned(const Plan& plan) {
  const Entry<Instance>* const own = entry_of<Instance>(plan.instance);
  const bool is_turing = own && own->instance->config.arch == kTuring;
  return instance_at<Instance>(plan, plan.instance_unaligned, is_turing ? kTuring : 80);
}
template const ForwardInstance* instance_for_unaligned<ForwardInstance>(const Plan&);
template const BackwardInstance* instance_for_unaligned<BackwardInstance>(const Plan&);
template const CachedInstance* instance_for_unaligned<CachedInstance>(const Plan&);

const CachedInstance* instance_for_few_queries(const Plan& plan, bool aligned) {
  return instance_at<CachedInstance>(
      plan, aligned ? plan.instance_few_queries : plan.instance_few_queries_unaligned, 80);
}

namespace {

// What a plan says of its instance.
template <typename Instance>
void describe_instance(Plan& plan) {
  const Instance& instance = *entry_of<Instance>(plan.instance)->instance;
  plan.tile_q = instance.config.tile_q;
  plan.tile_k = instance.config.tile_k;
  plan.block_threads = instance.shape.threads;
  plan.shared_bytes = instance.shape.shared_bytes;
}

}  // namespace

std::vector<Choice> choices_on(int arch, const char* kernel, const AttentionProblem& p,
                               const DeviceProperties& device) {
  std::vector<Choice> choices;
  if (p.mask.kind != STROBE_MASK_NONE) return choices;
  for (const std::string_view name : instances_to_choose(arch, p, device))
    choices.push_back({kernel, name});
  return choices;
}

std::string plan_on(int arch, Plan& plan, const DeviceProperties& device,
                    const Choice* asked_choice) {
  const AttentionProblem& p = plan.problem;
#if STROBE_RANDOM_WALKS
  if (p.mask.kind != STROBE_MASK_NONE) return "mask: this build's walks are lists of tests";
#endif
  const AskedFor by_environment = AskedFor::by_environment();
  if (asked_choice && !by_environment.name.empty()) {
    return "choice.instance beside STROBE_CUDA_ROW, expected one of them";
  }
  const InstanceChoice choice = choose_instance(
      arch, p, device, asked_choice ? AskedFor{asked_choice->instance, true} : by_environment);
  if (!choice.reason.empty()) return choice.reason;
  if (asked_choice && choice.name != asked_choice->instance) {
    return format("choice.instance = %.64s, expected one that takes the problem",
                  std::string(asked_choice->instance).c_str());
  }
  plan.instance_name = choice.name;
  plan.instance = choice.instance;
  plan.instance_unaligned = choice.unaligned;
  plan.instance_few_queries = choice.few_queries;
  plan.instance_few_queries_unaligned = choice.few_queries_unaligned;
  plan.workspace_bytes = choice.workspace_bytes;
  GridSize grid{};
  if (is_cached(plan)) {
    describe_instance<CachedInstance>(plan);
    plan.unpacks_first = takes_unpacked(entry_of<CachedInstance>(plan.instance)->instance->config,
                                        widens_queries(p) ? after_widening(p) : p);
    plan.block_q = plan.tile_q;
    plan.work_items = choice.grid.x * choice.grid.y;
    grid = {static_cast<unsigned>(choice.grid.x), static_cast<unsigned>(choice.grid.y)};
  } else if (p.direction == STROBE_FORWARD) {
    describe_instance<ForwardInstance>(plan);
    plan.block_q = plan.tile_q;
    plan.work_items = p.batch * p.heads * ceil_div(p.seqlen_q, plan.block_q);
    grid = grid_for(plan.work_items);
  } else {
    describe_instance<BackwardInstance>(plan);
    plan.block_k = plan.tile_k;
    plan.work_items = p.batch * p.heads_kv * ceil_div(p.seqlen_k, plan.block_k);
    grid = grid_for(plan.work_items);
  }
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  return {};
}

}  // namespace strobe::cuda
