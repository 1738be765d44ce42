#include "cuda/host/instance_choice.h"

#include <cinttypes>
#include <optional>
#include <utility>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/element.h"
#include "cuda/common/chunk_keys.h"
#include "cuda/common/tile_mask.h"
#include "cuda/host/cached_choice.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/launch_time.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/tensor_choice.h"
#include "cuda/host/widened_queries.h"

namespace strobe::cuda {

namespace {

// Both ways of a (resolved) problem without a cache; empty where there is but one.
struct TwoWays {
  WholeTiles whole;
  DividedKeys divided;
};
std::optional<TwoWays> estimate(const AttentionProblem& p, const DeviceProperties& device) {
  const Entry<CachedInstance>* const divides =
      find_cached_instance(mma_sync_arch(device), p, CachedFeatures::of(p), device, nullptr);
  const ForwardInstance* const whole = find_for_whole_tiles(p, device);
  if (!divides || !whole) return {};
  return TwoWays{whole_tiles(p, whole->config, device),
                 divided_keys(p, *divides->instance, device)};
}

// Whether a (resolved) problem without a cache may go to the kernels that divide keys, if they take
// it.
bool may_divide_keys(const AttentionProblem& p) {
  if (p.cache || p.direction != STROBE_FORWARD || p.dropout_p > 0) return false;
  // The estimates know nothing of what a mask's lists leave out, nor of what a bias takes.
  if (p.mask.kind != STROBE_MASK_NONE || p.has_bias) return false;
  // Where lengths vary, the longest would decide; and lengths in use count from the begin of a
  // packed sequence.
  return !p.varlen || (!p.batch_invariant && !p.has_seqused_k);
}

// Whether it does go there: where whole tiles are few, most multiprocessors would be idle; and
// where several query heads share a key head, whole tiles are of one query head each, and read its
// keys once for each. With batch_invariant none goes there that Hopper's kernels (arch 90) take,
// and of the others all that are not packed, since rows over a cache do.
bool divides_keys(int arch, const AttentionProblem& p, const DeviceProperties& device,
                  const AskedFor& asked_for) {
  if (!may_divide_keys(p)) return false;
  if (asked_for.has("cached_sm80_") || asked_for.has("cached_sm75_")) return true;
  if (!asked_for.name.empty()) return false;
  if (p.batch_invariant) return arch != 90;
  // Of the two, dividing has the estimate that is rather too low (docs/log/2026-11.md).
  constexpr double kClear = 1.03;
  const std::optional<TwoWays> ways = estimate(p, device);
  return ways && kClear * ways->divided.microseconds < ways->whole.microseconds;
}

// Whether a (resolved) forward problem is small, and all its keys fit in one block of 64, as
// mma.sync's kernels have them: one of Hopper's has 128, of which the rest would be multiplied for
// nothing. On an H200, up to 64 columns and eight tiles a multiprocessor, mma.sync is faster by as
// much as a third; above 64 columns, and where tiles are many, Hopper's kernels are
// (docs/log/2026-11.md). With batch_invariant nothing may choose that others in the batch decide.
bool fits_small_blocks(const AttentionProblem& p, const DeviceProperties& device) {
  constexpr int64_t kFewestKeys = 17, kMostKeys = 64, kMostColumns = 64, kTileRows = 128,
                    kMostTiles = 8;
  return p.direction == STROBE_FORWARD && !p.batch_invariant && p.mask.kind == STROBE_MASK_NONE &&
         !has_float8_queries(p) && p.seqlen_k >= kFewestKeys && p.seqlen_k <= kMostKeys &&
         max64(p.head_dim, p.head_dim_v) <= kMostColumns &&
         p.batch * p.heads * ceil_div(p.seqlen_q, kTileRows) <= kMostTiles * device.multiprocessors;
}

InstanceChoice declined(std::string reason) {
  InstanceChoice choice;
  choice.reason = std::move(reason);
  return choice;
}

}  // namespace

InstanceChoice choose_instance(int arch, const AttentionProblem& p, const DeviceProperties& device,
                               const AskedFor& asked_for) {
  const int cc = device.compute_capability;
  if (arch == 90 ? cc / 10 != 9 : arch == 80 ? cc < 80 : cc != kTuring) {
    return declined(format("device %d has compute capability %d.%d, expected %s", p.device_index,
                           cc / 10, cc % 10,
                           arch == 90   ? "9.x (TMA and wgmma)"
                           : arch == 80 ? "8.0 or newer"
                                        : "7.5"));
  }
  if (arch == kTuring && p.dtype == STROBE_BFLOAT16) {
    return declined("dtype = bf16, expected fp16 (the tensor cores of 7.5 multiply no bf16)");
  }
  if (p.dtype == STROBE_FLOAT32) {
    return declined("dtype = fp32, expected bf16 or fp16 (what the tensor cores multiply)");
  }
  if (arch == kTuring && has_float8_queries(p)) {
    return declined(format("dtype = %s, expected fp16 (float8 queries have kernels from 8.0 on)",
                           dtype_name(p.dtype)));
  }
  if (widens_queries(p)) {
    InstanceChoice choice = choose_instance(arch, after_widening(p), device, asked_for);
    Arena arena;
    WidenedQueries::take(arena, p);
    choice.workspace_bytes += arena.used();
    if (!choice.reason.empty()) choice.reason = "queries as bf16: " + choice.reason;
    return choice;
  }
  const Entry<CachedInstance>* const for_codes =
      has_quantised_cache(p) ? find_cached_instance(mma_sync_arch(device), p, CachedFeatures::of(p),
                                                    device, nullptr, asked_for)
                             : nullptr;
  if (has_quantised_cache(p) && unpacks_first(p, for_codes, device, asked_for)) {
    InstanceChoice choice = choose_instance(arch, after_unpacking(p), device, asked_for);
    CachedUpdateParams params{};
    fill_params(p, ForwardArgs{}, params);
    if (choice.reason.empty()) {
      choice.workspace_bytes += static_cast<size_t>(unpacked_bytes(params));
      return choice;
    }
    // Which have no kernels for codes.
    if (arch == 90 || arch == kTuring) return choice;
  }
  if (arch == 90 && has_quantised_cache(p)) {
    return declined(
        format("kv_dtype = %s, expected that of q, which is %s: cuda_sm80 has the kernels for "
               "few queries on quantised caches",
               dtype_name(p.kv_dtype), dtype_name(p.dtype)));
  }
  if (arch == 90 && has_float8_queries(p) && p.kv_dtype != p.dtype) {
    return declined(format("kv_dtype = %s, expected that of q, which is %s", dtype_name(p.kv_dtype),
                           dtype_name(p.dtype)));
  }
  if (p.dropout_first_key % 8 != 0) {
    return declined(format("dropout_first_key = %" PRId64
                           ", expected a multiple of 8 (bits are drawn for 8 keys)",
                           p.dropout_first_key));
  }
  for (const auto& [name, length] : {std::pair{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}}) {
    if (length > kLongestSequence) {
      return declined(
          format("%s = %" PRId64 ", expected at most %" PRId64, name, length, kLongestSequence));
    }
  }
  const bool other_instance = arch == 90 && asked_for.has("_sm80_");
  const char* const asks_for_another = "STROBE_CUDA_ROW asks for another kernel";
  if (p.cache) {
    return other_instance ? declined(asks_for_another)
                          : choose_cached(arch, p, device, asked_for, for_codes);
  }
  if (divides_keys(arch, p, device, asked_for)) {
    InstanceChoice choice = choose_cached(mma_sync_arch(device), p, device, asked_for);
    if (choice.reason.empty() && arch == 90)
      return declined("whole tiles would take longer: cuda_sm80 divides their keys");
    if (choice.reason.empty()) return choice;
    // Of what some kernel of the family takes, none that is too large goes elsewhere.
    const bool any = find_cached_instance(mma_sync_arch(device), p, CachedFeatures::of(p), device,
                                          nullptr, asked_for) != nullptr;
    if (p.batch_invariant && any) return declined(choice.reason);
  }
  if (other_instance) return declined(asks_for_another);
  // Where this build has a kernel for that.
  if (arch == 90 && asked_for.name.empty() && fits_small_blocks(p, device) &&
      choose_tensor<ForwardInstance>(mma_sync_arch(device), p, device, asked_for).reason.empty()) {
    return declined(
        format("seqlen_k = %" PRId64
               ", expected more than 64 where tiles are few: cuda_sm80 has blocks of 64 keys",
               p.seqlen_k));
  }
  if (p.direction == STROBE_BACKWARD)
    return choose_tensor<BackwardInstance>(arch, p, device, asked_for);
  InstanceChoice choice = choose_tensor<ForwardInstance>(arch, p, device, asked_for);
  if (!choice.reason.empty() && arch != 90 && may_divide_keys(p)) {
    // Where this build has no kernel for whole tiles, one that divides keys is better than none.
    InstanceChoice divided = choose_cached(arch, p, device, asked_for);
    if (divided.reason.empty()) return divided;
  }
  return choice;
}

namespace {

// Adds the names of those of a table that take the problem.
template <typename Instance>
void add_instances(int arch, const AttentionProblem& p, const DeviceProperties& device,
                   std::vector<std::string_view>& names) {
  const auto is_of_row = [](const auto& a, const auto& b) {
    return a.width == b.width && a.width_v == b.width_v && a.tile_q == b.tile_q &&
           a.tile_k == b.tile_k && a.stages == b.stages && a.warps == b.warps;
  };
  const Entry<Instance>* last = nullptr;
  for (const Entry<Instance>& entry : instance_table<Instance>()) {
    const auto& c = entry.instance->config;
    if (c.arch != arch || !has_dtypes(c, p)) continue;
    // There is no machine code of 9.0 for those.
    if (entry.when == When::kSmall && device.compute_capability / 10 == 9) continue;
    if (last && is_of_row(last->instance->config, c)) continue;
    const InstanceChoice choice = choose_instance(arch, p, device, {entry.name, true});
    if (!choice.reason.empty() || std::string_view(choice.name) != entry.name) continue;
    names.push_back(entry.name);
    last = &entry;
  }
}

}  // namespace

std::vector<std::string_view> instances_to_choose(int arch, const AttentionProblem& p,
                                                  const DeviceProperties& device) {
  if (widens_queries(p)) return instances_to_choose(arch, after_widening(p), device);
  std::vector<std::string_view> names;
  if (p.direction == STROBE_BACKWARD) {
    add_instances<BackwardInstance>(arch, p, device, names);
    return names;
  }
  if (!p.cache) add_instances<ForwardInstance>(arch, p, device, names);
  add_instances<CachedInstance>(arch, p, device, names);
  return names;
}

namespace {

// What batch_invariant promises of a plan, and what that costs.
std::string remark_on_rows(const Plan& plan) {
  const std::string same =
      "all rows of a sequence get the same bits here, whatever they are computed with; ";
  constexpr const char* kOther =
      "a row's bits depend on no other sequence, but a prompt's row may have others than it has "
      "decoded";
  const AttentionProblem& p = plan.problem;
  if (p.mask.kind != STROBE_MASK_NONE || p.dropout_p > 0) return kOther;
  const auto of_hopper = [&](const ForwardConfig& c, Features computes) -> std::string {
    if (!computes.has(features::kInvariantRows)) return kOther;
    return same + format("keys have chunks of %d, which thread blocks share where tiles are few",
                         sm90::chunk_blocks(c.tile_k) * c.tile_k);
  };
  if (const Entry<CachedInstance>* const entry = entry_of<CachedInstance>(plan.instance)) {
    const CachedConfig& c = entry->instance->config;
    if (c.arch == 90) return of_hopper(c, entry->instance->computes);
    return same + format(
                      "keys have chunks of %d, and tiles %d rows, prompts' too, which take several "
                      "times as long as without",
                      kChunkKeys, c.tile_q);
  }
  const Entry<ForwardInstance>* const entry = entry_of<ForwardInstance>(plan.instance);
  return entry ? of_hopper(entry->instance->config, entry->instance->computes) : std::string();
}

// By which way a plan's kernel gets at the keys, where there are several.
std::string remark_on_keys(const Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  if (plan.unpacks_first) {
    const char* const to = dtype_name(p.dtype);
    if (has_mixed_cache(p)) {
      return format("keys of %s and values of %s are unpacked to %s in the workspace first",
                    dtype_name(p.kv_dtype), dtype_name(v_dtype_of(p)), to);
    }
    return format("codes of %s are unpacked to %s in the workspace first", dtype_name(p.kv_dtype),
                  to);
  }
  if (p.mask.kind != STROBE_MASK_NONE && p.cache) {
    const bool unites = p.mask.heads > 1 && p.heads > p.heads_kv;
    return std::string("each tile's keys are those that the mask's list") +
           (unites ? "s of its heads have" : " has") + ", divided as if they were all";
  }
  if (p.mask.kind != STROBE_MASK_NONE) {
    const bool forward = p.direction == STROBE_FORWARD;
    const bool several = forward ? plan.tile_q > p.mask.block_q : plan.tile_k > p.mask.block_k;
    return std::string("each tile goes through the mask's list") + (several ? "s" : "") +
           " of its " + (forward ? "queries" : "keys");
  }
  if (p.batch_invariant || !entry_of<CachedInstance>(plan.instance)) return {};
  if (p.cache) return {};
  const std::optional<TwoWays> ways = estimate(p, device);
  if (!ways) return {};
  const auto& [whole, divided] = *ways;
  return format("%" PRId64 " tiles, about %" PRId64
                " thread blocks for the keys of each%s: some %.0f us, where %" PRId64
                " tiles of one head and thread block each would take %.0f",
                divided.tiles, divided.pieces,
                divided.merges_apart ? ", and a second kernel that merges" : "",
                divided.microseconds, whole.tiles, whole.microseconds);
}

std::string joined(const std::string& a, const std::string& b) {
  return a.empty() || b.empty() ? a + b : a + "; " + b;
}

}  // namespace

std::string remark_on(const Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  if (widens_queries(p)) {
    Plan widened = plan;
    widened.problem = after_widening(p);
    return joined("queries of float8 e4m3 are written as bf16 in the workspace first",
                  remark_on(widened, device));
  }
  const bool asks_of_rows = p.batch_invariant && p.direction == STROBE_FORWARD;
  return joined(remark_on_keys(plan, device), asks_of_rows ? remark_on_rows(plan) : std::string());
}

}  // namespace strobe::cuda
