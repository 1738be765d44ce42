#include "fixture.h"

#include <algorithm>
#include <cmath>

namespace strobe_test {
namespace {

strobe_strides Given(const Layout& layout, const Strided& t) {
  return layout.defaulted ? strobe_strides{0, 0, 0, 0} : t.strides;
}

}  // namespace

int32_t StrobeDType(oracle::DType dtype) {
  switch (dtype) {
    case oracle::DType::kFloat32:
      return STROBE_FLOAT32;
    case oracle::DType::kBFloat16:
      return STROBE_BFLOAT16;
    case oracle::DType::kFloat16:
      return STROBE_FLOAT16;
    case oracle::DType::kE4m3:
      return STROBE_FLOAT8_E4M3;
    case oracle::DType::kE5m2:
      return STROBE_FLOAT8_E5M2;
    case oracle::DType::kByte:
      break;  // of codes, which are of several dtypes
  }
  return -1;
}

std::vector<oracle::Sequence> Sequences(const Case& c) {
  std::vector<oracle::Sequence> sequences;
  int64_t at_q = 0, at_k = 0;
  for (size_t b = 0; b < c.seqlens_q.size(); ++b) {
    oracle::Sequence s{at_q, c.seqlens_q[b], at_k, c.seqlens_k[b]};
    if (c.has_seqused_q) s.q_length = c.arrays.seqused_q[b];
    if (c.has_seqused_k) s.k_length = c.arrays.seqused_k[b];
    if (c.has_q_position) s.q_position = c.arrays.q_position[b];
    // Of the keys in use: a longer prefix is all of them.
    if (c.has_prefix) s.prefix = c.arrays.prefix[b];
    sequences.push_back(s);
    at_q += c.seqlens_q[b];
    at_k += c.seqlens_k[b];
  }
  return sequences;
}

Fixture::Fixture(const Case& c) : case_(c) {
  const int64_t rows_q = c.varlen ? c.rows_q() : c.seqlens_q[0],
                rows_k = c.varlen ? c.rows_k() : c.seqlens_k[0];
  q = Place(case_.q, rows_q, c.heads, c.head_dim, c.q_dtype());
  k = Place(case_.k, rows_k, c.heads_kv, c.head_dim, c.kv_dtype());
  v = Place(case_.v, rows_k, c.heads_kv, c.head_dim_v, c.kv_dtype());
  out = Place(case_.out, rows_q, c.heads, c.head_dim_v, c.out_dtype());
  dout = Place(case_.dout, rows_q, c.heads, c.head_dim_v, c.dtype);
  dq = Place(case_.dq, rows_q, c.heads, c.head_dim, c.grad_dtype());
  dk = Place(case_.dk, rows_k, c.heads_kv, c.head_dim, c.grad_dtype());
  dv = Place(case_.dv, rows_k, c.heads_kv, c.head_dim_v, c.grad_dtype());
  if (c.packing == Packing::kQkv) {
    Pack({&q, &k, &v}, c.q);
    Pack({&dq, &dk, &dv}, c.dq);
    case_.q.defaulted = case_.dq.defaulted = false;
  } else if (c.packing == Packing::kKv) {
    Pack({&k, &v}, c.k);
    Pack({&dk, &dv}, c.dk);
  }
  if (c.packing != Packing::kSeparate) {
    case_.k.defaulted = case_.v.defaulted = case_.dk.defaulted = case_.dv.defaulted = false;
  }
  lse_ = PlaceRows();
  dlse_ = PlaceRows();
  delta_ = PlaceRows();

  oracle::Rng rng(c.seed ^ 0x5EEDF111u);
  if (c.float8) PlaceScales();
  Fill(q, c.size_qk, rng);
  Fill(k, c.size_qk, rng);
  Fill(v, c.size_v, rng);
  Fill(dout, c.size_dout, rng);
  Fill(dlse_, c.size_dout, rng);
  if (c.constant_keys) {
    k.ForEach(
        [&](int64_t, int64_t, int64_t d, int64_t e) { k.Set(e, 0.01 * static_cast<double>(d)); });
  }
  if (c.special != Special::kNone) PutSpecials(rng);
  PoisonUnused();
  if (c.float8) FillScales();
  const int64_t slopes = c.alibi == STROBE_ALIBI_PER_HEAD ? c.heads
                         : c.alibi                        ? c.batch() * c.heads
                                                          : 0;
  for (int64_t i = 0; i < slopes; ++i) {
    slopes_.push_back(
        static_cast<float>(std::exp2(-rng.Uniform(0, 8)) * (rng.Chance(0.1) ? -1 : 1)));
  }
  PlaceSinks(rng);
  cu_q_ = cu_k_ = {0};
  for (size_t b = 0; b < c.seqlens_q.size(); ++b) {
    cu_q_.push_back(static_cast<int32_t>(cu_q_.back() + c.seqlens_q[b]));
    cu_k_.push_back(static_cast<int32_t>(cu_k_.back() + c.seqlens_k[b]));
  }
  if (c.mask.there) PackMask();
  if (c.has_bias) FillBias(rng);  // with the rest of the problem known
}

// Of each sequence's key heads.
void Fixture::PlaceScales() {
  const Float8Case& f = case_.float8_case;
  const std::pair<Strided*, const Layout*> all[] = {
      {&q_scale, &f.q_scale}, {&k_scale, &f.k_scale}, {&v_scale, &f.v_scale}};
  for (const auto& [t, layout] : all) {
    *t = PlaceEntries(*layout, case_.batch(), 1, case_.heads_kv, 1, oracle::DType::kFloat32);
    t->strides.seqlen = 0;
  }
}

// Codes are made 16 times as large as the case has the values, to be normal numbers of float8;
// where there is a scale, it takes them back.
void Fixture::FillScales() {
  oracle::Rng rng(case_.seed ^ 0x5CA1E5u);
  for (const Strided* const t : {&q_scale, &k_scale, &v_scale}) {
    t->ForEach(
        [&](int64_t, int64_t, int64_t, int64_t e) { t->Set(e, rng.Uniform(0.7, 1.4) / 16); });
  }
}

// The sequence that a row of a tensor is of, of all that there are; of rows that are nobody's, any.
int64_t Fixture::SequenceOf(const Strided& t, int64_t row) const {
  if (!case_.varlen) return row / t.rows;
  const std::vector<int32_t>& starts = &t == &q ? cu_q_ : cu_k_;
  const auto next = std::upper_bound(starts.begin(), starts.end(), static_cast<int32_t>(row));
  return std::min<int64_t>(next - starts.begin(), case_.batch()) - 1;
}

oracle::Tensor Fixture::Values(const Strided& t) const {
  oracle::Tensor values = t.Read();
  if (!case_.float8 || !case_.HasScale(&t == &q)) return values;
  const Strided& scales = &t == &q ? q_scale : &t == &k ? k_scale : v_scale;
  const int64_t group = t.heads / case_.heads_kv;
  for (int64_t row = 0; row < values.rows; ++row) {
    for (int64_t head = 0; head < values.heads; ++head) {
      const float by = scales.Get(scales.Index(SequenceOf(t, row), 0, head / group, 0));
      for (int64_t d = 0; d < values.dim; ++d) values.at(row, head)[d] *= static_cast<double>(by);
    }
  }
  return values;
}

void Fixture::PackMask() {
  mask_shape_ = case_.mask.Shape(case_.batch(), case_.heads);
  mask_ = MaskData(case_.mask, MakeProblem(STROBE_FORWARD), cu_q_, cu_k_, case_.seed);
  mask_error_ = mask_.Pack(
      case_.mask.exact, [&] { return MakeProblem(STROBE_FORWARD); }, mask_shape_,
      [&](int64_t words) { return packed_mask_ = Allocate(words, 4, 0); });
}

Guarded* Fixture::Allocate(int64_t elements, int64_t element_size, int64_t shift) {
  memory_.push_back(std::make_unique<Guarded>(elements, element_size, shift * element_size));
  return memory_.back().get();
}

Strided Fixture::Place(const Layout& layout, int64_t rows, int64_t heads, int64_t dim,
                       oracle::DType dtype) {
  Strided t = PlaceEntries(layout, case_.varlen ? 1 : case_.batch(), rows, heads, dim, dtype);
  if (case_.varlen && !layout.defaulted) t.strides.batch = layout.odd_stride;
  return t;
}

Strided Fixture::PlaceEntries(const Layout& layout, int64_t batch, int64_t rows, int64_t heads,
                              int64_t dim, oracle::DType dtype) {
  Strided t;
  t.dtype = dtype;
  t.batch = batch;
  t.rows = rows;
  t.heads = heads;
  t.dim = dim;
  const int64_t sizes[3] = {t.batch, t.rows, t.heads};
  int64_t* const strides[3] = {&t.strides.batch, &t.strides.seqlen, &t.strides.head};
  t.strides.dim = layout.dim_step;

  const int64_t reach = (std::max<int64_t>(dim, 1) - 1) * layout.dim_step;
  int64_t span = std::abs(reach) + std::min<int64_t>(dim, 1);
  if (reach < 0) t.origin -= reach;
  for (int i = 2; i >= 0; --i) {
    const int dimension = layout.order[i];
    const int64_t step = layout.broadcast[dimension] ? 0 : span + layout.pad[dimension];
    if (step) span = step * std::max<int64_t>(sizes[dimension], 1);
    *strides[dimension] = layout.negative[dimension] ? -step : step;
    if (layout.negative[dimension]) t.origin += step * (std::max<int64_t>(sizes[dimension], 1) - 1);
    if (sizes[dimension] <= 1 && !layout.defaulted) *strides[dimension] = layout.odd_stride;
  }
  t.memory = Allocate(t.empty() ? 0 : span, oracle::ElementSize(t.dtype), layout.shift);
  return t;
}

// Lays the tensors side by side in each row: [batch, rows, all columns of all heads].
void Fixture::Pack(const std::vector<Strided*>& tensors, const Layout& layout) {
  int64_t columns = 0;
  for (const Strided* t : tensors) columns += t->heads * t->dim;
  const int64_t batch = tensors[0]->batch, rows = tensors[0]->rows, row = columns + layout.pad[1];
  Guarded* const memory =
      Allocate(batch * rows * row, oracle::ElementSize(tensors[0]->dtype), layout.shift);
  int64_t at = 0;
  for (Strided* t : tensors) {
    t->memory = memory;
    t->origin = at;
    t->strides = {rows * row, row, t->dim, 1};
    at += t->heads * t->dim;
  }
}

// float32 [batch, heads, seqlen_q], or [heads, total_q]: as a Strided with batch 1 where varlen.
Strided Fixture::PlaceRows() {
  Strided t;
  t.batch = case_.varlen ? 1 : case_.batch();
  t.rows = case_.varlen ? case_.rows_q() : case_.seqlens_q[0];
  t.heads = case_.heads;
  t.dim = 1;
  t.strides = {t.heads * t.rows, 1, t.rows, 1};
  t.memory = Allocate(t.batch * t.heads * t.rows, 4, 0);
  return t;
}

// One for each head, as an attention sink may be: among the scores, far above or below them, and
// none at all; where a case has NaN, also what takes all weight, and NaN.
void Fixture::PlaceSinks(oracle::Rng& rng) {
  const auto of_heads = [&] {
    Strided t;
    t.batch = t.rows = t.dim = 1;
    t.heads = case_.heads;
    t.strides = {0, 0, 1, 1};
    t.memory = Allocate(t.heads, 4, 0);
    return t;
  };
  sinks_ = of_heads();
  dsinks_ = of_heads();
  const bool tame = case_.special == Special::kInfinity;  // no weight may become 0
  const double none = case_.special == Special::kNan ? 0.91 : 1;
  // How far a sink outside lse may be above the keys has a bound, of which semantics.md speaks.
  const bool bounded = case_.sinks_outside_lse && case_.has_dlse;
  sinks_.ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
    const double u = tame ? 0 : rng.Uniform();
    sinks_.Set(e, u < 0.6    ? rng.Normal()
                  : u < 0.75 ? (bounded ? 2 : 10) * rng.Normal()
                  : u < 0.85 ? (bounded ? -100 * std::abs(rng.Normal()) : 100 * rng.Normal())
                  : u < none ? -HUGE_VAL
                  : u < 0.96 ? HUGE_VAL
                             : std::nan(""));
  });
}

