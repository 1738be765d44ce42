// `strobe run`: attention over the tensors of a safetensors file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>

#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/measure.h"
#include "cli/mirror.h"
#include "cli/safetensors.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

// q, k, v, out or a gradient, in whatever order of dimensions and however packed it lies in memory.
struct Tensor {
  std::string name;  // of the file's tensor that it is, or is part of
  int64_t batch = 1;
  int64_t seqlen = 0;  // with cu_seqlens all rows of all sequences, and batch is 1
  int64_t heads = 0;
  int64_t dim = 0;
  Strides strides = {};
  std::byte* data = nullptr;  // inputs are only read
};

// How a tensor lies in memory: it is part `part` of `parts` (3 in qkv, 2 in kv, else 1).
struct Packing {
  bool varlen = false;
  Layout layout = Layout::kSeqlenHeads;
  int64_t part = 0;
  int64_t parts = 1;

  [[nodiscard]] size_t Rank() const { return (varlen ? 3U : 4U) + (parts > 1 ? 1U : 0U); }

  [[nodiscard]] std::string Wanted() const {
    const char* rows = varlen                           ? "total"
                       : layout == Layout::kSeqlenHeads ? "batch, seqlen"
                                                        : "batch";
    if (parts > 1) return fmt::format("[{}, {}, heads, head_dim]", rows, parts);
    if (layout == Layout::kSeqlenHeads) return fmt::format("[{}, heads, head_dim]", rows);
    return varlen ? "[heads, total, head_dim]" : "[batch, heads, seqlen, head_dim]";
  }

  // Reads the extents from a shape of the right rank.
  void Read(const std::vector<int64_t>& shape, Tensor* t) const {
    auto at = shape.begin();
    t->batch = varlen ? 1 : *at++;
    if (layout == Layout::kHeadsSeqlen) t->heads = *at++;
    t->seqlen = *at++;
    if (parts > 1) ++at;
    if (layout == Layout::kSeqlenHeads) t->heads = *at++;
    t->dim = *at;
    SetStrides(t);
  }

  [[nodiscard]] std::vector<int64_t> Shape(const Tensor& t) const {
    std::vector<int64_t> shape;
    if (!varlen) shape.push_back(t.batch);
    if (layout == Layout::kHeadsSeqlen) shape.push_back(t.heads);
    shape.push_back(t.seqlen);
    if (parts > 1) shape.push_back(parts);
    if (layout == Layout::kSeqlenHeads) shape.push_back(t.heads);
    shape.push_back(t.dim);
    return shape;
  }

  void SetStrides(Tensor* t) const {
    if (layout == Layout::kSeqlenHeads) {
      const int64_t row = parts * t->heads * t->dim;
      t->strides = {.batch = t->seqlen * row, .seqlen = row, .head = t->dim, .dim = 1};
    } else {
      const int64_t head = t->seqlen * t->dim;
      t->strides = {.batch = t->heads * head, .seqlen = t->dim, .head = head, .dim = 1};
    }
  }

  // Elements before the first of this part.
  [[nodiscard]] int64_t Offset(const Tensor& t) const { return part * t.heads * t.dim; }
};

// From the first element to the last, what lies between included.
size_t Elements(const Tensor& t) {
  if (t.batch == 0 || t.seqlen == 0 || t.heads == 0 || t.dim == 0) return 0;
  return static_cast<size_t>((t.batch - 1) * t.strides.batch + (t.seqlen - 1) * t.strides.seqlen +
                             (t.heads - 1) * t.strides.head + t.dim);
}

DType FileDType(const TensorView& view) {
  for (const DType dtype : kDTypes) {
    if (view.dtype == FileName(dtype)) return dtype;
  }
  throw UserError(fmt::format("{} is {}, expected F32, BF16 or F16", view.name, view.dtype));
}

// The tensors of one file, checked against each other and, where asked for, converted.
class Inputs {
 public:
  Inputs(const SafetensorsView& file, const RunOptions& options) : file_(file), options_(options) {
    const TensorView* first = file.Find("qkv") != nullptr ? file.Find("qkv") : file.Find("q");
    if (first == nullptr) {
      std::vector<std::string> names;
      for (const TensorView& t : file.tensors) names.push_back(Printable(t.name));
      throw UserError(
          fmt::format("{} has {}, expected q, k and v, or qkv, or q and kv", options.input,
                      names.empty() ? "no tensor" : fmt::format("{}", fmt::join(names, ", "))));
    }
    file_dtype_ = FileDType(*first);
    dtype = options.dtype.value_or(file_dtype_);
    ReadLengths();
    ReadTensors();
    ReadSlopes();
    if (varlen) {
      ExpectEnd("cu_seqlens_q", cu_seqlens_q, q);
      ExpectEnd("cu_seqlens_k", cu_seqlens_k, k);
    }
  }

