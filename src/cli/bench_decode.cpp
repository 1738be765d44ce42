// `strobe bench --decode`: a few queries for each sequence against a long KV cache, beside a plain
// read of as many bytes by as many threads (on a GPU beside a copy on the device).
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/bench_fill.h"
#include "cli/buffer.h"
#include "cli/busy.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/machine_json.h"
#include "cli/measure.h"
#include "cli/mirror.h"
#include "cli/random.h"
#include "cli/streaming_read.h"
#include "cli/terminal.h"
#include "core/element.h"

namespace strobe::cli {
namespace {

// Caches are read in turns, as the layers of a model are, until so much has passed that no cache of
// the machine holds the first of them any more.
constexpr double kTurnBytes = 512e6;
constexpr int64_t kMostLayers = 128;

struct Shape {
  DType dtype;
  KvDTypes kv;                            // of the cache
  int64_t head_dim, seqlen_k, page_size;  // page_size 0: contiguous
  Layout layout;
};

// The keys, values and queries of a few layers of one shape.
class Layers {
 public:
  Layers(const Shape& shape, const BenchOptions& o) {
    const int64_t batch = o.batch > 0 ? o.batch : 16, heads = o.heads > 0 ? o.heads : 32;
    const int64_t heads_kv = o.heads_kv > 0 ? o.heads_kv : o.heads > 0 ? heads : 8;
    const int64_t seqlen_q = o.seqlens.empty() ? 1 : o.seqlens.front();
    const int64_t page = shape.page_size, dim = shape.head_dim;
    const int64_t pages = page > 0 ? (shape.seqlen_k + page - 1) / page : 0;
    const int64_t rows = page > 0 ? page : shape.seqlen_k;
    const int64_t entries = page > 0 ? batch * pages : batch;
    // In double: the product may be beyond 64 bits, and no machine has that much.
    if (static_cast<double>(batch) *
            static_cast<double>(std::max({shape.seqlen_k, seqlen_q, page})) *
            static_cast<double>(std::max(heads, heads_kv)) * static_cast<double>(dim) >
        0x1p48) {
      throw std::bad_alloc();
    }
    problem_ = {.dtype = shape.dtype,
                .device = o.device,
                .device_index = static_cast<int32_t>(o.device_index),
                .batch = batch,
                .seqlen_q = seqlen_q,
                .seqlen_k = shape.seqlen_k,
                .heads = heads,
                .heads_kv = heads_kv,
                .head_dim = dim};
    copy_options(o.problem, problem_);
    problem_.causal = !o.causal.empty() && o.causal.front();
    problem_.threads = static_cast<int32_t>(o.threads);
    problem_.has_seqused_k = true;
    problem_.cache = page > 0 ? Cache::kPaged : Cache::kContiguous;
    problem_.pages = page > 0 ? entries : 0;
    problem_.page_size = page;
    problem_.pages_per_sequence = pages;
    problem_.kv_dtype = shape.kv.keys(shape.dtype);
    problem_.v_dtype = shape.kv.values(shape.dtype);
    cache_rows_ = static_cast<size_t>(entries * rows * heads_kv);
    const auto set = [&](DType of, Side& side, Strides& strides, Strides& scale_strides) {
      const auto is = static_cast<int32_t>(of);
      const bool scaled = has_scales(is);
      if (scaled) {
        problem_.kv_scale = KvScale::kRow;
        problem_.kv_scale_dtype = DType::kFloat16;
      }
      const int64_t run = row_elements(is, dim);
      if (shape.layout == Layout::kHeadsSeqlen) {
        strides = {.batch = heads_kv * rows * run, .seqlen = run, .head = rows * run, .dim = 1};
        if (scaled) scale_strides = {.batch = heads_kv * rows, .seqlen = 1, .head = rows, .dim = 0};
      }
      side.row_bytes = static_cast<size_t>(row_bytes(is, dim));
      side.bytes = cache_rows_ * side.row_bytes;
      side.scale_bytes = scaled ? Bytes(problem_.kv_scale_dtype) : 0;
    };
    set(problem_.kv_dtype, k_, problem_.k, problem_.k_scale);
    set(problem_.v_dtype, v_, problem_.v, problem_.v_scale);
    q_bytes_ = static_cast<size_t>(batch * seqlen_q * heads * dim) * Bytes(shape.dtype);
    lengths_.assign(static_cast<size_t>(batch), static_cast<int32_t>(shape.seqlen_k));
  }