void Fixture::Fill(const Strided& t, double size, oracle::Rng& rng) const {
  // (FillScales: what takes it back.)
  const bool is_q = &t == &q, is_input = is_q || &t == &k || &t == &v;
  if (case_.float8 && is_input && case_.HasScale(is_q)) size *= 16;
  t.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { t.Set(e, size * rng.Normal()); });
}

void Fixture::PutSpecials(oracle::Rng& rng) const {
  const double inf = HUGE_VAL;
  const bool nan = case_.special == Special::kNan;
  const Strided* const inputs[] = {&q, &k, &v, &dout};
  const int64_t count = rng.Integer(1, 4);
  for (int64_t n = 0; n < count; ++n) {
    // Of dout only NaN: with infinities, dout . out differs from the mean of the weights' gradients
    // that it stands for.
    const Strided& t = *inputs[rng.Integer(0, nan ? 3 : 2)];
    const int64_t b = rng.Integer(0, 1'000'000), row = rng.Integer(0, 1'000'000),
                  head = rng.Integer(0, 1'000'000);
    const auto put = [&](const Strided& to) {
      const int64_t d = rng.Integer(0, to.dim - 1);
      const double x = nan ? std::nan("") : rng.Chance(0.5) ? inf : -inf;
      if (!to.empty()) to.Set(to.Index(b % to.batch, row % to.rows, head % to.heads, d), x);
    };
    put(t);
    // A key whose scores are infinite, and its value: where the weight is 0, the product is NaN.
    if (!nan && &t == &k && rng.Chance(0.5)) put(v);
  }
}

