#include "cache_fixture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "comparator.h"
#include "compare.h"
#include "fixture.h"

namespace strobe_test {

using oracle::DType;
using oracle::Form;
using oracle::Rng;

namespace {

// Most draws of the comparator's errors (comparator.h): while a result fails, for these are small.
constexpr size_t kMostDraws = 24;

const int32_t* PointerTo(const std::vector<int32_t>& values) {
  return values.empty() ? nullptr : values.data();
}

void Fill(const Strided& t, Rng& rng) {
  t.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { t.Set(e, rng.Normal()); });
}

void GiveOddStrides(Strided& t, const Spacing& spacing) {
  if (spacing.odd_stride == 0) return;
  if (t.batch <= 1) t.strides.batch = spacing.odd_stride;
  if (t.rows <= 1) t.strides.seqlen = spacing.odd_stride;
  if (t.heads <= 1) t.strides.head = spacing.odd_stride;
}

}  // namespace

Guarded* CacheFixture::Allocate(int64_t elements, DType dtype, int64_t shift) {
  const int64_t size = oracle::ElementSize(dtype);
  memory_.push_back(std::make_unique<Guarded>(elements, size, shift * size));
  return memory_.back().get();
}

Strided CacheFixture::Place(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim,
                            const Spacing& spacing) {
  Strided t;
  t.dtype = dtype;
  t.batch = batch;
  t.rows = rows;
  t.heads = heads;
  t.dim = dim;
  const int64_t inner = dim + spacing.pad_head;
  const int64_t outer = (spacing.heads_first ? rows : heads) * inner + spacing.pad_row;
  const int64_t entry = (spacing.heads_first ? heads : rows) * outer + spacing.pad_batch;
  t.strides = spacing.heads_first ? strobe_strides{entry, inner, outer, 1}
                                  : strobe_strides{entry, outer, inner, 1};
  t.memory = Allocate(batch * t.strides.batch, dtype, spacing.shift);
  GiveOddStrides(t, spacing);
  return t;
}

void CacheFixture::PlaceCache() {
  const CacheCase& c = case_;
  const int64_t dims[] = {oracle::RowBytes(c.form, c.head_dim),
                          oracle::RowBytes(c.value_form(), c.head_dim_v)};
  Strided* const tensors[] = {&k, &v};
  Guarded* pool = nullptr;
  for (int n = 0; n < 2; ++n) {
    const Spacing& spacing = n == 0 || c.layout == CacheLayout::kInterleaved ? c.k : c.v;
    Strided& t = *tensors[n];
    const DType dtype = FormOf(t) == Form::kNone ? c.dtype : DType::kByte;
    if (c.layout == CacheLayout::kRowsFirst) {
      t = Place(dtype, c.entries, c.rows, c.heads_kv, dims[n], spacing);
      continue;
    }
    const int64_t head = dims[n] + spacing.pad_head, plane = c.rows * c.heads_kv * head;
    t.dtype = dtype;
    t.batch = c.entries;
    t.rows = c.rows;
    t.heads = c.heads_kv;
    t.dim = dims[n];
    if (c.layout == CacheLayout::kHeadsFirst) {
      t.strides = {plane + spacing.pad_batch, head, c.rows * head, 1};
      t.memory = Allocate(c.entries * t.strides.batch, dtype, spacing.shift);
    } else if (c.layout == CacheLayout::kDescending) {
      t.strides = {plane + spacing.pad_batch, c.heads_kv * head, -head, 1};
      t.memory = Allocate(c.entries * t.strides.batch, dtype, spacing.shift);
      t.origin = (c.heads_kv - 1) * head;
    } else {
      if (!pool) pool = Allocate(c.entries * 2 * plane, dtype, spacing.shift);
      t.memory = pool;
      t.origin = n * plane;
      t.strides = {2 * plane, c.heads_kv * head, head, 1};
    }
    GiveOddStrides(t, spacing);
  }
  if (c.with_q_scale) {
    q_scale = Place(DType::kFloat32, c.batch(), 1, c.heads_kv, 1, c.k_scale);
    q_scale.strides.seqlen = 0;
  }
  if (c.scale_kind == STROBE_KV_SCALE_NONE) return;
  const bool of_sequences = c.scale_kind == STROBE_KV_SCALE_BATCH_HEAD;
  const bool of_rows = c.scale_kind == STROBE_KV_SCALE_ROW;
  const int64_t heads = c.scale_kind == STROBE_KV_SCALE_TENSOR ? 1 : c.heads_kv;
  for (int n = 0; n < 2; ++n) {
    if (ScaleKindOf(n == 0 ? k : v) == STROBE_KV_SCALE_NONE) continue;
    Strided& t = n == 0 ? k_scale : v_scale;
    t = Place(c.scale_dtype,
              of_rows        ? c.entries
              : of_sequences ? c.batch()
                             : 1,
              of_rows ? c.rows : 1, heads, 1, n == 0 ? c.k_scale : c.v_scale);
    // Axes without scales of their own have none of the strides.
    if (!of_rows) t.strides.seqlen = 0;
    if (!of_rows && !of_sequences) t.strides.batch = 0;
    if (heads == 1 && !of_rows) t.strides.head = 0;
  }
}

