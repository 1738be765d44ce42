#include "cli/case.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cli/buffer.h"
#include "cli/compare.h"
#include "cli/dtype.h"
#include "cli/measure.h"

namespace strobe::cli {
namespace {

// A NaN in every dtype, so that what is read before it is written shows.
constexpr std::byte kPoison{0xff};
constexpr int64_t kGuard = 16;  // elements before and after each tensor

std::vector<int64_t> Offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

}  // namespace

CaseTensor::CaseTensor(DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
                       Placement placement)
    : dtype_(dtype), batch_(batch), seqlen_(seqlen), heads_(heads), dim_(dim), offset_(kGuard) {
  switch (placement) {
    case Placement::kContiguous:
      strides_ = {.batch = seqlen * heads * dim, .seqlen = heads * dim, .head = dim, .dim = 1};
      break;
    case Placement::kHeadsFirst:
      strides_ = {.batch = heads * seqlen * dim, .seqlen = dim, .head = seqlen * dim, .dim = 1};
      break;
    case Placement::kPacked:  // the middle one of three, as k is in qkv
      strides_ = {
          .batch = seqlen * 3 * heads * dim, .seqlen = 3 * heads * dim, .head = dim, .dim = 1};
      offset_ += heads * dim;
      break;
    case Placement::kPadded:  // odd gaps everywhere
      strides_ = {.batch = 0, .seqlen = 0, .head = dim + 3, .dim = 1};
      strides_.seqlen = heads * strides_.head + 5;
      strides_.batch = seqlen * strides_.seqlen + 7;
      break;
  }
  const int64_t elements =
      offset_ + batch * std::max(strides_.batch, seqlen * strides_.seqlen) + kGuard;
  bytes_.assign(static_cast<size_t>(elements) * cli::Bytes(dtype), kPoison);
}

size_t CaseTensor::Index(int64_t row, int64_t head, int64_t i) const {
  return static_cast<size_t>(offset_ + row / seqlen_ * strides_.batch +
                             row % seqlen_ * strides_.seqlen + head * strides_.head + i);
}

void CaseTensor::FillNormal(Random* random) {
  for (int64_t row = 0; row < rows(); ++row) {
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < dim_; ++i) Set(row, h, i, static_cast<float>(random->Normal()));
    }
  }
}

void CaseTensor::Set(int64_t row, int64_t head, int64_t i, float value) {
  Store(dtype_, bytes_.data(), Index(row, head, i), value);
}

double CaseTensor::Get(int64_t row, int64_t head, int64_t i) const {
  return Load(dtype_, bytes_.data(), Index(row, head, i));
}

std::vector<double> CaseTensor::Values() const {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(rows() * heads_ * dim_));
  for (int64_t row = 0; row < rows(); ++row) {
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < dim_; ++i) values.push_back(Get(row, h, i));
    }
  }
  return values;
}

bool CaseTensor::RoomUntouched() const {
  const size_t element = cli::Bytes(dtype_);
  std::vector<bool> owned(bytes_.size(), false);
  for (int64_t row = 0; row < rows(); ++row) {
    for (int64_t h = 0; h < heads_; ++h) {
      const auto first = owned.begin() + static_cast<std::ptrdiff_t>(Index(row, h, 0) * element);
      std::fill(first, first + static_cast<std::ptrdiff_t>(static_cast<size_t>(dim_) * element),
                true);
    }
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!owned[i] && bytes_[i] != kPoison) return false;
  }
  return true;
}

void* CaseTensor::In(Mirror* mirror) {
  return mirror->In(bytes_.data(), bytes_.size()) +
         static_cast<size_t>(offset_) * cli::Bytes(dtype_);
}

void* CaseTensor::Out(Mirror* mirror) {
  return mirror->Out(bytes_.data(), bytes_.size()) +
         static_cast<size_t>(offset_) * cli::Bytes(dtype_);
}