// NaN in the inputs' rows that are not in use, but where broadcasting makes a row stand for others.
void Fixture::PoisonUnused() const {
  const std::vector<oracle::Sequence> sequences = Sequences(case_);
  const auto poison = [&](const Strided& t, const Layout& layout, bool of_q) {
    if (layout.broadcast[0] || layout.broadcast[1]) return;
    std::vector<bool> used(static_cast<size_t>(t.batch * t.rows), false);
    for (const oracle::Sequence& s : sequences) {
      const int64_t begin = of_q ? s.q_begin : s.k_begin;
      std::fill_n(used.begin() + begin, of_q ? s.q_length : s.k_length, true);
    }
    t.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (!used[static_cast<size_t>(row)]) t.Set(e, std::nan(""));
    });
  };
  if (case_.has_seqused_q || case_.past_q > 0) {
    poison(q, case_.q, true);
    poison(dout, case_.dout, true);
    poison(dlse_, {}, true);
  }
  if (case_.has_seqused_k || case_.past_k > 0) {
    poison(k, case_.k, false);
    poison(v, case_.v, false);
  }
}

// Random values, some pairs hidden, and NaN where the mask hides a pair from whoever shares it:
// what stands there must not matter.
void Fixture::FillBias(oracle::Rng& rng) {
  const BiasCase& b = case_.bias;
  bias = PlaceEntries(b.layout, case_.bias_batch(), case_.bias_queries(), case_.bias_heads(),
                      case_.bias_keys(), case_.bias_dtype());
  if (case_.has_dbias) {
    dbias = PlaceEntries(b.gradient, case_.bias_batch(), case_.bias_queries(), case_.bias_heads(),
                         case_.bias_keys(), case_.dbias_dtype());
  }
  int64_t hidden_row = -1;
  bias.ForEach([&](int64_t row, int64_t, int64_t j, int64_t e) {
    if (j == 0 && b.hides > 0 && rng.Chance(0.1)) hidden_row = row;
    const bool hides = row == hidden_row || rng.Chance(b.hides);
    bias.Set(e, hides ? -HUGE_VAL : b.size * rng.Normal());
  });
  if (case_.special != Special::kNone && rng.Chance(0.3) && !bias.empty()) {
    const int64_t e = bias.Index(rng.Integer(0, bias.batch - 1), rng.Integer(0, bias.rows - 1),
                                 rng.Integer(0, bias.heads - 1), rng.Integer(0, bias.dim - 1));
    bias.Set(e, case_.special == Special::kNan ? std::nan("") : HUGE_VAL);
  }
  // Where strides of 0 make one element stand for several pairs, some of them may be seen.
  const bool repeats = b.layout.dim_step == 0 || b.layout.broadcast[0] || b.layout.broadcast[1] ||
                       b.layout.broadcast[2];
  if (!b.spoils || repeats) return;
  oracle::Tensor seen(bias.batch * bias.rows, bias.heads, bias.dim);
  const oracle::Problem p = OracleProblem();
  for (int64_t s = 0; s < case_.batch(); ++s) {
    for (int64_t i = 0; i < p.sequences[static_cast<size_t>(s)].q_length; ++i) {
      for (int64_t h = 0; h < case_.heads; ++h) {
        const auto at = p.BiasAt(s, h, i);
        for (const int64_t j : oracle::VisibleKeys(p, s, h, i)) seen.at(at.row, at.head)[j] = 1;
      }
    }
  }
  bias.ForEach([&](int64_t row, int64_t head, int64_t j, int64_t e) {
    if (seen.at(row, head)[j] == 0 && std::isfinite(bias.Get(e))) bias.Set(e, std::nan(""));
  });
}

