// The rows of kernels.def that this build has, with what compiled code says of each.
#ifndef STROBE_CUDA_HOST_ROW_TABLE_H_
#define STROBE_CUDA_HOST_ROW_TABLE_H_

#include <span>

#include "cuda/host/rows.h"

namespace strobe::cuda {

/// Row: ForwardRow, CachedRow or BackwardRow.
template <typename Row>
struct Entry {
  const Row* row;
  const char* name;
  When when;
};

/// In the order of kernels.def.
template <typename Row>
std::span<const Entry<Row>> row_table();
template <>
std::span<const Entry<ForwardRow>> row_table<ForwardRow>();
template <>
std::span<const Entry<BackwardRow>> row_table<BackwardRow>();

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_ROW_TABLE_H_
