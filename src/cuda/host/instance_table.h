// The kernel instances that this build has: the rows of kernels.def in each type, with what
// compiled code says of each.
#ifndef STROBE_CUDA_HOST_INSTANCE_TABLE_H_
#define STROBE_CUDA_HOST_INSTANCE_TABLE_H_

#include <span>

#include "cuda/host/instance.h"

namespace strobe::cuda {

/// Instance: ForwardInstance, CachedInstance or BackwardInstance.
template <typename Instance>
struct Entry {
  const Instance* instance;
  const char* name;
  When when;
};

/// In the order of kernels.def.
template <typename Instance>
std::span<const Entry<Instance>> instance_table();
template <>
std::span<const Entry<ForwardInstance>> instance_table<ForwardInstance>();
template <>
std::span<const Entry<BackwardInstance>> instance_table<BackwardInstance>();

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_TABLE_H_