strobe_problem Fixture::MakeProblem(strobe_direction direction) const {
  const Case& c = case_;
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.direction = direction;
  p.dtype = StrobeDType(c.q_dtype());
  p.batch = c.batch();
  p.seqlen_q = c.longest_q() + c.slack_q;
  p.seqlen_k = c.longest_k() + c.slack_k;
  p.heads = c.heads;
  p.heads_kv = c.fields_defaulted && c.heads_kv == c.heads ? 0 : c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.fields_defaulted && c.head_dim_v == c.head_dim ? 0 : c.head_dim_v;
  p.varlen = c.varlen;
  if (c.varlen) {
    p.total_q = c.rows_q();
    p.total_k = c.rows_k();
  }
  strobe::copy_options(c, p);
  p.mask = mask_shape_;
  if (direction == STROBE_FORWARD) {
    p.has_dlse = p.accumulate = 0;
    p.has_delta = p.has_dsinks = p.has_dbias = 0;
  }
  if (c.float8) {
    if (c.float8_case.e5m2) p.kv_dtype = STROBE_FLOAT8_E5M2;
    if (c.out_dtype() != oracle::DType::kBFloat16) p.out_dtype = StrobeDType(c.out_dtype());
    if (c.has_q_scale) p.q_scale = Given(c.float8_case.q_scale, q_scale);
    if (c.float8_case.scaled) {
      p.kv_scale = STROBE_KV_SCALE_BATCH_HEAD;
      p.k_scale = Given(c.float8_case.k_scale, k_scale);
      p.v_scale = Given(c.float8_case.v_scale, v_scale);
    }
  }
  if (c.out_float32) p.out_dtype = STROBE_FLOAT32;
  if (direction == STROBE_BACKWARD && c.grad_float32) p.grad_dtype = STROBE_FLOAT32;
  p.q = Given(c.q, q);
  p.k = Given(c.k, k);
  p.v = Given(c.v, v);
  p.out = Given(c.out, out);
  if (direction == STROBE_BACKWARD) {
    p.dout = Given(c.dout, dout);
    p.dq = Given(c.dq, dq);
    p.dk = Given(c.dk, dk);
    p.dv = Given(c.dv, dv);
  }
  if (c.has_bias) {
    const auto extent = [&](bool one, int64_t full) {
      return !one && c.bias.extents_defaulted ? 0 : one ? 1 : full;
    };
    if (!c.bias.same_dtype) p.bias_dtype = StrobeDType(c.bias_dtype());
    p.bias_batch = extent(c.bias.one_batch, c.batch());
    p.bias_heads = extent(c.bias.one_head, c.heads);
    p.bias_seqlen_q = extent(c.bias.one_query, p.seqlen_q);
    p.bias = Given(c.bias.layout, bias);
    if (p.has_dbias && c.bias.grad_float32) p.dbias_dtype = STROBE_FLOAT32;
    if (p.has_dbias) p.dbias = Given(c.bias.gradient, dbias);
  }
  return p;
}

