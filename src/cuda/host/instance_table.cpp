#include "cuda/host/instance_table.h"

#include <iterator>

#include "cuda/host/instance_entries.h"

namespace strobe::cuda {

template <>
std::span<const Entry<ForwardInstance>> instance_table<ForwardInstance>() {
  return {entries::kForward, std::size(entries::kForward) - 1};
}
template <>
std::span<const Entry<BackwardInstance>> instance_table<BackwardInstance>() {
  return {entries::kBackward, std::size(entries::kBackward) - 1};
}

template <>
std::span<const Entry<CachedInstance>> instance_table<CachedInstance>() {
  return {entries::kCached, std::size(entries::kCached) - 1};
}

}  // namespace strobe::cuda
