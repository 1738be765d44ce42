// All instances of this build, as cuda_instances.inc lists them, for the file that makes the tables
// of them.
#ifndef STROBE_CUDA_HOST_INSTANCE_ENTRIES_H_
#define STROBE_CUDA_HOST_INSTANCE_ENTRIES_H_

#include "cuda/host/instance_table.h"

namespace strobe::cuda {

#define STROBE_forward_INSTANCE(name, when) extern const ForwardInstance name;
#define STROBE_cached_INSTANCE(name, when) extern const CachedInstance name;
#define STROBE_backward_INSTANCE(name, when) extern const BackwardInstance name;
#include "cuda_instances.inc"

namespace entries {

inline constexpr When any = When::kAny, up_to_256_keys = When::kUpTo256Keys,
                      up_to_4096_keys = When::kUpTo4096Keys, few_queries = When::kFewQueries,
                      runs = When::kRuns, small = When::kSmall;

// The null entry at the end keeps an array from being empty.
#define STROBE_forward_INSTANCE(name, when) {&name, #name, when},
inline constexpr Entry<ForwardInstance> kForward[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};
#define STROBE_backward_INSTANCE(name, when) {&name, #name, when},
inline constexpr Entry<BackwardInstance> kBackward[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};
#define STROBE_cached_INSTANCE(name, when) {&name, #name, when},
inline constexpr Entry<CachedInstance> kCached[] = {
#include "cuda_instances.inc"
    {nullptr, nullptr, any}};

}  // namespace entries

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_ENTRIES_H_
