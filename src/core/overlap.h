// Whether tensors share memory. Outputs must not overlap inputs or each other: a kernel that reads
// what it has written over gives wrong numbers, and says nothing.
#ifndef STROBE_CORE_OVERLAP_H_
#define STROBE_CORE_OVERLAP_H_

#include <cstdint>
#include <optional>

#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

/// Where the elements of a tensor lie: runs of contiguous bytes, which four dimensions repeat.
struct Extents {
  struct Dimension {
    int64_t count, stride;  // stride: in bytes
  };
  Dimension dimensions[4];
  int64_t run;  // in bytes

  /// [batch, rows, heads, dim] with strides in elements; `parts` of them, part_stride apart.
  static constexpr Extents of(int64_t batch, int64_t rows, int64_t heads, int64_t dim,
                              const strobe_strides& s, int64_t element_size, int64_t parts = 1,
                              int64_t part_stride = 0) {
    // The stride of a dimension with one entry means nothing, and may be of any size.
    const auto in_bytes = [&](int64_t count, int64_t stride) -> Dimension {
      return {count, count > 1 ? stride * element_size : 0};
    };
    return {{in_bytes(parts, part_stride), in_bytes(batch, s.batch), in_bytes(rows, s.seqlen),
             in_bytes(heads, s.head)},
            dim * element_size};
  }
  /// [batch, heads, rows, keys] of single elements: a bias.
  static constexpr Extents of_bias(int64_t batch, int64_t heads, int64_t rows, int64_t keys,
                                   const strobe_strides& s, int64_t element_size) {
    if (s.dim == 1) return of(batch, rows, heads, keys, s, element_size);
    return of(batch, rows, heads, 1, s, element_size, keys, s.dim);
  }
  static constexpr Extents contiguous(int64_t bytes) {
    return {{{1, 0}, {1, 0}, {1, 0}, {1, 0}}, bytes};
  }
  constexpr bool empty() const {
    for (const Dimension& d : dimensions)
      if (d.count <= 0) return true;
    return run <= 0;
  }
};

/// The memory that a launch reads and writes, argument by argument. Allocates nothing.
class Memory {
 public:
  /// Null pointers and empty tensors take no part. Strides are those that checks have let through.
  void add(const char* name, const void* pointer, const Extents& extents, bool written);

  /// Refuses an output that has a byte in common with an input or with another output. Intervals
  /// between strided rows do not count: tensors may be interleaved, as dq, dk and dv are in one
  /// tensor of gradients.
  Status check() const;

 private:
  struct Tensor {
    const char* name;
    Extents extents;
    uint64_t begin, bytes;  // the interval from the first byte to the last
    bool written;
  };
  static constexpr int kMost = 32;
  Tensor tensors_[kMost];
  int count_ = 0;
};

/// Whether two tensors have a byte in common: exactly, but for strides that would take more than
/// `steps` steps to find out about; nothing then. a_begin, b_begin: addresses of their lowest
/// bytes. Neither is empty.
std::optional<bool> share_bytes(uint64_t a_begin, const Extents& a, uint64_t b_begin,
                                const Extents& b, int64_t steps);

}  // namespace strobe

#endif  // STROBE_CORE_OVERLAP_H_
