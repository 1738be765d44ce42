#include "core/arithmetic.h"
#include "cuda/common/element.h"
#include "cuda/decode/pieces.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/merge_pieces.h"
#include "cuda/ptx/next_kernel.h"

namespace strobe::cuda {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kMostRows = 64;  // of a tile

/// Rows of blockIdx.x, a span, a warp for each. It is launched early, and gets its place when a
/// multiprocessor has room.
template <int kDtype, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_pieces_kernel(const __grid_constant__ CachedParams p, const __grid_constant__ Division d,
                        const OutRule rule) {
  constexpr int kWords = sizeof(OpenSpan) / sizeof(uint64_t);
  constexpr int kFloats = 64;  // registers that nobody else wants
  static_assert(kWords <= kThreads);
  extern __shared__ __align__(128) char shared[];
  const auto thread = static_cast<int>(threadIdx.x);
  ptx::wait_for_kernel_before();
  OpenSpan* const from = d.open_spans + blockIdx.x;
  const auto* const words = reinterpret_cast<const uint64_t*>(from);
  if (thread < kWords) reinterpret_cast<uint64_t*>(shared)[thread] = __ldcg(words + thread);
  __syncthreads();
  const auto& span = *reinterpret_cast<const OpenSpan*>(shared);
  // A thread block has had the whole span, or there is none.
  if (span.nonce != d.nonce || span.looks == gridDim.y) return;
  if (thread == 0) atomicAdd(&from->looks, 1u);
  merge_pieces<Element<kDtype>, kWidth, kMostRows, kFloats>(
      p, d, span.piece, static_cast<int32_t>(blockIdx.y) * kWarps, rule);
}

namespace {

template <int kDtype, int kWidth>
cudaError_t launch_kernel(const CachedParams& p, const Division& d, OutRule rule,
                          const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&merge_pieces_kernel<kDtype, kWidth>),
                             sizeof(OpenSpan));
  const int64_t spans = int64_t{d.tracks} * p.cache.batch * d.most_spans();
  const dim3 grid(static_cast<unsigned>(spans),
                  static_cast<unsigned>(ceil_div(d.piece_rows, kWarps)));
  void* args[] = {const_cast<CachedParams*>(&p), const_cast<Division*>(&d), &rule};
  return kernel.launch(grid, kThreads, args, target, true);
}

template <int kDtype>
cudaError_t launch_width(int width, const CachedParams& p, const Division& d, OutRule rule,
                         const LaunchTarget& target) {
  switch (width) {
    case 64:
      return launch_kernel<kDtype, 64>(p, d, rule, target);
    case 128:
      return launch_kernel<kDtype, 128>(p, d, rule, target);
    case 192:
      return launch_kernel<kDtype, 192>(p, d, rule, target);
    case 256:
      return launch_kernel<kDtype, 256>(p, d, rule, target);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_merge_pieces(const CachedParams& p, const Division& d,
                                const CachedConfig& config, Features computes,
                                const LaunchTarget& target) {
  const OutRule rule{computes.has(features::kScores), computes.has(features::kAnyRows)};
  return config.dtype == kBfloat16 ? launch_width<kBfloat16>(config.width, p, d, rule, target)
                                   : launch_width<kFloat16>(config.width, p, d, rule, target);
}

}  // namespace strobe::cuda
