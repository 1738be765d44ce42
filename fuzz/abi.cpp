// The C ABI under arbitrary input: every call returns a documented status, says why when it fails,
// writes nothing then, and touches no byte outside its tensors. Each tensor is a heap block of the
// very extent that its strides reach, so that AddressSanitizer sees the first byte beyond it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "input.h"
#include "strobe/strobe.h"
#include "tensor.h"

namespace {

// A text function keeps within its buffer, ends in NUL and gives the same length for every
// capacity.
template <typename Fill>
void check_text(Fill fill, size_t capacity) {
  const size_t length = fill(nullptr, 0);
  const std::unique_ptr<char[]> text(new char[capacity]);
  REQUIRE(fill(text.get(), capacity) == length);
  if (capacity > 0) REQUIRE(std::strlen(text.get()) == std::min(length, capacity - 1));
}

// A cache in place of k and v's own tensors, with all that comes with it.
void take_cache(Input& in, strobe_problem& p) {
  p.direction = STROBE_FORWARD;
  p.has_dlse = p.accumulate = 0;
  p.has_delta = 0;
  p.grad_dtype = STROBE_SAME_DTYPE;
  p.dropout_p = 0;
  p.dropout_first_query = p.dropout_first_key = p.dropout_first_head = p.dropout_heads = 0;
  p.cache = static_cast<int32_t>(in.range(1, 2));
  p.has_seqused_k = in.take<uint8_t>() % 8 != 0;
  if (p.cache == STROBE_CACHE_PAGED) {
    p.pages = in.range(0, 12);
    p.page_size = in.range(1, 17);
    p.pages_per_sequence = in.range(0, 6);
    p.block_table_stride = in.flag() ? p.pages_per_sequence + in.range(0, 3) : 0;
    p.seqlen_k = std::min(p.seqlen_k, p.pages_per_sequence * p.page_size);
  } else {
    p.cache_batch = in.flag() ? p.batch + in.range(0, 3) : 0;
    p.has_cache_batch_idx = in.flag();
  }
  if (p.has_seqused_k) p.append = static_cast<int32_t>(in.range(0, 2));
  if (p.append) p.seqlen_new = in.range(0, 9);
  if (p.append == STROBE_APPEND_PACKED) p.total_new = in.range(0, 20);
  p.has_leftpad = in.flag();
  if (in.flag()) {
    p.rotary_dim = in.range(1, std::max<int64_t>(p.head_dim / 2, 1)) * 2;
    p.rotary_rows = in.range(0, 90);
    p.rotary_interleaved = in.flag();
    p.has_rotary_position = in.flag();
  }
  if (in.flag()) p.out_dtype = STROBE_FLOAT32;
  const int64_t rows = p.cache == STROBE_CACHE_PAGED ? p.page_size : p.seqlen_k;
  const int64_t rows_new = p.append == STROBE_APPEND_PACKED ? p.total_new : p.seqlen_new;
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads,
                dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
  p.k = take_strides(in, rows, heads_kv, p.head_dim);
  p.v = take_strides(in, rows, heads_kv, dim_v);
  if (p.append) {
    p.k_new = take_strides(in, rows_new, heads_kv, p.head_dim);
    p.v_new = take_strides(in, rows_new, heads_kv, dim_v);
  }
}

// Small enough to run, with all that a caller can ask for, in and out of range.
strobe_problem small_problem(Input& in) {
  strobe_problem p;
  REQUIRE(strobe_problem_init(&p, sizeof p) == STROBE_OK);
  p.direction = static_cast<int32_t>(in.range(0, 1));
  p.dtype = static_cast<int32_t>(in.range(0, 2));
  p.batch = in.range(1, 3);
  p.seqlen_q = in.range(0, 70);
  p.seqlen_k = in.range(0, 70);
  p.heads_kv = in.range(0, 2);
  p.heads = std::max<int64_t>(p.heads_kv, 1) * in.range(1, 3);
  p.head_dim = in.range(1, in.flag() ? 256 : 40);
  p.head_dim_v = in.flag() ? in.range(1, 256) : 0;
  p.varlen = in.flag();
  p.causal = in.flag();
  p.total_q = in.range(0, 100);
  p.total_k = in.range(0, 100);
  p.window_signed = in.flag() && in.flag();
  p.window_left = in.range(p.window_signed ? -20 : -1, 80);
  p.window_right = in.range(p.window_signed ? -20 : -1, 80);
  if (in.flag()) p.scale = in.take<float>();
  if (in.flag()) p.softcap = in.take<float>();
  if (in.flag()) p.dropout_p = in.take<float>();
  if (p.dropout_p > 0 && in.flag()) {
    p.dropout_first_query = in.range(0, 90);
    p.dropout_first_key = in.range(0, 90);
    p.dropout_first_head = in.take<int32_t>();
    p.dropout_heads = in.range(0, 20);
  }
  p.alibi = static_cast<int32_t>(in.range(0, 2));
  p.deterministic = in.flag();
  p.batch_invariant = in.flag();
  p.has_dlse = in.flag();
  if (in.flag()) {
    p.attention_chunk = in.range(0, 90);
    const int64_t arrays = in.range(0, 15);
    p.has_seqused_q = arrays & 1;
    p.has_seqused_k = arrays >> 1 & 1;
    p.has_q_position = arrays >> 2 & 1;
    p.has_prefix = arrays >> 3 & 1;
    if (p.has_prefix && in.flag())
      p.window_left = p.window_signed ? STROBE_NO_LIMIT : -1, p.attention_chunk = 0;
  }
  if (in.flag()) {
    p.has_sinks = in.flag() || in.flag();
    p.sinks_outside_lse = in.flag();
    p.has_dsinks = in.flag();
  }
  p.threads = static_cast<int32_t>(in.range(1, 2));
  const int64_t rows_q = p.varlen ? p.total_q : p.seqlen_q,
                rows_k = p.varlen ? p.total_k : p.seqlen_k;
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads,
                dim_v = p.head_dim_v ? p.head_dim_v : p.head_dim;
  p.q = take_strides(in, rows_q, p.heads, p.head_dim);
  p.k = take_strides(in, rows_k, heads_kv, p.head_dim);
  p.v = take_strides(in, rows_k, heads_kv, dim_v);
  p.out = take_strides(in, rows_q, p.heads, dim_v);
  p.dout = take_strides(in, rows_q, p.heads, dim_v);
  p.dq = take_strides(in, rows_q, p.heads, p.head_dim);
  p.dk = take_strides(in, rows_k, heads_kv, p.head_dim);
  p.dv = take_strides(in, rows_k, heads_kv, dim_v);
  const int64_t gradients = in.range(0, 31);
  if (p.direction == STROBE_BACKWARD || gradients >= 28) {
    p.accumulate = gradients & 1;
    p.has_delta = gradients >> 1 & 1;
    if (gradients >> 2 & 1) p.grad_dtype = STROBE_FLOAT32;
    if (p.has_delta && gradients >> 3 & 1) p.has_dlse = 0;
  }
  return p;
}

// Float8 attention, in and out of range: what q, k, v and out are, and scales of batch and head.
void take_float8(Input& in, strobe_problem& p) {
  p.dtype = in.take<uint8_t>() % 16 == 0 ? STROBE_FLOAT8_E5M2 : STROBE_FLOAT8_E4M3;
  p.kv_dtype = static_cast<int32_t>(in.flag() ? in.range(STROBE_FLOAT8_E4M3, STROBE_FLOAT8_E5M2)
                                              : in.range(-1, 4));
  p.out_dtype = static_cast<int32_t>(in.range(-1, 3));
  p.has_q_scale = in.flag();
  p.kv_scale = in.flag() ? STROBE_KV_SCALE_BATCH_HEAD : static_cast<int32_t>(in.range(0, 4));
  for (strobe_strides* s : {&p.q_scale, &p.k_scale, &p.v_scale}) {
    *s = {in.range(0, 6), in.take<uint8_t>() % 16 == 0 ? 1 : 0, in.range(0, 3), in.range(0, 1)};
  }
  if (in.take<uint8_t>() % 16 == 0) p.v_dtype = in.range(-1, 8);  // mostly refused
}

// Whether there is memory for scales of batch and head, from the first one on.
bool scales_fit(const strobe_problem& p, const strobe_strides& s) {
  constexpr int64_t kMost = 1 << 16;
  const auto fits = [](int64_t x) { return 0 <= x && x <= kMost; };
  return fits(p.batch) && fits(p.heads_kv) && fits(s.batch) && fits(s.head) &&
         fits(p.batch * s.batch + p.heads_kv * s.head);
}
// These, as far as there are any.
std::vector<float> take_scales(Input& in, const strobe_problem& p, const strobe_strides& s,
                               bool are_there) {
  if (!are_there) return {};
  const int64_t count = (p.batch - 1) * s.batch + (p.heads_kv - 1) * s.head + 1;
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) scale = in.flag() ? in.take<float>() : 0.5F;
  return scales;
}