strobe_forward_args Fixture::ForwardArgs() const {
  // What has no elements may have no memory: NULL in every other case.
  const auto pointer = [&](const Strided& t) {
    return t.empty() && case_.seed % 2 ? nullptr : t.pointer();
  };
  strobe_forward_args a{};
  a.struct_size = sizeof a;
  a.q = pointer(q);
  a.k = pointer(k);
  a.v = pointer(v);
  a.out = pointer(out);
  a.lse = static_cast<float*>(pointer(lse_));
  a.cu_seqlens_q = case_.varlen ? cu_q_.data() : nullptr;
  a.cu_seqlens_k = case_.varlen ? cu_k_.data() : nullptr;
  a.alibi_slopes = slopes_.empty() ? nullptr : slopes_.data();
  a.sinks = case_.has_sinks ? static_cast<float*>(sinks_.pointer()) : nullptr;
  a.bias = case_.has_bias ? pointer(bias) : nullptr;
  a.dropout_seed = case_.dropout_seed;
  a.dropout_offset = case_.dropout_offset;
  strobe::map_arrays(case_.arrays, a, [](const std::vector<int32_t>& values) {
    return values.empty() ? nullptr : values.data();
  });
  a.mask = packed_mask_ ? packed_mask_->bytes() : nullptr;
  if (case_.has_q_scale) a.q_scale = static_cast<const float*>(q_scale.pointer());
  if (case_.float8_case.scaled) {
    a.k_scale = k_scale.pointer();
    a.v_scale = v_scale.pointer();
  }
  return a;
}

