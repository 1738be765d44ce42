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
#include "cuda/host/dispatch.h"
#include "cuda/host/dsinks.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/fill_plan.h"
#include "cuda/host/instance.h"
#include "cuda/host/machine.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/stream_blocks.h"
#include "cuda/host/tensor_choice.h"
#include "cuda/host/unused_rows.h"
#include "cuda/host/widened_queries.h"

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
// Whether an instance reads a bias by TMA. Kernels of mma.sync read it wherever it lies.
template <typename Instance>
bool loads_bias(const Instance& instance) {
  return instance.config.arch == 90 && instance.computes.has(features::kBias);
}
// Whether the addresses that the main kernel of this instance reads or writes are multiples of 16
// bytes.
bool all_aligned(const ForwardInstance& instance, const AttentionProblem&, const ForwardArgs& a) {
  return aligned({a.q, a.k, a.v, a.out, loads_bias(instance) ? a.bias : nullptr});
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
bool all_aligned(const BackwardInstance& instance, const AttentionProblem&, const BackwardArgs& a) {
  return aligned({a.q, a.k, a.v, a.dout, loads_bias(instance) ? a.bias : nullptr});
}

// A launch's workspace: the caller's, or where there is none the library's own.
class LaunchWorkspace {
 public:
  // may_keep: also from the block that is kept for each stream, until all kernels are enqueued.
  cudaError_t take(void* given, size_t bytes, int64_t device_index, cudaStream_t stream,
                   bool may_keep) {
    memory_ = given;
    if (memory_ || bytes == 0) return cudaSuccess;
    if (may_keep) {
      block_ = StreamBlocks::take(bytes, static_cast<int>(device_index), stream);
      memory_ = block_.memory;
      if (memory_) return cudaSuccess;
    }
    // From the stream's memory pool: ordered like a launch, and capturable.
    const cudaError_t error = cudaMallocAsync(&memory_, bytes, stream);
    own_ = error == cudaSuccess;
    return error;
  }
  void* memory() const { return memory_; }
  // After all kernels; error: of these.
  cudaError_t leave(cudaStream_t stream, cudaError_t error) {
    if (!own_) return error;
    const cudaError_t freed = cudaFreeAsync(memory_, stream);
    return error == cudaSuccess ? freed : error;
  }

 private:
  void* memory_ = nullptr;
  bool own_ = false;
  StreamBlocks::Lease block_;
};

LaunchTarget target_of(const AttentionProblem& p, cudaStream_t stream) {
  const DeviceProperties device = planned_device(p.device_index);
  return {stream, p.device_index, device.multiprocessors, device.shared_bytes};
}

// is_appended: whether a kernel that goes before has written the new keys to the cache, which still
// counts them.
template <typename Instance, typename Params, typename Args>
Status launch_instance(int arch, const Plan& plan, const Args& args, bool is_appended = false) {
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
  if constexpr (std::is_same_v<Instance, CachedInstance>) {
    if (is_appended) params.k_new = params.v_new = {};
  }
  const auto stream = static_cast<cudaStream_t>(args.stream);
  LaunchWorkspace workspace;
  if (const cudaError_t error = workspace.take(
          workspace_bytes > plan.workspace_bytes ? nullptr : args.workspace, workspace_bytes,
          p.device_index, stream, !std::is_same_v<Instance, BackwardInstance>);
      error != cudaSuccess) {
    return cuda_status(error, "allocating the workspace");
  }
  if constexpr (std::is_same_v<Instance, CachedInstance>) {
    params.workspace = workspace.memory();
  } else {
    Arena arena(workspace.memory());
    take_rows(arena, p, params);
    instance->carve(arena, p, params);
  }
  const LaunchTarget target = target_of(p, stream);
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
  error = workspace.leave(stream, error);
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

// Float8 queries over a cache: they are written as bf16, and what follows is a launch of its own
// over a quantised cache; out in fp16 is rounded from what that leaves in the workspace. New keys
// are in the cache by then.
Status launch_widened(int arch, const Plan& plan, const ForwardArgs& args) {
  const AttentionProblem& p = plan.problem;
  if (rows_q(p) == 0 && !p.append) return {};
  STROBE_RETURN_IF_ERROR(check_device(p.device_index));
  STROBE_RETURN_IF_ERROR(check_pointers(p, plan.workspace_bytes, args));
  const DeviceGuard guard(p.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");
  const auto stream = static_cast<cudaStream_t>(args.stream);
  LaunchWorkspace workspace;
  if (const cudaError_t error =
          workspace.take(args.workspace, plan.workspace_bytes, p.device_index, stream, true);
      error != cudaSuccess) {
    return cuda_status(error, "allocating the workspace");
  }
  Arena arena(workspace.memory());
  const WidenedQueries widened = WidenedQueries::take(arena, p);
  Status status;
  if (const cudaError_t error = launch_widening(p, args, widened, target_of(p, stream));
      error != cudaSuccess) {
    status = cuda_status(error, "launching the kernel");
  }
  if (status.ok() && rows_q(p) > 0) {
    Plan attends = plan;
    attends.problem = after_widening(p);
    attends.workspace_bytes -= arena.used();
    ForwardArgs its = args;
    its.q = widened.q;
    its.q_scale = nullptr;
    its.k_scale = widened.k_scale;
    its.v_scale = widened.v_scale;
    if (widened.out) its.out = widened.out;
    its.workspace = arena.take<std::byte>(0);
    its.workspace_bytes = attends.workspace_bytes;
    status = launch_instance<CachedInstance, CachedLaunchParams>(arch, attends, its, true);
    if (status.ok() && widened.out) {
      AddArgs rounds{};
      rounds.device = STROBE_CUDA;
      rounds.device_index = static_cast<int32_t>(p.device_index);
      rounds.out_dtype = p.out_dtype;
      rounds.batch = p.varlen ? 1 : p.batch;
      rounds.seqlen = p.varlen ? p.total_q : p.seqlen_q;
      rounds.heads = p.heads;
      rounds.head_dim = p.head_dim_v;
      rounds.x = widened.out;
      rounds.x_strides = attends.problem.out;
      rounds.out = args.out;
      rounds.out_strides = p.out;
      rounds.stream = args.stream;
      status = add(rounds);
    }
  }
  const cudaError_t left = workspace.leave(stream, cudaSuccess);
  return !status.ok() || left == cudaSuccess ? status : cuda_status(left, "freeing the workspace");
}

}  // namespace

Status launch(int arch, const Plan& plan, const ForwardArgs& args) {
  if (widens_queries(plan.problem)) return launch_widened(arch, plan, args);
  if (is_cached(plan)) return launch_instance<CachedInstance, CachedLaunchParams>(arch, plan, args);
  return launch_instance<ForwardInstance, ForwardParams>(arch, plan, args);
}
Status launch(int arch, const Plan& plan, const BackwardArgs& args) {
  return launch_instance<BackwardInstance, BackwardParams>(arch, plan, args);
}

}  // namespace strobe::cuda