// Strides of a bias or its gradient, of which the last one need not be 1.
strobe_strides take_bias_strides(Input& in, int64_t rows, int64_t heads, int64_t keys) {
  switch (in.take<uint8_t>() % 8) {
    case 0:  // keys before queries
      return {heads * rows * keys, 1, rows * keys, rows};
    case 1:  // from the last to the first
      return {-heads * rows * keys, -keys, -rows * keys, -1};
    case 2:  // padded
      return {heads * rows * (keys + 3) + 5, keys + 3, rows * (keys + 3), 1};
    case 3:  // small, of either sign, zero too
      return {in.range(-600, 600), in.range(-600, 600), in.range(-600, 600), in.range(-3, 3)};
    case 4:
      return in.take<strobe_strides>();
    default:
      return {0, 0, 0, 0};
  }
}

// A bias, in and out of range.
void take_bias(Input& in, strobe_problem& p) {
  p.has_bias = in.take<uint8_t>() % 8 != 0;
  p.has_dbias = p.direction == STROBE_BACKWARD ? in.flag() : in.take<uint8_t>() % 16 == 0;
  p.bias_dtype = static_cast<int32_t>(in.range(-1, 2));
  p.dbias_dtype = static_cast<int32_t>(in.flag() ? in.range(-1, 0) : in.range(-1, 2));
  const auto extent = [&in](int64_t all) -> int64_t {
    const uint8_t kind = in.take<uint8_t>() % 32;
    return kind == 0 ? in.range(0, 9) : kind % 3 == 0 ? all : kind % 3 == 1 ? 1 : 0;
  };
  p.bias_batch = extent(p.batch);
  p.bias_heads = extent(p.heads);
  p.bias_seqlen_q = extent(p.seqlen_q);
  p.bias = take_bias_strides(in, p.seqlen_q, p.heads, p.seqlen_k);
  p.dbias = take_bias_strides(in, p.seqlen_q, p.heads, p.seqlen_k);
}