strobe_backward_args Fixture::BackwardArgs() const {
  const auto pointer = [&](const Strided& t) {
    return t.empty() && case_.seed % 2 ? nullptr : t.pointer();
  };
  const strobe_forward_args f = ForwardArgs();
  strobe_backward_args a{};
  a.struct_size = sizeof a;
  a.q = f.q;
  a.k = f.k;
  a.v = f.v;
  a.out = case_.has_delta && case_.seed % 2 ? nullptr : f.out;
  a.lse = f.lse;
  a.dout = pointer(dout);
  a.dlse = case_.has_dlse ? static_cast<float*>(pointer(dlse_)) : nullptr;
  a.delta = case_.has_delta ? static_cast<float*>(pointer(delta_)) : nullptr;
  a.dq = pointer(dq);
  a.dk = pointer(dk);
  a.dv = pointer(dv);
  a.bias = f.bias;
  a.dbias = case_.has_dbias ? pointer(dbias) : nullptr;
  a.cu_seqlens_q = f.cu_seqlens_q;
  a.cu_seqlens_k = f.cu_seqlens_k;
  a.alibi_slopes = f.alibi_slopes;
  a.sinks = f.sinks;
  a.dsinks = case_.has_dsinks ? static_cast<float*>(dsinks_.pointer()) : nullptr;
  a.dropout_seed = f.dropout_seed;
  a.dropout_offset = f.dropout_offset;
  strobe::map_arrays(f, a, [](const int32_t* values) { return values; });
  a.mask = f.mask;
  return a;
}

namespace {

// Plans and launches with a workspace that is poison inside and watched around.
template <typename Args, typename Launch>
std::string PlanAndLaunch(const char* name, const strobe_problem& problem, Args args,
                          bool own_workspace, const std::function<void(strobe_plan&)>& edit,
                          Launch launch) {
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  strobe_status status = strobe_plan_make(&problem, &plan);
  if (status != STROBE_OK) return std::string(name) + " plan: " + strobe_last_error();
  if (edit) edit(plan);
  Guarded workspace(static_cast<int64_t>(plan.workspace_bytes), 1);
  workspace.Seal();
  if (!own_workspace) {
    args.workspace = workspace.bytes();
    args.workspace_bytes = plan.workspace_bytes;
  }
  status = launch(&plan, &args);
  if (status != STROBE_OK) return std::string(name) + ": " + strobe_last_error();
  return workspace.CheckZones(std::string(name) + " workspace");
}

}  // namespace