// Values where a sequence has rows, before the append; all else stays NaN. The rows that the append
// writes may change.
void CacheFixture::FillCache(Rng& rng) {
  FillScales(rng);
  for (const CacheSequence& s : case_.sequences) {
    for (int64_t n = s.leftpad; n < s.used + s.added; ++n) {
      for (const Strided* t : {&k, &v}) {
        const int64_t entry = case_.Entry(s, n), row = case_.Row(n);
        for (int64_t h = 0; h < t->heads; ++h) {
          if (FormOf(*t) != Form::kNone && n < s.used) {
            FillQuantised(*t, entry, row, h, rng);
            continue;
          }
          for (int64_t d = 0; d < t->dim; ++d) {
            const int64_t e = t->Index(entry, row, h, d);
            if (n < s.used) {
              t->Set(e, rng.Normal());
            } else {
              t->memory->AllowWrite(e);
            }
          }
          if (n >= s.used && ScaleKindOf(*t) == STROBE_KV_SCALE_ROW) {
            const Strided& scales = t == &k ? k_scale : v_scale;
            scales.memory->AllowWrite(scales.Index(entry, row, h, 0));
          }
        }
      }
    }
  }
}

namespace {

// A scale that says something odd.
float HostileScale(Rng& rng) {
  const float some[] = {0, -0.0f, 0x1p-24f, 0x1p-16f, -0.01f, 1, INFINITY, NAN};
  return rng.Pick(some);
}

}  // namespace

// The scales that rows share.
void CacheFixture::FillScales(Rng& rng) {
  if (case_.float8) {
    for (const Strided* t : {&q_scale, &k_scale, &v_scale}) {
      if (!t->memory) continue;
      t->ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
        const bool odd = t != &q_scale && case_.hostile && rng.Chance(0.1);
        t->Set(e, odd ? static_cast<double>(HostileScale(rng)) : rng.Uniform(0.7, 1.4) / 16);
      });
    }
    return;
  }
  if (case_.scale_kind == STROBE_KV_SCALE_NONE || case_.scale_kind == STROBE_KV_SCALE_ROW) return;
  for (const Strided* t : {&k_scale, &v_scale}) {
    if (!t->memory) continue;
    const Form form = FormOf(t == &k_scale ? k : v);
    t->ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
      const double usual = rng.Uniform(2, 4) / (form == Form::kInt8 ? 127 : 448);
      t->Set(e, case_.hostile && rng.Chance(0.2) ? static_cast<double>(HostileScale(rng)) : usual);
    });
  }
}

// A row of one head of k or v: values that are quantised, or now and then any bytes. given: its
// scale, where the row does not make it.
oracle::QuantisedRow CacheFixture::DrawRow(const Strided& t, std::optional<float> given,
                                           Rng& rng) const {
  const CacheCase& c = case_;
  const Form form = FormOf(t);
  const bool of_rows = ScaleKindOf(t) == STROBE_KV_SCALE_ROW;
  std::vector<float> x(static_cast<size_t>(&t == &k ? c.head_dim : c.head_dim_v));
  for (float& value : x) value = static_cast<float>(rng.Normal());
  const bool odd = c.hostile && rng.Chance(0.05);
  // Whoever reads a row of float8 attention has a scale for it.
  if (c.float8) given = c.scale_kind ? 1.0f / 16 : 1;
  oracle::QuantisedRow made = oracle::Quantise(form, x, c.scale_dtype, given);
  if (odd) {
    for (uint8_t& byte : made.bytes) byte = static_cast<uint8_t>(rng.Integer(0, 255));
    if (of_rows) made.scale = HostileScale(rng);
    const int64_t block = oracle::RowBytes(form, 32);
    for (size_t at = 0; block != 32 && at < made.bytes.size(); at += static_cast<size_t>(block)) {
      const uint16_t half = oracle::EncodeFloat16(HostileScale(rng));
      std::memcpy(made.bytes.data() + at, &half, 2);
    }
  }
  return made;
}