Case::Case(const CaseSpec& spec) : spec_(spec), problem_(spec.problem) {
  Problem& p = problem_;
  Random random(spec.seed);
  if (p.heads_kv == 0) p.heads_kv = p.heads;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  p.batch = static_cast<int64_t>(spec.lengths_q.size());
  p.seqlen_q = *std::max_element(spec.lengths_q.begin(), spec.lengths_q.end());
  p.seqlen_k = *std::max_element(spec.lengths_k.begin(), spec.lengths_k.end());
  int64_t batch = p.batch;
  int64_t rows_q = p.seqlen_q;
  int64_t rows_k = p.seqlen_k;
  if (p.varlen) {
    for (const int64_t offset : Offsets(spec.lengths_q))
      cu_q_.push_back(static_cast<int32_t>(offset));
    for (const int64_t offset : Offsets(spec.lengths_k))
      cu_k_.push_back(static_cast<int32_t>(offset));
    batch = 1;
    rows_q = p.total_q = cu_q_.back();
    rows_k = p.total_k = cu_k_.back();
  }
  const auto make = [&](int64_t rows, int64_t heads, int64_t dim) {
    return CaseTensor(p.dtype, batch, rows, heads, dim, spec.placement);
  };
  q_ = make(rows_q, p.heads, p.head_dim);
  k_ = make(rows_k, p.heads_kv, p.head_dim);
  v_ = make(rows_k, p.heads_kv, p.head_dim_v);
  out_ = dout_ = make(rows_q, p.heads, p.head_dim_v);
  dq_ = q_;
  dk_ = k_;
  dv_ = v_;
  for (CaseTensor* t : {&q_, &k_, &v_, &dout_}) t->FillNormal(&random);
  p.q = p.dq = q_.strides();
  p.k = p.dk = k_.strides();
  p.v = p.dv = v_.strides();
  p.out = p.dout = out_.strides();
  if (spec.placement == Placement::kContiguous) {  // let the library fill them in
    p.q = p.k = p.v = p.out = p.dout = p.dq = p.dk = p.dv = {};
  }
  if (spec.specials) {
    const float special = random.Chance(0.7) ? std::numeric_limits<float>::quiet_NaN()
                                             : std::numeric_limits<float>::infinity();
    // An infinity in q or k makes scores of inf - inf, whose lse is a matter of taste; in v it is
    // plain.
    CaseTensor* const tensors[] = {&q_, &k_, &v_};
    CaseTensor& t = *tensors[std::isnan(special) ? random.Integer(0, 2) : 2];
    if (t.rows() > 0) {
      t.Set(random.Integer(0, t.rows() - 1), random.Integer(0, t.heads() - 1),
            random.Integer(0, t.dim() - 1), special);
    }
  }

  lse_.resize(static_cast<size_t>(batch * p.heads * rows_q));
  if (random.Chance(spec.dlse_chance)) {
    p.has_dlse = true;
    for (size_t i = 0; i < lse_.size(); ++i) dlse_.push_back(static_cast<float>(random.Normal()));
  }
  for_each_array(p, spec_.arrays,
                 [](const OptionArray&, bool& has, const std::vector<int32_t>& values) {
                   has = !values.empty();
                 });
  PoisonUnused();
  if (p.alibi != Alibi::kNone) {
    const int64_t count = p.heads * (p.alibi == Alibi::kPerBatchHead ? p.batch : 1);
    for (int64_t i = 0; i < count; ++i) slopes_.push_back(static_cast<float>(random.Uniform()));
  }
}

// A row that is not in use is never read.
void Case::PoisonUnused() {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto poison = [&](const std::vector<int32_t>& used, const std::vector<int64_t>& lengths,
                          auto set) {
    int64_t row = 0;
    for (size_t b = 0; b < used.size(); ++b) {
      for (int64_t i = used[b]; i < lengths[b]; ++i) set(row + i);
      row += lengths[b];
    }
  };
  const auto set_all = [&](CaseTensor* t, int64_t row) {
    for (int64_t h = 0; h < t->heads(); ++h) {
      for (int64_t d = 0; d < t->dim(); ++d) t->Set(row, h, d, kNaN);
    }
  };
  poison(spec_.arrays.seqused_q, spec_.lengths_q, [&](int64_t row) {
    set_all(&q_, row);
    set_all(&dout_, row);
    if (dlse_.empty()) return;
    const int64_t seqlen = problem_.varlen ? out_.rows() : problem_.seqlen_q;
    for (int64_t h = 0; h < problem_.heads; ++h)
      dlse_[static_cast<size_t>((row / seqlen * problem_.heads + h) * seqlen + row % seqlen)] =
          kNaN;
  });
  poison(spec_.arrays.seqused_k, spec_.lengths_k, [&](int64_t row) {
    set_all(&k_, row);
    set_all(&v_, row);
  });
}

