#include "cuda/host/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "core/checks.h"
#include "core/element.h"
#include "core/pointers.h"
#include "core/workspace.h"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dsinks.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/fill_plan.h"
#include "cuda/host/instance.h"
#include "cuda/host/machine.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/stream_blocks.h"
#include "cuda/host/tensor_choice.h"
#include "cuda/host/unused_rows.h"

namespace strobe::cuda {

namespace {

template <typename Args>
Status check_pointers(const AttentionProblem& p, size_t workspace_bytes, const Args& a) {
  STROBE_RETURN_IF_ERROR(first_wrong(p, a, [&](const LaunchPointer& x) {
    return x.used && !x.extents.empty() ? check_device_pointer(x.name, x.pointer, p.device_index)
                                        : Status();
  }));
  if (workspace_bytes == 0) return {};
  return check_device_pointer("workspace", a.workspace, p.device_index);
}

bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* const pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return bits % 16 == 0;
}
bool new_keys_aligned(const AttentionProblem& p, const ForwardArgs& a) {
  return p.append == STROBE_APPEND_NONE || p.seqlen_new == 0 || aligned({a.k_new, a.v_new});
}
// Whether the addresses that the main kernel of this instance reads or writes are multiples of 16
// bytes.
bool all_aligned(const ForwardInstance&, const AttentionProblem&, const ForwardArgs& a) {
  return aligned({a.q, a.k, a.v, a.out});
}
bool all_aligned(const CachedInstance& instance, const AttentionProblem& p, const ForwardArgs& a) {
  // A kernel that goes before reads the new keys, and the queries that it rotates: it takes any
  // address. (Hopper's instances ask for q's all the same, since their sequences with few queries
  // have to get the kernel that they get without the others.)
  const bool rotated = instance.rotates_before(p.rotary_dim) && instance.config.arch != 90;
  if (has_quantised_cache(p)) return aligned({rotated ? nullptr : a.q, a.out});
  return aligned({rotated ? nullptr : a.q, a.k, a.v, a.out}) &&
         (instance.updates_before || new_keys_aligned(p, a));
}
bool all_aligned(const BackwardInstance&, const AttentionProblem&, const BackwardArgs& a) {
  return aligned({a.q, a.k, a.v, a.dout});
}

template <typename Instance, typename Params, typename Args>
Status launch_instance(int arch, const Plan& plan, const Args& args) {
  const AttentionProblem& p = plan.problem;
  const bool reads_keys = p.direction == STROBE_BACKWARD && rows_k(p) > 0;
  // (dbias has values where there are no rows: zeros.)
  const bool attends = rows_q(p) > 0 || reads_keys || p.append || p.has_dbias;
  if (!attends && !p.has_dsinks) return {};
  STROBE_RETURN_IF_ERROR(check_device(p.device_index));
  const Instance* instance = instance_of<Instance>(plan, arch);
  if (!instance) return invalid("plan: not made by strobe_plan_make");
  size_t workspace_bytes = plan.workspace_bytes;
  if (!all_aligned(*instance, p, args)) {
    instance = instance_for_unaligned<Instance>(plan);
    if (!instance) {
      return invalid(
          format("q = %p, k = %p, v = %p, expected alignment to 16 bytes", args.q, args.k, args.v));
    }
    if constexpr (std::is_same_v<Instance, ForwardInstance>)
      workspace_bytes = std::max(workspace_bytes, workspace_of(p, *instance));
  }
  STROBE_RETURN_IF_ERROR(check_pointers(p, plan.workspace_bytes, args));
  const DeviceGuard guard(p.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");

  Params params{};
  fill_params(p, args, params);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  void* workspace = workspace_bytes > plan.workspace_bytes ? nullptr : args.workspace;
  StreamBlocks::Lease block;  // until all kernels are enqueued
  if constexpr (!std::is_same_v<Instance, BackwardInstance>) {
    if (!workspace && workspace_bytes > 0) {
      block = StreamBlocks::take(workspace_bytes, p.device_index, stream);
      workspace = block.memory;
    }
  }
  const bool own = !workspace && workspace_bytes > 0;
  if (own) {
    // From the stream's memory pool: ordered like a launch, and capturable.
    const cudaError_t error = cudaMallocAsync(&workspace, workspace_bytes, stream);
    if (error != cudaSuccess) return cuda_status(error, "allocating the workspace");
  }
  if constexpr (std::is_same_v<Instance, CachedInstance>) {
    params.workspace = workspace;
  } else {
    Arena arena(workspace);
    take_rows(arena, p, params);
    instance->carve(arena, p, params);
  }
  const DeviceProperties device = planned_device(p.device_index);
  const LaunchTarget target{stream, p.device_index, device.multiprocessors, device.shared_bytes};
  cudaError_t error = cudaSuccess;
  if constexpr (std::is_same_v<Instance, CachedInstance>) {
    const CachedInstance* const few =
        instance->config.arch == 90 ? instance_for_few_queries(plan, new_keys_aligned(p, args))
                                    : nullptr;
    error = takes_unpacked(instance->config, p) ? launch_unpacked(*instance, params, target, few)
                                                : instance->launch(params, target, few);
  } else if (attends) {
    error = instance->launch(params, target);
  }
  if constexpr (std::is_same_v<Instance, BackwardInstance>) {
    if (error == cudaSuccess && params.dsinks) error = launch_dsinks(params, target);
  }
  if (error == cudaSuccess && attends && has_unused_rows(params)) {
    error = launch_unused_rows(unused_rows_of(params), target);
  }
  if (own) {
    const cudaError_t freed = cudaFreeAsync(workspace, stream);
    if (error == cudaSuccess) error = freed;
  }
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

}  // namespace

Status launch(int arch, const Plan& plan, const ForwardArgs& args) {
  if (is_cached(plan)) return launch_instance<CachedInstance, CachedLaunchParams>(arch, plan, args);
  return launch_instance<ForwardInstance, ForwardParams>(arch, plan, args);
}
Status launch(int arch, const Plan& plan, const BackwardArgs& args) {
  return launch_instance<BackwardInstance, BackwardParams>(arch, plan, args);
}

}  // namespace strobe::cuda
