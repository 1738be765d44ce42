// Which instance of the table takes a problem, and why none does.
#ifndef STROBE_CUDA_HOST_INSTANCE_CHOICE_H_
#define STROBE_CUDA_HOST_INSTANCE_CHOICE_H_

#include <string>

#include "core/problem.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

template <typename Instance>
struct Entry;  // instance_table.h
struct CachedInstance;

/// The entry of instance_table<Instance>() whose instance of this architecture takes the (resolved)
/// problem on such a device; null: none, and *reason, unless null, says why.
template <typename Instance>
const Entry<Instance>* find_instance(int arch, const AttentionProblem& problem,
                                     const DeviceProperties& device, std::string* reason);

/// Whether a (resolved) problem without a cache runs as one with a cache: with few queries it is
/// the faster for it that the keys are divided among thread blocks.
bool runs_as_cached(const AttentionProblem& problem, const DeviceProperties& device);

/// The same as find_instance for keys in a cache, and for problems that go the same way.
const Entry<CachedInstance>* find_cached_instance(int arch, const AttentionProblem& problem,
                                                  const DeviceProperties& device,
                                                  std::string* reason);

/// Whether some sequences of a (resolved) problem with a cache may have more than few_queries() in
/// use and others not: these then have a kernel of their own.
bool has_few_and_many_queries(const AttentionProblem& problem);
/// That kernel's problem, as far as the choice of its instance goes.
AttentionProblem few_queries_problem(const AttentionProblem& problem);

/// Empty when an instance of this architecture takes the (resolved) problem on such a device, else
/// why none does.
std::string declines_on(int arch, const AttentionProblem& problem, const DeviceProperties& device);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_CHOICE_H_
