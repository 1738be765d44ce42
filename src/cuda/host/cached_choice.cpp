#include "cuda/host/cached_choice.h"

#include <cinttypes>
#include <cstddef>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/element.h"
#include "cuda/common/key_boxes.h"
#include "cuda/common/tile_mask.h"
#include "cuda/host/asked_features.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/launch_time.h"
#include "cuda/host/tma_declines.h"

namespace strobe::cuda {

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
  const Entry<CachedInstance>* spare = nullptr;  // suits less, and is better than none
  for (const Entry<CachedInstance>& entry : instance_table<CachedInstance>()) {
    const CachedConfig& c = entry.instance->config;
    if (!is_for(entry, arch, p, device) || c.width < p.head_dim || c.width_v < p.head_dim_v)
      continue;
    if (!entry.instance->computes.contains(asked_of(arch, features, *entry.instance))) continue;
    // Those that take a mask go through its lists, or look for a bias.
    if (entry.instance->computes.has(features::kMask) && !features.whole.has(features::kOfPairs))
      continue;
    if (p.batch_invariant && arch != 90 && !has_chunked_kernels(c)) continue;
    if (asked_for.is(entry.name)) return &entry;
    const Entry<CachedInstance>*& best = entry.when == When::kRuns && !runs ? spare : found;
    if (best) {
      const CachedConfig& other = best->instance->config;
      if (c.width > other.width || holds(c) < holds(other)) continue;
      if (c.width == other.width && holds(c) == holds(other) && c.tile_q >= other.tile_q) continue;
    }
    best = &entry;
  }
  return found ? found : spare;
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

bool is_wide(const AttentionProblem& p) { return max64(p.head_dim, p.head_dim_v) > 128; }

// A tile of the kernels that divide keys, as has_many_queries sees it.
struct DividedTile {
  int64_t rows;
  double begin;  // microseconds: of a launch, and of merging what is divided
  double block;  // of 128 keys of 128 dimensions
};
// By what an H200 took (docs/log/2026-11.md). Above 128 dimensions there are tiles of 16 rows and
// of 64. Up to 32 rows a tile waits for its keys, which come the more slowly the smaller their
// pages are.
DividedTile divided_tile(const AttentionProblem& p, int64_t rows) {
  constexpr int64_t kRowsOfHalf = 32, kSmallPage = 64;
  if (is_wide(p)) return {64, 28, 2.9};
  if (rows > kRowsOfHalf) return {64, 20, 2.9};
  if (p.cache != STROBE_CACHE_PAGED) return {kRowsOfHalf, 20, 2.3};
  return {kRowsOfHalf, 20, p.page_size < kSmallPage ? 2.9 : 2.55};
}

// Whether tiles of 128 rows, queries times heads that share a key head, are faster for a cache than
// dividing its keys, by what an H200 took for heads of 128 dimensions. The kernels that divide keys
// keep all multiprocessors at work (divided_tile). A tile of 128 rows takes 1.4 microseconds for
// 128 keys (above 128 dimensions less for as many columns), and where it is the only one of its
// keys, the time of reading them if that is longer; where there are few tiles, many multiprocessors
// are idle.
//
// Nobody knows here how long sequences are, only how long they may be. Where one is much longer
// than the others, its tiles end late, while divided keys are shared out evenly: so up to 16 rows,
// which both ways read at about the same speed, always divide, and up to 32 the gain has to be
// clear.
bool has_many_queries(const AttentionProblem& p, const DeviceProperties& device) {
  constexpr int64_t kTileRows = 128, kMostRowsOfFew = 16, kRowsOfHalf = 32, kKeys = 128;
  constexpr double kTile = 1.4, kWideTile = 1, kTileBegin = 8, kRead = 2.1, kClear = 1.1;
  const int64_t group = p.heads / p.heads_kv, rows_of_sequence = p.seqlen_q * group;
  if (rows_of_sequence <= kMostRowsOfFew) return false;
  const DividedTile tile = divided_tile(p, rows_of_sequence);
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
  const double blocks = static_cast<double>(count(p.heads_kv, group, tile.rows)) / processors;
  const double divided = tile.begin + keys * tile.block * blocks;
  const double busy = static_cast<double>(tiles) / processors;
  const bool alone = tiles <= p.heads_kv * prompts;
  const double reading = alone ? kRead * (busy < 1 ? busy : 1) : 0;
  const double waves = static_cast<double>(ceil_div(tiles, device.multiprocessors));
  const double multiplying = is_wide(p) ? kWideTile : kTile;
  const double whole = kTileBegin + keys * waves * (multiplying < reading ? reading : multiplying);
  return (rows_of_sequence <= kRowsOfHalf ? kClear : 1) * whole < divided;
}

// That kernel's problem which attends for the sequences with few queries, as far as the choice of
// its instance goes.
AttentionProblem few_queries_problem(const AttentionProblem& p) {
  AttentionProblem few = p;
  few.seqlen_q = few_queries(p.heads / p.heads_kv);
  return few;
}

// Whether some sequences of a problem with a cache may have more than few_queries() in use and
// others not: these then have a kernel of their own. With batch_invariant they have not, since the
// bits of a row must not depend on how many there are.
bool has_few_and_many_queries(const AttentionProblem& p) {
  return !p.batch_invariant && p.seqlen_q > few_queries(p.heads / p.heads_kv) &&
         (p.has_seqused_q || (p.varlen && p.total_q < p.batch * p.seqlen_q));
}

// Why the kernels that read a cache by TMA decline a problem that this one of them would take.
std::string cached_prompt_declines(const Entry<CachedInstance>& entry, const AttentionProblem& p,
                                   const DeviceProperties& device, const AskedFor& asked_for) {
  // With batch_invariant the number of queries must not choose. Nor does it where this build has no
  // kernel for few.
  if (!asked_for.is(entry.name) && !p.batch_invariant && !has_many_queries(p, device) &&
      choose_cached(mma_sync_arch(device), p, device, asked_for).reason.empty()) {
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

}  // namespace

InstanceChoice choose_cached(int arch, const AttentionProblem& p, const DeviceProperties& device,
                             const AskedFor& asked_for, const Entry<CachedInstance>* found) {
  InstanceChoice choice;
  const bool has_mask = p.mask.kind != STROBE_MASK_NONE;
  if (p.batch_invariant && (has_mask || p.has_bias)) {
    choice.reason = format(
        "batch_invariant with a %s over a cache, expected one of them (the kernels that take both "
        "cut keys where their number says, not at fixed ones)",
        has_mask ? "mask" : "bias");
    return choice;
  }
  const CachedFeatures features = CachedFeatures::of(p);
  const auto find = [&](int of_arch, const AttentionProblem& problem, const CachedFeatures& asked,
                        std::string* reason) {
    return find_cached_instance(of_arch, problem, asked, device, reason, asked_for);
  };
  const Entry<CachedInstance>* const entry =
      found ? found : find(arch, p, features, &choice.reason);
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

// The kernels for codes have 16 rows of a sequence in a tile, each of which reads all keys and
// unpacks them anew; unpacking once takes as long as three or four such tiles (it reads the codes,
// writes twice or four times their bytes, and these are read).
bool unpacks_first(const AttentionProblem& p, const Entry<CachedInstance>* for_codes,
                   const DeviceProperties& device, const AskedFor& asked_for) {
  constexpr int64_t kRows = 64, kMostOfMemory = 16;  // one in so many bytes
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

}  // namespace strobe::cuda