std::string Case::RunLibrary(int32_t threads) {
  for (CaseTensor* t : {&out_, &dq_, &dk_, &dv_}) {
    *t = CaseTensor(problem_.dtype, problem_.varlen ? 1 : problem_.batch,
                    t->rows() / (problem_.varlen ? 1 : problem_.batch), t->heads(), t->dim(),
                    spec_.placement);
  }
  std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());

  constexpr size_t kGuardBytes = 64;
  const auto poisoned = [](size_t bytes) {
    Buffer buffer(bytes + kGuardBytes);
    std::memset(buffer.data(), static_cast<int>(kPoison), buffer.size());
    return buffer;
  };
  const auto overrun = [](const Buffer& buffer) {
    return std::any_of(buffer.span().end() - kGuardBytes, buffer.span().end(),
                       [](std::byte b) { return b != kPoison; });
  };

  Problem forward = problem_;
  forward.threads = threads;
  forward.has_dlse = false;
  const Plan forward_plan(forward);
  const Buffer forward_workspace = poisoned(forward_plan.workspace_bytes());
  Mirror mirror(problem_.device);
  const auto numbers = [&](const std::vector<int32_t>& values) {
    return values.empty() ? nullptr : mirror.In(values.data(), values.size());
  };
  ForwardArgs forward_args = {
      .q = q_.In(&mirror),
      .k = k_.In(&mirror),
      .v = v_.In(&mirror),
      .out = out_.Out(&mirror),
      .lse = mirror.Out(lse_.data(), lse_.size()),
      .cu_seqlens_q = mirror.In(cu_q_.data(), cu_q_.size()),
      .cu_seqlens_k = mirror.In(cu_k_.data(), cu_k_.size()),
      .alibi_slopes = mirror.In(slopes_.data(), slopes_.size()),
      .dropout_seed = spec_.seed,
      .dropout_offset = spec_.seed >> 32,
      .workspace = mirror.Out(forward_workspace.span()).first(forward_plan.workspace_bytes())};
  map_arrays(spec_.arrays, forward_args, numbers);
  forward_plan.forward(forward_args);
  mirror.Fetch();
  if (overrun(forward_workspace)) return "forward wrote past the end of its workspace";
  if (!out_.RoomUntouched()) return "forward wrote outside out";
  if (!spec_.backward) return "";

  Problem backward = problem_;
  backward.direction = Direction::kBackward;
  backward.threads = threads;
  const Plan backward_plan(backward);
  const Buffer backward_workspace = poisoned(backward_plan.workspace_bytes());
  BackwardArgs backward_args = {
      .q = q_.In(&mirror),
      .k = k_.In(&mirror),
      .v = v_.In(&mirror),
      .out = out_.In(&mirror),
      .lse = mirror.In(lse_.data(), lse_.size()),
      .dout = dout_.In(&mirror),
      .dlse = dlse_.empty() ? nullptr : mirror.In(dlse_.data(), dlse_.size()),
      .dq = dq_.Out(&mirror),
      .dk = dk_.Out(&mirror),
      .dv = dv_.Out(&mirror),
      .cu_seqlens_q = mirror.In(cu_q_.data(), cu_q_.size()),
      .cu_seqlens_k = mirror.In(cu_k_.data(), cu_k_.size()),
      .alibi_slopes = mirror.In(slopes_.data(), slopes_.size()),
      .dropout_seed = spec_.seed,
      .dropout_offset = spec_.seed >> 32,
      .workspace = mirror.Out(backward_workspace.span()).first(backward_plan.workspace_bytes())};
  map_arrays(spec_.arrays, backward_args, numbers);
  backward_plan.backward(backward_args);
  mirror.Fetch();
  if (overrun(backward_workspace)) return "backward wrote past the end of its workspace";
  if (!dq_.RoomUntouched()) return "backward wrote outside dq";
  if (!dk_.RoomUntouched()) return "backward wrote outside dk";
  if (!dv_.RoomUntouched()) return "backward wrote outside dv";
  return "";
}

ReferenceProblem Case::MakeReferenceProblem() const {
  const Problem& p = problem_;
  ReferenceProblem r = {
      .heads = p.heads,
      .heads_kv = p.heads_kv,
      .head_dim = p.head_dim,
      .head_dim_v = p.head_dim_v,
      .offsets_q = Offsets(spec_.lengths_q),
      .offsets_k = Offsets(spec_.lengths_k),
      .causal = p.causal,
      .window_left = p.window_left,
      .window_right = p.window_right,
      .attention_chunk = p.attention_chunk,
      .arrays = spec_.arrays,
      .scale = std::isnan(p.scale) ? 1 / std::sqrt(static_cast<double>(p.head_dim)) : p.scale,
      .softcap = p.softcap,
      .dropout_p = p.dropout_p,
      .keep_rows = p.seqlen_q,
      .keep_cols = p.seqlen_k,
      .keep = {},
      .slopes = {}};
  if (p.dropout_p > 0) {
    r.keep = dropout_mask(p.batch, p.heads, p.seqlen_q, p.seqlen_k, p.dropout_p, spec_.seed,
                          spec_.seed >> 32);
  }
  if (p.alibi != Alibi::kNone) {
    for (int64_t i = 0; i < p.batch * p.heads; ++i) {
      r.slopes.push_back(slopes_[static_cast<size_t>(i) % slopes_.size()]);
    }
  }
  return r;
}

