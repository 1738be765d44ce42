#include "xla.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "latest.h"
#include "xla_ffi.h"

// XLA calls a handler without the GIL, from threads of its own: nothing here touches Python but for
// the function at the end. strobe/jax.py says which buffers and attributes a call has.
namespace strobe_python {
namespace {

using namespace xla;

// What a handler answers in place of results.
struct Refused : std::runtime_error {
  Refused(Code given, const std::string& text) : std::runtime_error(text), code(given) {}
  Code code;
};

[[noreturn]] void refuse(Code code, const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  throw Refused(code, text);
}

void check(strobe_status status) {
  if (status == STROBE_OK) return;
  const Code code = status == STROBE_INVALID_ARGUMENT ? kInvalidArgument
                    : status == STROBE_UNSUPPORTED    ? kUnimplemented
                    : status == STROBE_OUT_OF_MEMORY  ? kResourceExhausted
                                                      : kInternal;
  refuse(code, "strobe: %s", library.last_error());
}

// ----------------------------------------------------------------------------------------- problem

// An option of a problem by its field's name; false: there is none of that name.
template <typename Number>
bool set_option(strobe_problem& problem, std::string_view name, Number value) {
#define STROBE_FIELD(field)                                              \
  if (name == #field) {                                                  \
    problem.field = static_cast<decltype(strobe_problem::field)>(value); \
    return true;                                                         \
  }
#define STROBE_FLAG(field, ...) STROBE_FIELD(field)
#define STROBE_CHOICE(field, ...) STROBE_FIELD(field)
#define STROBE_INTEGER(field, ...) STROBE_FIELD(field)
#define STROBE_REAL(field, ...) STROBE_FIELD(field)
#define STROBE_ARRAY(name_, ...) STROBE_FIELD(has_##name_)
#define STROBE_CACHE_ARRAY(...)
#include "core/options.def"
  STROBE_FIELD(bias_dtype)
  STROBE_FIELD(bias_batch)
  STROBE_FIELD(bias_heads)
  STROBE_FIELD(bias_seqlen_q)
#undef STROBE_FIELD
  // A mask as data, whose fields are a struct of their own.
#define STROBE_FIELD(field)                                                \
  if (name == "mask_" #field) {                                            \
    problem.mask.field = static_cast<decltype(strobe_mask::field)>(value); \
    return true;                                                           \
  }
  STROBE_FIELD(kind)
  STROBE_FIELD(block_q)
  STROBE_FIELD(block_k)
  STROBE_FIELD(batch)
  STROBE_FIELD(heads)
  STROBE_FIELD(capacity)
  STROBE_FIELD(partial_capacity)
#undef STROBE_FIELD
  return false;
}

// Without options. q, k, v: their four extents.
strobe_problem problem_of(bool backward, int32_t dtype, const int64_t* q, const int64_t* k,
                          const int64_t* v) {
  strobe_problem problem;
  std::memset(&problem, 0, sizeof problem);  // padding too: a plan's key is made of its bytes
  check(library.problem_init(&problem, sizeof problem));
  problem.direction = backward ? STROBE_BACKWARD : STROBE_FORWARD;
  problem.dtype = dtype;
  problem.batch = q[0];
  problem.seqlen_q = q[1];
  problem.heads = q[2];
  problem.head_dim = q[3];
  problem.seqlen_k = k[1];
  problem.heads_kv = k[2];
  problem.head_dim_v = v[3];
  return problem;
}

// Plans that were made, by the bytes of their problems.
class XlaPlans {
 public:
  SharedPlan find_or_make(const strobe_problem& problem) {
    const std::string key(reinterpret_cast<const char*>(&problem), sizeof problem);
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
    }
    auto plan = std::make_shared<strobe_plan>();
    plan->struct_size = sizeof *plan;
    check(library.plan_make(&problem, plan.get()));
    const std::unique_lock lock(mutex_);
    if (plans_.size() >= kCapacity) plans_.clear();
    plans_.emplace(key, plan);
    return plan;
  }

 private:
  static constexpr size_t kCapacity = 1024;  // about 2 KiB each
  std::shared_mutex mutex_;
  std::unordered_map<std::string, SharedPlan> plans_;
};
XlaPlans& xla_plans = *new XlaPlans;  // never freed: launches may come while the process ends

// ----------------------------------------------------------------------------------------- buffers

// The arguments or the results of a call, one after the other. Sizes are checked, as the HLO may
// have come from elsewhere than strobe.jax.
class Buffers {
 public:
  Buffers(const Values& values, const char* kind) : values_(values), kind_(kind) {}