// A bias of the problem, whose keys are steps like those along its other axes.
Tensor bias_tensor(const strobe_problem& p, bool is_there, const strobe_strides& s, int32_t dtype,
                   uint8_t seed) {
  return {is_there ? p.bias_batch : 0,
          p.bias_seqlen_q,
          p.bias_heads,
          p.seqlen_k > 0 ? 1 : 0,
          s,
          dtype == STROBE_FLOAT32 ? 4 : 2,
          seed,
          p.seqlen_k,
          s.dim};
}

// Numbers of all kinds at some places, or the same number at all.
template <typename T>
void spoil_bias(Input& in, Tensor& bias, const T (&kinds)[4]) {
  if (bias.elements() == 0) return;
  const uint8_t all = in.take<uint8_t>();
  for (int64_t n = 0; all < 32 && n < bias.elements(); ++n) bias.put(n, kinds[all % 4]);
  for (int64_t n = in.range(0, 9); n > 0; --n) {
    const uint8_t kind = in.take<uint8_t>() % 8;
    bias.put(in.range(0, bias.elements() - 1), kind < 4 ? kinds[kind] : in.take<T>());
  }
}

std::vector<int32_t> take_lengths(Input& in, const strobe_problem& p, int64_t total,
                                  int64_t longest) {
  std::vector<int32_t> cu(static_cast<size_t>(p.batch + 1));
  if (in.take<uint8_t>() % 8 == 0) {
    for (int32_t& c : cu) c = in.take<int32_t>();
    return cu;
  }
  for (size_t b = 1; b < cu.size(); ++b) {
    cu[b] = static_cast<int32_t>(std::min(total, cu[b - 1] + in.range(0, longest)));
  }
  return cu;
}

