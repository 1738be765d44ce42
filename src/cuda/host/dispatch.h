// What the CUDA back end gives to the API: its part of the kernel table, its devices, merging,
// quantising, and the packing of masks.
#ifndef STROBE_CUDA_HOST_DISPATCH_H_
#define STROBE_CUDA_HOST_DISPATCH_H_

#include <span>

#include "core/kernel.h"
#include "core/merge.h"
#include "core/quantise.h"
#include "core/validate_mask.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// Newest first: cuda_sm90 (TMA and wgmma), cuda_sm80 and cuda_sm75 (mma.sync).
std::span<const Kernel> kernels();

/// Devices of this machine, found at the first call. Never fails: with no driver there are none.
std::span<const DeviceProperties> devices();
/// Why there are none; "" when there are.
const char* no_devices_reason();

/// Enqueues the merging of partial results. The arguments have passed check_merge.
Status merge(const MergeArgs& args);

/// Enqueues the addition of gradients of a part. The arguments have passed check_add.
Status add(const AddArgs& args);

/// Enqueue what strobe_quantize and strobe_dequantize do. The arguments have passed check_quantise.
Status quantise(const QuantiseArgs& args);
Status dequantise(const QuantiseArgs& args);

/// Enqueues the packing of a mask as data. problem: resolved; args: passed check_mask_args. Nobody
/// looks at cu_seqlens: of sequences that overlap or are longer than the tensors the mask says
/// something, and nothing else is read or written.
Status pack_mask(const AttentionProblem& problem, const MaskArgs& args);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DISPATCH_H_