std::string Fixture::Forward(bool with_lse) {
  return Forward(
      [this](const strobe_problem& problem, const strobe_forward_args& args) {
        return PlanAndLaunch("forward", problem, args, case_.own_workspace, edit_plan,
                             strobe_forward);
      },
      with_lse);
}

std::string Fixture::Forward(const ForwardLaunch& launch, bool with_lse) {
  if (!mask_error_.empty()) return mask_error_;
  Seal();
  out.AllowWrite();
  strobe_forward_args args = ForwardArgs();
  if (with_lse) {
    lse_.AllowWrite();
  } else {
    args.lse = nullptr;
  }
  const std::string error = launch(MakeProblem(STROBE_FORWARD), args);
  return error.empty() ? CheckMemory("forward") : error;
}

std::string Fixture::Backward() {
  return Backward([this](const strobe_problem& problem, const strobe_backward_args& args) {
    return PlanAndLaunch("backward", problem, args, case_.own_workspace, edit_plan,
                         strobe_backward);
  });
}

std::string Fixture::Backward(const BackwardLaunch& launch) {
  if (case_.has_delta) FillDelta();
  if (case_.accumulate) FillGradients();
  Seal();
  dq.AllowWrite();
  dk.AllowWrite();
  dv.AllowWrite();
  if (case_.has_dsinks) dsinks_.AllowWrite();
  if (case_.has_dbias) dbias.AllowWrite();
  const std::string error = launch(MakeProblem(STROBE_BACKWARD), BackwardArgs());
  return error.empty() ? CheckMemory("backward", !case_.accumulate) : error;
}

void Fixture::Poison(strobe_direction direction) {
  const auto poison = [](const Strided& t) {
    t.ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
      char* const at = static_cast<char*>(t.memory->at(e));
      for (int64_t i = 0; i < t.memory->element_size(); i += 2) std::memcpy(at + i, &kPoison, 2);
    });
  };
  if (direction == STROBE_FORWARD) {
    poison(out);
    poison(lse_);
  } else {
    poison(dq);
    poison(dk);
    poison(dv);
    poison(dsinks_);
    if (case_.has_dbias) poison(dbias);
  }
}

void Fixture::Seal() {
  for (const auto& m : memory_) m->Seal();
}

// From out, as the library would make it. NaN where rows are not in use.
void Fixture::FillDelta() {
  const oracle::Tensor o = out.Read(), g = dout.Read(), dlse = ReadDlse(), lse = ReadLse();
  delta_.ForEach([&](int64_t i, int64_t head, int64_t, int64_t e) {
    // The rows of lse are counted as those of q are, batch by batch.
    double sum = 0;
    for (int64_t d = 0; d < o.dim; ++d) sum += o.at(i, head)[d] * g.at(i, head)[d];
    if (case_.delta_has_dlse) sum -= *dlse.at(i, head);
    delta_.Set(e, sum);
  });
  // Of a row that sees no key, out is 0 whatever dout holds.
  const oracle::Problem problem = OracleProblem();
  for (size_t b = 0; case_.special != Special::kNone && b < problem.sequences.size(); ++b) {
    const oracle::Sequence& s = problem.sequences[b];
    for (int64_t i = 0; i < s.q_length; ++i) {
      for (int64_t head = 0; head < case_.heads; ++head) {
        if (!oracle::VisibleKeys(problem, static_cast<int64_t>(b), head, i).empty()) continue;
        const int64_t row = s.q_begin + i, rows = delta_.rows;
        const double sum = case_.delta_has_dlse ? -*dlse.at(row, head) : 0;
        delta_.Set(delta_.Index(row / rows, row % rows, head, 0), sum);
      }
    }
  }
  std::vector<bool> used(static_cast<size_t>(o.rows), false);
  for (const oracle::Sequence& s : Sequences(case_)) {
    std::fill_n(used.begin() + s.q_begin, s.q_length, true);
  }
  delta_.ForEach([&](int64_t i, int64_t, int64_t, int64_t e) {
    if (!used[static_cast<size_t>(i)]) delta_.Set(e, std::nan(""));
  });
}