void CacheFixture::FillQuantised(const Strided& t, int64_t entry, int64_t row, int64_t head,
                                 Rng& rng) const {
  const Strided& scales = &t == &k ? k_scale : v_scale;
  const bool of_rows = ScaleKindOf(t) == STROBE_KV_SCALE_ROW;
  std::optional<float> given;
  if (!case_.float8 && oracle::HasScales(FormOf(t)) && !of_rows) {
    given = ScaleOf(t, entry, row, head);
  }
  const oracle::QuantisedRow made = DrawRow(t, given, rng);
  for (size_t d = 0; d < made.bytes.size(); ++d) {
    t.Set(t.Index(entry, row, head, static_cast<int64_t>(d)), made.bytes[d]);
  }
  if (of_rows) scales.Set(scales.Index(entry, row, head, 0), static_cast<double>(made.scale));
}

// New rows of float8 attention: codes as the cache of k or v has them.
void CacheFixture::FillNewCodes(const Strided& t, const Strided& of, Rng& rng) const {
  for (int64_t row = 0; row < t.batch * t.rows; ++row) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const oracle::QuantisedRow made = DrawRow(of, {}, rng);
      for (int64_t d = 0; d < t.dim; ++d)
        t.Set(t.Index(row / t.rows, row % t.rows, h, d), made.bytes[static_cast<size_t>(d)]);
    }
  }
}

int32_t CacheFixture::ScaleKindOf(const Strided& t) const {
  return oracle::HasScales(FormOf(t)) ? case_.scale_kind : STROBE_KV_SCALE_NONE;
}

// The scale of a row of k or of v; 0 where these have none.
float CacheFixture::ScaleOf(const Strided& t, int64_t entry, int64_t row, int64_t head) const {
  if (ScaleKindOf(t) == STROBE_KV_SCALE_NONE) return 0;
  const Strided& scales = &t == &k ? k_scale : v_scale;
  return scales.Get(scales.Index(entry, row, head, 0));
}

// Rows of sequences, end to end or where these say, times the sequence's scales.
void CacheFixture::ScaleSequences(const Strided& scales,
                                  const std::vector<oracle::Sequence>& sequences, bool of_q,
                                  oracle::Tensor& values) const {
  if (!case_.float8 || !scales.memory) return;
  const int64_t group = values.heads / case_.heads_kv;
  for (size_t b = 0; b < sequences.size(); ++b) {
    const oracle::Sequence& s = sequences[b];
    const int64_t begin = of_q ? s.q_begin : s.k_begin, length = of_q ? s.q_length : s.k_length;
    for (int64_t row = begin; row < begin + length; ++row) {
      for (int64_t h = 0; h < values.heads; ++h) {
        const auto by =
            static_cast<double>(scales.Get(scales.Index(static_cast<int64_t>(b), 0, h / group, 0)));
        for (int64_t d = 0; d < values.dim; ++d) {
          values.at(row, h)[d] *= std::isfinite(by) ? by : NAN;
        }
      }
    }
  }
}

// K or V as they are now, as the oracle has them; of float8 attention codes without their scales.
oracle::Tensor CacheFixture::ReadCache(const Strided& t) const {
  if (FormOf(t) == Form::kNone) return t.Read();
  oracle::Tensor values(t.batch * t.rows, t.heads, &t == &k ? case_.head_dim : case_.head_dim_v);
  for (int64_t row = 0; row < values.rows; ++row) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const std::vector<uint8_t> bytes = BytesOf(t, row, h);
      const double scale =
          case_.float8 ? 1 : static_cast<double>(ScaleOf(t, row / t.rows, row % t.rows, h));
      for (int64_t d = 0; d < values.dim; ++d) {
        const double value = oracle::ValueAt(FormOf(t), bytes.data(), scale, d);
        values.at(row, h)[d] =
            unpacks_first_
                ? static_cast<double>(oracle::Round(case_.dtype, static_cast<float>(value)))
                : value;
      }
    }
  }
  return values;
}

std::vector<uint8_t> CacheFixture::BytesOf(const Strided& t, int64_t row, int64_t head) const {
  std::vector<uint8_t> bytes;
  for (int64_t d = 0; d < t.dim; ++d) {
    bytes.push_back(static_cast<uint8_t>(t.Get(t.Index(row / t.rows, row % t.rows, head, d))));
  }
  return bytes;
}

void CacheFixture::FillRotary(Rng& rng) {
  const int64_t pairs = case_.rotary_dim / 2;
  Spacing spacing;
  spacing.shift = case_.shift_cos;
  cosines_ = Place(case_.dtype, 1, case_.rotary_rows, 1, pairs, spacing);
  spacing.shift = case_.shift_sin;
  sines_ = Place(case_.dtype, 1, case_.rotary_rows, 1, pairs, spacing);
  cosines_.ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
    const double angle = rng.Uniform(0, 6.28);
    cosines_.Set(e, std::cos(angle));
    sines_.Set(e, std::sin(angle));
  });
}