  const Buffer& array(const char* name, int64_t rank) {
    if (at_ >= values_.size || values_.types[at_] != kBufferType)
      refuse(kInvalidArgument, "strobe: %s has no buffer %s", kind_, name);
    const Buffer& buffer = *static_cast<const Buffer*>(values_.values[at_++]);
    if (buffer.rank != rank)
      refuse(kInvalidArgument, "strobe: %s.ndim = %lld, expected %lld", name,
             static_cast<long long>(buffer.rank), static_cast<long long>(rank));
    return buffer;
  }
  template <typename Element>
  Element* data(const char* name, int32_t dtype, std::initializer_list<int64_t> dims) {
    const Buffer& buffer = array(name, static_cast<int64_t>(dims.size()));
    if (buffer.dtype != dtype)
      refuse(kInvalidArgument, "strobe: %s has XLA's type %d, expected %d", name, buffer.dtype,
             dtype);
    const int64_t* wanted = dims.begin();
    for (int64_t axis = 0; axis < buffer.rank; ++axis)
      if (buffer.dims[axis] != wanted[axis])
        refuse(kInvalidArgument, "strobe: %s.shape[%d] = %lld, expected %lld", name,
               static_cast<int>(axis), static_cast<long long>(buffer.dims[axis]),
               static_cast<long long>(wanted[axis]));
    return static_cast<Element*>(buffer.data);
  }
  bool more_than(int64_t count) const { return values_.size - at_ > count; }
  void end() const {
    if (at_ != values_.size)
      refuse(kInvalidArgument, "strobe: %s has %lld buffers, expected %lld", kind_,
             static_cast<long long>(values_.size), static_cast<long long>(at_));
  }

 private:
  const Values& values_;
  const char* const kind_;
  int64_t at_ = 0;
};

int32_t dtype_of(const Buffer& q) {
  switch (q.dtype) {
    case kF32:
      return STROBE_FLOAT32;
    case kBF16:
      return STROBE_BFLOAT16;
    case kF16:
      return STROBE_FLOAT16;
    default:
      refuse(kInvalidArgument, "strobe: q has XLA's type %d, expected %d, %d or %d", q.dtype, kF32,
             kBF16, kF16);
  }
}

// XLA's type of a bias.
int32_t type_of_bias(const strobe_problem& problem) {
  const int32_t dtype =
      problem.bias_dtype == STROBE_SAME_DTYPE ? problem.dtype : problem.bias_dtype;
  return dtype == STROBE_FLOAT32 ? kF32 : dtype == STROBE_BFLOAT16 ? kBF16 : kF16;
}

// A bias among the arguments, or its gradient among the results.
void* bias_of(Buffers& buffers, const char* name, const strobe_problem& problem) {
  return buffers.data<void>(
      name, type_of_bias(problem),
      {problem.bias_batch, problem.bias_heads, problem.bias_seqlen_q, problem.seqlen_k});
}

void read_options(const Attributes& attributes, strobe_problem& problem) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name(attributes.names[i]->data, attributes.names[i]->length);
    bool known = false;
    if (attributes.types[i] == kScalarAttribute) {
      const auto& scalar = *static_cast<const Scalar*>(attributes.values[i]);
      if (scalar.dtype == kS64)
        known = set_option(problem, name, *static_cast<const int64_t*>(scalar.value));
      else if (scalar.dtype == kF32)
        known = set_option(problem, name, *static_cast<const float*>(scalar.value));
    }
    if (!known)
      refuse(kInvalidArgument, "strobe: attribute %.*s is unknown, or no int64 or float32",
             static_cast<int>(name.size()), name.data());
  }
}

