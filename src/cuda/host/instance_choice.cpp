#include "cuda/host/instance_choice.h"

#include <algorithm>
#include <cinttypes>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/element.h"
#include "cuda/common/key_boxes.h"
#include "cuda/common/tile_mask.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/launch_time.h"
#include "cuda/host/quantised_update.h"

namespace strobe::cuda {

namespace {

// Whose kernels through mma.sync a device runs.
int mma_sync_arch(const DeviceProperties& device) {
  return device.compute_capability >= 80 ? 80 : kTuring;
}

bool suits(When when, int32_t tile_q, const AttentionProblem& p, Features asked,
           const DeviceProperties& device) {
  // Of a width there is one row whose kernels take a mask, which is for all lengths.
  if (asked.has(features::kMask)) return true;
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

// Kernels that read by TMA are not asked about rows: tma_declines says which they take.
Features asked_of(int arch, Features asked) {
  return arch == 90 ? asked.without(features::kAnyRows) : asked;
}

// What a problem has that some kernels do not compute, and the value that they would take.
constexpr struct {
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
              {features::kUpdates, "new keys or rotary embedding, expected none"},
              {features::kSumsDq, "more keys than a tile has, expected one tile"}};

// Why no instance computes what is asked, though there are some that are wide enough.
// asked(Instance) are the features.
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
  return format("this build has no %s kernel for %s with all of its options together",
                dtype_name(p.dtype), purpose);
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
    constexpr Features kOfPairs = features::kBias | features::kMask;
    if (entry.instance->computes.has(features::kBias) && !wanted.has(kOfPairs)) continue;
    // Those of the backward pass and of Hopper that take a mask go through its lists.
    if ((std::is_same_v<Instance, BackwardInstance> || arch == 90) &&
        entry.instance->computes.has(features::kMask) && !wanted.has(features::kMask)) {
      continue;
    }
    if (asked_for.is(entry.name)) return &entry;
    if (found && c.width >= found->instance->config.width) continue;
    if (suits(entry.when, c.tile_q, p, wanted, device)) found = &entry;
  }
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

namespace {

// What a problem asks of this instance's main kernel.
Features asked_of(int arch, const CachedFeatures& features, const CachedInstance& instance) {
  return asked_of(arch, instance.updates_before ? features.after_update : features.whole);
}

bool is_for(const Entry<CachedInstance>& entry, int arch, const AttentionProblem& p,
            const DeviceProperties& device) {
  const CachedConfig& c = entry.instance->config;
  return c.arch == arch && has_dtypes(c, p) &&
         entry.instance->shape.shared_bytes <= device.shared_bytes;
}

double keys_of_heads(const AttentionProblem& p) {
  return static_cast<double>(p.batch) * static_cast<double>(p.heads_kv) *
         static_cast<double>(p.seqlen_k);
}

// find_cached_instance, where a tile has to hold `packed` rows: the largest does, if none is large
// enough.
const Entry<CachedInstance>* find_for_rows(int arch, const AttentionProblem& p,
                                           const CachedFeatures& features,
                                           const DeviceProperties& device, int64_t packed,
                                           const AskedFor& asked_for) {
  const auto holds = [&](const CachedConfig& c) { return min64(c.tile_q, packed); };
  // Small pages are looked up by four warps a block where bandwidth counts: at 64 x 8192 keys of 8
  // heads an H200 is 6 % faster so. Eight warps are faster in a launch that ends soon: by two
  // fifths at 1 x 8192 keys, by 9 % at 16 x 4096.
  constexpr double kShortLaunch = 1 << 20;
  const bool is_short = !p.batch_invariant && keys_of_heads(p) <= kShortLaunch;
  const bool runs = p.cache != STROBE_CACHE_PAGED || p.page_size >= 64 || is_short;
  const Entry<CachedInstance>* found = nullptr;
  for (const Entry<CachedInstance>& entry : instance_table<CachedInstance>()) {
    const CachedConfig& c = entry.instance->config;
    if (!is_for(entry, arch, p, device) || c.width < p.head_dim || c.width_v < p.head_dim_v)
      continue;
    if (!entry.instance->computes.contains(asked_of(arch, features, *entry.instance))) continue;
    // Those that take a mask go through its lists.
    if (entry.instance->computes.has(features::kMask) && !features.whole.has(features::kMask))
      continue;
    if (p.batch_invariant && arch != 90 && !has_chunked_kernels(c)) continue;
    if (asked_for.is(entry.name)) return &entry;
    if (entry.when == When::kRuns && !runs) continue;
    if (found) {
      const CachedConfig& best = found->instance->config;
      if (c.width > best.width || holds(c) < holds(best)) continue;
      if (c.width == best.width && holds(c) == holds(best) && c.tile_q >= best.tile_q) continue;
    }
    found = &entry;
  }
  return found;
}

}  // namespace

const Entry<CachedInstance>* find_cached_instance(int arch, const AttentionProblem& p,
                                                  const CachedFeatures& features,
                                                  const DeviceProperties& device,
                                                  std::string* reason, const AskedFor& asked_for) {
  // With batch_invariant the number of rows does not count, since instances differ in their bits:
  // whatever it is, they get the tile that 32 rows of this device get.
  // On an H200 32 rows read for one query at 0.8 to 0.98 of the speed of 16, and 64 at 0.62 to
  // 0.82; for hundreds of queries at 0.67 of the speed of 64, and 16 at 0.43.
  constexpr int64_t kRowsOfAnyLength = 32;
  // Of few keys two tiles of 32 rows are read faster than one of 64, since L2 has them for the
  // second: on an H100 by 15 to 20 % at 2^16 keys of 128 dimensions of all heads, in pages of 16 by
  // 13 %; at 2^18 one of 64 is 5 % faster.
  constexpr double kFewKeys = 1 << 17;
  constexpr int64_t kTwoTiles = 64, kHalf = 32;
  const bool few_keys = !p.batch_invariant && keys_of_heads(p) <= kFewKeys;
  int64_t packed = p.batch_invariant ? kRowsOfAnyLength : p.seqlen_q * (p.heads / p.heads_kv);
  if (p.cache && few_keys && kHalf < packed && packed <= kTwoTiles) packed = kHalf;
  const Entry<CachedInstance>* found = find_for_rows(arch, p, features, device, packed, asked_for);
  // Without a cache an estimate decides, for any number of tiles.
  if (found && !p.cache && packed > kHalf) {
    const auto time = [&](const Entry<CachedInstance>& entry) {
      return divided_keys(p, *entry.instance, device).microseconds;
    };
    const Entry<CachedInstance>* const halves =
        find_for_rows(arch, p, features, device, kHalf, asked_for);
    if (halves != found && time(*halves) < time(*found)) found = halves;
  }
  if (found || !reason) return found;
  const int64_t dim = max64(p.head_dim, p.head_dim_v);
  int64_t widest = 0;
  for (const Entry<CachedInstance>& entry : instance_table<CachedInstance>())
    if (is_for(entry, arch, p, device)) widest = max64(widest, entry.instance->config.width);
  const std::string of =
      has_mixed_cache(p)
          ? format(" of %s and values of %s", dtype_name(p.kv_dtype), dtype_name(v_dtype_of(p)))
      : has_quantised_cache(p) ? format(" of %s", dtype_name(p.kv_dtype))
                               : std::string();
  if (widest == 0) {
    *reason = format("this build has no %s kernel for keys in a cache%s", dtype_name(p.dtype),
                     of.c_str());
  } else if (widest >= dim) {
    *reason = lacks_feature<CachedInstance>(arch, p, device, [&](const CachedInstance& instance) {
      return asked_of(arch, features, instance);
    });
  } else {
    *reason = format("max(head_dim, head_dim_v) = %" PRId64 ", expected at most %" PRId64
                     " for keys in a cache%s",
                     dim, widest, of.c_str());
  }
  return nullptr;
}

CachedFeatures CachedFeatures::of(const AttentionProblem& p) {
  // No feature of these depends on a tile's keys: those are the backward's.
  return {features_of(p, 0), features_of(strobe::cuda::after_update(p), 0)};
}

CachedFeatures CachedFeatures::unaligned() const {
  return {whole | features::kAnyRows, after_update | features::kAnyRows};
}

namespace {

// Whether tiles of 128 rows, queries times heads that share a key head, are faster for a cache than
// dividing its keys, by what an H200 took for heads of 128 dimensions. The kernels that divide keys
// keep all multiprocessors at work, each of which multiplies 128 keys with 64 rows in 2.9
// microseconds; a short launch takes 20. A tile of 128 rows takes 1.4 microseconds for 128 keys,
// and where it is the only one of its keys, the time of reading them if that is longer; where there
// are few tiles, many multiprocessors are idle.
bool has_many_queries(const AttentionProblem& p, const DeviceProperties& device) {
  constexpr int64_t kDividedRows = 64, kTileRows = 128, kMostRowsOfFew = 32, kKeys = 128;
  constexpr double kDivided = 2.9, kDividedBegin = 20, kTile = 1.4, kTileBegin = 8, kRead = 2.1;
  const int64_t group = p.heads / p.heads_kv;
  if (p.seqlen_q * group <= kMostRowsOfFew) return false;
  const int64_t batch = p.batch;
  // Where some sequences are shorter than the longest, they are taken to have one query, and the
  // others as many as the longest.
  const int64_t queries = p.varlen ? p.total_q : batch * p.seqlen_q;
  const int64_t longer = max64(1, p.seqlen_q - 1);
  const int64_t prompts = max64(1, min64(batch, ceil_div(queries - batch, longer)));
  const int64_t of_prompts = max64(queries - (batch - prompts), min64(queries, p.seqlen_q));
  const auto count = [&](int64_t heads, int64_t rows_of_query, int64_t rows) {
    const int64_t most = prompts * ceil_div(rows_of_query * p.seqlen_q, rows);
    return heads * min64(most, rows_of_query * of_prompts / rows + prompts);
  };
  const int32_t pack = packed_heads_log2(group, p.alibi != 0);
  const int64_t tiles = count(p.heads >> pack, int64_t{1} << pack, kTileRows);
  const auto processors = static_cast<double>(device.multiprocessors);
  const double keys = static_cast<double>(MaskRule::of(p).most_seen(kTileRows, p.seqlen_k)) /
                      kKeys * static_cast<double>(p.head_dim + p.head_dim_v) / 256;
  const double blocks = static_cast<double>(count(p.heads_kv, group, kDividedRows)) / processors;
  const double divided = kDividedBegin + keys * kDivided * blocks;
  const double busy = static_cast<double>(tiles) / processors;
  const bool alone = tiles <= p.heads_kv * prompts;
  const double reading = alone ? kRead * (busy < 1 ? busy : 1) : 0;
  const double waves = static_cast<double>(ceil_div(tiles, device.multiprocessors));
  const double whole = kTileBegin + keys * waves * (kTile < reading ? reading : kTile);
  return whole < divided;
}

// What the sm90 kernels leave to mma.sync. TMA moves 16-byte units: strides must be multiples of 8
// values, of float8 16, and it knows no stride of 0. Pointers are looked at when they are there, at
// launch.
std::string tma_declines(const AttentionProblem& p) {
  const bool forward = p.direction == STROBE_FORWARD;
  // The backward kernel for wide heads draws its work items, 128 keys of a key head and a part of
  // its group each, in 32 bits.
  const int64_t most_items = int64_t{INT32_MAX} - 65536;
  const int64_t blocks_of_head = p.batch * ceil_div(p.seqlen_k, 128);
  if (!forward && max64(p.head_dim, p.head_dim_v) > 128 &&
      p.heads > most_items / max64(1, blocks_of_head)) {
    return format("batch * heads * seqlen_k / 128 = %" PRId64 " * %" PRId64 " * %" PRId64
                  ", expected at most %" PRId64,
                  p.batch, p.heads, ceil_div(p.seqlen_k, 128), most_items);
  }
  if (forward && p.head_dim_v % 8 != 0) {
    return format("head_dim_v = %" PRId64 ", expected a multiple of 8 (TMA writes 16-byte units)",
                  p.head_dim_v);
  }
  const int64_t rows_of_map_q = p.varlen ? p.total_q : p.seqlen_q;
  const int64_t rows_of_map_k = kv_rows(p);
  // With batch_invariant a batch of one must go where a larger one goes.
  const auto entries = [&](int64_t n) { return p.batch_invariant && n == 1 ? 2 : n; };
  const int64_t batch = p.varlen ? 1 : entries(p.batch);
  const int64_t batch_k = p.varlen && !p.cache ? 1 : entries(kv_entries(p));
  const int64_t unit = 16 / element_size(p.dtype);
  const struct {
    const char* name;
    const Strides& strides;
    int64_t rows, heads, batch, unit;
  } tensors[] = {
      {"q", p.q, rows_of_map_q, p.heads, batch, unit},
      {"k", p.k, rows_of_map_k, p.heads_kv, batch_k, unit},
      {"v", p.v, rows_of_map_k, p.heads_kv, batch_k, unit},
      // The backward pass reads dout by TMA, and writes nothing by it.
      {forward ? "out" : "dout", forward ? p.out : p.dout, rows_of_map_q, p.heads, batch, 8}};
  for (const auto& t : tensors) {
    const struct {
      const char* name;
      int64_t stride, length;
    } dims[] = {{"batch", t.strides.batch, t.batch},
                {"seqlen", t.strides.seqlen, t.rows},
                {"head", t.strides.head, t.heads}};
    for (const auto& dim : dims) {
      if (dim.length > 1 && (dim.stride <= 0 || dim.stride % t.unit != 0)) {
        return format("%s.%s = %" PRId64 " elements, expected a positive multiple of %" PRId64
                      " (TMA reads 16-byte units)",
                      t.name, dim.name, dim.stride, t.unit);
      }
    }
  }
  return {};
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

// That kernel's problem which attends for the sequences with few queries, as far as the choice of
// its instance goes.
AttentionProblem few_queries_problem(const AttentionProblem& p) {
  AttentionProblem few = p;
  few.seqlen_q = few_queries(p.heads / p.heads_kv);
  return few;
}

// Whether some sequences of a problem with a cache may have more than few_queries() in use and
// others not: these then have a kernel of their own.
bool has_few_and_many_queries(const AttentionProblem& p) {
  return p.seqlen_q > few_queries(p.heads / p.heads_kv) &&
         (p.has_seqused_q || (p.varlen && p.total_q < p.batch * p.seqlen_q));
}

// Why Hopper's kernels decline what those that divide keys take, with batch_invariant.
constexpr const char* kOneFamily =
    "batch_invariant: all rows of a sequence get the bits of cuda_sm80's kernels that divide keys";

// Why the kernels that read a cache by TMA decline a problem that this one of them would take.
std::string cached_prompt_declines(const Entry<CachedInstance>& entry, const AttentionProblem& p,
                                   const DeviceProperties& device, const AskedFor& asked_for) {
  if (!asked_for.is(entry.name) && p.batch_invariant) return kOneFamily;
  if (!asked_for.is(entry.name) && !has_many_queries(p, device)) {
    return "few queries: cuda_sm80 has the kernels that divide their keys";
  }
  if (std::string reason = tma_declines(p); !reason.empty()) return reason;
  if (p.cache != STROBE_CACHE_PAGED) return {};
  if (p.has_leftpad) return "leftpad with pages: TMA reads no box across the end of a page";
  if (KeyBoxes::make(entry.instance->config.tile_k, p.page_size).rows == 0) {
    return format("page_size = %" PRId64
                  ", expected a multiple of 8 (TMA reads boxes of eight rows)",
                  p.page_size);
  }
  return {};
}

// The choice among the kernels that take keys in a cache: for a problem with one, or one that goes
// the same way.
InstanceChoice choose_cached(int arch, const AttentionProblem& p, const DeviceProperties& device,
                             const AskedFor& asked_for) {
  InstanceChoice choice;
  if (p.batch_invariant && p.mask.kind != STROBE_MASK_NONE) {
    choice.reason =
        "batch_invariant with a mask over a cache, expected one of them (the keys of a span are "
        "those "
        "that its lists have, which no fixed numbers cut)";
    return choice;
  }
  const CachedFeatures features = CachedFeatures::of(p);
  const auto find = [&](int of_arch, const AttentionProblem& problem, const CachedFeatures& asked,
                        std::string* reason) {
    return find_cached_instance(of_arch, problem, asked, device, reason, asked_for);
  };
  const Entry<CachedInstance>* const entry = find(arch, p, features, &choice.reason);
  if (!entry) return choice;
  if (arch == 90) {
    choice.reason = cached_prompt_declines(*entry, p, device, asked_for);
    if (!choice.reason.empty()) return choice;
  }
  CachedUpdateParams params{};
  fill_params(p, ForwardArgs{}, params);
  const auto grid_of = [&](const Entry<CachedInstance>& of) {
    return of.instance->carve(params, device.multiprocessors, device.shared_bytes);
  };
  choice.grid = grid_of(*entry);
  int64_t bytes = choice.grid.workspace_bytes;
  if (bytes < 0) {
    choice.reason =
        "too many parts: batch x heads x seqlen_k, expected below 2^30 units of 64 keys";
    return choice;
  }
  choice.name = entry->name;
  choice.instance = number_of(entry);
  // Another instance, for a part of the problem: the sequences with few queries, or pointers that
  // are not aligned. Where there is none, this instance takes all sequences, and a launch with such
  // pointers is refused. With the same tiles it needs what the one that is asked needs.
  const auto number_with = [&](const Entry<CachedInstance>* other, int64_t& needed) {
    needed = other ? grid_of(*other).workspace_bytes : -1;
    return needed < 0 ? 0 : number_of(other);
  };
  int64_t unaligned = 0;
  choice.unaligned =
      number_with(find(mma_sync_arch(device), p, features.unaligned(), nullptr), unaligned);
  if (arch == 90 && has_few_and_many_queries(p)) {
    params.cache.most_q = few_queries(params.group);
    const AttentionProblem few = few_queries_problem(p);
    // They find the cache updated. New keys that the instance would not have read by whole 16-byte
    // units, if it were alone, choose it all the same: it then does the same to its sequences.
    const CachedFeatures alone = CachedFeatures::of(few);
    const Features rows{alone.whole.bits & features::kAnyRows.bits};
    const CachedFeatures asked{alone.after_update | rows, alone.after_update};
    int64_t of_few = 0;
    choice.few_queries = number_with(find(80, few, asked, nullptr), of_few);
    if (choice.few_queries) {
      const CachedFeatures asked_unaligned{asked.whole | features::kAnyRows, asked.after_update};
      int64_t of_unaligned = 0;
      choice.few_queries_unaligned =
          number_with(find(80, few, asked_unaligned, nullptr), of_unaligned);
      bytes += max64(of_few, of_unaligned);
    }
  }
  choice.workspace_bytes = static_cast<size_t>(max64(bytes, unaligned));
  return choice;
}

// The choice among the kernels that take whole tensors.
template <typename Instance>
InstanceChoice choose_tensor(int arch, const AttentionProblem& p, const DeviceProperties& device,
                             const AskedFor& asked_for) {
  InstanceChoice choice;
  const Entry<Instance>* const entry =
      find_instance<Instance>(arch, p, {}, device, &choice.reason, asked_for);
  if (entry && arch == 90) choice.reason = tma_declines(p);
  if (entry && arch == 90 && choice.reason.empty())
    choice.reason = mask_declines(entry->instance->config, p);
  if (!choice.reason.empty()) return choice;
  const Entry<Instance>* const unaligned = find_instance<Instance>(
      mma_sync_arch(device), p, features::kAnyRows, device, nullptr, asked_for);
  choice.name = entry->name;
  choice.instance = number_of(entry);
  choice.unaligned = number_of(unaligned);
  choice.workspace_bytes =
      workspace_of(p, *entry->instance, unaligned ? unaligned->instance : nullptr);
  return choice;
}

// The instance that takes a problem without a cache by whole tiles: on this device, not of this
// architecture alone, so that all architectures divide the same problems' keys.
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

// Whether a (resolved) problem without a cache goes to the kernels that divide keys, if they take
// it: where whole tiles are few, most multiprocessors would be idle; and where several query heads
// share a key head, whole tiles are of one query head each, and read its keys once for each. With
// batch_invariant all that are not packed go there, since rows over a cache do.
bool divides_keys(const AttentionProblem& p, const DeviceProperties& device,
                  const AskedFor& asked_for) {
  if (p.cache || p.direction != STROBE_FORWARD || p.dropout_p > 0) return false;
  // The estimates know nothing of what a mask's lists leave out.
  if (p.mask.kind != STROBE_MASK_NONE) return false;
  // Where lengths vary, the longest would decide; and lengths in use count from the begin of a
  // packed sequence.
  if (p.varlen && (p.batch_invariant || p.has_seqused_k)) return false;
  if (asked_for.has("cached_sm80_") || asked_for.has("cached_sm75_")) return true;
  if (!asked_for.name.empty()) return false;
  if (p.batch_invariant) return true;
  // Of the two, dividing has the estimate that is rather too low (docs/log/2026-11.md).
  constexpr double kClear = 1.03;
  const std::optional<TwoWays> ways = estimate(p, device);
  return ways && kClear * ways->divided.microseconds < ways->whole.microseconds;
}

// Whether the keys and values of a quantised cache are unpacked to the workspace first, for a
// kernel that reads a float cache. The kernels for codes have 16 rows of a sequence in a tile, each
// of which reads all keys and unpacks them anew; unpacking once takes as long as three or four such
// tiles (it reads the codes, writes twice or four times their bytes, and these are read).
bool unpacks_first(const AttentionProblem& p, const DeviceProperties& device,
                   const AskedFor& asked_for) {
  constexpr int64_t kRows = 64, kMostOfMemory = 16;  // one in so many bytes
  const int arch = mma_sync_arch(device);
  const Entry<CachedInstance>* const for_codes =
      find_cached_instance(arch, p, CachedFeatures::of(p), device, nullptr, asked_for);
  if (!for_codes) return true;
  for (const Entry<CachedInstance>& entry : instance_table<CachedInstance>()) {
    const CachedConfig& c = entry.instance->config;
    if (!asked_for.name.empty() && asked_for.is(entry.name)) return takes_unpacked(c, p);
  }
  const int64_t bytes =
      2 * p.batch * p.seqlen_k * p.heads_kv * (round_up(p.head_dim, 8) + round_up(p.head_dim_v, 8));
  const int64_t queries = p.varlen ? p.total_q : p.batch * p.seqlen_q;
  return !p.batch_invariant && bytes <= device.memory_bytes / kMostOfMemory &&
         queries * (p.heads / p.heads_kv) > kRows * p.batch;
}

InstanceChoice declined(std::string reason) {
  InstanceChoice choice;
  choice.reason = std::move(reason);
  return choice;
}

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
size_t workspace_of(const AttentionProblem& p, const Instance& instance, const Instance* other) {
  const size_t bytes = workspace_of_instance(p, instance);
  return other && other != &instance ? std::max(bytes, workspace_of_instance(p, *other)) : bytes;
}
template size_t workspace_of(const AttentionProblem&, const ForwardInstance&,
                             const ForwardInstance*);
template size_t workspace_of(const AttentionProblem&, const BackwardInstance&,
                             const BackwardInstance*);

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
  if (has_quantised_cache(p) && unpacks_first(p, device, asked_for)) {
    InstanceChoice choice = choose_instance(arch, after_unpacking(p), device, asked_for);
    CachedUpdateParams params{};
    fill_params(p, ForwardArgs{}, params);
    if (choice.reason.empty()) {
      choice.workspace_bytes += static_cast<size_t>(unpacked_bytes(params));
      return choice;
    }
    if (arch == 90) return choice;
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
    return other_instance ? declined(asks_for_another) : choose_cached(arch, p, device, asked_for);
  }
  if (divides_keys(p, device, asked_for)) {
    InstanceChoice choice = choose_cached(mma_sync_arch(device), p, device, asked_for);
    if (choice.reason.empty() && arch == 90) {
      return declined(p.batch_invariant
                          ? kOneFamily
                          : "whole tiles would take longer: cuda_sm80 divides their keys");
    }
    if (choice.reason.empty()) return choice;
    // Of what some kernel of the family takes, none that is too large goes elsewhere.
    const bool any = find_cached_instance(mma_sync_arch(device), p, CachedFeatures::of(p), device,
                                          nullptr, asked_for) != nullptr;
    if (p.batch_invariant && any) return declined(choice.reason);
  }
  if (other_instance) return declined(asks_for_another);
  return p.direction == STROBE_FORWARD
             ? choose_tensor<ForwardInstance>(arch, p, device, asked_for)
             : choose_tensor<BackwardInstance>(arch, p, device, asked_for);
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
  std::vector<std::string_view> names;
  if (p.direction == STROBE_BACKWARD) {
    add_instances<BackwardInstance>(arch, p, device, names);
    return names;
  }
  if (!p.cache) add_instances<ForwardInstance>(arch, p, device, names);
  add_instances<CachedInstance>(arch, p, device, names);
  return names;
}

std::string remark_on(const Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const Entry<CachedInstance>* const cached = entry_of<CachedInstance>(plan.instance);
  if (cached && takes_unpacked(cached->instance->config, p)) {
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
  const Entry<CachedInstance>* const divides = entry_of<CachedInstance>(plan.instance);
  if (!divides) return {};
  if (p.batch_invariant && divides->instance->config.arch != 90)
    return "all rows of a sequence get the same bits here, whatever they are computed with";
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

}  // namespace strobe::cuda
