// The instance that a plan is for, and what the plan says of it.
#ifndef STROBE_CUDA_HOST_FILL_PLAN_H_
#define STROBE_CUDA_HOST_FILL_PLAN_H_

#include "core/kernel.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

struct CachedInstance;

/// Fills a plan for the instance that find_instance finds, which must be there.
void fill_on(int arch, Plan& plan, const DeviceProperties& device);

/// The instance of a plan; null where the plan is not one that fill_on made for this architecture:
/// a plan is the caller's memory. Instance: ForwardInstance or BackwardInstance.
template <typename Instance>
const Instance* instance_of(const Plan& plan, int arch);

/// Whether the instance of a forward plan is a CachedInstance.
bool is_cached(const Plan& plan);

/// Pointers are not known when a plan is made. This is the plan's instance for those that TMA, by
/// which instance_of's reads, cannot read: one of mma.sync's. Null where there is none.
template <typename Instance>
const Instance* instance_for_unaligned(const Plan& plan);

/// The plan's instance for the sequences of a cache that have few queries, where another one is for
/// those that have many. Null where there is none.
const CachedInstance* instance_for_few_queries(const Plan& plan);

/// What a launch of the (resolved) problem needs, whichever of a plan's instances it is of. other:
/// null where there is none.
template <typename Instance>
size_t workspace_of(const AttentionProblem& problem, const Instance& instance,
                    const Instance* other);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FILL_PLAN_H_