  [[nodiscard]] const Problem& problem() const { return problem_; }
  // Of K and V that one launch reads.
  [[nodiscard]] double ReadBytes() const {
    return static_cast<double>(problem_.batch * problem_.seqlen_k * problem_.heads_kv) *
           static_cast<double>(k_.row_bytes + k_.scale_bytes + v_.row_bytes + v_.scale_bytes);
  }

  [[nodiscard]] size_t HalfOfRead() const { return static_cast<size_t>(ReadBytes() / 2); }

  struct Times {
    Timing decode, read;  // seconds of one launch, and of a read of its bytes
    int64_t layers = 0;
  };
  // The launches of all layers and the reads of all, in turns, until `seconds` have passed.
  [[nodiscard]] Times Run(const Plan& plan, double seconds) {
    const auto turns = static_cast<int64_t>(kTurnBytes / std::max(ReadBytes(), 1.0)) + 1;
    const auto layers = static_cast<size_t>(std::min(turns, kMostLayers));
    Fill(layers);
    Mirror mirror(problem_.device, problem_.device_index);
    const Buffer workspace(plan.workspace_bytes());
    std::vector<ForwardArgs> args;
    for (size_t n = 0; n < layers; ++n) {
      args.push_back(
          {.q = mirror.In(q_.data(), q_.size()),
           .k = mirror.Out(k_.rows.data(), k_.rows.size()) + n * k_.bytes,
           .v = mirror.Out(v_.rows.data(), v_.rows.size()) + n * v_.bytes,
           .out = mirror.Out(out_.data(), out_.size()),
           .lse = mirror.Out(lse_.floats(), lse_.size() / sizeof(float)),
           .workspace = mirror.Out(workspace.span()),
           .seqused_k = mirror.In(lengths_.data(), lengths_.size()),
           .block_table = table_.empty() ? nullptr : mirror.In(table_.data(), table_.size()),
           .k_scale = ScalesOf(k_, &mirror),
           .v_scale = ScalesOf(v_, &mirror)});
    }
    const auto decode = [&] {
      for (const ForwardArgs& each : args) plan.forward(each);
      mirror.Wait();
    };
    const auto read = [&] {
      for (const ForwardArgs& each : args) Read(mirror, each, plan.threads());
      mirror.Wait();
    };
    const auto count = static_cast<double>(layers);
    std::vector<Timing> times = MeasureInTurns({decode, read}, seconds);
    for (Timing& t : times) t = {t.median / count, t.best / count, t.runs};
    return {times[0], times[1], static_cast<int64_t>(layers)};
  }

 private:
  // Keys or values.
  struct Side {
    size_t row_bytes = 0, bytes = 0, scale_bytes = 0;  // of a row, of all, of a row's scale
    Buffer rows, scales;
  };
  static void* ScalesOf(const Side& side, Mirror* mirror) {
    return side.scale_bytes > 0 ? mirror->Out(side.scales.data(), side.scales.size()) : nullptr;
  }

  void Fill(size_t layers) {
    // Pages in a random order, as a pool has them after a while.
    Random random(1);
    table_.reserve(static_cast<size_t>(problem_.pages));
    for (int64_t i = 0; i < problem_.pages; ++i) {
      table_.push_back(static_cast<int32_t>(i));
      std::swap(table_.back(), table_[static_cast<size_t>(random.Integer(0, i))]);
    }
    q_ = Buffer(q_bytes_);
    out_ = Buffer(q_bytes_);
    lse_ = Buffer(static_cast<size_t>(problem_.batch * problem_.heads * problem_.seqlen_q) *
                  sizeof(float));
    FillNormal(problem_.dtype, q_.span(), 1);
    uint64_t seed = 2;
    for (const auto& [side, dtype] : {std::pair{&k_, problem_.kv_dtype}, {&v_, problem_.v_dtype}}) {
      // Behind the last there is room for a read of half of a launch's bytes, where these rows are
      // fewer: beside those of more bytes, and with scales.
      const size_t room = std::max(HalfOfRead(), side->bytes) - side->bytes;
      side->rows = Buffer(side->bytes * layers + room);
      std::memset(side->rows.data() + side->bytes * layers, 0, room);
      side->scales = Buffer(cache_rows_ * side->scale_bytes);
      FillCache(dtype, *side, seed++);
      for (size_t n = 1; n < layers; ++n)
        std::memcpy(side->rows.data() + n * side->bytes, side->rows.data(), side->bytes);
    }
  }