// One number a sequence, mostly from 0 to `most`.
std::vector<int32_t> take_numbers(Input& in, const strobe_problem& p, int64_t most) {
  std::vector<int32_t> numbers(static_cast<size_t>(p.batch));
  const bool any = in.take<uint8_t>() % 8 == 0;
  for (int32_t& x : numbers)
    x = any ? in.take<int32_t>() : static_cast<int32_t>(in.range(0, std::max<int64_t>(most, 0)));
  return numbers;
}

// One of the pointers that a launch with a cache carries besides goes missing, now and then.
void spoil_cache(Input& in, strobe_forward_args& args) {
  const int32_t** const numbers[] = {&args.block_table, &args.cache_batch_idx, &args.leftpad,
                                     &args.cu_seqlens_k_new, &args.rotary_position};
  const void** const tensors[] = {&args.k_new, &args.v_new, &args.rotary_cos, &args.rotary_sin};
  const uint8_t choice = in.take<uint8_t>();
  if (choice < 16) *numbers[choice % std::size(numbers)] = nullptr;
  if (choice >= 240) *tensors[choice % std::size(tensors)] = nullptr;
}

template <typename Args>
void spoil(Input& in, int64_t element_size, Args& args) {
  const void** const inputs[] = {&args.q, &args.k, &args.v};
  const void*& victim = *inputs[in.take<uint8_t>() % std::size(inputs)];
  switch (in.take<uint8_t>() % 16) {
    case 0:
      victim = nullptr;
      break;
    case 1:
      // (A byte is aligned anywhere: there is one too few behind it.)
      if (victim && element_size > 1) victim = static_cast<const uint8_t*>(victim) + 1;
      break;
    case 2:
      args.workspace_bytes /= 2;
      break;
    case 3:
      if (args.workspace) args.workspace = static_cast<uint8_t*>(args.workspace) + 4;
      break;
    case 4:
      args.struct_size = in.take<uint8_t>();
      break;
    case 5:
      args.cu_seqlens_q = nullptr;
      break;
    case 6:
      args.alibi_slopes = nullptr;
      break;
    case 7:
      args.lse = nullptr;
      break;
    case 8:
      args.seqused_k = nullptr;
      break;
    case 9:
      args.prefix = nullptr;
      break;
    case 10:  // an output: refused where they have elements
      if constexpr (requires { args.dq; }) {
        victim = args.dq;
      } else {
        victim = args.out;
      }
      break;
    case 11:
      args.bias = nullptr;
      break;
    case 12:
      if (args.bias) args.bias = static_cast<const uint8_t*>(args.bias) + 1;
      break;
    case 13:
      if constexpr (requires { args.dbias; }) args.dbias = in.flag() ? nullptr : args.dq;
      break;
    default:
      break;
  }
}

// What a launch with a cache carries besides, each array in a block of its very size.
struct CacheArguments {
  Tensor k_new, v_new, cos, sin;
  std::vector<int32_t> table, entries, leftpad, position, starts;

