// `strobe check --kv`: what it costs to keep keys and values as codes, told on the tensors of a
// file. Attention over caches of floats and of codes, against float64 over the tensors as they are.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/inputs.h"
#include "cli/machine_json.h"
#include "cli/on_device.h"
#include "cli/random.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "core/element.h"
#include "core/team.h"
#include "oracle/oracle.h"
#include "oracle/quantised.h"

namespace strobe::cli {
namespace {

// Multiplications of float64 that one line of the table may take. Where all queries would take
// more, queries at equal distances are compared.
constexpr double kMostWork = 5e8;

// q, k and v as they are in the file, the rows in use of all sequences one after the other, and
// what says which keys their queries see.
struct Activations {
  std::string file;  // "" : drawn
  DType dtype = DType::kFloat32;
  std::vector<std::string> unused;
  Options options;
  oracle::Problem problem;  // slopes: [sequences, heads]
  oracle::Tensor q, k, v;
};

// Rows [first, first + count) of one entry, behind those that `to` has. Throws where one of their
// values is not finite: an error could not be told.
void AppendRows(DType dtype, const Tensor& from, int64_t entry, int64_t first, int64_t count,
                oracle::Tensor* to) {
  to->heads = from.heads;
  to->dim = from.dim;
  to->rows += count;
  for (int64_t row = first; row < first + count; ++row) {
    for (int64_t head = 0; head < from.heads; ++head) {
      const int64_t at =
          entry * from.strides.batch + row * from.strides.seqlen + head * from.strides.head;
      for (int64_t d = 0; d < from.dim; ++d) {
        const float value = Load(dtype, from.data, static_cast<size_t>(at + d * from.strides.dim));
        if (!std::isfinite(value)) {
          throw UserError(
              fmt::format("{} has {} (entry {}, row {}, head {}, dim {}), expected finite numbers",
                          from.name, value, entry, row, head, d));
        }
        to->data.push_back(static_cast<double>(value));
      }
    }
  }
}

void SetOptions(const Options& options, Activations* a) {
  a->options = options;
  oracle::Problem& p = a->problem;
  p.heads = a->q.heads;
  p.heads_kv = a->k.heads;
  p.head_dim = a->q.dim;
  p.head_dim_v = a->v.dim;
  p.causal = options.causal;
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  p.window_signed = options.window_signed;
  if (options.window_signed) {  // the oracle has one number for "no limit", the library another
    if (p.window_left == STROBE_NO_LIMIT) p.window_left = INT64_MAX;
    if (p.window_right == STROBE_NO_LIMIT) p.window_right = INT64_MAX;
  }
  p.attention_chunk = options.attention_chunk;
  p.scale = std::isnan(options.scale) ? 1 / std::sqrt(static_cast<double>(p.head_dim))
                                      : static_cast<double>(options.scale);
  p.softcap = static_cast<double>(options.softcap);
}

Activations ReadFile(const std::string& path, const CheckOptions& o) {
  RunOptions options;
  options.input = path;
  options.layout = o.layout;
  options.problem = o.problem;
  SafetensorsFile file(path);
  Inputs in(&file, options);
  const auto refuse = [&](const std::string& got) {
    throw UserError(fmt::format("{} has {}, expected q, k and v of floats, which --kv quantises",
                                PathText(path), got));
  };
  if (in.float8()) refuse(in.q.name + " of F8_E4M3");
  if (in.cached()) refuse(fmt::format("{}, which makes k and v a cache", in.cache.because));
  if (!in.bias.shape.empty()) refuse("a bias");
  if (in.mask.there()) refuse("a mask as data");
  for (const auto& [t, dim] : {std::pair{&in.q, in.q.dim}, std::pair{&in.v, in.v.dim}}) {
    for (const DType kv : o.kv) {
      if (!has_blocks(static_cast<int32_t>(kv)) || dim % kBlockValues == 0) continue;
      throw UserError(fmt::format("{} has head_dim = {} with --kv {}, expected a multiple of {}",
                                  t->name, dim, Name(kv), kBlockValues));
    }
  }
  in.ReadData();

  Activations a;
  a.file = path;
  a.dtype = in.dtype;
  for (const std::string_view name : in.unused) a.unused.emplace_back(name);
  for (int64_t b = 0; b < in.Batch(); ++b) {
    const auto at = static_cast<size_t>(b);
    const auto rows = [&](const std::vector<int32_t>& offsets, const std::vector<int32_t>& used,
                          const Tensor& t) {
      const int64_t all = in.varlen ? int64_t{offsets[at + 1]} - offsets[at] : t.seqlen;
      return used.empty() ? all : std::min<int64_t>(used[at], all);
    };
    oracle::Sequence s;
    s.q_begin = a.q.rows;
    s.k_begin = a.k.rows;
    s.q_length = rows(in.cu_seqlens_q, in.arrays.seqused_q, in.q);
    s.k_length = rows(in.cu_seqlens_k, in.arrays.seqused_k, in.k);
    if (!in.arrays.q_position.empty()) s.q_position = in.arrays.q_position[at];
    if (!in.arrays.prefix.empty()) s.prefix = std::min<int64_t>(in.arrays.prefix[at], s.k_length);
    const int64_t entry = in.varlen ? 0 : b;
    const int64_t first_q = in.varlen ? in.cu_seqlens_q[at] : 0;
    const int64_t first_k = in.varlen ? in.cu_seqlens_k[at] : 0;
    AppendRows(in.dtype, in.q, entry, first_q, s.q_length, &a.q);
    AppendRows(in.dtype, in.k, entry, first_k, s.k_length, &a.k);
    AppendRows(in.dtype, in.v, entry, first_k, s.k_length, &a.v);
    if (s.q_length > 0 && s.k_length > 0) a.problem.sequences.push_back(s);
    for (int64_t h = 0; in.alibi != Alibi::kNone && h < in.q.heads; ++h) {
      if (s.q_length == 0 || s.k_length == 0) break;
      const int64_t of = in.alibi == Alibi::kPerBatchHead ? b * in.q.heads + h : h;
      a.problem.slopes.push_back(static_cast<double>(in.slopes[static_cast<size_t>(of)]));
    }
  }
  if (a.problem.sequences.empty()) {
    throw UserError(fmt::format(
        "{} has no sequence with both queries and keys, expected one at least", PathText(path)));
  }
  a.problem.sinks.assign(in.sinks.begin(), in.sinks.end());
  SetOptions(o.problem, &a);
  return a;
}

// Standard normal numbers, of which one in a thousand is ten times as large: a cache's worst case,
// since a softmax over random scores averages nearly everything.
Activations DrawnActivations(const CheckOptions& o) {
  constexpr int64_t kQueries = 32, kKeys = 4096, kHeads = 8, kHeadsKv = 2, kDim = 128;
  constexpr double kOutliers = 0.001, kFactor = 10;
  Activations a;
  Random random(static_cast<uint64_t>(o.seed));
  const auto draw = [&](int64_t rows, int64_t heads) {
    oracle::Tensor t(rows, heads, kDim);
    for (double& x : t.data) {
      const double factor = random.Uniform() < kOutliers ? kFactor : 1;
      x = static_cast<double>(static_cast<float>(random.Normal() * factor));
    }
    return t;
  };
  a.q = draw(kQueries, kHeads);
  a.k = draw(kKeys, kHeadsKv);
  a.v = draw(kKeys, kHeadsKv);
  a.problem.sequences = {{.q_length = kQueries, .k_length = kKeys}};
  SetOptions(o.problem, &a);
  return a;
}

// The queries that are compared, each a sequence of its own that has the keys and the position it
// has in its sequence.
std::vector<oracle::Problem> ComparedRows(const Activations& a) {
  const oracle::Problem& whole = a.problem;
  int64_t queries = 0;
  double work = 0;
  for (const oracle::Sequence& s : whole.sequences) {
    queries += s.q_length;
    work += static_cast<double>(s.q_length) * static_cast<double>(s.k_length) *
            static_cast<double>(whole.heads * (2 * whole.head_dim + whole.head_dim_v));
  }
  const int64_t compared = std::clamp<int64_t>(
      static_cast<int64_t>(static_cast<double>(queries) * std::min(1.0, kMostWork / work)), 1,
      queries);
  oracle::Problem one = whole;
  one.sequences.clear();
  one.slopes.clear();
  std::vector<oracle::Problem> rows;
  int64_t before = 0;  // queries of the sequences before
  for (size_t n = 0; n < whole.sequences.size(); ++n) {
    const oracle::Sequence& s = whole.sequences[n];
    for (int64_t i = 0; i < s.q_length; ++i) {
      // The last of every queries / compared, so that the last query of all is among them.
      const int64_t row = before + i;
      if ((row + 1) * compared / queries == row * compared / queries) continue;
      oracle::Problem& p = rows.emplace_back(one);
      p.sequences = {s};
      p.sequences[0].q_begin = s.q_begin + i;
      p.sequences[0].q_length = 1;
      p.sequences[0].q_position = s.Position(i);
      if (!whole.slopes.empty()) {
        const auto first = whole.slopes.begin() + static_cast<int64_t>(n) * whole.heads;
        p.slopes.assign(first, first + whole.heads);
      }
    }
    before += s.q_length;
  }
  return rows;
}

// The float64 result of each of these rows, [rows, heads, dim].
oracle::Tensor Float64(const std::vector<oracle::Problem>& rows, const oracle::Tensor& q,
                       const oracle::Tensor& k, const oracle::Tensor& v, int64_t threads) {
  const oracle::Problem& first = rows.front();
  oracle::Tensor out(static_cast<int64_t>(rows.size()), first.heads, first.head_dim_v);
  std::atomic<bool> no_memory = false;  // no exception may leave a thread of the team
  share_out(out.rows, threads, [&](int64_t n) {
    try {
      oracle::Problem p = rows[static_cast<size_t>(n)];
      oracle::Tensor query(1, q.heads, q.dim);
      std::copy_n(q.at(p.sequences[0].q_begin, 0), q.heads * q.dim, query.at(0, 0));
      p.sequences[0].q_begin = 0;
      const oracle::Tensor row = oracle::Forward(p, query, k, v).out;
      std::copy(row.data.begin(), row.data.end(), out.at(n, 0));
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  });
  if (no_memory) throw std::bad_alloc();
  return out;
}

// How far a result is from the float64 one, over the root mean square of the latter.
struct Error {
  double rms = 0;             // of all elements
  double worst = 0;           // the largest of one element
  std::vector<double> heads;  // rms of each head, over that head's own

  [[nodiscard]] int64_t WorstHead() const {
    return std::max_element(heads.begin(), heads.end()) - heads.begin();
  }
};

double Over(double difference, double size) { return difference == 0 ? 0 : difference / size; }

Error ErrorOf(const oracle::Tensor& got, const oracle::Tensor& wanted) {
  const auto heads = static_cast<size_t>(wanted.heads);
  std::vector<double> differences(heads), sizes(heads);
  double largest = 0, difference = 0, size = 0;
  for (int64_t row = 0; row < wanted.rows; ++row) {
    for (size_t h = 0; h < heads; ++h) {
      const double* const x = got.at(row, static_cast<int64_t>(h));
      const double* const y = wanted.at(row, static_cast<int64_t>(h));
      for (int64_t d = 0; d < wanted.dim; ++d) {
        largest = std::max(largest, std::fabs(x[d] - y[d]));
        differences[h] += (x[d] - y[d]) * (x[d] - y[d]);
        sizes[h] += y[d] * y[d];
      }
    }
  }
  Error error;
  for (size_t h = 0; h < heads; ++h) {
    difference += differences[h];
    size += sizes[h];
    error.heads.push_back(std::sqrt(Over(differences[h], sizes[h])));
  }
  error.rms = std::sqrt(Over(difference, size));
  error.worst = Over(largest, std::sqrt(size / static_cast<double>(wanted.data.size())));
  return error;
}

// K or V as a cache holds it, and what that stands for.
struct Held {
  Buffer data, scales;
  oracle::Tensor values;
};

oracle::Form FormOf(DType kv) {
  switch (kv) {
    case DType::kInt8:
      return oracle::Form::kInt8;
    case DType::kFloat8E4M3:
      return oracle::Form::kE4m3;
    case DType::kFloat8E5M2:
      return oracle::Form::kE5m2;
    case DType::kQ8_0:
      return oracle::Form::kQ8;
    case DType::kQ4_0:
      return oracle::Form::kQ4;
    default:
      return oracle::Form::kNone;
  }
}

// A tensor in a dtype of floats.
Buffer InDType(const oracle::Tensor& t, DType dtype) {
  Buffer all(t.data.size() * Bytes(dtype));
  for (size_t i = 0; i < t.data.size(); ++i)
    Store(dtype, all.data(), i, static_cast<float>(t.data[i]));
  return all;
}

// One line of the table: attention in `dtype` over a cache of `kv`.
struct Line {
  DType dtype, kv;  // kv: kSame where the cache is of dtype
  KvScale scale = KvScale::kNone;
  static constexpr DType kScaleDType = DType::kFloat16;

  [[nodiscard]] std::string Cache() const {
    return kv == DType::kSame ? ShortName(dtype) : Name(kv);
  }
  [[nodiscard]] int64_t RowBytes(int64_t dim) const {
    const auto held = static_cast<int32_t>(kv == DType::kSame ? dtype : kv);
    return row_bytes(held, dim) +
           (scale == KvScale::kRow ? static_cast<int64_t>(Bytes(kScaleDType)) : 0);
  }

  // Rows of floats become those of the cache; its scales are those of all rows together.
  [[nodiscard]] Held Hold(const oracle::Tensor& t, int64_t threads) const {
    Held held{.data = InDType(t, dtype), .scales = {}, .values = t};
    if (kv == DType::kSame) {
      for (size_t i = 0; i < t.data.size(); ++i)
        held.values.data[i] = static_cast<double>(Load(dtype, held.data.data(), i));
      return held;
    }
    const int64_t bytes = row_bytes(static_cast<int32_t>(kv), t.dim);
    const int64_t scales = scale == KvScale::kRow    ? t.rows * t.heads
                           : scale == KvScale::kHead ? t.heads
                                                     : int64_t{scale == KvScale::kTensor};
    Buffer codes(static_cast<size_t>(t.rows * t.heads * bytes));
    held.scales = Buffer(static_cast<size_t>(scales) * Bytes(kScaleDType));
    QuantizeArgs args;
    args.dtype = dtype;
    args.kv_dtype = kv;
    args.kv_scale = scale;
    if (scales > 0) args.kv_scale_dtype = kScaleDType;
    args.threads = static_cast<int32_t>(threads);
    args.seqlen = t.rows;
    args.heads = t.heads;
    args.head_dim = t.dim;
    args.x = held.data.data();
    args.codes = codes.data();
    args.scale = scales > 0 ? held.scales.data() : nullptr;
    quantize(args);
    const auto* const all = reinterpret_cast<const uint8_t*>(codes.data());
    for (int64_t row = 0; row < t.rows; ++row) {
      for (int64_t head = 0; head < t.heads; ++head) {
        const int64_t n = row * t.heads + head;
        const int64_t of = scale == KvScale::kRow ? n : scale == KvScale::kHead ? head : 0;
        const double factor = scales == 0
                                  ? 1
                                  : static_cast<double>(Load(kScaleDType, held.scales.data(),
                                                             static_cast<size_t>(of)));
        for (int64_t d = 0; d < t.dim; ++d)
          held.values.at(row, head)[d] = oracle::ValueAt(FormOf(kv), all + n * bytes, factor, d);
      }
    }
    held.data = std::move(codes);
    return held;
  }

  // The problem of one sequence; that of the cache is the sequence's part of all rows.
  [[nodiscard]] Problem ProblemOf(const Activations& a, const oracle::Sequence& s) const {
    Problem p;
    copy_options(a.options, p);
    p.dtype = dtype;
    p.seqlen_q = s.q_length;
    p.seqlen_k = s.k_length;
    p.heads = a.q.heads;
    p.heads_kv = a.k.heads;
    p.head_dim = a.q.dim;
    p.head_dim_v = a.v.dim;
    p.cache = strobe::Cache::kContiguous;
    p.cache_batch = 1;
    p.kv_dtype = kv;
    p.kv_scale = scale;
    if (scale != KvScale::kNone) p.kv_scale_dtype = kScaleDType;
    p.has_sinks = !a.problem.sinks.empty();
    p.has_q_position = s.q_position.has_value();
    p.has_prefix = s.prefix > 0;
    if (!a.problem.slopes.empty()) p.alibi = Alibi::kPerHead;
    return p;
  }
};

class Comparison {
 public:
  Comparison(const CheckOptions& o, const Activations& a)
      : launch_(o.device, o.device_index, o.threads),
        threads_(o.threads > 0 ? o.threads : default_threads()),
        a_(a) {}

  [[nodiscard]] bool Takes(const Line& line) const {
    return launch_.Takes(line.ProblemOf(a_, a_.problem.sequences[0]).c());
  }

  // The library's attention over the cache: [all rows of q, heads, dim].
  oracle::Tensor Attention(const Line& line, const Held& k, const Held& v) {
    const Buffer q = InDType(a_.q, line.dtype);
    oracle::Tensor result(a_.q.rows, a_.q.heads, a_.v.dim);
    std::vector<float> sinks(a_.problem.sinks.begin(), a_.problem.sinks.end());
    size_t slopes_before = 0;
    for (const oracle::Sequence& s : a_.problem.sequences) {
      const Problem problem = line.ProblemOf(a_, s);
      const auto element = static_cast<int64_t>(Bytes(line.dtype));
      const auto rows = [](const Buffer& all, int64_t first, int64_t count, int64_t row) {
        return all.span().subspan(static_cast<size_t>(first * row),
                                  static_cast<size_t>(count * row));
      };
      const auto keys = [&](const Held& held, const oracle::Tensor& t) {
        const auto of = static_cast<int32_t>(line.kv == DType::kSame ? line.dtype : line.kv);
        return rows(held.data, s.k_begin, s.k_length, t.heads * row_bytes(of, t.dim));
      };
      const auto scales = [&](const Held& held) {
        const int64_t row = a_.k.heads * static_cast<int64_t>(Bytes(Line::kScaleDType));
        return line.scale == KvScale::kRow ? rows(held.scales, s.k_begin, s.k_length, row)
                                           : held.scales.span();
      };
      const Buffer out(static_cast<size_t>(s.q_length * a_.q.heads * a_.v.dim * element));
      const auto q_rows = rows(q, s.q_begin, s.q_length, a_.q.heads * a_.q.dim * element);
      const std::vector<float> slopes =
          a_.problem.slopes.empty()
              ? std::vector<float>()
              : std::vector<float>(
                    a_.problem.slopes.begin() + static_cast<int64_t>(slopes_before),
                    a_.problem.slopes.begin() + static_cast<int64_t>(slopes_before) + a_.q.heads);
      slopes_before += slopes.size();
      const auto position = static_cast<int32_t>(s.q_position.value_or(0));
      const auto prefix = static_cast<int32_t>(s.prefix);
      ForwardArgs args = {.q = q_rows.data(),
                          .k = keys(k, a_.k).data(),
                          .v = keys(v, a_.v).data(),
                          .out = out.data()};
      if (!slopes.empty()) args.alibi_slopes = slopes.data();
      if (!sinks.empty()) args.sinks = sinks.data();
      if (problem.has_q_position) args.q_position = &position;
      if (problem.has_prefix) args.prefix = &prefix;
      if (line.scale != KvScale::kNone) {
        args.k_scale = scales(k).data();
        args.v_scale = scales(v).data();
      }
      const std::string error =
          launch_.Run({q_rows, keys(k, a_.k), keys(v, a_.v), out.span(), scales(k), scales(v),
                       std::as_writable_bytes(std::span(sinks))},
                      problem.c(), args.c());
      if (!error.empty()) throw UserError(error);
      double* const to = result.at(s.q_begin, 0);
      for (int64_t i = 0; i < s.q_length * a_.q.heads * a_.v.dim; ++i)
        to[i] = static_cast<double>(Load(line.dtype, out.data(), static_cast<size_t>(i)));
    }
    return result;
  }

  [[nodiscard]] int64_t threads() const { return threads_; }

 private:
  OnDevice launch_;
  int64_t threads_;
  const Activations& a_;
};

// "0.31 %": two digits, and of large ones all before the point.
std::string PercentText(double error) {
  return error < 0.995 ? fmt::format("{:.2g} %", 100 * error)
                       : fmt::format("{:.0f} %", 100 * error);
}

nlohmann::ordered_json ErrorJson(const Error& error) {
  return {{"rms", error.rms}, {"worst", error.worst}, {"heads", error.heads}};
}

const char* ScaleName(KvScale scale) {
  return scale == KvScale::kRow ? "row" : scale == KvScale::kHead ? "head" : "tensor";
}

// What the table is of.
void PrintHead(const CheckOptions& o, const Activations& a, DType dtype, int64_t compared) {
  const oracle::Problem& p = a.problem;
  Print("{}\n", Bold(a.file.empty() ? fmt::format("no FILE: standard normal numbers, one in a "
                                                  "thousand ten times as large, seed {}",
                                                  o.seed)
                                    : PathText(a.file)));
  Print("  {} queries and {} keys in {} sequence{}, {} heads on {}, head_dim {}{}\n", a.q.rows,
        a.k.rows, p.sequences.size(), p.sequences.size() == 1 ? "" : "s", p.heads, p.heads_kv,
        p.head_dim, p.head_dim == p.head_dim_v ? "" : fmt::format(", of v {}", p.head_dim_v));
  if (!a.unused.empty()) {
    Print("  not used: {}\n", NamesText({a.unused.begin(), a.unused.end()}));
  }
  Print("  scales of int8 and float8: fp16, {}; attention over codes in {}\n",
        o.kv_scale == KvScale::kTensor ? "one of all rows"
                                       : fmt::format("of each {}", ScaleName(o.kv_scale)),
        ShortName(dtype));
  if (compared < a.q.rows) Print("  {} of the queries compared\n", compared);
  Flush();
}

// One file's table.
nlohmann::ordered_json Compare(const CheckOptions& o, const Activations& a, bool first) {
  const DType dtype = o.dtype.value_or(a.dtype);
  const oracle::Problem& p = a.problem;
  const std::vector<oracle::Problem> rows = ComparedRows(a);
  const auto compared = static_cast<int64_t>(rows.size());
  std::vector<Line> lines;
  Comparison comparison(o, a);
  for (const DType each : kDTypes) {
    const Line line{.dtype = each, .kv = DType::kSame};
    if (each == dtype || comparison.Takes(line)) lines.push_back(line);
  }
  for (const DType kv : o.kv) {
    lines.push_back({.dtype = dtype,
                     .kv = kv,
                     .scale = has_scales(static_cast<int32_t>(kv)) ? o.kv_scale : KvScale::kNone});
  }
  // All launches before the first float64 result, so that what is refused is refused at once.
  std::vector<Held> keys, values;
  std::vector<oracle::Tensor> results;
  for (const Line& line : lines) {
    keys.push_back(line.Hold(a.k, o.threads));
    values.push_back(line.Hold(a.v, o.threads));
    const oracle::Tensor all = comparison.Attention(line, keys.back(), values.back());
    oracle::Tensor of_rows(compared, p.heads, p.head_dim_v);
    for (int64_t n = 0; n < compared; ++n) {
      std::copy_n(all.at(rows[static_cast<size_t>(n)].sequences[0].q_begin, 0),
                  p.heads * p.head_dim_v, of_rows.at(n, 0));
    }
    results.push_back(std::move(of_rows));
  }

  if (!o.json) {
    if (first) {
      Print("{}\n\n",
            Dim("Errors of out against float64 over q, k and v as they are, over the root mean "
                "square of that result:\nrms of all elements, worst of one, and rms of the head "
                "where that is largest. K and V alone: float64\nattention over what the cache "
                "stands for. Bytes: of a key and its value in one head."));
    }
    PrintHead(o, a, dtype, compared);
    Print("\n  {:<13}{:>7}  {:<43}{}\n", "", "", "  attention", "K and V alone");
    Print("  {:<13}{:>7}{:>12}{:>12}{:>20}{:>14}\n", "cache", "bytes", "rms", "worst", "worst head",
          "rms");
  }
  const oracle::Tensor wanted = Float64(rows, a.q, a.k, a.v, comparison.threads());
  nlohmann::ordered_json caches = nlohmann::ordered_json::array();
  for (size_t n = 0; n < lines.size(); ++n) {
    const Line& line = lines[n];
    Progress(fmt::format("  {:<13}", line.Cache()));
    const Error error = ErrorOf(results[n], wanted);
    const Error alone =
        ErrorOf(Float64(rows, a.q, keys[n].values, values[n].values, comparison.threads()), wanted);
    keys[n] = {}, values[n] = {};
    const int64_t bytes = line.RowBytes(p.head_dim) + line.RowBytes(p.head_dim_v);
    ClearProgress();
    const int64_t head = error.WorstHead();
    caches.push_back({{"kv", line.kv == DType::kSame ? "same" : Name(line.kv)},
                      {"dtype", Name(line.dtype)},
                      {"bytes", bytes},
                      {"worst_head", head},
                      {"attention", ErrorJson(error)},
                      {"k_and_v_alone", ErrorJson(alone)}});
    if (o.json) continue;
    const std::string worst_head =
        fmt::format("{} ({})", PercentText(error.heads[static_cast<size_t>(head)]), head);
    Print("  {:<13}{:>7}{:>12}{:>12}{:>20}{:>14}\n", line.Cache(), bytes, PercentText(error.rms),
          PercentText(error.worst), worst_head, PercentText(alone.rms));
    Flush();
  }
  if (!o.json) Print("\n");
  nlohmann::ordered_json file = nullptr;
  if (!a.file.empty()) file = a.file;
  return {{"file", file},
          {"dtype", Name(dtype)},
          {"sequences", p.sequences.size()},
          {"queries", a.q.rows},
          {"queries_compared", compared},
          {"keys", a.k.rows},
          {"heads", p.heads},
          {"heads_kv", p.heads_kv},
          {"head_dim", p.head_dim},
          {"head_dim_v", p.head_dim_v},
          {"caches", std::move(caches)}};
}

}  // namespace

int CheckKv(const CheckOptions& o) {
  if (o.problem.dropout_p > 0) {
    throw UserError(
        fmt::format("--dropout = {} with --kv, expected 0: no result over a cache has "
                    "dropped weights",
                    o.problem.dropout_p));
  }
  const Machine m = machine();
  nlohmann::ordered_json inputs = nlohmann::ordered_json::array();
  if (o.files.empty()) inputs.push_back(Compare(o, DrawnActivations(o), true));
  for (const std::string& file : o.files)
    inputs.push_back(Compare(o, ReadFile(file, o), inputs.empty()));
  if (o.json) {
    const nlohmann::ordered_json document = {{"machine", MachineJson(m)},
                                             {"device", o.device == Device::kCuda ? "cuda" : "cpu"},
                                             {"seed", o.seed},
                                             {"kv_scale", ScaleName(o.kv_scale)},
                                             {"inputs", std::move(inputs)}};
    Print("{}\n", document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }
  return 0;
}

}  // namespace strobe::cli
