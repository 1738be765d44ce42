#include "cli/cached_case.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cli/buffer.h"
#include "cli/compare.h"
#include "cli/dtype.h"

namespace strobe::cli {

CachedCase::CachedCase(const CachedSpec& spec, Random* random) {
  Problem& p = problem_;
  p.device = spec.device;
  p.dtype = kDTypes[random->Integer(spec.device == Device::kCuda ? 1 : 0, 2)];
  p.batch = random->Integer(1, 3);
  p.heads_kv = random->Integer(1, 2);
  p.heads = p.heads_kv * random->Integer(1, 4);
  p.head_dim = random->OneOf({8, 16, 40, 64, 80, 128});
  p.head_dim_v = random->Chance(0.2) ? random->OneOf({8, 32, 72}) : p.head_dim;
  p.varlen = random->Chance(0.3);
  p.causal = random->Chance(0.5);
  if (random->Chance(0.2)) p.window_left = random->Integer(0, 40);
  if (random->Chance(0.1)) p.softcap = 5;
  if (random->Chance(0.2)) p.out_dtype = DType::kFloat32;
  p.has_seqused_k = true;
  p.has_leftpad = random->Chance(0.3);
  p.cache = spec.paged ? Cache::kPaged : Cache::kContiguous;
  if (spec.append) p.append = random->Chance(0.5) ? Append::kDense : Append::kPacked;
  if (spec.append && random->Chance(0.7)) {
    p.rotary_dim = 2 * random->Integer(1, p.head_dim / 2);
    p.rotary_interleaved = random->Chance(0.5);
    p.has_rotary_position = random->Chance(0.3);
  }
  DrawSequences(random);
  Place(random);
}

void CachedCase::DrawSequences(Random* random) {
  Problem& p = problem_;
  const int64_t queries = random->Integer(1, 12), added = random->Integer(0, 9);
  cu_q_ = cu_new_ = {0};
  int64_t longest = 1, most_queries = 0, most_added = 0, positions = 1;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence s{};
    s.queries = p.varlen ? random->Integer(0, queries) : queries;
    if (p.append == Append::kDense) s.added = added;
    if (p.append == Append::kPacked) s.added = random->Integer(0, added);
    s.used = random->Chance(0.15) ? 0 : random->Integer(1, 150);
    s.pad = p.has_leftpad ? random->Integer(0, s.used) : 0;
    s.first_query = cu_q_.back();
    s.first_new = cu_new_.back();
    s.rotary_start = p.has_rotary_position ? random->Integer(0, 20) : s.used - s.pad;
    cu_q_.push_back(static_cast<int32_t>(s.first_query + s.queries));
    cu_new_.push_back(static_cast<int32_t>(s.first_new + s.added));
    used_.push_back(static_cast<int32_t>(s.used));
    pads_.push_back(static_cast<int32_t>(s.pad));
    positions_.push_back(static_cast<int32_t>(s.rotary_start));
    longest = std::max(longest, s.used + s.added);
    most_queries = std::max(most_queries, s.queries);
    most_added = std::max(most_added, s.added);
    positions = std::max(positions, s.rotary_start + std::max(s.queries, s.added));
    sequences_.push_back(s);
  }
  p.seqlen_q = most_queries;
  p.seqlen_k = longest + random->Integer(0, 5);
  p.total_q = p.varlen ? cu_q_.back() : 0;
  p.seqlen_new = p.append == Append::kNone ? 0 : most_added;
  p.total_new = p.append == Append::kPacked ? cu_new_.back() : 0;
  p.rotary_rows = p.rotary_dim > 0 ? positions : 0;
}