// Random values, some pairs hidden, and NaN past the keys that a sequence has: what stands there
// must not matter.
void CacheFixture::FillBias(Rng& rng) {
  const CacheCase& c = case_;
  const BiasCase& b = c.bias;
  const int64_t step = b.layout.dim_step;
  bias_ = Place(c.bias_dtype(), b.one_batch ? 1 : c.batch(), b.one_query ? 1 : c.longest_queries(),
                b.one_head ? 1 : c.heads, step * c.most_rows, c.bias_place);
  bias_.dim = c.most_rows;
  bias_.strides.dim = step;
  std::vector<int64_t> keys;
  for (const CacheSequence& s : c.sequences) keys.push_back(s.used - s.leftpad + s.added);
  const int64_t most = *std::max_element(keys.begin(), keys.end());
  int64_t hidden_row = -1;
  bias_.ForEach([&](int64_t row, int64_t, int64_t j, int64_t e) {
    if (j == 0 && b.hides > 0 && rng.Chance(0.1)) hidden_row = row;
    const bool hides = row == hidden_row || rng.Chance(b.hides);
    const int64_t there = b.one_batch ? most : keys[static_cast<size_t>(row / bias_.rows)];
    const double value = hides ? -HUGE_VAL : b.size * rng.Normal();
    bias_.Set(e, b.spoils && j >= there ? std::nan("") : value);
  });
}

void CacheFixture::SetArrays() {
  const CacheCase& c = case_;
  cu_q = {0};
  cu_new = {0};
  const auto number = [](int64_t x) { return static_cast<int32_t>(x); };
  for (const CacheSequence& s : c.sequences) {
    cu_q.push_back(number(cu_q.back() + s.queries));
    cu_new.push_back(number(cu_new.back() + s.added));
    table.insert(table.end(), s.pages.begin(), s.pages.end());
    used_q.push_back(number(s.used_queries));
    used_k.push_back(number(s.used));
    entries.push_back(number(s.entry));
    leftpad.push_back(number(s.leftpad));
    q_position.push_back(number(s.q_position));
    prefix.push_back(number(s.prefix));
    rotary_position.push_back(number(s.rotary_position));
  }
}

CacheFixture::CacheFixture(const CacheCase& c) : case_(c) {
  const int64_t batch = c.varlen ? 1 : c.batch();
  const int64_t rows = c.varlen ? c.queries() : c.sequences[0].queries;
  const bool packed = c.append == STROBE_APPEND_PACKED;
  const int64_t rows_new = packed ? c.added() + c.past_new : c.longest_added();
  const int64_t batch_new = packed ? 1 : c.batch();
  q = Place(c.float8 ? DType::kE4m3 : c.dtype, batch, rows, c.heads, c.head_dim, c.q);
  out = Place(c.out_dtype, batch, rows, c.heads, c.head_dim_v, c.out);
  const DType dtype_new = c.float8 ? DType::kByte : c.dtype;
  k_new = Place(dtype_new, batch_new, rows_new, c.heads_kv, c.head_dim, c.k_new);
  v_new = Place(dtype_new, batch_new, rows_new, c.heads_kv, c.head_dim_v, c.v_new);
  lse = {nullptr, DType::kFloat32, batch, rows, c.heads, 1, 0, {c.heads * rows, 1, rows, 1}};
  lse.memory = Allocate(batch * rows * c.heads, DType::kFloat32, c.shift_lse);
  PlaceCache();
  SetArrays();

  Rng rng(c.seed ^ 0xCAC4Eu);
  if (c.float8) {
    FillNewCodes(k_new, k, rng);
    FillNewCodes(v_new, v, rng);
  } else {
    Fill(k_new, rng);
    Fill(v_new, rng);
  }
  int64_t first = 0;
  for (const CacheSequence& s : c.sequences) {  // queries that are not in use stay NaN
    for (int64_t i = 0; i < s.used_queries; ++i) {
      const int64_t row = first + i;
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t d = 0; d < c.head_dim; ++d) {
          const double unit = c.with_q_scale ? 16 : 1;  // which the scale takes back
          q.Set(q.Index(rows ? row / rows : 0, rows ? row % rows : 0, h, d), unit * rng.Normal());
        }
      }
    }
    first += s.queries;
  }
  FillCache(rng);
  FillRotary(rng);
  const int64_t slopes = c.alibi == STROBE_ALIBI_PER_HEAD ? c.heads : c.batch() * c.heads;
  for (int64_t n = 0; c.alibi && n < slopes; ++n) {
    slopes_.push_back(static_cast<float>(std::exp2(-rng.Uniform(1, 8))));
  }
  sinks_.batch = sinks_.rows = sinks_.dim = 1;
  sinks_.heads = c.heads;
  sinks_.strides = {0, 0, 1, 1};
  memory_.push_back(std::make_unique<Guarded>(c.heads, 4));
  sinks_.memory = memory_.back().get();
  for (int64_t h = 0; h < c.heads; ++h) {
    sinks_.Set(h, rng.Chance(0.1) ? -HUGE_VAL : rng.Normal() * (rng.Chance(0.2) ? 30 : 2));
  }
  if (c.mask.there) PackMask();
  if (c.has_bias) FillBias(rng);
  out.AllowWrite();
  if (c.with_lse) lse.AllowWrite();
  Seal();
}