  CacheArguments(Input& in, const strobe_problem& p, int64_t size)
      : k_new(entries_of_new(p), rows_of_new(p), p.heads_kv, p.head_dim, p.k_new, size, 11),
        v_new(entries_of_new(p), rows_of_new(p), p.heads_kv, p.head_dim_v, p.v_new, size, 12),
        cos(p.rotary_dim ? 1 : 0, p.rotary_rows, 1, p.rotary_dim / 2, table_strides(p), size, 13),
        sin(p.rotary_dim ? 1 : 0, p.rotary_rows, 1, p.rotary_dim / 2, table_strides(p), size, 14) {
    if (!p.cache) return;
    const bool any = in.take<uint8_t>() % 8 == 0;
    const int64_t cells =
        p.pages_per_sequence ? (p.batch - 1) * p.block_table_stride + p.pages_per_sequence : 0;
    table.resize(static_cast<size_t>(cells));
    for (int32_t& page : table) {
      page = any ? in.take<int32_t>()
                 : static_cast<int32_t>(in.range(0, std::max<int64_t>(p.pages - 1, 0)));
    }
    entries = take_numbers(in, p, p.cache_batch - 1);
    leftpad = take_numbers(in, p, p.has_leftpad ? in.range(0, p.seqlen_k) : 0);
    position = take_numbers(in, p, p.has_rotary_position ? p.rotary_rows : 0);
    starts = take_lengths(in, p, p.total_new, p.seqlen_new);
  }
  bool fit() const { return k_new.fits() && v_new.fits() && cos.fits() && sin.fits(); }
  bool unchanged() const {
    return k_new.unchanged() && v_new.unchanged() && cos.unchanged() && sin.unchanged();
  }
  void give(const strobe_problem& p, strobe_forward_args& args) {
    args.block_table = p.cache == STROBE_CACHE_PAGED ? table.data() : nullptr;
    args.cache_batch_idx = p.has_cache_batch_idx ? entries.data() : nullptr;
    args.leftpad = p.has_leftpad ? leftpad.data() : nullptr;
    const bool takes_new = p.append != STROBE_APPEND_DENSE || p.seqlen_new > 0;
    args.k_new = takes_new ? k_new.get() : nullptr;
    args.v_new = takes_new ? v_new.get() : nullptr;
    args.cu_seqlens_k_new = p.append == STROBE_APPEND_PACKED ? starts.data() : nullptr;
    args.rotary_cos = cos.get();
    args.rotary_sin = sin.get();
    args.rotary_position = p.has_rotary_position ? position.data() : nullptr;
  }

 private:
  static int64_t entries_of_new(const strobe_problem& p) {
    return p.append == STROBE_APPEND_NONE ? 0 : p.append == STROBE_APPEND_PACKED ? 1 : p.batch;
  }
  static int64_t rows_of_new(const strobe_problem& p) {
    return p.append == STROBE_APPEND_PACKED ? p.total_new : p.seqlen_new;
  }
  static strobe_strides table_strides(const strobe_problem& p) {
    return {0, p.rotary_dim / 2, p.rotary_dim / 2, 1};
  }
};

