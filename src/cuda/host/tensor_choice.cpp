#include "cuda/host/tensor_choice.h"

#include <algorithm>
#include <cinttypes>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/element.h"
#include "core/workspace.h"
#include "cuda/host/asked_features.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/tma_declines.h"

namespace strobe::cuda {

namespace {

// Whether the rules may take such a row at all. The bits of a row depend on how many keys a block
// has: where they may depend on nothing beside the row, blocks are those of the rows for any
// length, as they are over a cache.
bool may_take(When when, Features asked) {
  const bool is_for_lengths = when == When::kUpTo256Keys || when == When::kUpTo4096Keys;
  return !(asked.has(features::kInvariantRows) && is_for_lengths);
}

// Whether such a row is the best one: a preference, which counts where there is another.
bool suits(When when, int32_t tile_q, const AttentionProblem& p, Features asked,
           const DeviceProperties& device) {
  // Rows whose kernels take a mask, or a bias, are for all lengths.
  if (asked.has(features::kOfPairs)) return true;
  const bool is_plain = !asked.has(features::kScores | features::kDropout);
  // Instances differ in their bits: with batch_invariant nothing counts here that others in the
  // batch decide, which are its size and, where lengths vary, the longest.
  const auto keys_up_to = [&](int64_t most) {
    return !(p.batch_invariant && p.varlen) && MaskRule::of(p).keys_to_diagonal(p.seqlen_k) <= most;
  };
  switch (when) {
    case When::kUpTo256Keys:
      return keys_up_to(256) || !is_plain;
    case When::kUpTo4096Keys:
      return keys_up_to(4096) || !is_plain;
    case When::kFewQueries: {
      if (p.batch_invariant && p.varlen) return false;
      // A quarter fewer rows than tiles have that are half again as large.
      const auto rows_of_tiles = [&](int64_t rows) { return ceil_div(p.seqlen_q, rows) * rows; };
      if (4 * rows_of_tiles(tile_q) <= 3 * rows_of_tiles(tile_q / 2 * 3)) return true;
      return !p.batch_invariant &&
             p.batch * p.heads * ceil_div(p.seqlen_q, tile_q) <= device.multiprocessors;
    }
    default:
      return true;
  }
}

// What a Hopper kernel that takes a mask as data leaves to mma.sync: the order of a tile's
// additions to dQ is that of one list, so that no tile may have two.
std::string mask_declines(const BackwardConfig& c, const AttentionProblem& p) {
  if (p.direction != STROBE_BACKWARD || p.mask.kind == STROBE_MASK_NONE || !p.deterministic)
    return {};
  if (p.mask.block_q >= c.tile_q && p.mask.block_k >= c.tile_k) return {};
  return format("deterministic with a mask in blocks of %d x %d, expected at least %d x %d",
                static_cast<int>(p.mask.block_q), static_cast<int>(p.mask.block_k), c.tile_q,
                c.tile_k);
}
std::string mask_declines(const ForwardConfig&, const AttentionProblem&) { return {}; }

template <typename Instance>
size_t workspace_of_instance(const AttentionProblem& p, const Instance& instance) {
  typename Instance::Params params{};
  fill_params(p, typename Instance::Args{}, params);
  Arena arena;
  take_rows(arena, p, params);
  instance.carve(arena, p, params);
  return arena.used();
}

}  // namespace

template <typename Instance>
const Entry<Instance>* find_instance(int arch, const AttentionProblem& p, Features more,
                                     const DeviceProperties& device, std::string* reason,
                                     const AskedFor& asked_for) {
  const int64_t dim = max64(p.head_dim, p.head_dim_v);
  const auto asked = [&](const Instance& instance) {
    return asked_of(arch, features_of(p, instance.config.tile_k) | more);
  };
  const Entry<Instance>* found = nullptr;
  const Entry<Instance>* spare = nullptr;  // suits less, and is better than none
  bool is_wide_enough = false;
  int64_t widest = 0, least_shared = 0;
  for (const Entry<Instance>& entry : instance_table<Instance>()) {
    const auto& c = entry.instance->config;
    if (c.arch != arch || !has_dtypes(c, p)) continue;
    widest = max64(widest, c.width);
    if (c.width < p.head_dim || c.width_v < p.head_dim_v) continue;
    const int64_t shared = entry.instance->shape.shared_bytes;
    if (shared > device.shared_bytes) {
      least_shared = least_shared ? min64(least_shared, shared) : shared;
      continue;
    }
    is_wide_enough = true;
    const Features wanted = asked(*entry.instance);
    if (!entry.instance->computes.contains(wanted)) continue;
    // Kernels with a bias are for what has one, or a mask as data, also where they are asked for by
    // name: others may read a bias without a look whether it is there.
    if (entry.instance->computes.has(features::kBias) && !wanted.has(features::kOfPairs)) continue;
    // Those of the backward pass and of Hopper that take a mask go through its lists.
    if ((std::is_same_v<Instance, BackwardInstance> || arch == 90) &&
        entry.instance->computes.has(features::kMask) && !wanted.has(features::kMask)) {
      continue;
    }
    if (asked_for.is(entry.name)) return &entry;
    if (!may_take(entry.when, wanted)) continue;
    const Entry<Instance>*& best = suits(entry.when, c.tile_q, p, wanted, device) ? found : spare;
    if (!best || c.width < best->instance->config.width) best = &entry;
  }
  if (!found) found = spare;
  if (found || !reason) return found;
  const char* const direction = p.direction == STROBE_FORWARD ? "forward" : "backward";
  if (widest == 0) {
    *reason = format("this build has no %s %s kernel of this kind", dtype_name(p.dtype), direction);
  } else if (is_wide_enough) {
    *reason = lacks_feature<Instance>(arch, p, device, asked);
  } else if (least_shared > 0) {
    *reason = format("its tiles take %" PRId64 " bytes of shared memory, the device has %" PRId64,
                     least_shared, device.shared_bytes);
  } else {
    *reason = arch == kTuring ? format("head_dim = %" PRId64 ", expected at most %" PRId64
                                       " (what 64 KB of shared memory have room for)",
                                       dim, widest)
                              : format("head_dim = %" PRId64 ", expected at most %" PRId64
                                       " in this build (STROBE_CUDA_HEAD_DIMS)",
                                       dim, widest);
  }
  return nullptr;
}

template const Entry<ForwardInstance>* find_instance(int, const AttentionProblem&, Features,
                                                     const DeviceProperties&, std::string*,
                                                     const AskedFor&);
template const Entry<BackwardInstance>* find_instance(int, const AttentionProblem&, Features,
                                                      const DeviceProperties&, std::string*,
                                                      const AskedFor&);

template <typename Instance>
InstanceChoice choose_tensor(int arch, const AttentionProblem& p, const DeviceProperties& device,
                             const AskedFor& asked_for) {
  InstanceChoice choice;
  const Entry<Instance>* const entry =
      find_instance<Instance>(arch, p, {}, device, &choice.reason, asked_for);
  if (entry && arch == 90) choice.reason = tma_declines(p);
  if (entry && arch == 90 && choice.reason.empty()) choice.reason = bias_declines(p);
  if (entry && arch == 90 && choice.reason.empty())
    choice.reason = mask_declines(entry->instance->config, p);
  if (!choice.reason.empty()) return choice;
  const Entry<Instance>* const unaligned = find_instance<Instance>(
      mma_sync_arch(device), p, features::kAnyRows, device, nullptr, asked_for);
  choice.name = entry->name;
  choice.instance = number_of(entry);
  choice.unaligned = number_of(unaligned);
  // Hopper's kernels read float8 as it is; those for odd addresses unpack it, into several times
  // its size. A launch that comes with such addresses looks for that memory itself.
  const bool shares_workspace = unaligned && !(arch == 90 && has_float8_queries(p));
  choice.workspace_bytes =
      workspace_of(p, *entry->instance, shares_workspace ? unaligned->instance : nullptr);
  return choice;
}

template InstanceChoice choose_tensor<ForwardInstance>(int, const AttentionProblem&,
                                                       const DeviceProperties&, const AskedFor&);
template InstanceChoice choose_tensor<BackwardInstance>(int, const AttentionProblem&,
                                                        const DeviceProperties&, const AskedFor&);

const ForwardInstance* find_for_whole_tiles(const AttentionProblem& p,
                                            const DeviceProperties& device) {
  const auto find = [&](int arch) {
    const Entry<ForwardInstance>* const entry =
        find_instance<ForwardInstance>(arch, p, {}, device, nullptr);
    return entry ? entry->instance : nullptr;
  };
  const bool is_hopper = device.compute_capability / 10 == 9 && machine().forced_arch != 80;
  const ForwardInstance* const found = is_hopper && tma_declines(p).empty() ? find(90) : nullptr;
  return found ? found : find(mma_sync_arch(device));
}

template <typename Instance>
size_t workspace_of(const AttentionProblem& p, const Instance& instance, const Instance* other) {
  const size_t bytes = workspace_of_instance(p, instance);
  return other && other != &instance ? std::max(bytes, workspace_of_instance(p, *other)) : bytes;
}
template size_t workspace_of(const AttentionProblem&, const ForwardInstance&,
                             const ForwardInstance*);
template size_t workspace_of(const AttentionProblem&, const BackwardInstance&,
                             const BackwardInstance*);

}  // namespace strobe::cuda
