// The choice among the kernels that take keys in a cache: for a problem with one, or one that goes
// the same way.
#ifndef STROBE_CUDA_HOST_CACHED_CHOICE_H_
#define STROBE_CUDA_HOST_CACHED_CHOICE_H_

#include <string>

#include "core/problem.h"
#include "cuda/common/features.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// What a problem asks of the main kernel where that appends and rotates itself, and where a kernel
/// before it does.
struct CachedFeatures {
  Features whole, after_update;

  static CachedFeatures of(const AttentionProblem& problem);
  /// The same where addresses are not multiples of 16 bytes.
  CachedFeatures unaligned() const;
};

/// The same as find_instance (tensor_choice.h) for keys in a cache, and for problems that go the
/// same way.
const Entry<CachedInstance>* find_cached_instance(
    int arch, const AttentionProblem& problem, const CachedFeatures& features,
    const DeviceProperties& device, std::string* reason,
    const AskedFor& asked_for = AskedFor::by_environment());

/// choose_instance among them. found: what find_cached_instance has found for the problem; null:
/// that is looked up.
InstanceChoice choose_cached(int arch, const AttentionProblem& problem,
                             const DeviceProperties& device, const AskedFor& asked_for,
                             const Entry<CachedInstance>* found = nullptr);

/// Whether the keys and values of a quantised cache are unpacked to the workspace first, for a
/// kernel that reads a float cache. for_codes: what find_cached_instance has found of those that
/// read codes.
bool unpacks_first(const AttentionProblem& problem, const Entry<CachedInstance>* for_codes,
                   const DeviceProperties& device, const AskedFor& asked_for);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_CACHED_CHOICE_H_
