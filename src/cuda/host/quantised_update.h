// What is done to a quantised cache before the kernel that reads it.
#ifndef STROBE_CUDA_HOST_QUANTISED_UPDATE_H_
#define STROBE_CUDA_HOST_QUANTISED_UPDATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/params.h"
#include "cuda/host/instance.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Rotates new keys, quantises them and new values, and writes them to the cache with the scales
/// that are theirs alone; rotates queries to `rotated`, whose data is null where nothing is rotated
/// (rotated_rows: of all heads; then 0). dtype: of queries and new keys. Launches nothing where
/// there is nothing to be done.
cudaError_t launch_quantised_update(const CachedLaunchParams& p, const Tensor& rotated,
                                    int64_t rotated_rows, int dtype, const LaunchTarget& target);

/// Bytes of a workspace for the keys and values of a quantised cache, unpacked, and for queries
/// that are rotated.
int64_t unpacked_bytes(const CachedUpdateParams& p);

/// What launch_quantised_update does; then unpacks the keys and values in use to an entry of each
/// sequence, in the type of queries; and attends to those by an instance for caches of that type.
/// for_few_queries: as CachedInstance::launch takes it.
cudaError_t launch_unpacked(const CachedInstance& instance, const CachedLaunchParams& p,
                            const LaunchTarget& target, const CachedInstance* for_few_queries);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_QUANTISED_UPDATE_H_
