#include "cuda/host/fill_plan.h"

#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/fill_params.h"
#include "cuda/host/row_choice.h"
#include "cuda/host/row_table.h"

namespace strobe::cuda {

namespace {

// Of Plan::reserved: the row's index in its table; of the row for unaligned pointers the index and
// 1, or 0 where there is none; whether the row is a CachedRow; of the row for sequences with few
// queries beside others the index and 1, or 0.
constexpr int kRowSlot = 0, kUnalignedRowSlot = 1, kCachedSlot = 2, kFewSlot = 3;

template <typename Row>
const Row* row_at(const Plan& plan, int64_t index, int arch) {
  const auto rows = row_table<Row>();
  if (index < 0 || static_cast<size_t>(index) >= rows.size()) return nullptr;
  const Row* const row = rows[static_cast<size_t>(index)].row;
  const AttentionProblem& p = plan.problem;
  const bool fits = row->config.arch == arch && row->config.dtype == p.dtype &&
                    row->config.width >= max64(p.head_dim, p.head_dim_v);
  return fits ? row : nullptr;
}

template <typename Row>
size_t workspace_of_row(const AttentionProblem& p, const Row& row) {
  typename Row::Params params{};
  fill_params(p, typename Row::Args{}, params);
  Arena arena;
  row.carve(arena, p, params);
  return arena.used();
}

}  // namespace

template <typename Row>
const Row* row_of(const Plan& plan, int arch) {
  return row_at<Row>(plan, plan.reserved[kRowSlot], arch);
}
template const ForwardRow* row_of<ForwardRow>(const Plan&, int);
template const BackwardRow* row_of<BackwardRow>(const Plan&, int);
template const CachedRow* row_of<CachedRow>(const Plan&, int);

bool is_cached(const Plan& plan) {
  return plan.problem.cache != STROBE_CACHE_NONE || plan.reserved[kCachedSlot] != 0;
}

template <typename Row>
const Row* row_for_unaligned(const Plan& plan) {
  return row_at<Row>(plan, plan.reserved[kUnalignedRowSlot] - 1, 80);
}
template const ForwardRow* row_for_unaligned<ForwardRow>(const Plan&);
template const BackwardRow* row_for_unaligned<BackwardRow>(const Plan&);
template const CachedRow* row_for_unaligned<CachedRow>(const Plan&);

const CachedRow* row_for_few(const Plan& plan) {
  return row_at<CachedRow>(plan, plan.reserved[kFewSlot] - 1, 80);
}

template <typename Row>
size_t workspace_of(const AttentionProblem& p, const Row& row, const Row* other) {
  const size_t bytes = workspace_of_row(p, row);
  return other ? std::max(bytes, workspace_of_row(p, *other)) : bytes;
}
template size_t workspace_of(const AttentionProblem&, const ForwardRow&, const ForwardRow*);
template size_t workspace_of(const AttentionProblem&, const BackwardRow&, const BackwardRow*);

namespace {

// An entry's place in its table and 1, or 0 for null.
template <typename Row>
int64_t number_of(const Entry<Row>* entry) {
  return entry ? entry - row_table<Row>().data() + 1 : 0;
}

// The row of this entry, which a plan is for from then on.
template <typename Row>
const Row& take_row(Plan& plan, const Entry<Row>* entry) {
  const Row& row = *entry->row;
  plan.reserved[kRowSlot] = number_of(entry) - 1;
  plan.tile_q = row.config.tile_q;
  plan.tile_k = row.config.tile_k;
  plan.block_threads = row.shape.threads;
  plan.shared_bytes = row.shape.shared_bytes;
  return row;
}

template <typename Row>
void fill_row(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const Row& row = take_row(plan, find_row<Row>(arch, p, device, nullptr));
  if (p.direction == STROBE_FORWARD) {
    plan.block_q = row.config.tile_q;
    plan.work_items = p.batch * p.heads * ceil_div(p.seqlen_q, plan.block_q);
  } else {
    plan.block_k = row.config.tile_k;
    plan.work_items = p.batch * p.heads_kv * ceil_div(p.seqlen_k, plan.block_k);
  }
  const GridSize grid = grid_for(plan.work_items);
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  if (arch == 90) {
    plan.reserved[kUnalignedRowSlot] = number_of(find_row<Row>(80, p, device, nullptr));
  }
  plan.workspace_bytes = workspace_of(p, row, row_for_unaligned<Row>(plan));
}

void fill_cached(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const CachedRow& row = take_row(plan, find_cached_row(arch, p, device, nullptr));
  plan.reserved[kCachedSlot] = 1;
  CachedUpdateParams params{};
  fill_params(p, ForwardArgs{}, params);
  const auto grid_of = [&](const CachedRow& r) {
    return r.carve(params, device.multiprocessors, device.shared_bytes);
  };
  const CachedGrid grid = grid_of(row);
  plan.block_q = row.config.tile_q;
  plan.work_items = grid.x * grid.y;
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  int64_t bytes = grid.workspace_bytes;
  if (arch == 90) {
    // A row for few queries, of a part of the problem. Where none can be had, none is needed: the
    // row takes all sequences, and no pointers that are not aligned.
    const auto other_bytes = [&](int slot, const AttentionProblem& problem) {
      const Entry<CachedRow>* const other = find_cached_row(80, problem, device, nullptr);
      const int64_t needed = other ? grid_of(*other->row).workspace_bytes : 0;
      if (!other || needed < 0) return int64_t{0};
      plan.reserved[slot] = number_of(other);
      return needed;
    };
    const int64_t unaligned = other_bytes(kUnalignedRowSlot, p);
    if (has_few_and_many(p)) {
      params.cache.most_q = few_queries(params.group);
      bytes += other_bytes(kFewSlot, few_of_many(p));
    }
    bytes = max64(bytes, unaligned);
  }
  plan.workspace_bytes = static_cast<size_t>(bytes);
}

}  // namespace

void fill_on(int arch, Plan& plan, const DeviceProperties& device) {
  if (plan.problem.cache || runs_as_cached(plan.problem, device)) {
    fill_cached(arch, plan, device);
  } else if (plan.problem.direction == STROBE_FORWARD) {
    fill_row<ForwardRow>(arch, plan, device);
  } else {
    fill_row<BackwardRow>(arch, plan, device);
  }
}

}  // namespace strobe::cuda
