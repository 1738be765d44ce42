// What the checks of problems, of launch arguments and of merges are made of. A message names the
// argument, what was got and what was wanted.
#ifndef STROBE_CORE_CHECKS_H_
#define STROBE_CORE_CHECKS_H_

#include <cstdint>
#include <string>

#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

// Row, key and head indices are 32-bit in the dropout counter and on the GPU.
inline constexpr int64_t kMaxLength = INT32_MAX;
// Offsets in bytes, sums of a few strides included, must stay far from the end of int64.
inline constexpr int64_t kMaxOffset = int64_t{1} << 58;
// Bytes: entries of a packed mask's lists of keys are 16.
inline constexpr int64_t kMaskAlignment = 16;

Status invalid(std::string text);

Status check_integer(const char* name, int64_t got, int64_t low, int64_t high);
inline Status check_flag(const char* name, int32_t got) { return check_integer(name, got, 0, 1); }

/// True when `strides` were left at zero, which asks for a contiguous tensor.
inline bool unset(const strobe_strides& s) {
  return s.batch == 0 && s.seqlen == 0 && s.head == 0 && s.dim == 0;
}
/// Sets strides that were left at zero to those of a contiguous [.., rows, heads, dim].
inline void make_contiguous(strobe_strides& s, int64_t rows, int64_t heads, int64_t dim) {
  if (unset(s)) s = {rows * heads * dim, heads * dim, dim, 1};
}

/// Strides of a tensor of these extents, one entry when packed. An output must not overlap itself.
Status check_strides(const char* name, const strobe_strides& s, int64_t batch, int64_t rows,
                     int64_t heads, int64_t dim, bool packed, bool output);

/// Strides of a bias or its gradient, [batch, heads, rows, keys], whose last one need not be 1.
Status check_bias_strides(const char* name, const strobe_strides& s, int64_t batch, int64_t heads,
                          int64_t rows, int64_t keys, bool output);

/// Along which axes scales of this strobe_kv_scale differ.
inline bool differ_by_entry(int32_t kv_scale) {
  return kv_scale == STROBE_KV_SCALE_ROW || kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
}
inline bool differ_by_head(int32_t kv_scale) { return kv_scale >= STROBE_KV_SCALE_HEAD; }

/// Whether a quantised dtype goes with these scales. Other dtypes have none.
Status check_scale_kind(const char* name, int32_t dtype, int32_t kv_scale, int32_t scale_dtype);
/// Strides of the scales of [entries, rows, heads]; strides.dim is not used.
Status check_scale_strides(const char* name, strobe_strides strides, int32_t kv_scale,
                           int64_t entries, int64_t rows, int64_t heads, bool output);

/// alignment: in bytes.
Status check_pointer(const char* name, const void* pointer, bool needed, int64_t alignment);

/// The [batch + 1] starts of packed sequences in `total` rows. of: the end of the names total_<of>
/// and seqlen_<of>.
Status check_cumulative(const char* name, const char* of, const int32_t* cu, int64_t batch,
                        int64_t total, int64_t longest);

}  // namespace strobe

#endif  // STROBE_CORE_CHECKS_H_
