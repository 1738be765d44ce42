#include "cpu/quantise.h"

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "core/team.h"
#include "cpu/dispatch.h"

namespace strobe::cpu {

namespace {

// Values that are worth a thread of their own, and rows that a thread takes at a time.
constexpr int64_t kValuesPerThread = int64_t{1} << 15, kRowsAtOnce = 64;
constexpr int64_t kMostDim = 256;

std::byte* at(void* data, const strobe_strides& s, int64_t size, int64_t b, int64_t i, int64_t h) {
  return static_cast<std::byte*>(data) + (b * s.batch + i * s.seqlen + h * s.head) * size;
}

// A tensor and its quantised form, row by row.
class Rows {
 public:
  explicit Rows(const QuantiseArgs& a) : a_(a), isa_(*instruction_sets().back()) {}

  int64_t count() const { return a_.batch * a_.seqlen * a_.heads; }
  // visit(batch, row, head) for all rows, on several threads.
  template <typename Visit>
  void each(const Visit& visit) const {
    const int64_t most = threads_or_default(a_.threads);
    const int64_t threads = min64(most, 1 + count() * a_.head_dim / kValuesPerThread);
    share_out(ceil_div(count(), kRowsAtOnce), threads, [&](int64_t n) {
      const int64_t end = min64((n + 1) * kRowsAtOnce, count());
      for (int64_t row = n * kRowsAtOnce; row < end; ++row) {
        visit(row / a_.heads / a_.seqlen, row / a_.heads % a_.seqlen, row % a_.heads);
      }
    });
  }
  /// As it is quantised: rotated, where that is wanted.
  void read(int64_t b, int64_t i, int64_t h, float* values) const {
    isa_.to_float(a_.dtype, floats(b, i, h), values, a_.head_dim);
    if (a_.hadamard) rotate_by_hadamard(values, a_.head_dim);
  }
  void write(int64_t b, int64_t i, int64_t h, float* values) const {
    if (a_.hadamard) rotate_by_hadamard(values, a_.head_dim);
    isa_.from_float(a_.dtype, values, floats(b, i, h), a_.head_dim);
  }
  std::byte* codes(int64_t b, int64_t i, int64_t h) const {
    return at(a_.codes, a_.codes_strides, 1, b, i, h);
  }
  std::byte* scale(int64_t b, int64_t i, int64_t h) const {
    if (a_.kv_scale != STROBE_KV_SCALE_ROW) h /= group();
    return at(a_.scale, a_.scale_strides, element_size(a_.kv_scale_dtype), b, i, h);
  }

 private:
  // Heads that share a scale.
  int64_t group() const { return a_.heads / a_.heads_kv; }
  std::byte* floats(int64_t b, int64_t i, int64_t h) const {
    return at(a_.x, a_.x_strides, element_size(a_.dtype), b, i, h);
  }

  const QuantiseArgs& a_;
  // The last one is made for every machine, and converts from and to every dtype.
  const InstructionSet& isa_;
};

// The scales that several rows share, from the largest value of these. Those of a block of rows are
// written for each of them, all others once.
void make_shared_scales(const QuantiseArgs& a, const Rows& rows) {
  if (rows.count() == 0) return;
  const bool of_rows = a.kv_scale == STROBE_KV_SCALE_ROW;
  const int64_t sets_of_heads = differ_by_head(a.kv_scale) ? a.heads_kv : 1;
  const int64_t entries = differ_by_entry(a.kv_scale) ? 1 : a.batch;
  const int64_t length = of_rows ? a.scale_rows : a.seqlen, heads = a.heads / sets_of_heads;
  const int64_t blocks = ceil_div(a.seqlen, length);
  const int64_t scales = a.batch / entries * blocks * sets_of_heads;
  const int64_t most = threads_or_default(a.threads);
  share_out(scales, min64(most, scales), [&](int64_t n) {
    const int64_t head = n % sets_of_heads * heads, first = n / sets_of_heads % blocks * length;
    const int64_t entry = n / sets_of_heads / blocks, end = min64(a.seqlen, first + length);
    float values[kMostDim], largest = 0;
    for (int64_t b = entry; b < entry + entries; ++b) {
      for (int64_t i = first; i < end; ++i) {
        for (int64_t h = head; h < head + heads; ++h) {
          rows.read(b, i, h, values);
          largest = largest_value(values, a.head_dim, largest);
        }
      }
    }
    const float scale = scale_for(a.kv_dtype, largest);
    for (int64_t i = first; i < (of_rows ? end : first + 1); ++i) {
      write_scale(a.kv_scale_dtype, scale, rows.scale(entry, i, head));
    }
  });
}

}  // namespace

Status quantise(const QuantiseArgs& a) {
  const Rows rows(a);
  const bool shared = makes_shared_scales(a);
  if (shared) make_shared_scales(a, rows);
  const RowForm form{a.kv_dtype, a.kv_scale_dtype, !shared && !a.scale_is_given};
  rows.each([&](int64_t b, int64_t i, int64_t h) {
    float values[kMostDim];
    rows.read(b, i, h, values);
    quantise_row(form, values, a.head_dim, rows.codes(b, i, h), rows.scale(b, i, h));
  });
  return {};
}

Status dequantise(const QuantiseArgs& a) {
  const Rows rows(a);
  const RowForm form{a.kv_dtype, a.kv_scale_dtype, false};
  rows.each([&](int64_t b, int64_t i, int64_t h) {
    float values[kMostDim];
    dequantise_row(form, rows.codes(b, i, h), rows.scale(b, i, h), a.head_dim, values);
    rows.write(b, i, h, values);
  });
  return {};
}

}  // namespace strobe::cpu