// What a launch adds to: the same numbers each time.
void Fixture::FillGradients() {
  oracle::Rng rng(case_.seed ^ 0xADDEDu);
  for (const Strided* t : {&dq, &dk, &dv, &dsinks_}) Fill(*t, case_.size_dout, rng);
  before_ = {dq.Read(), dk.Read(), dv.Read(), dsinks_.Read()};
}

std::string Fixture::CheckMemory(const char* call, bool every) {
  const auto name = [&](const Guarded* m) -> std::string {
    const std::pair<const char*, const Strided*> all[] = {{"q", &q},
                                                          {"k", &k},
                                                          {"v", &v},
                                                          {"out", &out},
                                                          {"dout", &dout},
                                                          {"dq", &dq},
                                                          {"dk", &dk},
                                                          {"dv", &dv},
                                                          {"lse", &lse_},
                                                          {"dlse", &dlse_},
                                                          {"delta", &delta_},
                                                          {"sinks", &sinks_},
                                                          {"dsinks", &dsinks_},
                                                          {"bias", &bias},
                                                          {"q_scale", &q_scale},
                                                          {"k_scale", &k_scale},
                                                          {"v_scale", &v_scale},
                                                          {"dbias", &dbias}};
    for (const auto& [label, t] : all) {
      if (t->memory == m) return std::string(call) + ": memory of " + label;
    }
    return std::string(call) + ": unused memory";
  };
  for (const auto& m : memory_) {
    const std::string error = m->Check(name(m.get()), every);
    if (!error.empty()) return error;
    m->ForbidWrites();
  }
  return "";
}

oracle::Problem Fixture::OracleProblem() const {
  const Case& c = case_;
  oracle::Problem p;
  p.sequences = Sequences(c);
  p.heads = c.heads;
  p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  strobe::copy_options(c, p);
  p.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(c.head_dim))
                                : static_cast<double>(c.scale);
  for (int64_t b = 0; c.alibi && b < c.batch(); ++b) {
    const int64_t first = c.alibi == STROBE_ALIBI_PER_HEAD ? 0 : b * c.heads;
    p.slopes.insert(p.slopes.end(), slopes_.begin() + first, slopes_.begin() + first + c.heads);
  }
  if (c.has_sinks) p.sinks = sinks_.Read().data;
  if (c.has_bias) {
    p.bias = bias.Read();
    p.bias_queries = bias.rows;
  }
  if (c.random_blocks.seed) {
    p.hides = [blocks = c.random_blocks](int64_t sequence, int64_t head, int64_t i, int64_t j) {
      return blocks.hides(sequence, head, i, j);
    };
  }
  if (c.mask.there) {
    p.hides = [this](int64_t sequence, int64_t head, int64_t i, int64_t j) {
      return !mask_.Allows(sequence, head, i, j);
    };
  }
  if (c.dropout_p > 0) {
    p.keep_rows = c.longest_q();
    p.keep_columns = c.longest_k();
    p.keep = oracle::DropoutMask(
        c.batch(), c.heads, p.keep_rows, p.keep_columns, c.dropout_p, c.dropout_seed,
        c.dropout_offset,
        {c.dropout_first_query, c.dropout_first_key, c.dropout_first_head, c.dropout_heads});
  }
  return p;
}

oracle::Tensor Fixture::ReadRows(const Strided& t) const { return t.Read(); }

std::string Fixture::Bits(const Strided& t) {
  std::string bits;
  const int64_t size = t.memory->element_size();
  t.ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
    bits.append(static_cast<const char*>(t.memory->at(e)), static_cast<size_t>(size));
  });
  return bits;
}

void Fixture::RestoreLse(const std::string& bits) const {
  size_t at = 0;
  lse_.ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
    std::memcpy(lse_.memory->at(e), bits.data() + at, 4);
    at += 4;
  });
}

}  // namespace strobe_test
