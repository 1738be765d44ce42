// A kernel instance as compiled code: one main kernel, which is a row of kernels.def in one of its
// types and one of its variants, with what runs around it. The files that CMake writes
// (instance.cu.in) define them.
#ifndef STROBE_CUDA_HOST_INSTANCE_H_
#define STROBE_CUDA_HOST_INSTANCE_H_

#include "core/element.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/params.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

static_assert(kBfloat16 == STROBE_BFLOAT16 && kFloat16 == STROBE_FLOAT16);
static_assert(kE4m3Codes == STROBE_FLOAT8_E4M3 && kInt8Codes == STROBE_INT8 &&
              kE5m2Codes == STROBE_FLOAT8_E5M2 && kQ8Blocks == STROBE_Q8_0 &&
              kQ4Blocks == STROBE_Q4_0);

/// For keys in whole tensors. Args: of a launch.
template <typename Config, typename Params_, typename Args_>
struct TensorInstance {
  using Params = Params_;
  using Args = Args_;

  Config config;
  Features computes;
  LaunchShape shape;  // backward: of the main kernel
  /// Takes what the kernel needs of the workspace: counts while the arena counts.
  void (*carve)(Arena& arena, const AttentionProblem& problem, Params& params);
  cudaError_t (*launch)(const Params& params, const LaunchTarget& target);
};
using ForwardInstance = TensorInstance<ForwardConfig, ForwardParams, ForwardArgs>;
using BackwardInstance = TensorInstance<BackwardConfig, BackwardParams, BackwardArgs>;

/// What a launch for keys in a cache takes on a device.
struct CachedGrid {
  int64_t x, y;             // thread blocks
  int64_t workspace_bytes;  // negative: the problem has too many parts
  // Of kernels that divide keys: keys of a unit; parts of a tile's keys, where the batch may not
  // decide, else 0 (decode/shares.h).
  int64_t unit = 0, most_chunks = 0;
  int64_t of_span = 0;        // thread blocks that a tile's keys have for themselves; 0: any number
  bool merges_apart = false;  // whether a kernel of its own merges the parts
};

/// For keys in a cache.
struct CachedInstance {
  CachedConfig config;
  Features computes;
  /// Whether new keys are appended and rows rotated by a kernel of its own before the one that
  /// attends (update_kernel.cuh): where no variant of the row has registers to do so itself.
  bool updates_before;
  LaunchShape shape;
  CachedGrid (*carve)(const CachedParams& params, int64_t multiprocessors, int64_t shared_bytes);
  /// for_few_queries: null, or the instance that attends for sequences with up to few_queries()
  /// queries, in the same launch; this one then has the others.
  cudaError_t (*launch)(const CachedLaunchParams& params, const LaunchTarget& target,
                        const CachedInstance* for_few_queries);
  /// What launch does where new keys lie in the cache already, and nothing is rotated. Null where
  /// another instance has to go first.
  cudaError_t (*attend)(const CachedParams& params, const LaunchTarget& target);

  /// Whether a kernel before the one that attends leaves rotated queries in the workspace for it.
  constexpr bool rotates_before(int64_t rotary_dim) const {
    return updates_before && rotary_dim > 0;
  }
};

/// log2 of the query heads that a tile of a Hopper instance holds of each query: a power of two of
/// those that share a key head, at most a warpgroup's 64 rows. ALiBi's slopes are a head's own.
constexpr int32_t packed_heads_log2(int64_t group, bool alibi) {
  int32_t log2 = 0;
  while (!alibi && log2 < 6 && (group & (int64_t{1} << log2)) == 0) ++log2;
  return log2;
}

/// Whether kernels of this configuration are for the dtypes of the (resolved) problem.
constexpr bool has_dtypes(const ForwardConfig& c, const AttentionProblem& p) {
  if (c.dtype != p.dtype) return false;
  if (has_float8_queries(p) && c.kv_dtype == kEitherFloat8) return true;
  if (has_mixed_cache(p)) return false;  // they are unpacked first
  return c.kv_dtype == (p.kv_dtype != p.dtype ? p.kv_dtype : kSameAsQ);
}
constexpr bool has_dtypes(const BackwardConfig& c, const AttentionProblem& p) {
  return c.dtype == p.dtype;
}

/// Whether kernels of this configuration take the problem's keys after they have been unpacked
/// (after_unpacking in features_of.h).
constexpr bool takes_unpacked(const CachedConfig& c, const AttentionProblem& p) {
  return has_quantised_cache(p) && c.dtype == p.dtype && c.kv_dtype == kSameAsQ;
}

/// The most queries of a sequence that are left to the kernels that divide keys, where there is
/// another: with the heads that share a key head 64 rows, one tile of the largest.
constexpr int32_t few_queries(int64_t group) {
  return static_cast<int32_t>(group < 64 ? 64 / group : 1);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_H_