  void FillCache(DType dtype, const Side& side, uint64_t seed) {
    const std::span<std::byte> cache = side.rows.span().first(side.bytes);
    if (dtype == problem_.dtype) return FillNormal(problem_.dtype, cache, seed);
    // Some rows, quantised, again and again.
    const size_t rows = std::min<size_t>(cache_rows_, 4096);
    const auto dim = static_cast<size_t>(problem_.head_dim);
    const Buffer floats(rows * dim * sizeof(float));
    FillNormal(DType::kFloat32, floats.span(), seed);
    const bool scaled = side.scale_bytes > 0;
    quantize({.kv_dtype = dtype,
              .kv_scale = scaled ? problem_.kv_scale : KvScale::kNone,
              .kv_scale_dtype = scaled ? problem_.kv_scale_dtype : DType::kFloat32,
              .seqlen = static_cast<int64_t>(rows),
              .head_dim = problem_.head_dim,
              .x = floats.data(),
              .codes = cache.data(),
              .scale = scaled ? side.scales.data() : nullptr});
    const auto repeat = [&](std::span<std::byte> all, size_t row) {
      for (size_t at = rows * row; at < all.size(); at += rows * row) {
        std::memcpy(all.data() + at, all.data(), std::min(rows * row, all.size() - at));
      }
    };
    repeat(cache, side.row_bytes);
    if (scaled) repeat(side.scales.span(), side.scale_bytes);
  }

  // On a CPU each thread reads its share of as much of K and of V as a launch reads. On a GPU so
  // much of K is copied over V, which reads and writes as many bytes together.
  void Read(const Mirror& mirror, const ForwardArgs& args, int threads) const {
    const size_t bytes = HalfOfRead();
    if (problem_.device == Device::kCuda) {
      mirror.CopyOnGpu(const_cast<void*>(args.v), args.k, bytes);
      return;
    }
    StreamingRead({args.k, args.v}, bytes, threads);
  }

