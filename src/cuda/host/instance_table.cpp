#include "cuda/host/instance_table.h"

#include <iterator>

namespace strobe::cuda {

#define STROBE_forward_INSTANCE(name, when) extern const ForwardInstance name;
#define STROBE_cached_INSTANCE(name, when) extern const CachedInstance name;
#define STROBE_backward_INSTANCE(name, when) extern const BackwardInstance name;
#include "cuda_instances.inc"

namespace {

constexpr When any = When::kAny, up_to_256_keys = When::kUpTo256Keys,
               up_to_4096_keys = When::kUpTo4096Keys, few_queries = When::kFewQueries,
               runs = When::kRuns, small = When::kSmall;

// The null entry at the end keeps an array from being empty.
#define STROBE_forward_INSTANCE(name, when) {&name, #name, when},
constexpr Entry<ForwardInstance> kForward[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};
#define STROBE_backward_INSTANCE(name, when) {&name, #name, when},
constexpr Entry<BackwardInstance> kBackward[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};
#define STROBE_cached_INSTANCE(name, when) {&name, #name, when},
constexpr Entry<CachedInstance> kCached[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};

}  // namespace

template <>
std::span<const Entry<ForwardInstance>> instance_table<ForwardInstance>() {
  return {kForward, std::size(kForward) - 1};
}
template <>
std::span<const Entry<BackwardInstance>> instance_table<BackwardInstance>() {
  return {kBackward, std::size(kBackward) - 1};
}

template <>
std::span<const Entry<CachedInstance>> instance_table<CachedInstance>() {
  return {kCached, std::size(kCached) - 1};
}

}  // namespace strobe::cuda