void CachedCase::Place(Random* random) {
  Problem& p = problem_;
  const auto placement = [&] { return static_cast<Placement>(random->Integer(0, 3)); };
  const int64_t batch_q = p.varlen ? 1 : p.batch, batch_new = p.total_new > 0 ? 1 : p.batch;
  q_ = CaseTensor(p.dtype, batch_q, cu_q_.back() / batch_q, p.heads, p.head_dim, placement());
  out_ = CaseTensor(p.out_dtype == DType::kSame ? p.dtype : p.out_dtype, batch_q,
                    cu_q_.back() / batch_q, p.heads, p.head_dim_v, placement());
  const int64_t rows_new = cu_new_.back() / batch_new;
  k_new_ = CaseTensor(p.dtype, batch_new, rows_new, p.heads_kv, p.head_dim, placement());
  v_new_ = CaseTensor(p.dtype, batch_new, rows_new, p.heads_kv, p.head_dim_v, placement());
  int64_t entries = p.batch + random->Integer(0, 2), rows = p.seqlen_k;
  if (p.cache == Cache::kPaged) {
    p.page_size = rows = random->Integer(1, 17);
    p.pages_per_sequence = (p.seqlen_k + p.page_size - 1) / p.page_size;
    p.pages = entries = p.batch * p.pages_per_sequence + random->Integer(0, 3);
  } else {
    p.cache_batch = entries;
    p.has_cache_batch_idx = random->Chance(0.5);
  }
  const Placement cache = placement();
  k_ = CaseTensor(p.dtype, entries, rows, p.heads_kv, p.head_dim, cache);
  v_ = CaseTensor(p.dtype, entries, rows, p.heads_kv, p.head_dim_v, cache);

  // Entries or pages in a random order, each of one sequence alone.
  std::vector<int32_t> order(static_cast<size_t>(entries));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i-- > 1;)
    std::swap(order[i], order[static_cast<size_t>(random->Integer(0, static_cast<int64_t>(i)))]);
  if (p.cache == Cache::kPaged) {
    table_.assign(order.begin(), order.begin() + p.batch * p.pages_per_sequence);
  } else {
    for (int64_t b = 0; b < p.batch; ++b)
      entries_.push_back(p.has_cache_batch_idx ? order[static_cast<size_t>(b)]
                                               : static_cast<int32_t>(b));
  }
  for (CaseTensor* t : {&q_, &k_new_, &v_new_}) t->FillNormal(random);
  for (size_t b = 0; b < sequences_.size(); ++b) {
    for (int64_t n = sequences_[b].pad; n < sequences_[b].used; ++n) {
      for (CaseTensor* t : {&k_, &v_}) {
        for (int64_t h = 0; h < t->heads(); ++h) {
          for (int64_t d = 0; d < t->dim(); ++d)
            t->Set(CacheRow(b, n), h, d, static_cast<float>(random->Normal()));
        }
      }
    }
  }
  const int64_t half = p.rotary_dim / 2;
  cos_ = sin_ = CaseTensor(p.dtype, 1, p.rotary_rows, 1, half, Placement::kContiguous);
  for (int64_t row = 0; row < p.rotary_rows; ++row) {
    for (int64_t n = 0; n < half; ++n) {
      const double angle = static_cast<double>(row) /
                           std::pow(50.0, static_cast<double>(n) / static_cast<double>(half));
      cos_.Set(row, 0, n, static_cast<float>(std::cos(angle)));
      sin_.Set(row, 0, n, static_cast<float>(std::sin(angle)));
    }
  }
  p.q = q_.strides();
  p.out = out_.strides();
  p.k = k_.strides();
  p.v = v_.strides();
  if (p.append != Append::kNone) {
    p.k_new = k_new_.strides();
    p.v_new = v_new_.strides();
  }
  lse_.resize(static_cast<size_t>(cu_q_.back() * p.heads));
}

int64_t CachedCase::CacheRow(size_t b, int64_t n) const {
  const Problem& p = problem_;
  if (p.cache == Cache::kContiguous) return entries_[b] * p.seqlen_k + n;
  const auto column = static_cast<size_t>(n / p.page_size);
  return table_[b * static_cast<size_t>(p.pages_per_sequence) + column] * p.page_size +
         n % p.page_size;
}

