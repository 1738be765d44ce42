#include "cuda/host/fill_plan.h"

#include <type_traits>

#include "core/workspace.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/fill_params.h"
#include "cuda/host/longest.h"
#include "cuda/host/row_choice.h"
#include "cuda/host/row_table.h"

namespace strobe::cuda {

namespace {

// Of Plan::reserved: the row's index in its table.
constexpr int kRowSlot = 0;

}  // namespace

template <typename Row>
const Row* row_of(const Plan& plan, int arch) {
  const auto rows = row_table<Row>();
  const auto index = static_cast<size_t>(plan.reserved[kRowSlot]);
  if (index >= rows.size()) return nullptr;
  const Row* const row = rows[index].row;
  const AttentionProblem& p = plan.problem;
  const bool fits = row->config.arch == arch && row->config.dtype == p.dtype &&
                    row->config.width >= max64(p.head_dim, p.head_dim_v);
  return fits ? row : nullptr;
}

template const ForwardRow* row_of<ForwardRow>(const Plan&, int);
template const BackwardRow* row_of<BackwardRow>(const Plan&, int);

namespace {

template <typename Row, typename Params>
void fill_row(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const int index = find_row<Row>(arch, p, device, nullptr);
  const Row& row = *row_table<Row>()[static_cast<size_t>(index)].row;
  plan.reserved[kRowSlot] = index;
  plan.tile_q = row.config.tile_q;
  plan.tile_k = row.config.tile_k;
  plan.block_threads = row.shape.threads;
  plan.shared_bytes = row.shape.shared_bytes;
  if (p.direction == STROBE_FORWARD) {
    plan.block_q = row.config.tile_q;
    plan.work_items = p.batch * p.heads * ceil_div(longest_q(p), plan.block_q);
  } else {
    plan.block_k = row.config.tile_k;
    plan.work_items = p.batch * p.heads_kv * ceil_div(longest_k(p), plan.block_k);
  }
  const GridSize grid = grid_for(plan.work_items);
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  Params params{};
  if constexpr (std::is_same_v<Row, ForwardRow>) {
    fill_params(p, ForwardArgs{}, params);
  } else {
    fill_params(p, BackwardArgs{}, params);
  }
  Arena arena;
  row.carve(arena, p, params);
  plan.workspace_bytes = arena.used();
}

}  // namespace

void fill_on(int arch, Plan& plan, const DeviceProperties& device) {
  if (plan.problem.direction == STROBE_FORWARD) {
    fill_row<ForwardRow, ForwardParams>(arch, plan, device);
  } else {
    fill_row<BackwardRow, BackwardParams>(arch, plan, device);
  }
}

}  // namespace strobe::cuda