  DType dtype = DType::kFloat32;
  bool varlen = false;
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> cu_seqlens_k;
  Packing packing_q;
  Packing packing_k;
  Packing packing_v;
  Tensor q, k, v, dout;       // dout.data is null when the file has none
  std::vector<float> dlse;    // empty: none
  std::vector<float> slopes;  // empty: none
  Alibi alibi = Alibi::kNone;
  std::vector<std::string> unused;  // tensors of the file that mean nothing here

  // The file's tensors, to print.
  [[nodiscard]] const std::vector<const TensorView*>& used() const { return used_; }

  [[nodiscard]] int64_t Batch() const {
    return varlen ? static_cast<int64_t>(cu_seqlens_q.size()) - 1 : q.batch;
  }

 private:
  const TensorView* Take(const std::string& name) {
    const TensorView* view = file_.Find(name);
    if (view != nullptr) used_.push_back(view);
    return view;
  }

  std::vector<int32_t> TakeOffsets(const std::string& name) {
    const TensorView* view = Take(name);
    if (view == nullptr) return {};
    if (view->dtype != "I32" || view->shape.size() != 1 || view->shape[0] < 2) {
      throw UserError(fmt::format("{} is {} {}, expected I32 [batch + 1]", name, view->dtype,
                                  ShapeText(view->shape)));
    }
    std::vector<int32_t> offsets(static_cast<size_t>(view->shape[0]));
    std::memcpy(offsets.data(), view->data.data(), view->data.size());
    return offsets;
  }

  void ReadLengths() {
    const bool one = file_.Find("cu_seqlens") != nullptr;
    cu_seqlens_q = TakeOffsets(one ? "cu_seqlens" : "cu_seqlens_q");
    cu_seqlens_k = one ? cu_seqlens_q : TakeOffsets("cu_seqlens_k");
    if (cu_seqlens_q.size() != cu_seqlens_k.size()) {
      throw UserError(
          fmt::format("cu_seqlens_q has {} numbers and cu_seqlens_k {}, expected batch + 1 of each",
                      cu_seqlens_q.size(), cu_seqlens_k.size()));
    }
    varlen = !cu_seqlens_q.empty();
  }

  // The view's data in the dtype of this run. Tensors that share a view share the copy.
  std::byte* Data(const TensorView& view) {
    const size_t element = Bytes(file_dtype_);
    const bool aligned = reinterpret_cast<uintptr_t>(view.data.data()) % element == 0;
    if (dtype == file_dtype_ && aligned) return const_cast<std::byte*>(view.data.data());
    if (const auto known = converted_.find(&view); known != converted_.end())
      return known->second.data();
    const size_t count = view.data.size() / element;
    Buffer copy(count * Bytes(dtype));
    for (size_t i = 0; i < count; ++i)
      Store(dtype, copy.data(), i, Load(file_dtype_, view.data.data(), i));
    return converted_.emplace(&view, std::move(copy)).first->second.data();
  }

  Tensor Read(const TensorView& view, const Packing& packing) {
    if (FileDType(view) != file_dtype_) {
      throw UserError(fmt::format("{} is {}, expected {} like the others", view.name, view.dtype,
                                  FileName(file_dtype_)));
    }
    if (view.shape.size() != packing.Rank() ||
        (packing.parts > 1 && view.shape[packing.Rank() - 3] != packing.parts)) {
      throw UserError(fmt::format("{} has the shape {}, expected {}{}", view.name,
                                  ShapeText(view.shape), packing.Wanted(),
                                  varlen ? " because the file has cu_seqlens" : ""));
    }
    Tensor t;
    t.name = view.name;
    // Beside an extent of 0 the others can be anything; strides are products of them.
    double product = 1;
    for (const int64_t extent : view.shape)
      product *= static_cast<double>(std::max<int64_t>(extent, 1));
    if (product > 0x1p60) {
      throw UserError(
          fmt::format("{} has the shape {}, expected extents whose product is below 2^60",
                      view.name, ShapeText(view.shape)));
    }
    packing.Read(view.shape, &t);
    t.data = Data(view) + packing.Offset(t) * static_cast<int64_t>(Bytes(dtype));
    return t;
  }

