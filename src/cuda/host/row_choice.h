// Which row of the table takes a problem, and why none does.
#ifndef STROBE_CUDA_HOST_ROW_CHOICE_H_
#define STROBE_CUDA_HOST_ROW_CHOICE_H_

#include <string>

#include "core/problem.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

template <typename Row>
struct Entry;  // row_table.h
struct CachedRow;

/// The entry of row_table<Row>() whose row of this architecture takes the (resolved) problem on
/// such a device; null: none, and *reason, unless null, says why.
template <typename Row>
const Entry<Row>* find_row(int arch, const AttentionProblem& problem,
                           const DeviceProperties& device, std::string* reason);

/// Whether a (resolved) problem without a cache runs as one with a cache: with few queries it is the
/// faster for it that the keys are divided among thread blocks.
bool runs_as_cached(const AttentionProblem& problem, const DeviceProperties& device);

/// The same as find_row for keys in a cache, and for problems that go the same way.
const Entry<CachedRow>* find_cached_row(int arch, const AttentionProblem& problem,
                                        const DeviceProperties& device, std::string* reason);

/// Whether some sequences of a (resolved) problem with a cache may have more than few_queries() in
/// use and others not: these then have a kernel of their own.
bool has_few_and_many(const AttentionProblem& problem);
/// That kernel's problem, as far as the choice of its row goes.
AttentionProblem few_of_many(const AttentionProblem& problem);

/// Empty when a row of this architecture takes the (resolved) problem on such a device, else why
/// none does.
std::string declines_on(int arch, const AttentionProblem& problem, const DeviceProperties& device);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_ROW_CHOICE_H_