void launch(Input& in, const strobe_plan& plan) {
  const strobe_problem& p = plan.problem;
  const bool float8 = p.dtype == STROBE_FLOAT8_E4M3;
  const int64_t size = float8 ? 1 : p.dtype == STROBE_FLOAT32 ? 4 : 2;
  const int64_t size_out = p.out_dtype == STROBE_FLOAT32 ? 4 : 2;
  // The extents of k and v in batch and seqlen.
  const bool paged = p.cache == STROBE_CACHE_PAGED;
  const int64_t entries = paged ? p.pages : p.cache ? p.cache_batch : p.varlen ? 1 : p.batch;
  const int64_t batch = p.varlen ? 1 : p.batch;
  const int64_t rows_q = p.varlen ? p.total_q : p.seqlen_q, rows_k = paged ? p.page_size
                                                                     : p.varlen && !p.cache
                                                                         ? p.total_k
                                                                         : p.seqlen_k;
  const strobe_strides packed = {rows_q * p.heads, 1, rows_q, 1};  // of lse
  Tensor q(batch, rows_q, p.heads, p.head_dim, p.q, size, 1);
  Tensor k(entries, rows_k, p.heads_kv, p.head_dim, p.k, size, 2);
  Tensor v(entries, rows_k, p.heads_kv, p.head_dim_v, p.v, size, 3);
  Tensor out(batch, rows_q, p.heads, p.head_dim_v, p.out, size_out, 4);
  Tensor lse(batch, rows_q, p.heads, 1, packed, 4, 5);
  // Forward does not look at the strides of gradients, so they may be anything.
  const int64_t back = p.direction == STROBE_BACKWARD ? batch : 0;
  Tensor dlse(back, rows_q, p.heads, 1, packed, 4, 6);
  Tensor delta(back, rows_q, p.heads, 1, packed, 4, 11);
  Tensor dout(back, rows_q, p.heads, p.head_dim_v, p.dout, size, 7);
  const int64_t size_grad = p.grad_dtype == STROBE_FLOAT32 ? 4 : 2;
  Tensor dq(back, rows_q, p.heads, p.head_dim, p.dq, size_grad, 8);
  Tensor dk(back, rows_k, p.heads_kv, p.head_dim, p.dk, size_grad, 9);
  Tensor dv(back, rows_k, p.heads_kv, p.head_dim_v, p.dv, size_grad, 10);
  Tensor bias = bias_tensor(p, p.has_bias, p.bias, p.bias_dtype, 12);
  Tensor dbias = bias_tensor(p, p.has_dbias, p.dbias, p.dbias_dtype, 13);
  for (const Tensor* t : {&q, &k, &v, &out, &dout, &dq, &dk, &dv, &bias, &dbias}) {
    if (!t->fits()) return;
  }
  // -inf, inf, NaN and the lowest number.
  if (p.has_bias && p.bias_dtype == STROBE_FLOAT32) {
    spoil_bias<uint32_t>(in, bias, {0xFF800000, 0x7F800000, 0x7FC00000, 0xFF7FFFFF});
  } else if (p.has_bias && p.bias_dtype == STROBE_BFLOAT16) {
    spoil_bias<uint16_t>(in, bias, {0xFF80, 0x7F80, 0x7FC0, 0xFF7F});
  } else if (p.has_bias) {
    spoil_bias<uint16_t>(in, bias, {0xFC00, 0x7C00, 0x7E00, 0xFBFF});
  }
  const std::vector<int32_t> cu_q = take_lengths(in, p, p.total_q, p.seqlen_q);
  const std::vector<int32_t> cu_k = take_lengths(in, p, p.total_k, p.seqlen_k);
  std::vector<float> slopes(
      static_cast<size_t>(p.heads * (p.alibi == STROBE_ALIBI_PER_BATCH_HEAD ? p.batch : 1)));
  for (float& slope : slopes) slope = in.flag() ? in.take<float>() : 0.5F;
  std::vector<float> sinks(static_cast<size_t>(p.heads)), dsinks = sinks;
  for (float& sink : sinks) sink = p.has_sinks && in.flag() ? in.take<float>() : 0.5F;
  // With varying lengths some are longer than their sequence, and are to be refused.
  const std::vector<int32_t> used_q = take_numbers(in, p, p.has_seqused_q ? p.seqlen_q : 0),
                             used_k = take_numbers(in, p, p.has_seqused_k ? p.seqlen_k : 0),
                             position = take_numbers(in, p, p.has_q_position ? 90 : 0),
                             prefix = take_numbers(in, p, p.has_prefix ? p.seqlen_k : 0);
  CacheArguments cache(in, p, size);
  if (!cache.fit()) return;
  const bool scaled = p.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
  if ((p.has_q_scale && !scales_fit(p, p.q_scale)) ||
      (scaled && !(scales_fit(p, p.k_scale) && scales_fit(p, p.v_scale)))) {
    return;
  }
  const std::vector<float> q_scale = take_scales(in, p, p.q_scale, p.has_q_scale != 0),
                           k_scale = take_scales(in, p, p.k_scale, scaled),
                           v_scale = take_scales(in, p, p.v_scale, scaled);
  // No larger than the plan says, so that a launch that wants more is seen.
  const std::unique_ptr<void, decltype(&std::free)> workspace(
      in.flag() ? std::aligned_alloc(64, (plan.workspace_bytes + 63) / 64 * 64) : nullptr,
      &std::free);

  const auto fill = [&](auto& args) {
    args.struct_size = sizeof args;
    args.q = q.get();
    args.k = k.get();
    args.v = v.get();
    args.out = out.get();
    args.lse = lse.as<float>();
    args.cu_seqlens_q = p.varlen ? cu_q.data() : nullptr;
    args.cu_seqlens_k = p.varlen && !p.cache ? cu_k.data() : nullptr;
    args.alibi_slopes = p.alibi ? slopes.data() : nullptr;
    args.sinks = p.has_sinks ? sinks.data() : nullptr;
    args.bias = bias.get();
    args.seqused_q = p.has_seqused_q ? used_q.data() : nullptr;
    args.seqused_k = p.has_seqused_k ? used_k.data() : nullptr;
    args.q_position = p.has_q_position ? position.data() : nullptr;
    args.prefix = p.has_prefix ? prefix.data() : nullptr;
    args.dropout_seed = in.take<uint64_t>();
    args.dropout_offset = in.take<uint64_t>();
    args.workspace = workspace.get();
    args.workspace_bytes = workspace ? plan.workspace_bytes : 0;
    spoil(in, size, args);
  };
  strobe_status status;
  if (p.direction == STROBE_FORWARD) {
    strobe_forward_args args = {};
    if (p.cache) cache.give(p, args);
    args.q_scale = q_scale.empty() ? nullptr : q_scale.data();
    args.k_scale = k_scale.empty() ? nullptr : k_scale.data();
    args.v_scale = v_scale.empty() ? nullptr : v_scale.data();
    fill(args);
    if (p.cache) spoil_cache(in, args);
    status = strobe_forward(&plan, &args);
    REQUIRE(status == STROBE_OK || (out.unchanged() && lse.unchanged()));
    REQUIRE(cache.unchanged());
  } else {
    strobe_backward_args args = {};
    args.dout = dout.get();
    args.dlse = p.has_dlse ? dlse.as<float>() : nullptr;
    args.delta = p.has_delta ? delta.as<float>() : nullptr;
    args.dsinks = p.has_dsinks ? dsinks.data() : nullptr;
    args.dbias = dbias.get();
    args.dq = dq.get();
    args.dk = dk.get();
    args.dv = dv.get();
    fill(args);
    status = strobe_backward(&plan, &args);
    REQUIRE(status == STROBE_OK ||
            (dq.unchanged() && dk.unchanged() && dv.unchanged() && dbias.unchanged()));
    REQUIRE(out.unchanged() && lse.unchanged() && dout.unchanged());
    REQUIRE(dlse.unchanged() && delta.unchanged());
  }
  require_documented(status);
  REQUIRE(q.unchanged() && bias.unchanged());
  REQUIRE((k.unchanged() && v.unchanged()) || (status == STROBE_OK && p.append));
}