  // Tensor `name`, or part `part` of the packed one.
  Tensor ReadPart(const char* name, const char* packed, int64_t part, int64_t parts,
                  Packing* packing) {
    *packing = {.varlen = varlen, .layout = options_.layout, .part = 0, .parts = 1};
    const TensorView* view = file_.Find(packed);
    if (view != nullptr) {
      if (options_.layout != Layout::kSeqlenHeads) {
        throw UserError(fmt::format("{} is packed, expected --layout bshd", packed));
      }
      packing->part = part;
      packing->parts = parts;
    } else {
      view = file_.Find(name);
    }
    if (view == nullptr)
      throw UserError(fmt::format("{} has no {}, expected q, k and v", options_.input, name));
    if (std::find(used_.begin(), used_.end(), view) == used_.end()) used_.push_back(view);
    return Read(*view, *packing);
  }

  void ReadTensors() {
    const bool kv = file_.Find("qkv") == nullptr && file_.Find("kv") != nullptr;
    q = ReadPart("q", "qkv", 0, 3, &packing_q);
    k = ReadPart("k", kv ? "kv" : "qkv", kv ? 0 : 1, kv ? 2 : 3, &packing_k);
    v = ReadPart("v", kv ? "kv" : "qkv", kv ? 1 : 2, kv ? 2 : 3, &packing_v);
    Expect(k.batch == q.batch, k, "batch", k.batch, fmt::format("{} like q's", q.batch));
    Expect(k.dim == q.dim, k, "head_dim", k.dim, fmt::format("{} like q's", q.dim));
    Expect(v.batch == q.batch, v, "batch", v.batch, fmt::format("{} like q's", q.batch));
    Expect(v.seqlen == k.seqlen, v, varlen ? "total" : "seqlen", v.seqlen,
           fmt::format("{} like k's", k.seqlen));
    Expect(v.heads == k.heads, v, "heads", v.heads, fmt::format("{} like k's", k.heads));

    if (const TensorView* view = Take("dout")) {
      dout = Read(*view, {.varlen = varlen, .layout = options_.layout, .part = 0, .parts = 1});
      Expect(dout.batch == q.batch, dout, "batch", dout.batch, fmt::format("{} like q's", q.batch));
      Expect(dout.seqlen == q.seqlen, dout, varlen ? "total" : "seqlen", dout.seqlen,
             fmt::format("{} like q's", q.seqlen));
      Expect(dout.heads == q.heads, dout, "heads", dout.heads, fmt::format("{} like q's", q.heads));
      Expect(dout.dim == v.dim, dout, "head_dim", dout.dim, fmt::format("{} like v's", v.dim));
    }
    dlse = TakeFloats("dlse", varlen ? std::vector<int64_t>{q.heads, q.seqlen}
                                     : std::vector<int64_t>{q.batch, q.heads, q.seqlen});
  }

  static void Expect(bool good, const Tensor& t, const char* extent, int64_t got,
                     const std::string& wanted) {
    if (!good)
      throw UserError(fmt::format("{}: {} = {}, expected {}", t.name, extent, got, wanted));
  }

  // Rows past the last sequence would be left unwritten in the result.
  static void ExpectEnd(const char* name, const std::vector<int32_t>& offsets, const Tensor& t) {
    if (offsets.back() == t.seqlen) return;
    throw UserError(fmt::format("{} ends with {}, expected {}, the rows of {}", name,
                                offsets.back(), t.seqlen, t.name));
  }

  // F32 of that shape, or empty when the file has none.
  std::vector<float> TakeFloats(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorView* view = Take(name);
    if (view == nullptr) return {};
    if (view->dtype != "F32" || view->shape != shape) {
      throw UserError(fmt::format("{} is {} {}, expected F32 {}", name, view->dtype,
                                  ShapeText(view->shape), ShapeText(shape)));
    }
    std::vector<float> values(view->data.size() / sizeof(float));
    std::memcpy(values.data(), view->data.data(), view->data.size());
    return values;
  }

