// Which of a problem's features kernels are asked for, and what is said where none computes them.
#ifndef STROBE_CUDA_HOST_ASKED_FEATURES_H_
#define STROBE_CUDA_HOST_ASKED_FEATURES_H_

#include <cinttypes>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/element.h"
#include "core/problem.h"
#include "cuda/common/features.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// Kernels that read by TMA are not asked about rows: tma_declines says which they take. Of the
/// others the choice alone keeps what batch_invariant promises (host/cached_choice.cpp).
inline Features asked_of(int arch, Features asked) {
  return asked.without(arch == 90 ? features::kAnyRows : features::kInvariantRows);
}

/// What a problem has that some kernels do not compute, and the value that they would take.
inline constexpr struct {
  Features feature;
  const char* text;
} kAsked[] = {{features::kMask, "mask, expected none"},
              {features::kDbias, "dbias, expected none"},
              {features::kBias, "bias, expected none"},
              {features::kDropout, "dropout_p > 0, expected 0"},
              {features::kOrder, "deterministic, expected false"},
              {features::kSoftcap, "softcap > 0, expected 0"},
              {features::kAlibi, "alibi_slopes, expected none"},
              {features::kAnyScale, "scale <= 0, expected more"},
              {features::kChunks, "attention_chunk > 0, expected 0"},
              {features::kUsedRows, "seqused, q_position, prefix or a cache, expected none"},
              {features::kFloatOut, "out_dtype = fp32, expected that of q"},
              {features::kAnyRows, "rows of a part of 16 bytes, expected whole units of 16"},
              {features::kInvariantRows, "batch_invariant, expected false"},
              {features::kUpdates, "new keys or rotary embedding, expected none"},
              {features::kSumsDq, "more keys than a tile has, expected one tile"}};

/// Why no instance computes what is asked, though there are some that are wide enough.
/// asked(Instance) are the features.
template <typename Instance, typename Asked>
std::string lacks_feature(int arch, const AttentionProblem& p, const DeviceProperties& device,
                          const Asked& asked) {
  const int64_t dim = max64(p.head_dim, p.head_dim_v);
  const char* const purpose = std::is_same_v<Instance, CachedInstance> ? "keys in a cache"
                              : p.direction == STROBE_FORWARD          ? "the forward pass"
                                                                       : "the backward pass";
  for (const auto& [feature, text] : kAsked) {
    bool is_asked = false;
    int64_t widest = 0;
    for (const Entry<Instance>& entry : instance_table<Instance>()) {
      const auto& c = entry.instance->config;
      if (c.arch != arch || !has_dtypes(c, p)) continue;
      if (entry.instance->shape.shared_bytes > device.shared_bytes) continue;
      if (c.width >= dim) is_asked |= asked(*entry.instance).contains(feature);
      if (entry.instance->computes.contains(feature)) widest = max64(widest, c.width);
    }
    if (!is_asked || widest >= dim) continue;
    const std::string here = widest > 0 ? format(" above head_dim %" PRId64, widest) : "";
    return format("%s for %s%s", text, purpose, here.c_str());
  }
  // Two of them, which none of those that are wide enough computes together. What each of these is
  // asked for is worked out once: plans are made in front of launches.
  std::vector<std::pair<Features, Features>> wide;  // asked, computed
  Features all;                                     // that some are asked for
  for (const Entry<Instance>& entry : instance_table<Instance>()) {
    const auto& c = entry.instance->config;
    if (c.arch != arch || !has_dtypes(c, p) || c.width < dim) continue;
    if (entry.instance->shape.shared_bytes > device.shared_bytes) continue;
    wide.emplace_back(asked(*entry.instance), entry.instance->computes);
    all = all | wide.back().first;
  }
  const auto of = [](const char* text) {
    const char* const end = std::strstr(text, ", expected");
    return std::string(text, end ? static_cast<size_t>(end - text) : std::strlen(text));
  };
  for (const auto& first : kAsked) {
    for (const auto& second : kAsked) {
      const Features both = first.feature | second.feature;
      if (&second <= &first || !all.contains(both)) continue;
      bool is_asked = false, is_computed = false;
      for (const auto& [of_it, computed] : wide) {
        is_asked |= of_it.contains(both);
        is_computed |= computed.contains(both);
      }
      if (is_asked && !is_computed) {
        return format("%s beside %s for %s, expected one of them", of(first.text).c_str(),
                      of(second.text).c_str(), purpose);
      }
    }
  }
  return format("this build has no %s kernel for %s with all of its options together",
                dtype_name(p.dtype), purpose);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_ASKED_FEATURES_H_
