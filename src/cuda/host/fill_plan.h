// The row that a plan is for, and what the plan says of it.
#ifndef STROBE_CUDA_HOST_FILL_PLAN_H_
#define STROBE_CUDA_HOST_FILL_PLAN_H_

#include "core/kernel.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

struct CachedRow;

/// Fills a plan for the row that find_row finds, which must be there.
void fill_on(int arch, Plan& plan, const DeviceProperties& device);

/// The row of a plan; null where the plan is not one that fill_on made for this architecture: a
/// plan is the caller's memory. Row: ForwardRow or BackwardRow.
template <typename Row>
const Row* row_of(const Plan& plan, int arch);

/// Whether the row of a forward plan is a CachedRow.
bool is_cached(const Plan& plan);

/// Pointers are not known when a plan is made. This is the plan's row for those that TMA, by which
/// row_of's reads, cannot read: one of mma.sync's. Null where there is none.
template <typename Row>
const Row* row_for_unaligned(const Plan& plan);

/// The plan's row for the sequences of a cache that have few queries, where another one is for
/// those that have many. Null where there is none.
const CachedRow* row_for_few(const Plan& plan);

/// What a launch of the (resolved) problem needs, whichever of a plan's rows it is of. other: null
/// where there is none.
template <typename Row>
size_t workspace_of(const AttentionProblem& problem, const Row& row, const Row* other);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FILL_PLAN_H_