  void ReadSlopes() {
    const TensorView* view = file_.Find("alibi_slopes");
    if (view != nullptr) {
      const bool per_batch = view->shape.size() == 2;
      slopes = TakeFloats("alibi_slopes", per_batch ? std::vector<int64_t>{Batch(), q.heads}
                                                    : std::vector<int64_t>{q.heads});
      alibi = per_batch ? Alibi::kPerBatchHead : Alibi::kPerHead;
    } else if (options_.alibi) {
      for (int64_t h = 0; h < q.heads; ++h) {
        slopes.push_back(static_cast<float>(
            std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(q.heads))));
      }
      alibi = Alibi::kPerHead;
    }
    for (const TensorView& t : file_.tensors) {
      if (std::find(used_.begin(), used_.end(), &t) == used_.end())
        unused.push_back(Printable(t.name));
    }
  }

  const SafetensorsView& file_;
  const RunOptions& options_;
  DType file_dtype_ = DType::kFloat32;
  std::vector<const TensorView*> used_;
  std::map<const TensorView*, Buffer> converted_;
};

// Tensors of the result and the memory that they lie in.
class Outputs {
 public:
  // A tensor with the extents of `like`. Parts of one packed tensor share its memory.
  Tensor Add(const std::string& name, const Tensor& like, const Packing& packing, DType dtype) {
    Tensor t = like;
    t.name = name;
    packing.SetStrides(&t);
    auto found = std::find_if(views_.begin(), views_.end(),
                              [&](const TensorView& view) { return view.name == name; });
    if (found == views_.end()) {
      AddView(name, FileName(dtype), packing.Shape(t), Bytes(dtype));
      found = std::prev(views_.end());
    }
    t.data = const_cast<std::byte*>(found->data.data()) +
             packing.Offset(t) * static_cast<int64_t>(Bytes(dtype));
    return t;
  }

  float* AddFloats(const std::string& name, std::vector<int64_t> shape) {
    AddView(name, "F32", std::move(shape), sizeof(float));
    return buffers_.back().floats();
  }

  [[nodiscard]] const std::vector<TensorView>& views() const { return views_; }

  // The counterpart of a pointer into one of the tensors.
  template <typename T>
  [[nodiscard]] T* Mirrored(Mirror* mirror, T* pointer) const {
    auto* const at = reinterpret_cast<std::byte*>(pointer);
    for (const Buffer& buffer : buffers_) {
      if (buffer.data() <= at && at < buffer.data() + buffer.size()) {
        return reinterpret_cast<T*>(mirror->Out(buffer.data(), buffer.size()) +
                                    (at - buffer.data()));
      }
    }
    return pointer;  // of no bytes
  }

 private:
  void AddView(const std::string& name, const char* dtype, std::vector<int64_t> shape,
               size_t element) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    buffers_.emplace_back(count * element);
    views_.push_back(
        {.name = name, .dtype = dtype, .shape = std::move(shape), .data = buffers_.back().span()});
  }

  std::vector<TensorView> views_;
  std::deque<Buffer> buffers_;
};

// Of sequences that lie in `rows` rows. Offsets that make no sense are for the launch to refuse.
int64_t Longest(const std::vector<int32_t>& offsets, int64_t rows) {
  int64_t longest = 0;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    longest = std::max<int64_t>(longest, int64_t{offsets[b + 1]} - offsets[b]);
  }
  return std::min(longest, rows);
}

Problem MakeProblem(const Inputs& in, const RunOptions& o) {
  Problem p;
  p.dtype = in.dtype;
  p.device = o.device;
  p.device_index = static_cast<int32_t>(o.device_index);
  p.batch = in.Batch();
  p.seqlen_q = in.varlen ? Longest(in.cu_seqlens_q, in.q.seqlen) : in.q.seqlen;
  p.seqlen_k = in.varlen ? Longest(in.cu_seqlens_k, in.k.seqlen) : in.k.seqlen;
  p.heads = in.q.heads;
  p.heads_kv = in.k.heads;
  p.head_dim = in.q.dim;
  p.head_dim_v = in.v.dim;
  p.varlen = in.varlen;
  p.total_q = in.varlen ? in.q.seqlen : 0;
  p.total_k = in.varlen ? in.k.seqlen : 0;
  p.causal = o.causal;
  p.window_left = o.window[0];
  p.window_right = o.window[1];
  if (o.scale) p.scale = static_cast<float>(*o.scale);
  p.softcap = static_cast<float>(o.softcap);
  p.dropout_p = static_cast<float>(o.dropout_p);
  p.alibi = in.alibi;
  p.deterministic = o.deterministic;
  p.batch_invariant = o.batch_invariant;
  p.threads = static_cast<int32_t>(o.threads);
  p.q = in.q.strides;
  p.k = in.k.strides;
  p.v = in.v.strides;
  return p;
}

