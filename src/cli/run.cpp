// `strobe run`: attention over the tensors of a safetensors file.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/inputs.h"
#include "cli/launch_check.h"
#include "cli/launch_progress.h"
#include "cli/measure.h"
#include "cli/mirror.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "core/element.h"

namespace strobe::cli {
namespace {

// From the first element to the last, what lies between included.
size_t Elements(const Tensor& t) {
  if (t.batch == 0 || t.seqlen == 0 || t.heads == 0 || t.dim == 0) return 0;
  return static_cast<size_t>((t.batch - 1) * t.strides.batch + (t.seqlen - 1) * t.strides.seqlen +
                             (t.heads - 1) * t.strides.head + t.dim);
}

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

  std::byte* AddArray(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    AddView(name, FileName(dtype), shape, Bytes(dtype));
    return buffers_.back().data();
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

void SetCache(const CacheInputs& cache, const Inputs& in, Problem* p) {
  p->cache = cache.kind;
  if (cache.kind == Cache::kPaged) {
    p->pages = in.k.batch;
    p->page_size = in.k.seqlen;
    p->pages_per_sequence = cache.pages_per_sequence;
  } else {
    p->cache_batch = in.k.batch;
  }
  p->has_cache_batch_idx = !cache.cache_batch_idx.empty();
  p->has_leftpad = !cache.leftpad.empty();
  p->append = cache.append;
  if (cache.append != Append::kNone) {
    const bool packed = cache.append == Append::kPacked;
    p->seqlen_new = packed ? Longest(cache.cu_seqlens_k_new) : cache.k_new.seqlen;
    p->total_new = packed ? cache.k_new.seqlen : 0;
    p->k_new = cache.k_new.strides;
    p->v_new = cache.v_new.strides;
  }
  p->kv_scale_dtype = cache.scale_dtype;
  p->rotary_dim = cache.rotary_dim;
  p->rotary_rows = cache.rotary_rows;
  p->has_rotary_position = !cache.rotary_position.empty();
}

Problem MakeProblem(const Inputs& in, const RunOptions& o) {
  Problem p;
  copy_options(o.problem, p);
  p.dtype = in.dtype;
  p.device = o.device;
  p.device_index = static_cast<int32_t>(o.device_index);
  p.batch = in.Batch();
  p.seqlen_q = in.SeqlenQ();
  p.seqlen_k = in.SeqlenK();
  p.heads = in.q.heads;
  p.heads_kv = in.k.heads;
  p.head_dim = in.q.dim;
  p.head_dim_v = in.DimV();
  p.varlen = in.varlen;
  p.total_q = in.varlen ? in.q.seqlen : 0;
  p.total_k = in.varlen && !in.cached() ? in.k.seqlen : 0;
  p.alibi = in.alibi;
  p.has_sinks = !in.sinks.empty();
  p.has_seqused_q = !in.arrays.seqused_q.empty();
  p.has_seqused_k = !in.arrays.seqused_k.empty();
  p.has_q_position = !in.arrays.q_position.empty();
  p.has_prefix = !in.arrays.prefix.empty();
  if (!in.bias.shape.empty()) {
    p.has_bias = true;
    p.bias_dtype = in.bias.dtype;
    p.bias_batch = in.bias.shape[0];
    p.bias_heads = in.bias.shape[1];
    p.bias_seqlen_q = in.bias.shape[2];
  }
  p.threads = static_cast<int32_t>(o.threads);
  p.q = in.q.strides;
  p.k = in.k.strides;
  p.v = in.v.strides;
  if (o.out_float32) p.out_dtype = DType::kFloat32;
  p.kv_dtype = in.DTypeOf(in.k);
  p.v_dtype = in.DTypeOf(in.v);
  p.kv_scale = in.cache.scale;
  if (has_scales(static_cast<int32_t>(p.kv_dtype))) p.k_scale = in.cache.k_scale_strides;
  if (has_scales(static_cast<int32_t>(p.v_dtype))) p.v_scale = in.cache.v_scale_strides;
  p.has_q_scale = in.float8() && in.HasScaleOfQ();
  p.q_scale = in.cache.q_scale_strides;
  p.rotary_interleaved = o.rotary_interleaved;
  if (in.cached()) SetCache(in.cache, in, &p);
  p.mask = in.MaskOf();
  return p;
}

// The arguments that a launch has besides its tensors. number(values) and data(pointer, bytes) give
// the places that it reads them from: the host's, or a mirror's.
template <typename Number, typename Data>
void SetNumbers(const Inputs& in, const Number& number, const Data& data, ForwardArgs* args) {
  args->cu_seqlens_q = number(in.cu_seqlens_q);
  args->cu_seqlens_k = number(in.cu_seqlens_k);
  map_arrays(in.arrays, *args, number);
  const CacheInputs& cache = in.cache;
  args->block_table = number(cache.block_table);
  args->cache_batch_idx = number(cache.cache_batch_idx);
  args->leftpad = number(cache.leftpad);
  args->rotary_position = number(cache.rotary_position);
  args->cu_seqlens_k_new = number(cache.cu_seqlens_k_new);
  const size_t element = Bytes(in.dtype);
  args->k_new = data(cache.k_new.data, Elements(cache.k_new) * element);
  args->v_new = data(cache.v_new.data, Elements(cache.v_new) * element);
  const auto angles = static_cast<size_t>(cache.rotary_rows * cache.rotary_dim / 2) * element;
  args->k_scale = data(cache.k_scale.data(), cache.k_scale.size());
  args->v_scale = data(cache.v_scale.data(), cache.v_scale.size());
  args->q_scale = static_cast<const float*>(
      static_cast<const void*>(data(cache.q_scale.data(), cache.q_scale.size())));
  args->rotary_cos = data(cache.rotary_cos, angles);
  args->rotary_sin = data(cache.rotary_sin, angles);
  args->bias = data(in.bias.data.data(), in.bias.data.size());
}

// The numbers and tensors of a launch where the host has them. Nobody writes through the pointers.
ForwardArgs HostArguments(const Inputs& in, const Tensor& out) {
  ForwardArgs args = {.q = in.q.data,
                      .k = in.k.data,
                      .v = in.v.data,
                      .out = out.data,
                      .alibi_slopes = in.slopes.data(),
                      .sinks = in.sinks.empty() ? nullptr : in.sinks.data()};
  SetNumbers(
      in,
      [](const std::vector<int32_t>& values) { return values.empty() ? nullptr : values.data(); },
      [](const void* at, size_t bytes) { return bytes > 0 ? at : nullptr; }, &args);
  return args;
}

double Pairs(const Inputs& in, const Plan& plan, const Problem& p, const ForwardArgs& host) {
  if (in.mask.there()) return MaskedPairs(plan.c().problem, host.c());
  return in.cached() ? CachedPairs(plan.c().problem, host.c()) : VisiblePairs(SequencesOf(p, host));
}

// New keys and values are written to a copy of the cache, which becomes a part of the result.
void CopyCache(const Packing& packing, DType dtype, Outputs* outputs, Tensor* t) {
  const Tensor copy = outputs->Add(t->name, *t, packing, dtype);
  if (const size_t bytes = Elements(*t) * Bytes(dtype); bytes > 0)
    std::memcpy(copy.data, t->data, bytes);
  t->data = copy.data;
}

// So are the scales of its rows.
void CopyScales(const char* name, const Inputs& in, Outputs* outputs,
                std::span<const std::byte>* scales) {
  const Tensor& k = in.k;
  const bool rows_first = in.packing_k.layout == Layout::kSeqlenHeads;
  std::byte* const copy = outputs->AddArray(
      name, in.cache.scale_dtype,
      {k.batch, rows_first ? k.seqlen : k.heads, rows_first ? k.heads : k.seqlen});
  if (!scales->empty()) std::memcpy(copy, scales->data(), scales->size());
  *scales = {copy, scales->size()};
}

void PrintTensor(std::string_view name, std::string_view dtype, const std::vector<int64_t>& shape) {
  Print("  {:<13} {:<5} {}\n", Printable(name), dtype, ShapeText(shape));
}

void PrintLaunch(const char* direction, const Plan& plan, const Timing& timing, double flop) {
  Print("  {:<10} {:<14} {:>7} {:>11} {:>11} {:>5} {:>16}\n", direction, plan.kernel(),
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
  Print("\n{}\n{}\n", Bold(fmt::format("Plan, {}", direction)), indented(plan.text()));
}

// Options that say how a tensor of the file is meant, where there is none.
void CheckTensorsOf(const RunOptions& o, const Inputs& in) {
  const auto check = [&](bool given, bool there, const char* option, const char* tensors) {
    if (!given || there) return;
    throw UserError(
        fmt::format("{}, expected the {} in {} too", option, tensors, PathText(o.input)));
  };
  check(o.problem.sinks_outside_lse, !in.sinks.empty(), "--sinks-outside-lse", "tensor sinks");
  check(o.rotary_interleaved, in.cache.rotary_dim > 0, "--rotary-interleaved",
        "tensors rotary_cos and rotary_sin");
}

}  // namespace

int Run(const RunOptions& options) {
  SafetensorsFile file(options.input);
  if (!options.output.empty()) CheckWritable(options.output);
  Inputs in(&file, options);
  const Which which = options.direction.value_or(in.has_dout ? Which::kBoth : Which::kForward);
  const bool backward = which != Which::kForward;
  if (backward && in.cached()) {
    throw UserError(
        fmt::format("{} makes k and v a KV cache, which has no backward pass, expected "
                    "--forward{}",
                    in.cache.because, in.has_dout ? " or no dout" : ""));
  }
  if (backward && in.float8()) {
    throw UserError(fmt::format(
        "{} is F8_E4M3: no kernel computes gradients from float8, expected --forward{}, or F32, "
        "BF16 or F16",
        in.q.name, in.has_dout ? " or no dout" : ""));
  }

  CheckTensorsOf(options, in);
  Outputs outputs;
  Problem problem = MakeProblem(in, options);
  Tensor like_out = in.q;
  like_out.dim = in.DimV();
  const Packing plain = {.varlen = in.varlen, .layout = options.layout};
  // The strides of out do not depend on its memory, and memory is only taken, and the tensors only
  // read, for a problem that some kernel accepts.
  Tensor out = like_out;
  plain.SetStrides(&out);
  problem.out = out.strides;
  Plan forward_plan(problem);
  in.ReadData();
  Buffer mask;
  if (in.mask.there()) {
    mask = in.PackMask(&problem);
    forward_plan = Plan(problem);
  }

  const DType out_dtype = options.out_float32 ? DType::kFloat32
                          : in.float8()       ? DType::kBFloat16
                                              : in.dtype;
  out = outputs.Add("out", like_out, plain, out_dtype);
  float* lse = outputs.AddFloats(
      "lse", in.varlen ? std::vector<int64_t>{in.q.heads, in.q.seqlen}
                       : std::vector<int64_t>{in.q.batch, in.q.heads, in.q.seqlen});
  const bool append = in.cache.append != Append::kNone;
  if (append) {
    CopyCache(in.packing_k, in.DTypeOf(in.k), &outputs, &in.k);
    CopyCache(in.packing_v, in.DTypeOf(in.v), &outputs, &in.v);
    if (in.cache.scale == KvScale::kRow) {
      if (in.cache.k_scale.data()) CopyScales("k_scale", in, &outputs, &in.cache.k_scale);
      if (in.cache.v_scale.data()) CopyScales("v_scale", in, &outputs, &in.cache.v_scale);
    }
  }
  // Numbers are refused before anything is said: a GPU would not tell.
  ForwardArgs host = HostArguments(in, out);
  if (in.mask.there()) host.mask = mask.data();
  if (in.cached()) CheckLaunch(forward_plan.c().problem, host.c());
  const Buffer forward_workspace(forward_plan.workspace_bytes());
  Mirror mirror(options.device, options.device_index);
  const auto input = [&](const Tensor& t) {
    return mirror.In(t.data, Elements(t) * Bytes(in.DTypeOf(t)));
  };
  const auto output = [&](const Tensor& t) { return outputs.Mirrored(&mirror, t.data); };
  ForwardArgs forward_args = {.q = input(in.q),
                              .k = append ? output(in.k) : input(in.k),
                              .v = append ? output(in.v) : input(in.v),
                              .out = output(out),
                              .lse = outputs.Mirrored(&mirror, lse),
                              .alibi_slopes = mirror.In(in.slopes.data(), in.slopes.size()),
                              .dropout_seed = static_cast<uint64_t>(options.seed),
                              .dropout_offset = static_cast<uint64_t>(options.offset),
                              .workspace = mirror.Out(forward_workspace.span())};
  if (problem.has_sinks) forward_args.sinks = mirror.In(in.sinks.data(), in.sinks.size());
  if (in.mask.there()) forward_args.mask = mirror.In(mask.data(), mask.size());
  SetNumbers(
      in,
      [&](const std::vector<int32_t>& values) {
        return values.empty() ? nullptr : mirror.In(values.data(), values.size());
      },
      [&](const void* at, size_t bytes) -> const std::byte* {
        // Scales that an append writes are outputs.
        const auto* const given = static_cast<const std::byte*>(at);
        const std::byte* const own = outputs.Mirrored(&mirror, const_cast<std::byte*>(given));
        if (own != given) return own;
        return bytes > 0 ? mirror.In(given, bytes) : nullptr;
      },
      &forward_args);

  // Both plans before the first launch, so that what is refused is refused at once.
  Problem backward_problem = problem;
  Plan backward_plan;
  Buffer backward_workspace;
  Buffer ones;
  BackwardArgs backward_args;
  if (backward) {
    if (!in.has_dout) {
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
    std::byte* dbias = nullptr;
    if (problem.has_bias) dbias = outputs.AddArray("dbias", in.bias.dtype, in.bias.shape);
    backward_problem.direction = Direction::kBackward;
    backward_problem.has_dbias = problem.has_bias;
    backward_problem.has_dlse = !in.dlse.empty();
    backward_problem.has_dsinks = problem.has_sinks;
    float* const dsinks = problem.has_sinks ? outputs.AddFloats("dsinks", {in.q.heads}) : nullptr;
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
                     .workspace = mirror.Out(backward_workspace.span()),
                     .sinks = forward_args.sinks,
                     .dsinks = outputs.Mirrored(&mirror, dsinks),
                     .mask = forward_args.mask,
                     .bias = forward_args.bias,
                     .dbias = dbias ? outputs.Mirrored(&mirror, dbias) : nullptr};
    map_arrays(forward_args, backward_args, [](const int32_t* values) { return values; });
  }

  Print("{}\n", Bold(PathText(options.input)));
  for (const TensorInfo* info : in.used()) PrintTensor(info->name, info->dtype, info->shape);
  if (!in.unused.empty()) Print("  not used: {}\n", NamesText(in.unused));
  if (options.dtype) Print("  converted to {}\n", Name(in.dtype));
  if (in.cached()) {
    Print("  k and v are a {} cache\n", in.cache.kind == Cache::kPaged ? "paged" : "contiguous");
  }
  Flush();

  constexpr double kSeconds = 0.5;
  const double flop =
      ForwardFlop(Pairs(in, forward_plan, problem, host), in.q.heads, in.q.dim, in.v.dim);
  // Without a number of runs a launch that takes long runs twice.
  const double runs = options.repeat > 0 ? static_cast<double>(options.repeat) : 2;
  const auto timed = [&](const char* direction, double flop_of_one, auto launch, auto args) {
    LaunchProgress progress(direction, problem, runs * flop_of_one);
    if (options.device == Device::kCpu) {  // called while a launch computes
      args.interrupt = LaunchProgress::Interrupt;
      args.interrupt_data = &progress;
    }
    return Measure(
        [&] {
          launch(args);
          mirror.Wait();
        },
        kSeconds, options.repeat, [&](double left) { progress.Left(left); });
  };
  const Timing forward = timed(
      "forward", flop, [&](const ForwardArgs& args) { forward_plan.forward(args); }, forward_args);
  Print("\n  {:<10} {:<14} {:>7} {:>11} {:>11} {:>5} {:>16}\n", "", "kernel", "threads",
        "workspace", "time", "runs", "speed");
  PrintLaunch("forward", forward_plan, forward, flop);
  Flush();
  if (backward) {
    const Timing timing = timed(
        "backward", BackwardFlop(flop),
        [&](const BackwardArgs& args) { backward_plan.backward(args); }, backward_args);
    PrintLaunch("backward", backward_plan, timing, BackwardFlop(flop));
  }

  if (options.why) {
    PrintPlan("forward", forward_plan);
    if (backward) PrintPlan("backward", backward_plan);
  }
  Print("\n");
  if (options.output.empty()) {
    Print("Nothing written: name a file with -o to keep the result.\n");
    return 0;
  }
  mirror.Fetch();
  WriteSafetensors(options.output, outputs.views(),
                   {{"made_by", fmt::format("strobe {}", version())}});
  Print("{}\n", Bold("wrote " + PathText(options.output)));
  for (const TensorView& view : outputs.views()) PrintTensor(view.name, view.dtype, view.shape);
  return 0;
}

}  // namespace strobe::cli
