// In place of cuda/host/instance_table.cpp.
#include "some_instances.h"

#include <vector>

#include "cuda/host/instance_entries.h"

namespace strobe::cuda {
namespace {

template <typename Instance>
struct Table {
  std::vector<Entry<Instance>> all, kept;

  template <size_t kCount>
  explicit Table(const Entry<Instance> (&entries)[kCount])
      : all(entries, entries + kCount - 1), kept(all) {}
  void keep(const std::function<bool(std::string_view)>& keeps) {
    kept.clear();
    for (const Entry<Instance>& entry : all)
      if (keeps(entry.name)) kept.push_back(entry);
  }
};
Table<ForwardInstance>& forward() {
  static Table table(entries::kForward);
  return table;
}
Table<BackwardInstance>& backward() {
  static Table table(entries::kBackward);
  return table;
}
Table<CachedInstance>& cached() {
  static Table table(entries::kCached);
  return table;
}

}  // namespace

template <>
std::span<const Entry<ForwardInstance>> instance_table<ForwardInstance>() {
  return forward().kept;
}
template <>
std::span<const Entry<BackwardInstance>> instance_table<BackwardInstance>() {
  return backward().kept;
}
template <>
std::span<const Entry<CachedInstance>> instance_table<CachedInstance>() {
  return cached().kept;
}

}  // namespace strobe::cuda

namespace strobe::emulator {

void keep_instances(const std::function<bool(std::string_view)>& keeps) {
  cuda::forward().keep(keeps);
  cuda::backward().keep(keeps);
  cuda::cached().keep(keeps);
}

}  // namespace strobe::emulator