double Pairs(const Inputs& in, const Problem& p) {
  const auto pairs = [&p](int64_t seqlen_q, int64_t seqlen_k) {
    return VisiblePairs(seqlen_q, seqlen_k, p.causal, p.window_left, p.window_right);
  };
  if (!in.varlen) return static_cast<double>(p.batch) * pairs(p.seqlen_q, p.seqlen_k);
  double sum = 0;
  for (size_t b = 0; b + 1 < in.cu_seqlens_q.size(); ++b) {
    sum += pairs(in.cu_seqlens_q[b + 1] - in.cu_seqlens_q[b],
                 in.cu_seqlens_k[b + 1] - in.cu_seqlens_k[b]);
  }
  return sum;
}

void PrintTensor(std::string_view name, std::string_view dtype, const std::vector<int64_t>& shape) {
  fmt::print("  {:<13} {:<5} {}\n", Printable(name), dtype, ShapeText(shape));
}

void PrintLaunch(const char* direction, const Plan& plan, const Timing& timing, double flop) {
  fmt::print("  {:<10} {:<14} {:>7} {:>11} {:>11} {:>5} {:>16}\n", direction, plan.kernel(),
             plan.threads(), BytesText(static_cast<double>(plan.workspace_bytes())),
             TimeText(timing.median), timing.runs, SpeedText(flop / timing.median));
}

void PrintPlan(const char* direction, const Plan& plan) {
  const auto indented = [](std::string text) {
    while (!text.empty() && text.back() == '\n') text.pop_back();
    for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 3)
      text.insert(at + 1, "  ");
    return "  " + text;
  };
  fmt::print("\n{}\n{}\n", Bold(fmt::format("Plan, {}", direction)), indented(plan.text()));
}

}  // namespace

