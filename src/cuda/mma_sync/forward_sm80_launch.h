// Launches forward_sm80.cuh.
#ifndef STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_
#define STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/config.h"
#include "cuda/common/stagger.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/mma_sync/float8_passes.cuh"
#include "cuda/mma_sync/forward_sm80.cuh"

namespace strobe::cuda::sm80 {

template <ForwardConfig kC, Features kComputes>
struct ForwardKernel {
  static constexpr bool kGeneral = kComputes.has(features::kScores);
  static constexpr bool kBias = kComputes.has(features::kBias);
  static constexpr ForwardTuning kT = kBias      ? bias_tuning(kC)
                                      : kGeneral ? general_tuning(kC)
                                                 : forward_tuning(kC);
  // Of float8 the kernel has fp16, which a kernel before it has made of the codes.
  static constexpr bool kFloat8 = kC.dtype == kE4m3Codes;
  static_assert(!kFloat8 || (kGeneral && kC.kv_dtype == kEitherFloat8));
  using Shape =
      ForwardShape<kFloat8 ? kFloat16 : kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages,
                   kC.warps, kT.step, kT.kept, kT.split, kT.min_blocks, kFloat8>;
  static constexpr int kSharedBytes = Shape::template kSharedBytes<kBias>;
};

template <ForwardConfig kConfig, Features kComputes>
constexpr LaunchShape forward_shape() {
  using Kernel = ForwardKernel<kConfig, kComputes>;
  return {Kernel::Shape::kThreads, Kernel::kSharedBytes};
}

/// What float8 attention has in the workspace: Q, K and V in fp16, and O in float32.
struct Float8Rooms {
  PassRows q_rows, k_rows, v_rows, out_rows;
  __half *q, *k, *v;
  float* out;

  static Float8Rooms take(Arena& arena, const ForwardParams& p) {
    const auto rows = [&](const int32_t* packed, int64_t total, int32_t heads, int32_t dim) {
      return PassRows{packed ? 1 : p.batch, total, heads, dim,
                      static_cast<int32_t>(round_up(dim, 8))};
    };
    Float8Rooms r{};
    r.q_rows = rows(p.cu_q, p.total_q, p.heads, p.head_dim);
    r.k_rows = rows(p.cu_k, p.total_k, p.heads_kv, p.head_dim);
    r.v_rows = rows(p.cu_k, p.total_k, p.heads_kv, p.head_dim_v);
    r.out_rows = rows(p.cu_q, p.total_q, p.heads, p.head_dim_v);
    r.q = arena.take<__half>(r.q_rows.values());
    r.k = arena.take<__half>(r.k_rows.values());
    r.v = arena.take<__half>(r.v_rows.values());
    r.out = arena.take<float>(r.out_rows.values());
    return r;
  }
};

template <ForwardConfig kConfig, Features kComputes>
void forward_carve(Arena& arena, const AttentionProblem& problem, ForwardParams& params) {
  if constexpr (ForwardKernel<kConfig, kComputes>::kFloat8) {
    // A plan's params have no arrays, which say what is packed: one entry of all rows is as much.
    ForwardParams p = params;
    if (problem.varlen) p.batch = 1;
    params.workspace = Float8Rooms::take(arena, p).q;
  }
}

/// Threads of so many rows, a warp each, on all multiprocessors.
inline dim3 pass_grid(int64_t rows, unsigned y, const LaunchTarget& target) {
  const int64_t most = max64(1, target.multiprocessors * 16);
  const int64_t blocks = ceil_div(rows, kPassThreads / 32);
  return {static_cast<unsigned>(max64(1, min64(blocks, most))), y};
}

template <ForwardConfig kConfig, Features kComputes>
cudaError_t launch_forward(const ForwardParams& params, const LaunchTarget& target) {
  using Kernel = ForwardKernel<kConfig, kComputes>;
  using Shape = typename Kernel::Shape;
  ForwardParams p = params;
  [[maybe_unused]] Float8Rooms rooms{};
  if constexpr (Kernel::kFloat8) {
    static KernelHandle unpack(reinterpret_cast<const void*>(&unpack_codes_kernel<kPassThreads>));
    Arena arena(params.workspace);
    rooms = Float8Rooms::take(arena, params);
    const RowScales none{}, of_values{p.v_scale, p.cu_k, p.batch, 1};
    UnpackParams codes{{{rooms.q_rows, p.q, rooms.q, 0, none},
                        {rooms.k_rows, p.k, rooms.k, p.e5m2_kv, none},
                        {rooms.v_rows, p.v, rooms.v, p.e5m2_kv, of_values}}};
    const bool packed_q = p.cu_q != nullptr, packed_k = p.cu_k != nullptr;
    p.q = rooms.q_rows.in(rooms.q, packed_q);
    p.k = rooms.k_rows.in(rooms.k, packed_k);
    p.v = rooms.v_rows.in(rooms.v, packed_k);
    p.out = rooms.out_rows.in(rooms.out, packed_q);
    p.float_out = 1;
    void* args[] = {&codes};
    const int64_t most = max64(rooms.q_rows.count(), rooms.k_rows.count());
    STROBE_RETURN_IF_CUDA_ERROR(
        unpack.launch(pass_grid(most, 3, target), kPassThreads, args, target));
  }
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&forward_kernel<Shape, Kernel::kGeneral, Kernel::kBias>),
      Kernel::kSharedBytes);
  StaticOrder order = StaticOrder::make(p, Shape::kTileQ);
  const GridSize grid = grid_for(order.items);
  Stagger stagger =
      Stagger::make(p, order.items,
                    blocks_at_once(target.multiprocessors, target.shared_bytes,
                                   Kernel::kSharedBytes, Shape::kMinBlocks),
                    2 * Shape::QTile::kBytes + 2 * Shape::KTile::kBytes, Shape::kTileQ);
  void* args[] = {&p, &order, &stagger};
  const cudaError_t error = kernel.launch(dim3(grid.x, grid.y), Shape::kThreads, args, target);
  if constexpr (Kernel::kFloat8) {
    if (error != cudaSuccess) return error;
    static KernelHandle scale(reinterpret_cast<const void*>(&scale_out_kernel<kPassThreads>));
    ScaleParams out{rooms.out_rows,   rooms.out,
                    params.out,       {params.v_scale, params.cu_q, params.batch, params.group},
                    params.float_out, params.half_out};
    void* scale_args[] = {&out};
    return scale.launch(pass_grid(rooms.out_rows.count(), 1, target), kPassThreads, scale_args,
                        target);
  }
  return error;
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_