std::vector<double> Case::LseValues() const {
  const Problem& p = problem_;
  const int64_t rows = out_.rows();
  const int64_t seqlen = p.varlen ? rows : p.seqlen_q;
  std::vector<double> values;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t h = 0; h < p.heads; ++h) {
      values.push_back(
          lse_[static_cast<size_t>((row / seqlen * p.heads + h) * seqlen + row % seqlen)]);
    }
  }
  return values;
}

double Case::Compare(std::string* what) const {
  const Problem& p = problem_;
  const ReferenceProblem reference = MakeReferenceProblem();
  ReferenceInputs in = {
      .q = q_.Values(), .k = k_.Values(), .v = v_.Values(), .dout = {}, .dlse = {}};
  const bool backward = spec_.backward && out_.rows() > 0;
  if (backward) in.dout = dout_.Values();
  if (!dlse_.empty()) {
    const int64_t seqlen = p.varlen ? out_.rows() : p.seqlen_q;
    for (int64_t row = 0; row < out_.rows(); ++row) {
      for (int64_t h = 0; h < p.heads; ++h) {
        in.dlse.push_back(
            dlse_[static_cast<size_t>((row / seqlen * p.heads + h) * seqlen + row % seqlen)]);
      }
    }
  }
  const ReferenceResult truth = PlainAttention(reference, in, Arithmetic::kFloat64);
  const ReferenceResult plain = PlainAttention(reference, in, ArithmeticOf(p.dtype));

  const double epsilon = Epsilon(p.dtype);
  const double gradient_factor = p.alibi == Alibi::kNone ? 3 : 8;
  double worst = CompareTensor("out", out_.Values(), plain.out, truth.out, 2, epsilon, what);
  const auto compare = [&](const char* name, const std::vector<double>& got,
                           const std::vector<double>& plain_values,
                           const std::vector<double>& true_values, double factor, double eps) {
    if (worst > 1) return;  // *what tells of the first that fails
    const double ratio = CompareTensor(name, got, plain_values, true_values, factor, eps, what);
    worst = std::max(worst, ratio);
  };
  if (!spec_.specials) {
    compare("lse", LseValues(), plain.lse, truth.lse, 2, Epsilon(DType::kFloat32));
  }
  if (backward) {
    compare("dq", dq_.Values(), plain.dq, truth.dq, gradient_factor, epsilon);
    compare("dk", dk_.Values(), plain.dk, truth.dk, gradient_factor, epsilon);
    compare("dv", dv_.Values(), plain.dv, truth.dv, gradient_factor, epsilon);
  }
  return worst;
}

std::vector<std::vector<std::byte>> Case::ResultBytes() const {
  return {out_.Bytes(), dq_.Bytes(), dk_.Bytes(), dv_.Bytes()};
}

std::string Case::Describe() const {
  const Problem& p = problem_;
  std::string text =
      fmt::format("{}, batch {}, heads {}/{}, seqlen {}/{}, head_dim {}/{}", Name(p.dtype), p.batch,
                  p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v);
  if (p.varlen) text += ", packed sequences";
  if (p.causal) text += ", causal";
  if (p.window_left >= 0 || p.window_right >= 0) {
    text += fmt::format(", window {} {}", p.window_left, p.window_right);
  }
  if (p.attention_chunk > 0) text += fmt::format(", chunks of {}", p.attention_chunk);
  for_each_array(p, spec_.arrays, [&](const OptionArray& row, bool has, const auto& values) {
    if (has) text += fmt::format(", {} {}", row.name, fmt::join(values, " "));
  });
  if (!std::isnan(p.scale)) text += fmt::format(", scale {:.3g}", p.scale);
  if (p.softcap > 0) text += fmt::format(", softcap {:.3g}", p.softcap);
  if (p.alibi != Alibi::kNone) text += ", ALiBi";
  if (p.dropout_p > 0) text += fmt::format(", dropout {:.3g}", p.dropout_p);
  if (p.has_dlse) text += ", dlse";
  if (p.deterministic) text += ", deterministic";
  if (p.batch_invariant) text += ", batch-invariant";
  static constexpr const char* kPlacements[] = {"", ", heads first", ", packed qkv", ", padded"};
  return text + kPlacements[static_cast<int>(spec_.placement)];
}

}  // namespace strobe::cli