// What both directions have after their own arguments.
template <typename Arguments>
void fill(Buffers& in, const strobe_problem& problem, Arguments& arguments) {
  arguments.struct_size = sizeof arguments;
  if (problem.alibi == STROBE_ALIBI_PER_HEAD)
    arguments.alibi_slopes = in.data<const float>("alibi_slopes", kF32, {problem.heads});
  else if (problem.alibi != STROBE_ALIBI_NONE)
    arguments.alibi_slopes =
        in.data<const float>("alibi_slopes", kF32, {problem.batch, problem.heads});
#define STROBE_ARRAY(name, ...) \
  if (problem.has_##name) arguments.name = in.data<const int32_t>(#name, kS32, {problem.batch});
#include "core/options.def"
  if (problem.has_sinks) arguments.sinks = in.data<const float>("sinks", kF32, {problem.heads});
  if (problem.mask.kind != STROBE_MASK_NONE) {
    size_t bytes = 0;
    check(library.mask_bytes(&problem, &bytes));
    const auto words = static_cast<int64_t>(bytes / sizeof(int32_t));
    arguments.mask = in.data<const int32_t>("mask", kS32, {words});
  }
  if (problem.has_bias) arguments.bias = bias_of(in, "bias", problem);
  if (problem.dropout_p > 0) {
    const uint32_t* seed = in.data<const uint32_t>("dropout_seed", kU32, {2});
    if (problem.device == STROBE_CUDA)
      refuse(kUnimplemented,
             "strobe: dropout_p = %g on a CUDA device, expected 0: a launch there takes its seed "
             "from the host, and XLA keeps dropout_seed on the device",
             static_cast<double>(problem.dropout_p));
    arguments.dropout_seed = uint64_t{seed[0]} << 32 | seed[1];
  }
  in.end();
}

// ------------------------------------------------------------------------------------------ launch

void check(const Api& api, Error* error, const char* what) {
  if (error == nullptr) return;
  ErrorDestroyArgs args{STROBE_XLA_SIZE(ErrorDestroyArgs, error), nullptr, error};
  api.destroy_error(&args);
  refuse(kInternal, "strobe: XLA gives no %s", what);
}

// The device and its stream, from XLA.
void* enter_cuda(const CallFrame& frame, strobe_problem& problem) {
  const Api& api = *frame.api;
  if (api.struct_size < STROBE_XLA_SIZE(Api, get_device_ordinal))
    refuse(kUnimplemented, "strobe: this XLA does not say on which device it calls: update jaxlib");
  DeviceArgs device{STROBE_XLA_SIZE(DeviceArgs, ordinal), nullptr, frame.context, 0};
  check(api, api.get_device_ordinal(&device), "device");
  StreamArgs stream{STROBE_XLA_SIZE(StreamArgs, stream), nullptr, frame.context, nullptr};
  check(api, api.get_stream(&stream), "stream");
  problem.device = STROBE_CUDA;
  problem.device_index = device.ordinal;
  return stream.stream;
}

// The last result: on the CPU the library has workspaces of its own.
template <typename Arguments>
void give_workspace(Buffers& out, const strobe_plan& plan, Arguments& arguments) {
  const Buffer& buffer = out.array("workspace", 1);
  out.end();
  if (plan.problem.device == STROBE_CPU || plan.workspace_bytes == 0) return;
  if (buffer.dtype != kU8 || static_cast<size_t>(buffer.dims[0]) < plan.workspace_bytes)
    refuse(kInternal,
           "strobe: workspace has %lld bytes, expected %zu: the call was traced for other devices",
           static_cast<long long>(buffer.dims[0]), plan.workspace_bytes);
  arguments.workspace = buffer.data;
  arguments.workspace_bytes = plan.workspace_bytes;
}

// forward:  q, k, v, options' arrays -> out, [lse,] workspace
// backward: dout, q, k, v, out, lse, [dlse,] options' arrays -> dq, dk, dv, [dsinks,] [dbias,]
//           workspace
void run(const CallFrame& frame, bool backward, bool cuda) {
  Buffers in(frame.arguments, "the call"), out(frame.results, "the result");
  const Buffer* dout = backward ? &in.array("dout", 4) : nullptr;
  const Buffer& q = in.array("q", 4);
  const Buffer& k = in.array("k", 4);
  const Buffer& v = in.array("v", 4);
  strobe_problem problem = problem_of(backward, dtype_of(q), q.dims, k.dims, v.dims);
  read_options(frame.attributes, problem);
  const int64_t batch = q.dims[0], rows = q.dims[1], heads = q.dims[2], dim = q.dims[3];
  const int64_t keys = k.dims[1], heads_kv = k.dims[2], dim_v = v.dims[3];
  for (const Buffer* other : {&k, &v})
    if (other->dtype != q.dtype || other->dims[0] != batch || other->dims[1] != keys ||
        other->dims[2] != heads_kv || (other == &k && other->dims[3] != dim))
      refuse(kInvalidArgument, "strobe: q, k and v differ in dtype or shape");
  void* stream = cuda ? enter_cuda(frame, problem) : nullptr;
  const SharedPlan plan = xla_plans.find_or_make(problem);

  if (!backward) {
    strobe_forward_args arguments{};
    fill(in, problem, arguments);
    arguments.q = q.data;
    arguments.k = k.data;
    arguments.v = v.data;
    arguments.out = out.data<void>("out", q.dtype, {batch, rows, heads, dim_v});
    if (out.more_than(1)) arguments.lse = out.data<float>("lse", kF32, {batch, heads, rows});
    give_workspace(out, *plan, arguments);
    arguments.stream = stream;
    check(library.forward(plan.get(), &arguments));
    return note_launch_of_xla("strobe.jax.attention", plan);
  }
  strobe_backward_args arguments{};
  if (dout->dtype != q.dtype || dout->dims[0] != batch || dout->dims[1] != rows ||
      dout->dims[2] != heads || dout->dims[3] != dim_v)
    refuse(kInvalidArgument, "strobe: dout differs from out in dtype or shape");
  arguments.q = q.data;
  arguments.k = k.data;
  arguments.v = v.data;
  arguments.dout = dout->data;
  arguments.out = in.data<const void>("out", q.dtype, {batch, rows, heads, dim_v});
  arguments.lse = in.data<const float>("lse", kF32, {batch, heads, rows});
  if (problem.has_dlse) arguments.dlse = in.data<const float>("dlse", kF32, {batch, heads, rows});
  fill(in, problem, arguments);
  arguments.dq = out.data<void>("dq", q.dtype, {batch, rows, heads, dim});
  arguments.dk = out.data<void>("dk", q.dtype, {batch, keys, heads_kv, dim});
  arguments.dv = out.data<void>("dv", q.dtype, {batch, keys, heads_kv, dim_v});
  if (problem.has_dsinks) arguments.dsinks = out.data<float>("dsinks", kF32, {heads});
  if (problem.has_dbias) arguments.dbias = bias_of(out, "dbias", problem);
  give_workspace(out, *plan, arguments);
  arguments.stream = stream;
  check(library.backward(plan.get(), &arguments));
  note_launch_of_xla("the gradient of strobe.jax.attention", plan);
}

Error* error_of(const CallFrame& frame, Code code, const char* text) {
  ErrorArgs args{STROBE_XLA_SIZE(ErrorArgs, code), nullptr, text, code};
  return frame.api->create_error(&args);
}

template <bool backward, bool cuda>
Error* handler(CallFrame* frame) noexcept {
  // XLA asks once for version and traits, by a call without anything else.
  for (Extension* one = frame->extensions; one != nullptr; one = one->next) {
    if (one->type != kMetadataExtension) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(one)->metadata;
    metadata.api_version.major = kVersionMajor;
    metadata.api_version.minor = kVersionMinor;
    // A plan depends on shapes and options alone, so a replayed launch does the same.
    if (cuda) metadata.traits = kCommandBufferCompatible;
    return nullptr;
  }
  if (frame->stage != kExecute) return nullptr;
  try {
    run(*frame, backward, cuda);
    return nullptr;
  } catch (const Refused& refused) {
    return error_of(*frame, refused.code, refused.what());
  } catch (const std::bad_alloc&) {
    return error_of(*frame, kResourceExhausted, "strobe: out of memory");
  } catch (const std::exception& error) {
    return error_of(*frame, kInternal, error.what());
  }
}

// --------------------------------------------------------------------------------- Python's
// methods

PyObject* capsule_of(Error* (*function)(CallFrame*) noexcept) {
  return PyCapsule_New(reinterpret_cast<void*>(function), nullptr, nullptr);
}

PyObject* xla_handlers(PyObject*, PyObject*) {
  return Py_BuildValue("(NNNN)", capsule_of(handler<false, false>),
                       capsule_of(handler<true, false>), capsule_of(handler<false, true>),
                       capsule_of(handler<true, true>));
}

}  // namespace

PyMethodDef xla_methods[] = {
    method<xla_handlers>("xla_handlers", METH_NOARGS,
                         "Capsules of XLA's handlers: forward and backward of the CPU, of CUDA."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