void CacheFixture::Seal() {
  for (const auto& memory : memory_) memory->Seal();
}

void CacheFixture::PackMask() {
  mask_shape_ = case_.mask.Shape(case_.batch(), case_.heads);
  mask_ = MaskData(case_.mask, Problem(), cu_q, {}, case_.seed);
  mask_error_ = mask_.Pack(
      case_.mask.exact, [&] { return Problem(); }, mask_shape_,
      [&](int64_t words) { return packed_mask_ = Allocate(words, DType::kFloat32, 0); });
}

strobe_problem CacheFixture::Problem() const {
  const CacheCase& c = case_;
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.dtype = StrobeDType(c.float8 ? DType::kE4m3 : c.dtype);
  const bool is_default = c.out_dtype == (c.float8 ? DType::kBFloat16 : c.dtype);
  p.out_dtype = is_default ? STROBE_SAME_DTYPE : StrobeDType(c.out_dtype);
  p.has_q_scale = c.with_q_scale;
  if (c.with_q_scale) p.q_scale = q_scale.strides;
  p.batch = c.batch();
  p.seqlen_q = c.longest_queries();
  p.seqlen_k = c.most_rows;
  p.heads = c.heads;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.varlen = c.varlen;
  if (c.varlen) p.total_q = c.queries();
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.window_signed = c.window_signed;
  p.attention_chunk = c.chunk;
  p.softcap = c.softcap;
  p.alibi = c.alibi;
  p.has_sinks = c.with_sinks;
  p.sinks_outside_lse = c.sinks_outside_lse;
  p.threads = c.threads;
  p.batch_invariant = c.batch_invariant;
  p.q = q.strides;
  p.k = k.strides;
  p.v = v.strides;
  p.out = out.strides;
  p.has_seqused_q = c.with_used_q;
  p.has_seqused_k = c.with_lengths;
  p.has_q_position = c.with_q_position;
  p.has_prefix = c.with_prefix;
  p.has_leftpad = c.with_leftpad;
  p.has_cache_batch_idx = c.with_entries;
  if (c.form != Form::kNone || c.form_v) {
    constexpr int32_t kForms[] = {STROBE_SAME_DTYPE, STROBE_INT8, STROBE_FLOAT8_E4M3,
                                  STROBE_Q8_0,       STROBE_Q4_0, STROBE_FLOAT8_E5M2};
    p.kv_dtype = kForms[static_cast<int>(c.form)];
    if (c.form_v) {
      p.v_dtype =
          *c.form_v == Form::kNone ? StrobeDType(c.dtype) : kForms[static_cast<int>(*c.form_v)];
    }
    p.kv_scale = c.scale_kind;
    p.kv_scale_dtype = StrobeDType(c.scale_dtype);
    p.k_scale = k_scale.strides;
    p.v_scale = v_scale.strides;
  }
  p.cache = c.paged ? STROBE_CACHE_PAGED : STROBE_CACHE_CONTIGUOUS;
  if (c.paged) {
    p.pages = c.entries;
    p.page_size = c.rows;
    p.pages_per_sequence = c.columns;
    p.block_table_stride = c.table_stride;
  } else {
    p.cache_batch = c.entries;
  }
  p.mask = mask_shape_;
  if (c.has_bias) {
    const BiasCase& b = c.bias;
    const auto extent = [&](bool one, int64_t full) {
      return !one && b.extents_defaulted ? 0 : one ? 1 : full;
    };
    p.has_bias = 1;
    if (!b.same_dtype) p.bias_dtype = StrobeDType(c.bias_dtype());
    p.bias_batch = extent(b.one_batch, c.batch());
    p.bias_heads = extent(b.one_head, c.heads);
    p.bias_seqlen_q = extent(b.one_query, p.seqlen_q);
    p.bias = bias_.strides;
  }
  p.append = c.append;
  if (c.append) {
    p.seqlen_new = c.longest_added();
    p.k_new = k_new.strides;
    p.v_new = v_new.strides;
  }
  if (c.append == STROBE_APPEND_PACKED) p.total_new = c.added() + c.past_new;
  if (c.rotary_dim) {
    p.rotary_dim = c.rotary_dim;
    p.rotary_rows = c.rotary_rows;
    p.rotary_interleaved = c.interleaved;
    p.has_rotary_position = c.with_rotary_position;
  }
  return p;
}