std::vector<double> CachedCase::Rotated(const CaseTensor& t, int64_t row, int64_t head,
                                        int64_t position) const {
  std::vector<double> x;
  for (int64_t d = 0; d < t.dim(); ++d) x.push_back(t.Get(row, head, d));
  const int64_t half = problem_.rotary_dim / 2;
  for (int64_t n = 0; n < half; ++n) {
    const auto first = static_cast<size_t>(problem_.rotary_interleaved ? 2 * n : n);
    const size_t second =
        first + static_cast<size_t>(problem_.rotary_interleaved ? int64_t{1} : half);
    const double c = cos_.Get(position, 0, n), s = sin_.Get(position, 0, n);
    const double a = x[first], b = x[second];
    x[first] = a * c - b * s;
    x[second] = a * s + b * c;
  }
  return x;
}

std::string CachedCase::RunLibrary(int32_t threads) {
  const CaseTensor k_before = k_, v_before = v_;
  Problem p = problem_;
  p.threads = threads;
  const Plan plan(p);
  const Buffer workspace(plan.workspace_bytes());
  std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());
  Mirror mirror(p.device);
  const auto numbers = [&](const std::vector<int32_t>& values, bool given) {
    return given && !values.empty() ? mirror.In(values.data(), values.size()) : nullptr;
  };
  const bool append = p.append != Append::kNone, rotary = p.rotary_dim > 0;
  plan.forward({.q = q_.In(&mirror),
                .k = append ? k_.Out(&mirror) : k_.In(&mirror),
                .v = append ? v_.Out(&mirror) : v_.In(&mirror),
                .out = out_.Out(&mirror),
                .lse = mirror.Out(lse_.data(), lse_.size()),
                .cu_seqlens_q = numbers(cu_q_, p.varlen),
                .workspace = mirror.Out(workspace.span()).first(plan.workspace_bytes()),
                .seqused_k = numbers(used_, true),
                .block_table = numbers(table_, true),
                .cache_batch_idx = numbers(entries_, p.has_cache_batch_idx),
                .leftpad = numbers(pads_, p.has_leftpad),
                .k_new = append ? k_new_.In(&mirror) : nullptr,
                .v_new = append ? v_new_.In(&mirror) : nullptr,
                .cu_seqlens_k_new = numbers(cu_new_, p.append == Append::kPacked),
                .rotary_cos = rotary ? cos_.In(&mirror) : nullptr,
                .rotary_sin = rotary ? sin_.In(&mirror) : nullptr,
                .rotary_position = numbers(positions_, p.has_rotary_position)});
  mirror.Fetch();
  if (!out_.RoomUntouched()) return "forward wrote outside out";
  return CheckCache(k_before, v_before);
}

std::string CachedCase::CheckCache(const CaseTensor& k_before, const CaseTensor& v_before) const {
  CaseTensor k = k_before, v = v_before;
  for (size_t b = 0; b < sequences_.size(); ++b) {
    const Sequence& s = sequences_[b];
    for (int64_t i = 0; i < s.added; ++i) {
      const int64_t row = CacheRow(b, s.used + i), from = s.first_new + i;
      for (int64_t h = 0; h < problem_.heads_kv; ++h) {
        const std::vector<double> key = Rotated(k_new_, from, h, s.rotary_start + i);
        for (int64_t d = 0; d < problem_.head_dim; ++d) {
          const double wanted = key[static_cast<size_t>(d)], got = k_.Get(row, h, d);
          // One rounding to the dtype, after sums in float32.
          const double room = Epsilon(problem_.dtype) * std::abs(wanted) + 1e-6;
          const bool right =
              d < problem_.rotary_dim ? std::abs(got - wanted) <= room : got == wanted;
          if (!right)
            return fmt::format("appended k[{}][{}][{}] = {}, expected {}", row, h, d, got, wanted);
          k.Set(row, h, d, static_cast<float>(got));
        }
        for (int64_t d = 0; d < problem_.head_dim_v; ++d)
          v.Set(row, h, d, static_cast<float>(v_new_.Get(from, h, d)));
      }
    }
  }
  if (k.Bytes() != k_.Bytes()) return "forward changed k outside the appended rows";
  return v.Bytes() == v_.Bytes() ? "" : "v of the cache is not what it was with the new rows";
}

