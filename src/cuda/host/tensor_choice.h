// The choice among the kernels that take whole tensors.
#ifndef STROBE_CUDA_HOST_TENSOR_CHOICE_H_
#define STROBE_CUDA_HOST_TENSOR_CHOICE_H_

#include <cstddef>
#include <string>

#include "core/problem.h"
#include "cuda/common/features.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// The entry of instance_table<Instance>() whose instance of this architecture takes the (resolved)
/// problem on such a device, and computes `more` besides what that asks for; null: none, and
/// *reason, unless null, says why. Instance: ForwardInstance or BackwardInstance.
template <typename Instance>
const Entry<Instance>* find_instance(int arch, const AttentionProblem& problem, Features more,
                                     const DeviceProperties& device, std::string* reason,
                                     const AskedFor& asked_for = AskedFor::by_environment());

/// choose_instance among them. Instance: ForwardInstance or BackwardInstance.
template <typename Instance>
InstanceChoice choose_tensor(int arch, const AttentionProblem& problem,
                             const DeviceProperties& device, const AskedFor& asked_for);

/// The instance that takes a problem without a cache by whole tiles: on this device, not of this
/// architecture alone, so that all architectures divide the same problems' keys.
const ForwardInstance* find_for_whole_tiles(const AttentionProblem& problem,
                                            const DeviceProperties& device);

/// What a launch of the (resolved) problem needs, whichever of two instances it is of. other: null
/// where there is none.
template <typename Instance>
size_t workspace_of(const AttentionProblem& problem, const Instance& instance,
                    const Instance* other = nullptr);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_TENSOR_CHOICE_H_