strobe_forward_args CacheFixture::Args() const {
  const CacheCase& c = case_;
  // What has no elements may have no memory: NULL in every other case.
  const auto pointer = [&](const Strided& t) {
    return t.empty() && c.seed % 2 ? nullptr : t.pointer();
  };
  strobe_forward_args a{};
  a.struct_size = sizeof a;
  a.q = pointer(q);
  a.k = pointer(k);
  a.v = pointer(v);
  if (k_scale.memory) a.k_scale = pointer(k_scale);
  if (v_scale.memory) a.v_scale = pointer(v_scale);
  if (c.with_q_scale) a.q_scale = static_cast<const float*>(pointer(q_scale));
  a.out = pointer(out);
  a.lse = c.with_lse ? static_cast<float*>(pointer(lse)) : nullptr;
  a.alibi_slopes = slopes_.empty() ? nullptr : slopes_.data();
  if (c.with_sinks) a.sinks = static_cast<float*>(sinks_.pointer());
  if (c.has_bias) a.bias = pointer(bias_);
  if (c.varlen) a.cu_seqlens_q = cu_q.data();
  if (c.with_used_q) a.seqused_q = used_q.data();
  if (c.with_lengths) a.seqused_k = used_k.data();
  if (c.with_q_position) a.q_position = q_position.data();
  if (c.with_prefix) a.prefix = prefix.data();
  if (c.with_leftpad) a.leftpad = leftpad.data();
  if (c.with_entries) a.cache_batch_idx = entries.data();
  if (c.paged) a.block_table = PointerTo(table);
  if (packed_mask_) a.mask = packed_mask_->bytes();
  if (c.append == STROBE_APPEND_PACKED || c.longest_added() > 0) {
    a.k_new = pointer(k_new);
    a.v_new = pointer(v_new);
  }
  if (c.append == STROBE_APPEND_PACKED) a.cu_seqlens_k_new = cu_new.data();
  if (c.rotary_dim) {
    a.rotary_cos = cosines_.pointer();
    a.rotary_sin = sines_.pointer();
    if (c.with_rotary_position) a.rotary_position = rotary_position.data();
  }
  return a;
}

std::string CacheFixture::Run(const Launch& launch) {
  if (!mask_error_.empty()) return mask_error_;
  Seal();  // tests may have changed what was filled
  strobe_forward_args args = Args();
  const Launched launched = launch(Problem(), args);
  const strobe_status status = launched;
  unpacks_first_ = launched.unpacks_first;
  if (status != STROBE_OK) {
    return std::string(strobe_status_name(status)) + ": " + strobe_last_error();
  }
  const struct {
    const char* name;
    const Strided& tensor;
  } tensors[] = {{"q", q},     {"k cache", k},    {"v cache", v},  {"k_new", k_new}, {"out", out},
                 {"lse", lse}, {"cos", cosines_}, {"sin", sines_}, {"v_new", v_new}};
  for (const auto& t : tensors) {
    // A code may be what was there before.
    const bool every = t.tensor.dtype != DType::kByte;
    if (std::string wrong = t.tensor.memory->Check(t.name, every); !wrong.empty()) return wrong;
  }
  for (const Strided* t : {&k_scale, &v_scale, &q_scale}) {
    if (!t->memory) continue;
    if (std::string wrong = t->memory->Check("scales"); !wrong.empty()) return wrong;
  }
  return "";
}

// The case as the oracle has it; k and v as they are now.
oracle::Cache CacheFixture::OracleCache() const {
  const CacheCase& c = case_;
  oracle::Cache cache;
  cache.k = ReadCache(k);
  cache.v = ReadCache(v);
  cache.k_new = k_new.Read();
  cache.v_new = v_new.Read();
  if (c.rotary_dim) {
    cache.cosines = cosines_.Read();
    cache.sines = sines_.Read();
  }
  cache.interleaved = c.interleaved;
  int64_t new_begin = 0, b = 0;
  for (const CacheSequence& s : c.sequences) {
    const bool packed = c.append == STROBE_APPEND_PACKED;
    oracle::CachedSequence sequence{s.leftpad, s.used, s.added,
                                    packed ? new_begin : b * c.longest_added(), s.rotary_position};
    for (int64_t n = 0; n < s.used + s.added; ++n) {
      const bool wanted = n >= s.leftpad;  // pages before may be nonsense
      sequence.rows.push_back(!wanted   ? -1
                              : c.paged ? oracle::PagedRow(s.pages.data(), c.rows, n)
                                        : s.entry * c.rows + n);
    }
    cache.sequences.push_back(sequence);
    new_begin += s.added;
    ++b;
  }
  return cache;
}