  Problem problem_;
  size_t cache_rows_ = 0, q_bytes_ = 0;
  std::vector<int32_t> lengths_, table_;
  Side k_, v_;
  Buffer q_, out_, lse_;
};

std::vector<Shape> Shapes(const BenchOptions& o) {
  const auto some = [](const std::vector<int64_t>& given, std::vector<int64_t> otherwise) {
    return given.empty() ? std::move(otherwise) : given;
  };
  const std::vector<DType> dtypes =
      o.dtypes.empty() ? std::vector{DType::kFloat32, DType::kBFloat16} : o.dtypes;
  const Layout layout = o.layout.value_or(Layout::kSeqlenHeads);
  std::vector<Shape> shapes;
  for (const DType dtype : dtypes) {
    if (o.device == Device::kCuda && o.dtypes.empty() && dtype == DType::kFloat32) continue;
    for (const int64_t head_dim : some(o.head_dims, {128})) {
      for (const int64_t seqlen_k : some(o.seqlens_k, {4096})) {
        for (const int64_t page_size : some(o.page_sizes, {0})) {
          for (const KvDTypes& kv : o.kv.empty() ? std::vector<KvDTypes>(1) : o.kv)
            shapes.push_back({dtype, kv, head_dim, seqlen_k, page_size, layout});
        }
      }
    }
  }
  return shapes;
}

std::string KvName(const Shape& shape) {
  const std::string keys = Name(shape.kv.keys(shape.dtype));
  return shape.kv.v ? keys + "/" + Name(shape.kv.values(shape.dtype)) : keys;
}

nlohmann::ordered_json ToJson(const Problem& p, const Shape& shape, const Plan& plan,
                              const Layers::Times& times, double bytes, const std::string& busy) {
  return {{"dtype", Name(p.dtype)},
          {"kv", KvName(shape)},
          {"head_dim", p.head_dim},
          {"batch", p.batch},
          {"heads", p.heads},
          {"heads_kv", p.heads_kv},
          {"seqlen", p.seqlen_q},
          {"seqlen_k", p.seqlen_k},
          {"page_size", shape.page_size},
          {"layout", shape.layout == Layout::kSeqlenHeads ? "bshd" : "bhsd"},
          {"kernel", plan.kernel()},
          {"threads", plan.threads()},
          {"layers", times.layers},
          {"runs", times.decode.runs},
          {"bytes", bytes},
          {"median_seconds", times.decode.median},
          {"best_seconds", times.decode.best},
          {"read_median_seconds", times.read.median},
          {"read_best_seconds", times.read.best},
          {"gbytes_per_second", bytes / times.decode.median / 1e9},
          {"read_gbytes_per_second", bytes / times.read.median / 1e9},
          {"share_of_read", times.read.median / times.decode.median},
          {"busy", busy}};
}

}  // namespace

int BenchDecode(const BenchOptions& options) {
  if (options.direction.value_or(Which::kForward) != Which::kForward)
    throw UserError("--direction with --decode, expected forward: a KV cache has no backward pass");
  if (options.seqlens.size() > 1)
    throw UserError("--seqlen with --decode, expected one number of queries");
  if (options.causal.size() > 1)
    throw UserError("--causal with --decode, expected either no or yes");
  if (options.problem.dropout_p > 0) {
    throw UserError(
        fmt::format("--dropout = {} with --decode, expected 0: a KV cache has no dropout",
                    options.problem.dropout_p));
  }
  const std::vector<Shape> shapes = Shapes(options);
  for (const Shape& shape : shapes) {
    for (const DType of : {shape.kv.keys(shape.dtype), shape.kv.values(shape.dtype)}) {
      if (has_blocks(static_cast<int32_t>(of)) && shape.head_dim % kBlockValues != 0) {
        throw UserError(fmt::format("--head-dim = {} with --kv {}, expected a multiple of {}",
                                    shape.head_dim, Name(of), kBlockValues));
      }
    }
    (void)Plan(Layers(shape, options).problem());
  }
  const Machine m = machine();
  const bool cuda = options.device == Device::kCuda;
  nlohmann::ordered_json json = {{"machine", MachineJson(m)},
                                 {"results", nlohmann::ordered_json::array()}};
  if (!options.json) {
    const Problem p = Layers(shapes.front(), options).problem();
    const std::string where =
        cuda ? m.cuda_devices[static_cast<size_t>(options.device_index)].name
             : fmt::format("{}, {} threads", m.cpu_name,
                           options.threads > 0 ? options.threads : m.cpu_threads);
    Print("Strobe {} on {}: {} sequences x {} queries, {} heads, {} of keys.\n", version(), where,
          p.batch, p.seqlen_q, p.heads, p.heads_kv);
    Print("{}\n\n",
          Dim(cuda ? "Median times. The machine: a copy on the device, bytes read and written."
                   : "Median times. The machine: a plain read of as many bytes, as many threads."));
    Print("{:<9} {:<13} {:>8} {:>8} {:>6}  {:<13} {:>10} {:>9} {:>11} {:>13} {:>6}\n", "dtype",
          "cache", "head_dim", "seqlen_k", "page", "kernel", "time", "K and V", "", "machine",
          "share");
  }
  bool above = false;
  BusyLines busy_lines("strobe bench --decode");
  const Stopwatch watch;
  double done = 0;
  for (const Shape& shape : shapes) {
    Layers layers(shape, options);
    const std::string label = fmt::format(
        "{:<9} {:<13} {:>8} {:>8} {:>6}", Name(shape.dtype), KvName(shape), shape.head_dim,
        shape.seqlen_k, shape.page_size > 0 ? fmt::format("{}", shape.page_size) : "-");
    const double rest = static_cast<double>(shapes.size()) - done;
    Progress(label, done > 0 ? watch.Seconds() / done * rest : 0);
    ++done;
    const Plan plan(layers.problem());
    const OtherPrograms others({getpid()});
    const Layers::Times times = layers.Run(plan, options.min_time);
    const std::string busy =
        busy_lines.Judge(others, cuda ? 0 : plan.threads(), {times.decode, times.read});
    const double bytes = layers.ReadBytes();
    json["results"].push_back(ToJson(layers.problem(), shape, plan, times, bytes, busy));
    ClearProgress();
    if (options.json) continue;
    above = above || times.read.median > times.decode.median;
    Print("{}  {:<13} {:>10} {:>9} {:>9}/s {:>11}/s {:>4.0f} %{}\n", label, plan.kernel(),
          TimeText(times.decode.median), BytesText(bytes), BytesText(bytes / times.decode.median),
          BytesText(bytes / times.read.median), 100 * times.read.median / times.decode.median,
          busy.empty() ? "" : "  busy");
    Flush();
  }
  if (options.json) Print("{}\n", json.dump(2));
  if (!options.json && !busy_lines.note().empty()) Print("\n{}\n", busy_lines.note());
  if (above && !options.json) {
    Print("\n{}\n", Dim(cuda ? "A share above 100 %: a copy writes half of its bytes, and memory "
                               "may give more to a "
                               "launch, which only reads."
                             : "A share above 100 %: the plain read leaves fetching ahead to the "
                               "processor, which on "
                               "some gives less than\nmemory has; the kernel asks for pages and "
                               "lines ahead itself. "
                               "Other work on the machine moves the share, too."));
  }
  return 0;
}

}  // namespace strobe::cli