double CachedCase::Compare(std::string* what) const {
  const Problem& p = problem_;
  ReferenceProblem r;
  r.heads = p.heads;
  r.heads_kv = p.heads_kv;
  r.head_dim = p.head_dim;
  r.head_dim_v = p.head_dim_v;
  r.causal = p.causal;
  r.window_left = p.window_left;
  r.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
  r.softcap = p.softcap;
  r.offsets_q = {0};
  r.offsets_k = {0};
  // Queries move on in the rotary tables where the mask looks at positions.
  const bool move = p.causal || p.window_left >= 0;
  ReferenceInputs in;
  std::vector<double> lse;
  for (size_t b = 0; b < sequences_.size(); ++b) {
    const Sequence& s = sequences_[b];
    for (int64_t i = 0; i < s.queries; ++i) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const std::vector<double> x = Rotated(
            q_, s.first_query + i, h, p.rotary_dim > 0 ? s.rotary_start + (move ? i : 0) : 0);
        in.q.insert(in.q.end(), x.begin(), x.end());
        const int64_t at = p.varlen ? h * cu_q_.back() + s.first_query + i
                                    : (static_cast<int64_t>(b) * p.heads + h) * p.seqlen_q + i;
        lse.push_back(lse_[static_cast<size_t>(at)]);
      }
    }
    for (int64_t n = s.pad; n < s.used + s.added; ++n) {
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        for (int64_t d = 0; d < p.head_dim; ++d) in.k.push_back(k_.Get(CacheRow(b, n), h, d));
        for (int64_t d = 0; d < p.head_dim_v; ++d) in.v.push_back(v_.Get(CacheRow(b, n), h, d));
      }
    }
    r.offsets_q.push_back(r.offsets_q.back() + s.queries);
    r.offsets_k.push_back(r.offsets_k.back() + s.used + s.added - s.pad);
  }
  const ReferenceResult truth = PlainAttention(r, in, Arithmetic::kFloat64);
  // A framework stores the turned queries in their dtype.
  for (double& x : in.q) x = Rounded(p.dtype, static_cast<float>(x));
  const ReferenceResult plain = PlainAttention(r, in, ArithmeticOf(p.dtype));
  const double worst =
      CompareTensor("out", out_.Values(), plain.out, truth.out, 2, Epsilon(p.dtype), what);
  if (worst > 1) return worst;
  return std::max(
      worst, CompareTensor("lse", lse, plain.lse, truth.lse, 2, Epsilon(DType::kFloat32), what));
}

std::string CachedCase::Describe() const {
  const Problem& p = problem_;
  std::string text =
      fmt::format("{}, batch {}, heads {}/{}, head_dim {}/{}, cache of {} rows", Name(p.dtype),
                  p.batch, p.heads, p.heads_kv, p.head_dim, p.head_dim_v, p.seqlen_k);
  if (p.cache == Cache::kPaged) text += fmt::format(" in pages of {}", p.page_size);
  text += fmt::format(", lengths {}", fmt::join(used_, " "));
  if (p.has_leftpad) text += fmt::format(", left pads {}", fmt::join(pads_, " "));
  text += fmt::format(", queries from {}", fmt::join(cu_q_, " "));
  if (p.append != Append::kNone) text += fmt::format(", new keys from {}", fmt::join(cu_new_, " "));
  if (p.rotary_dim > 0) {
    text += fmt::format(", rotary {}{}", p.rotary_dim, p.rotary_interleaved ? " interleaved" : "");
  }
  if (p.causal) text += ", causal";
  if (p.window_left >= 0) text += fmt::format(", window {} -1", p.window_left);
  if (p.softcap > 0) text += fmt::format(", softcap {:.3g}", p.softcap);
  if (p.out_dtype == DType::kFloat32) text += ", out in float32";
  return text;
}

}  // namespace strobe::cli