// What the append wrote: values as they were, and turned ones as near as the dtype has them, with
// room for products in float32.
std::string CacheFixture::CheckAppended(const oracle::Cache& cache) const {
  const oracle::Appended wanted = oracle::Append(cache);
  for (int64_t n = 0; n < wanted.k.rows; ++n) {
    const int64_t row = wanted.rows[static_cast<size_t>(n)];
    for (int64_t h = 0; h < case_.heads_kv; ++h) {
      for (const bool of_k : {true, false}) {
        const char* const name = of_k ? "appended k" : "appended v";
        const Strided& t = of_k ? k : v;
        const double* const exact = (of_k ? wanted.k : wanted.v).at(n, h);
        const double* const got = (of_k ? cache.k : cache.v).at(row, h);
        const int64_t dim = of_k ? case_.head_dim : case_.head_dim_v;
        const int64_t turned = of_k ? case_.rotary_dim : 0;
        if (case_.float8) {  // codes, whose bytes are those that came
          const std::vector<uint8_t> bytes = BytesOf(t, row, h);
          if (!std::equal(bytes.begin(), bytes.end(), exact)) {
            return std::string(name) + ": other bytes in row " + std::to_string(row);
          }
          continue;
        }
        if (FormOf(t) != Form::kNone) {
          std::string wrong = CheckQuantised(name, t, row, h, exact, dim, turned > 0);
          if (!wrong.empty()) return wrong;
          continue;
        }
        for (int64_t d = 0; d < dim; ++d) {
          const double spacing = oracle::Spacing(case_.dtype, static_cast<float>(exact[d]));
          const double room = d < turned ? 0.5 * spacing + 1e-6 : 0;
          if (!(std::fabs(got[d] - exact[d]) <= room)) {
            return oracle::Describe(name, n, h, d, got[d], exact[d], room);
          }
        }
      }
    }
  }
  return "";
}

// That a row holds x: bit by bit, or, where x was turned in float32, with the codes nearest to it.
std::string CacheFixture::CheckQuantised(const char* name, const Strided& t, int64_t row,
                                         int64_t head, const double* x, int64_t dim,
                                         bool turned) const {
  const CacheCase& c = case_;
  const Form form = FormOf(t);
  const bool of_rows = ScaleKindOf(t) == STROBE_KV_SCALE_ROW;
  const std::vector<uint8_t> bytes = BytesOf(t, row, head);
  const float scale = ScaleOf(t, row / t.rows, row % t.rows, head);
  const std::vector<float> values(x, x + dim);
  std::optional<float> given;
  if (oracle::HasScales(form) && !of_rows) given = scale;
  const oracle::QuantisedRow made = oracle::Quantise(form, values, c.scale_dtype, given);
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  if (bytes == made.bytes && (!of_rows || bits(scale) == bits(made.scale))) return "";
  const std::vector<double> codes = oracle::CodeValues(form);
  for (int64_t d = 0; d < dim; ++d) {
    const double by = oracle::ScaleAt(form, bytes.data(), static_cast<double>(scale), d);
    const double wanted_by =
        oracle::ScaleAt(form, made.bytes.data(), static_cast<double>(made.scale), d);
    const double got = oracle::CodeAt(form, bytes.data(), d);
    const double units = by == 0 ? 0 : x[d] / by;
    double best = codes[0];
    for (const double code : codes) {
      if (std::fabs(code - units) < std::fabs(best - units)) best = code;
    }
    const bool near = std::fabs(got - units) <= std::fabs(best - units) + 1e-3;
    // The value of largest magnitude, of which there may be two of different signs, makes q4_0's.
    const bool scale_near =
        std::fabs(std::fabs(by) - std::fabs(wanted_by)) <= std::fabs(wanted_by) * 2e-3 + 6e-8;
    if (turned && near && scale_near) continue;
    return oracle::Describe(name, row, head, d, got * by, x[d], 0) + ", " + oracle::Name(form) +
           (turned ? "" : ", expected to the bit");
  }
  return turned ? "" : std::string(name) + ": other bits";
}

std::string CacheFixture::Judge() const { return JudgeWith(0).errors; }