// A plan that strobe_plan_make did not make: all that take one refuse it in the same words.
void check_foreign_plan(const strobe_plan& plan) {
  strobe_forward_args forward = {};
  forward.struct_size = sizeof forward;
  REQUIRE(strobe_forward(&plan, &forward) == STROBE_INVALID_ARGUMENT);
  const std::string why = std::string("invalid: ") + strobe_last_error() + "\n";
  strobe_backward_args backward = {};
  backward.struct_size = sizeof backward;
  REQUIRE(strobe_backward(&plan, &backward) == STROBE_INVALID_ARGUMENT);
  char text[512];
  REQUIRE(strobe_plan_text(&plan, text, sizeof text) == why.size());
  REQUIRE(text == why);
}

// Zeros, any bytes, or a good plan with one number changed of those by which it is known.
void check_foreign_plans(Input& in, strobe_plan plan) {
  switch (in.take<uint8_t>() % 4) {
    case 0:
      std::memset(static_cast<void*>(&plan), 0, sizeof plan);
      if (in.flag()) plan.struct_size = sizeof plan;
      break;
    case 1:
      plan = in.take<strobe_plan>();
      if (in.flag()) plan.struct_size = sizeof plan;
      break;
    case 2:
      plan.kernel_index += static_cast<int32_t>(in.range(1, 1000));
      break;
    default:
      plan.struct_size += static_cast<size_t>(in.range(1, 1000));
      break;
  }
  check_foreign_plan(plan);
}

