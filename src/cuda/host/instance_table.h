// The kernel instances that this build has: those of kernels.def, with what compiled code says of
// each.
#ifndef STROBE_CUDA_HOST_INSTANCE_TABLE_H_
#define STROBE_CUDA_HOST_INSTANCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

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
template <>
std::span<const Entry<CachedInstance>> instance_table<CachedInstance>();

/// How many instances are in the tables before this one. Those of all tables are numbered through,
/// from 1: a number says of which table its instance is.
template <typename Instance>
int32_t instances_before() {
  int32_t before = 0;
  if constexpr (!std::is_same_v<Instance, ForwardInstance>) {
    before += static_cast<int32_t>(instance_table<ForwardInstance>().size());
    if constexpr (!std::is_same_v<Instance, BackwardInstance>)
      before += static_cast<int32_t>(instance_table<BackwardInstance>().size());
  }
  return before;
}

/// An entry's number, as a plan has it; 0 for null.
template <typename Instance>
int32_t number_of(const Entry<Instance>* entry) {
  if (!entry) return 0;
  return instances_before<Instance>() + 1 +
         static_cast<int32_t>(entry - instance_table<Instance>().data());
}

/// The entry of a number; null where it is no number of this table.
template <typename Instance>
const Entry<Instance>* entry_of(int32_t number) {
  const auto table = instance_table<Instance>();
  const int64_t index = int64_t{number} - instances_before<Instance>() - 1;
  if (index < 0 || index >= static_cast<int64_t>(table.size())) return nullptr;
  return &table[static_cast<size_t>(index)];
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_TABLE_H_