oracle::Verdict CacheFixture::JudgeWith(double spare) const {
  const CacheCase& c = case_;
  const oracle::Cache cache = OracleCache();
  if (std::string wrong = CheckAppended(cache); !wrong.empty()) return {wrong, HUGE_VAL};

  oracle::Problem p;
  p.heads = c.heads;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.window_signed = c.window_signed;
  p.attention_chunk = c.chunk;
  p.scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.softcap = c.softcap;
  if (c.with_sinks) p.sinks = sinks_.Read().data;
  if (c.has_bias) {
    p.bias = bias_.Read();
    p.bias_queries = bias_.rows;
  }
  p.sinks_outside_lse = c.sinks_outside_lse;
  if (c.mask.there) {
    p.hides = [this](int64_t sequence, int64_t head, int64_t i, int64_t j) {
      return !mask_.Allows(sequence, head, i, j);
    };
  }
  if (c.random_blocks.seed) {
    p.hides = [blocks = c.random_blocks](int64_t sequence, int64_t head, int64_t i, int64_t j) {
      return blocks.hides(sequence, head, i, j);
    };
  }
  int64_t query = 0;
  for (const CacheSequence& s : c.sequences) {
    oracle::Sequence sequence{query, s.used_queries};
    if (c.with_q_position) sequence.q_position = s.q_position;
    if (c.with_prefix) sequence.prefix = s.prefix;
    p.sequences.push_back(sequence);
    query += s.queries;
  }
  for (int64_t b = 0; c.alibi && b < c.batch(); ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t at = c.alibi == STROBE_ALIBI_PER_HEAD ? h : b * c.heads + h;
      p.slopes.push_back(slopes_[static_cast<size_t>(at)]);
    }
  }

  const bool rounds_scaled = c.float8 && unpacks_first_;
  oracle::Tensor queries = q.Read();
  if (!rounds_scaled) ScaleSequences(q_scale, p.sequences, true, queries);
  oracle::Gathered dense = oracle::Gather(p, cache, queries);
  if (rounds_scaled) ScaleSequences(q_scale, dense.problem.sequences, false, dense.k);
  ScaleSequences(k_scale, dense.problem.sequences, false, dense.k);
  ScaleSequences(v_scale, dense.problem.sequences, false, dense.v);
  for (oracle::Tensor* const t : {&dense.k, &dense.v}) {
    for (double& x : t->data)
      if (rounds_scaled) x = oracle::Round(DType::kBFloat16, static_cast<float>(x));
  }
  const oracle::ForwardResult wanted = oracle::Forward(dense.problem, dense.q, dense.k, dense.v);
  oracle::Verdict verdict;
  if (c.with_lse) {
    // Queries are rounded when they were turned: half a spacing of each of a product's terms.
    const double rounding = c.rotary_dim == 0            ? 0
                            : c.dtype == DType::kFloat32 ? 0x1p-24
                            : c.dtype == DType::kFloat16 ? 0x1p-11
                                                         : 0x1p-8;
    const oracle::Worst worst = oracle::CompareWith(
        "lse", lse.Read(), wanted.lse, DType::kFloat32, [&](int64_t row, int64_t head) {
          const double size = *wanted.size.at(row, head);
          return oracle::LseTolerance(size) + rounding * size;
        });
    verdict.Add(worst);
  }
  // A framework stores the turned queries in their dtype.
  oracle::Tensor rounded = dense.q;
  for (double& x : rounded.data) x = oracle::Round(c.dtype, static_cast<float>(x));
  oracle::Yardstick yardstick(
      [&](uint64_t noise_seed) {
        return oracle::PlainAttention(dense.problem, c.dtype, rounded, dense.k, dense.v, nullptr,
                                      nullptr, noise_seed);
      },
      kMostDraws, spare);
  verdict.Add(yardstick.CheckOut(out.Read(), wanted, c.out_dtype));
  return verdict;
}

std::string CacheFixture::Bits(int64_t sequence) const {
  std::string bits;
  int64_t first = 0;
  for (int64_t b = 0; b < sequence; ++b) first += case_.sequences[static_cast<size_t>(b)].queries;
  const int64_t end = first + case_.sequences[static_cast<size_t>(sequence)].queries;
  for (const Strided* t : {&out, &lse}) {
    if (t == &lse && !case_.with_lse) continue;
    t->ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < first || row >= end) return;
      bits.append(t->memory->bytes() + e * t->memory->element_size(),
                  static_cast<size_t>(t->memory->element_size()));
    });
  }
  return bits;
}

CacheFixture::Launch ThroughTheLibrary(std::function<void(strobe_plan&)> edit) {
  return
      [edit](const strobe_problem& problem, strobe_forward_args& args) -> CacheFixture::Launched {
        strobe_plan plan;
        plan.struct_size = sizeof plan;
        if (const strobe_status s = strobe_plan_make(&problem, &plan); s != STROBE_OK) return s;
        if (edit) edit(plan);
        Guarded workspace(static_cast<int64_t>(plan.workspace_bytes), 1);
        workspace.Seal();
        args.workspace = workspace.bytes();
        args.workspace_bytes = plan.workspace_bytes;
        const strobe_status status = strobe_forward(&plan, &args);
        if (status == STROBE_OK && !workspace.CheckZones("workspace").empty()) {
          return STROBE_INTERNAL_ERROR;
        }
        return {status, plan.unpacks_first != 0};
      };
}

}  // namespace strobe_test