// The mask of extents that may be anything, in a block of its very size.
void check_dropout_mask(Input& in) {
  int64_t extents[4];
  double bytes = 1;
  for (int64_t& extent : extents) {
    extent = in.flag() ? in.range(-1, 9) : in.take<int64_t>() >> in.range(0, 63);
    bytes *= static_cast<double>(extent);
  }
  // The caller's memory has to be there: what nobody could have is refused without a look at it.
  const bool small = bytes >= 0 && bytes <= 1 << 20;
  if (!small && bytes > 0 && bytes <= 0x1p58) return;
  std::vector<uint8_t> mask(small ? static_cast<size_t>(bytes) : 0, 9);
  mask.shrink_to_fit();
  const auto p = in.take<float>();
  const auto seed = in.take<uint64_t>(), offset = in.take<uint64_t>();
  const strobe_status status = strobe_dropout_mask(extents[0], extents[1], extents[2], extents[3],
                                                   p, seed, offset, mask.data());
  require_documented(status);
  REQUIRE(status == STROBE_OK ? small
                              : std::count(mask.begin(), mask.end(), 9) ==
                                    static_cast<std::ptrdiff_t>(mask.size()));
  if (status != STROBE_OK) return;
  // A part that may be anything too: what there is of it, or an error.
  const auto all = static_cast<int64_t>(mask.size());
  const int64_t first = in.range(-1, 99), count = in.flag() ? in.range(-1, 99) : in.take<int64_t>();
  const bool within = first >= 0 && first <= all && count >= 0 && count <= all - first;
  std::vector<uint8_t> part(within ? static_cast<size_t>(count) : 0, 9);
  part.shrink_to_fit();
  REQUIRE(strobe_dropout_mask_part(extents[0], extents[1], extents[2], extents[3], p, seed, offset,
                                   first, count,
                                   part.data()) == (within ? STROBE_OK : STROBE_INVALID_ARGUMENT));
  REQUIRE(std::equal(part.begin(), part.end(), mask.begin() + (within ? first : 0)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  // A problem that is small and can be run, with a cache or without; the same with fields
  // overwritten; or any bytes at all.
  const uint8_t first = in.take<uint8_t>();
  const int kind = first % 4;
  strobe_problem problem = kind == 3 ? in.take<strobe_problem>() : small_problem(in);
  if (kind != 3 && first >= 128) take_cache(in, problem);
  if (kind != 3 && first % 128 >= 64) take_bias(in, problem);
  if (kind != 3 && first % 64 >= 48) take_float8(in, problem);
  for (int64_t fields = kind == 2 ? in.range(1, 4) : 0; fields > 0; --fields) {
    const int64_t value = in.take<int64_t>() >> in.range(0, 63);
    const size_t field = static_cast<size_t>(in.range(0, sizeof problem / sizeof value - 1));
    std::memcpy(reinterpret_cast<char*>(&problem) + field * sizeof value, &value, sizeof value);
  }
  const size_t capacity = in.take<uint8_t>();

  check_text([&](char* text, size_t n) { return strobe_why(&problem, text, n); }, capacity);
  strobe_plan plan;
  std::memset(static_cast<void*>(&plan), 0x5a, sizeof plan);
  plan.struct_size = sizeof plan;
  const strobe_plan before = plan;
  const strobe_status status = strobe_plan_make(&problem, &plan);
  require_documented(status);
  REQUIRE(strobe_supports(&problem) == status);
  if (status != STROBE_OK) {
    REQUIRE(std::memcmp(&plan, &before, sizeof plan) == 0);
    check_foreign_plan(plan);
    check_foreign_plans(in, plan);
    check_dropout_mask(in);
    return 0;
  }
  REQUIRE(std::strcmp(plan.kernel, strobe_kernel_name(plan.kernel_index)) == 0);
  check_text([&](char* text, size_t n) { return strobe_plan_text(&plan, text, n); }, capacity);
  // The others are planned only: they may be of any size.
  if (kind < 2) launch(in, plan);
  check_foreign_plans(in, plan);
  check_dropout_mask(in);
  return 0;
}
