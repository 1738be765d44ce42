#include "cuda/host/fill_plan.h"

#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/fill_params.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"

namespace strobe::cuda {

namespace {

// Of Plan::reserved: the instance's index in its table; of the instance for unaligned pointers the
// index and 1, or 0 where there is none; whether the instance is a CachedInstance; of the instance
// for sequences with few queries beside others the index and 1, or 0.
constexpr int kInstanceSlot = 0, kUnalignedSlot = 1, kCachedSlot = 2, kFewQueriesSlot = 3;

template <typename Instance>
const Instance* instance_at(const Plan& plan, int64_t index, int arch) {
  const auto instances = instance_table<Instance>();
  if (index < 0 || static_cast<size_t>(index) >= instances.size()) return nullptr;
  const Instance* const instance = instances[static_cast<size_t>(index)].instance;
  const AttentionProblem& p = plan.problem;
  const bool fits = instance->config.arch == arch && instance->config.dtype == p.dtype &&
                    instance->config.width >= max64(p.head_dim, p.head_dim_v);
  return fits ? instance : nullptr;
}

template <typename Instance>
size_t workspace_of_instance(const AttentionProblem& p, const Instance& instance) {
  typename Instance::Params params{};
  fill_params(p, typename Instance::Args{}, params);
  Arena arena;
  instance.carve(arena, p, params);
  return arena.used();
}

}  // namespace

template <typename Instance>
const Instance* instance_of(const Plan& plan, int arch) {
  return instance_at<Instance>(plan, plan.reserved[kInstanceSlot], arch);
}
template const ForwardInstance* instance_of<ForwardInstance>(const Plan&, int);
template const BackwardInstance* instance_of<BackwardInstance>(const Plan&, int);
template const CachedInstance* instance_of<CachedInstance>(const Plan&, int);

bool is_cached(const Plan& plan) {
  return plan.problem.cache != STROBE_CACHE_NONE || plan.reserved[kCachedSlot] != 0;
}

template <typename Instance>
const Instance* instance_for_unaligned(const Plan& plan) {
  return instance_at<Instance>(plan, plan.reserved[kUnalignedSlot] - 1, 80);
}
template const ForwardInstance* instance_for_unaligned<ForwardInstance>(const Plan&);
template const BackwardInstance* instance_for_unaligned<BackwardInstance>(const Plan&);
template const CachedInstance* instance_for_unaligned<CachedInstance>(const Plan&);

const CachedInstance* instance_for_few_queries(const Plan& plan) {
  return instance_at<CachedInstance>(plan, plan.reserved[kFewQueriesSlot] - 1, 80);
}

template <typename Instance>
size_t workspace_of(const AttentionProblem& p, const Instance& instance, const Instance* other) {
  const size_t bytes = workspace_of_instance(p, instance);
  return other ? std::max(bytes, workspace_of_instance(p, *other)) : bytes;
}
template size_t workspace_of(const AttentionProblem&, const ForwardInstance&,
                             const ForwardInstance*);
template size_t workspace_of(const AttentionProblem&, const BackwardInstance&,
                             const BackwardInstance*);

namespace {

// An entry's place in its table and 1, or 0 for null.
template <typename Instance>
int64_t number_of(const Entry<Instance>* entry) {
  return entry ? entry - instance_table<Instance>().data() + 1 : 0;
}

// The instance of this entry, which a plan is for from then on.
template <typename Instance>
const Instance& take_instance(Plan& plan, const Entry<Instance>* entry) {
  const Instance& instance = *entry->instance;
  plan.reserved[kInstanceSlot] = number_of(entry) - 1;
  plan.tile_q = instance.config.tile_q;
  plan.tile_k = instance.config.tile_k;
  plan.block_threads = instance.shape.threads;
  plan.shared_bytes = instance.shape.shared_bytes;
  return instance;
}

template <typename Instance>
void fill_instance(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const Instance& instance = take_instance(plan, find_instance<Instance>(arch, p, device, nullptr));
  if (p.direction == STROBE_FORWARD) {
    plan.block_q = instance.config.tile_q;
    plan.work_items = p.batch * p.heads * ceil_div(p.seqlen_q, plan.block_q);
  } else {
    plan.block_k = instance.config.tile_k;
    plan.work_items = p.batch * p.heads_kv * ceil_div(p.seqlen_k, plan.block_k);
  }
  const GridSize grid = grid_for(plan.work_items);
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  if (arch == 90) {
    plan.reserved[kUnalignedSlot] = number_of(find_instance<Instance>(80, p, device, nullptr));
  }
  plan.workspace_bytes = workspace_of(p, instance, instance_for_unaligned<Instance>(plan));
}

void fill_cached(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const CachedInstance& instance =
      take_instance(plan, find_cached_instance(arch, p, device, nullptr));
  plan.reserved[kCachedSlot] = 1;
  CachedUpdateParams params{};
  fill_params(p, ForwardArgs{}, params);
  const auto grid_of = [&](const CachedInstance& r) {
    return r.carve(params, device.multiprocessors, device.shared_bytes);
  };
  const CachedGrid grid = grid_of(instance);
  plan.block_q = instance.config.tile_q;
  plan.work_items = grid.x * grid.y;
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  int64_t bytes = grid.workspace_bytes;
  if (arch == 90) {
    // Another instance, for a part of the problem: the sequences with few queries, or pointers that
    // are not aligned. Where there is none, this instance takes all sequences, and a launch with
    // such pointers is refused.
    const auto other_bytes = [&](int slot, const AttentionProblem& problem) {
      const Entry<CachedInstance>* const other = find_cached_instance(80, problem, device, nullptr);
      const int64_t needed = other ? grid_of(*other->instance).workspace_bytes : 0;
      if (!other || needed < 0) return int64_t{0};
      plan.reserved[slot] = number_of(other);
      return needed;
    };
    const int64_t unaligned = other_bytes(kUnalignedSlot, p);
    if (has_few_and_many_queries(p)) {
      params.cache.most_q = few_queries(params.group);
      bytes += other_bytes(kFewQueriesSlot, few_queries_problem(p));
    }
    bytes = max64(bytes, unaligned);
  }
  plan.workspace_bytes = static_cast<size_t>(bytes);
}

}  // namespace

void fill_on(int arch, Plan& plan, const DeviceProperties& device) {
  if (plan.problem.cache || runs_as_cached(plan.problem, device)) {
    fill_cached(arch, plan, device);
  } else if (plan.problem.direction == STROBE_FORWARD) {
    fill_instance<ForwardInstance>(arch, plan, device);
  } else {
    fill_instance<BackwardInstance>(arch, plan, device);
  }
}

}  // namespace strobe::cuda
