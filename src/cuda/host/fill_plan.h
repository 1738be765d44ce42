// The instances that a plan is for, and what the plan says of them.
#ifndef STROBE_CUDA_HOST_FILL_PLAN_H_
#define STROBE_CUDA_HOST_FILL_PLAN_H_

#include <string>
#include <vector>

#include "core/kernel.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

struct CachedInstance;

/// Fills a plan, whose (resolved) problem is there, for the instances of this architecture that
/// choose_instance chooses on such a device, and returns ""; or says why there are none. choice:
/// names the instance; null: choose_instance's rules do.
std::string plan_on(int arch, Plan& plan, const DeviceProperties& device,
                    const Choice* choice = nullptr);

/// All choices that plan_on takes for the (resolved) problem. kernel: their row of the kernel
/// table.
std::vector<Choice> choices_on(int arch, const char* kernel, const AttentionProblem& problem,
                               const DeviceProperties& device);

/// The instance of a plan; null where the plan is not one that plan_on made for this architecture:
/// a plan is the caller's memory. Instance: ForwardInstance, BackwardInstance or CachedInstance.
template <typename Instance>
const Instance* instance_of(const Plan& plan, int arch);

/// Whether the instance of a forward plan is a CachedInstance.
bool is_cached(const Plan& plan);

/// The plan's instance where an address is no multiple of 16 bytes. Null where there is none.
template <typename Instance>
const Instance* instance_for_unaligned(const Plan& plan);

/// The plan's instance for the sequences of a cache that have few queries, where another one is for
/// those that have many. aligned: whether the addresses of new keys are multiples of 16 bytes. Null
/// where there is none.
const CachedInstance* instance_for_few_queries(const Plan& plan, bool aligned = true);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FILL_PLAN_H_