int Run(const RunOptions& options) {
  const SafetensorsFile file(options.input);
  if (!options.output.empty()) CheckWritable(options.output);
  Inputs in(file.view(), options);
  const Which which =
      options.direction.value_or(in.dout.data != nullptr ? Which::kBoth : Which::kForward);
  const bool backward = which != Which::kForward;

  Outputs outputs;
  Problem problem = MakeProblem(in, options);
  Tensor like_out = in.q;
  like_out.dim = in.v.dim;
  const Packing plain = {.varlen = in.varlen, .layout = options.layout, .part = 0, .parts = 1};
  // The strides of out do not depend on its memory, and memory is only taken for a problem that
  // some kernel accepts.
  Tensor out = like_out;
  plain.SetStrides(&out);
  problem.out = out.strides;
  const Plan forward_plan(problem);

  out = outputs.Add("out", like_out, plain, in.dtype);
  float* lse = outputs.AddFloats(
      "lse", in.varlen ? std::vector<int64_t>{in.q.heads, in.q.seqlen}
                       : std::vector<int64_t>{in.q.batch, in.q.heads, in.q.seqlen});
  const Buffer forward_workspace(forward_plan.workspace_bytes());
  Mirror mirror(options.device, options.device_index);
  const auto input = [&](const Tensor& t) {
    return mirror.In(t.data, Elements(t) * Bytes(in.dtype));
  };
  const auto output = [&](const Tensor& t) { return outputs.Mirrored(&mirror, t.data); };
  const ForwardArgs forward_args = {
      .q = input(in.q),
      .k = input(in.k),
      .v = input(in.v),
      .out = output(out),
      .lse = outputs.Mirrored(&mirror, lse),
      .cu_seqlens_q = mirror.In(in.cu_seqlens_q.data(), in.cu_seqlens_q.size()),
      .cu_seqlens_k = mirror.In(in.cu_seqlens_k.data(), in.cu_seqlens_k.size()),
      .alibi_slopes = mirror.In(in.slopes.data(), in.slopes.size()),
      .dropout_seed = static_cast<uint64_t>(options.seed),
      .dropout_offset = static_cast<uint64_t>(options.offset),
      .workspace = mirror.Out(forward_workspace.span())};

  // Both plans before the first launch, so that what is refused is refused at once.
  Problem backward_problem = problem;
  Plan backward_plan;
  Buffer backward_workspace;
  Buffer ones;
  BackwardArgs backward_args;
  if (backward) {
    if (in.dout.data == nullptr) {
      in.dout = out;
      const size_t count = outputs.views().front().data.size() / Bytes(in.dtype);
      ones = Buffer(count * Bytes(in.dtype));
      for (size_t i = 0; i < count; ++i) Store(in.dtype, ones.data(), i, 1.0F);
      in.dout.data = ones.data();
    }
    const bool qkv = in.packing_q.parts == 3;
    const bool kv = in.packing_k.parts == 2;
    const Tensor dq = outputs.Add(qkv ? "dqkv" : "dq", in.q, in.packing_q, in.dtype);
    const Tensor dk = outputs.Add(qkv ? "dqkv" : kv ? "dkv" : "dk", in.k, in.packing_k, in.dtype);
    const Tensor dv = outputs.Add(qkv ? "dqkv" : kv ? "dkv" : "dv", in.v, in.packing_v, in.dtype);
    backward_problem.direction = Direction::kBackward;
    backward_problem.has_dlse = !in.dlse.empty();
    backward_problem.dout = in.dout.strides;
    backward_problem.dq = dq.strides;
    backward_problem.dk = dk.strides;
    backward_problem.dv = dv.strides;
    backward_plan = Plan(backward_problem);
    backward_workspace = Buffer(backward_plan.workspace_bytes());
    backward_args = {.q = forward_args.q,
                     .k = forward_args.k,
                     .v = forward_args.v,
                     .out = forward_args.out,
                     .lse = forward_args.lse,
                     .dout = input(in.dout),
                     .dlse = in.dlse.empty() ? nullptr : mirror.In(in.dlse.data(), in.dlse.size()),
                     .dq = output(dq),
                     .dk = output(dk),
                     .dv = output(dv),
                     .cu_seqlens_q = forward_args.cu_seqlens_q,
                     .cu_seqlens_k = forward_args.cu_seqlens_k,
                     .alibi_slopes = forward_args.alibi_slopes,
                     .dropout_seed = forward_args.dropout_seed,
                     .dropout_offset = forward_args.dropout_offset,
                     .workspace = mirror.Out(backward_workspace.span())};
  }

  fmt::print("{}\n", Bold(options.input));
  for (const TensorView* view : in.used()) PrintTensor(view->name, view->dtype, view->shape);
  if (!in.unused.empty()) fmt::print("  not used: {}\n", fmt::join(in.unused, ", "));
  if (options.dtype) fmt::print("  converted to {}\n", Name(in.dtype));
  std::fflush(stdout);

  constexpr double kSeconds = 0.5;
  // The first launch checks the arguments, among them cu_seqlens, before the pairs are counted from
  // them.
  const Timing forward = Measure(
      [&] {
        forward_plan.forward(forward_args);
        mirror.Wait();
      },
      kSeconds, options.repeat);
  const double flop = ForwardFlop(Pairs(in, problem), in.q.heads, in.q.dim, in.v.dim);
  fmt::print("\n  {:<10} {:<14} {:>7} {:>11} {:>11} {:>5} {:>16}\n", "", "kernel", "threads",
             "workspace", "time", "runs", "speed");
  PrintLaunch("forward", forward_plan, forward, flop);
  std::fflush(stdout);
  if (backward) {
    const Timing timing = Measure(
        [&] {
          backward_plan.backward(backward_args);
          mirror.Wait();
        },
        kSeconds, options.repeat);
    PrintLaunch("backward", backward_plan, timing, BackwardFlop(flop));
  }

  if (options.why) {
    PrintPlan("forward", forward_plan);
    if (backward) PrintPlan("backward", backward_plan);
  }
  fmt::print("\n");
  if (options.output.empty()) {
    fmt::print("Nothing written: name a file with -o to keep the result.\n");
    return 0;
  }
  mirror.Fetch();
  WriteSafetensors(options.output, outputs.views(),
                   {{"made_by", fmt::format("strobe {}", version())}});
  fmt::print("{}\n", Bold("wrote " + options.output));
  for (const TensorView& view : outputs.views()) PrintTensor(view.name, view.dtype, view.shape);
  return 0;
}

}  // namespace strobe::cli
