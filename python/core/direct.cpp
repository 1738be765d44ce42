#include "direct.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace strobe_python {

namespace {

// ------------------------------------------------------------------------- PyTorch's interface

struct OpaqueTensor;
using Handle = OpaqueTensor*;  // owned by whoever has it
struct OpaqueLibrary;

// A value on PyTorch's stack: a Handle, a number, a truth value, or a pointer to what may be None.
using Value = uint64_t;
using Kernel = void (*)(Value*, uint64_t, uint64_t);

// Functions of libtorch_cpu. Unless they say otherwise they return 0, or an error's number.
#define STROBE_SHIM(X)                                                                        \
  X(aoti_torch_is_defined, int, (Handle, bool*))                                              \
  X(aoti_torch_get_dim, int, (Handle, int64_t*))                                              \
  X(aoti_torch_get_sizes, int, (Handle, int64_t**))                                           \
  X(aoti_torch_get_strides, int, (Handle, int64_t**))                                         \
  X(aoti_torch_get_storage_offset, int, (Handle, int64_t*))                                   \
  X(aoti_torch_get_dtype, int, (Handle, int32_t*))                                            \
  X(aoti_torch_dtype_element_size, size_t, (int32_t))                                         \
  X(aoti_torch_get_device_type, int, (Handle, int32_t*))                                      \
  X(aoti_torch_get_device_index, int, (Handle, int32_t*))                                     \
  X(aoti_torch_get_data_ptr, int, (Handle, void**))                                           \
  X(torch_get_const_data_ptr, int, (Handle, const void**))                                    \
  X(aoti_torch_empty_strided, int,                                                            \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*))            \
  X(aoti_torch_new_tensor_handle, int, (Handle, Handle*))                                     \
  X(aoti_torch_new_uninitialized_tensor, int, (Handle*))                                      \
  X(aoti_torch_delete_tensor_object, int, (Handle))                                           \
  X(aoti_torch_call_dispatcher, int, (const char*, const char*, Value*))                      \
  X(aoti_torch_library_init_impl, int,                                                        \
    (const char*, const char*, const char*, uint32_t, OpaqueLibrary**))                       \
  X(aoti_torch_library_impl, int, (OpaqueLibrary*, const char*, Kernel))                      \
  X(aoti_torch_delete_library_object, int, (OpaqueLibrary*))                                  \
  X(torch_get_num_threads, int, (uint32_t*))                                                  \
  /* at::hasCallbacks(): whether a profiler or an observer sees each operator. */             \
  X(_ZN2at12hasCallbacksEv, bool, ())                                                         \
  /* at::globalContext(), and of that deterministicAlgorithms(): these two are no part of the \
     stable interface, which cannot say it; without one of them all is Python's. */           \
  X(_ZN2at13globalContextEv, void*, ())                                                       \
  X(_ZNK2at7Context23deterministicAlgorithmsEv, bool, (const void*))

struct Shim {
#define X(name, result, arguments) result(*name) arguments = nullptr;
  STROBE_SHIM(X)
#undef X
  // c10::detail::torchCheckFail(function, file, line, message), which raises a RuntimeError.
  void (*fail)(const char*, const char*, uint32_t, const char*) = nullptr;
  int (*current_stream)(int32_t, void**) = nullptr;  // without CUDA there is none
  int (*delete_value)(Value*) = nullptr;             // PyTorch 2.13
  // at::_ops::zero_::call(tensor): unlike the stable interface it lets exceptions pass.
  void* (*zero)(Handle) = nullptr;
};
Shim shim;

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = library != nullptr ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
  return function != nullptr;
}

// Whether this PyTorch, which has been imported, has all of it.
bool find_shim() {
  static const bool found = [] {
    const auto opened = [](const char* name) { return dlopen(name, RTLD_NOW | RTLD_NOLOAD); };
    void* cpu = opened("libtorch_cpu.so");
    void* cuda = opened("libtorch_cuda.so");
    find(cuda, "aoti_torch_get_current_cuda_stream", shim.current_stream);
    find(cpu, "torch_delete_stable_ivalue", shim.delete_value);
    find(cpu, "_ZN2at4_ops5zero_4callERNS_6TensorE", shim.zero);
#define X(name, result, arguments) &&find(cpu, #name, shim.name)
    return find(opened("libc10.so"), "_ZN3c106detail14torchCheckFailEPKcS2_jS2_", shim.fail)
        STROBE_SHIM(X);
#undef X
  }();
  return found;
}

[[noreturn]] void fail(const std::string& text) {
  shim.fail("strobe", __FILE__, __LINE__, text.c_str());
  std::abort();  // not reached
}

constexpr int32_t kTorchCpu = 0, kTorchCuda = 1;  // of c10::DeviceType
constexpr int32_t kTorchInt32 = 3;                // of c10::ScalarType

// ----------------------------------------------------------------------------------- operators

// What an argument of an operator is, by its name in the schema.
enum class Role : uint8_t {
  kArray,        // of the kernel's: `slot`
  kKey,          // a plan may depend on it, and on nothing else of it than its value
  kMustBeFalse,  // or zero, else Python decides
  kUnused,
};
struct NamedRole {
  const char* name;
  Role role;
  Slot slot = kSlots;
};
constexpr NamedRole kRoles[] = {
    {"grad_out", Role::kArray, kDout},
    {"query", Role::kArray, kQ},
    {"key", Role::kArray, kK},
    {"value", Role::kArray, kV},
    {"out", Role::kArray, kOut},
    {"logsumexp", Role::kArray, kLse},
    {"cum_seq_q", Role::kArray, kSlot_cu_seqlens_q},
    {"cum_seq_k", Role::kArray, kSlot_cu_seqlens_k},
    {"seqused_k", Role::kArray, kSlot_seqused_k},
    {"alibi_slopes", Role::kArray, kSlot_alibi_slopes},
    {"block_table", Role::kArray, kSlot_block_table},
    {"max_q", Role::kKey},
    {"max_k", Role::kKey},
    {"is_causal", Role::kKey},
    {"scale", Role::kKey},
    {"window_size_left", Role::kKey},
    {"window_size_right", Role::kKey},
    {"num_splits", Role::kKey},
    {"dropout_p", Role::kMustBeFalse},
    {"return_debug_mask", Role::kMustBeFalse},
    {"rng_state", Role::kUnused},
    {"philox_seed", Role::kUnused},
    {"philox_offset", Role::kUnused},
    {"unused", Role::kUnused},
};

struct Argument {
  Role role;
  Slot slot;
  bool is_tensor, may_be_none;
};

struct Operator {
  std::string name;    // in the namespace aten
  std::string python;  // the operator that is Python's, with its namespace
  bool backward = false;
  std::vector<Argument> arguments;
  // Of each kSlots for a tensor; else it is the number of rows of that one, (batch, heads, rows,
  // head_dim). Python's operator does not have these.
  std::vector<Slot> results;
  const char* door() const {
    return backward ? "the gradient of PyTorch's flash attention" : "PyTorch's flash attention";
  }
};

constexpr int kMostOperators = 4;
// Never changed once they are called, and never freed: threads may call them while the process
// ends.
Operator* const operators = new Operator[kMostOperators];

// ------------------------------------------------------------------------------------ known calls

struct Shape {
  int64_t ndim = 0, sizes[kMaxAxes], strides[kMaxAxes];
  int32_t dtype = 0;

  bool read(Handle tensor) {
    int64_t *found_sizes, *found_strides;
    if (shim.aoti_torch_get_dim(tensor, &ndim) != 0 || ndim > kMaxAxes ||
        shim.aoti_torch_get_sizes(tensor, &found_sizes) != 0 ||
        shim.aoti_torch_get_strides(tensor, &found_strides) != 0 ||
        shim.aoti_torch_get_dtype(tensor, &dtype) != 0)
      return false;
    std::copy(found_sizes, found_sizes + ndim, sizes);
    std::copy(found_strides, found_strides + ndim, strides);
    return true;
  }
};

// A tensor that is owned here.
class Held {
 public:
  Held() = default;
  Held(Held&& other) noexcept : handle_(other.release()) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Held() {
    if (handle_ != nullptr) shim.aoti_torch_delete_tensor_object(handle_);
  }
  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }
  Handle release() { return std::exchange(handle_, nullptr); }

 private:
  Handle handle_ = nullptr;
};

// A result of an operator, as the first call gave it.
struct Result {
  enum { kNew, kSame, kUndefined, kInteger } kind = kUndefined;
  Shape shape;            // of a new tensor
  Handle same = nullptr;  // what all calls get; of `kept_for_all`
  int64_t number = 0;     // likewise
};

struct KnownCall {
  SharedPlan plan;
  bool has_workspace = false;
  bool library_has_it = false;  // so small that the library keeps it, see Launch
  std::vector<Result> results;
};

// A handle that is never freed of a tensor that all calls of a kind get. A thread that ends may not
// own one: to give up the last reference of a tensor that Python knows takes the interpreter's
// lock, and the interpreter may have ended.
Handle kept_for_all(uint64_t kind, Handle tensor) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<uint64_t, Handle>;
  const std::lock_guard lock(mutex);
  Handle& kept = known[kind];
  if (kept == nullptr && shim.aoti_torch_new_tensor_handle(tensor, &kept) != 0) kept = nullptr;
  return kept;
}

// `_core.forget` begins a new generation.
std::atomic<uint64_t> generation = 0;

// Each thread's own: no lock is waited for, and none is left locked by a fork.
struct Known {
  uint64_t generation = 0;
  Kept<KnownCall> calls;
};
Kept<KnownCall>& known() {
  thread_local Known found;
  const uint64_t now = generation.load(std::memory_order_relaxed);
  if (found.generation != now) found.calls.clear();
  found.generation = now;
  return found.calls;
}

// What a call that goes by way of Python may leave on its way back: how to do it without.
thread_local KnownCall* wanted = nullptr;
// And what it raised, in words. Its results are then tensors that raise it whatever is done to
// them.
thread_local std::string error;

std::atomic<uint64_t> served = 0;

// -------------------------------------------------------------------------------------- one call

Handle as_handle(Value value) { return reinterpret_cast<Handle>(value); }

template <typename Result>
Value as_value(Result result) {
  Value value = 0;
  static_assert(sizeof result <= sizeof value);
  std::memcpy(&value, &result, sizeof result);
  return value;
}

// Of an argument that may be None and is not: what it is. Its place is given back.
Value unwrapped(Value value) {
  auto* inner = reinterpret_cast<Value*>(value);
  const Value found = *inner;
  if (shim.delete_value != nullptr)
    shim.delete_value(inner);
  else
    delete inner;
  return found;
}

class DirectCall {
 public:
  DirectCall(const Operator& op, Value* stack, uint64_t count)
      : op_(op), stack_(stack), count_(count) {}

  void run() {
    const bool readable =
        count_ == op_.arguments.size() && !shim._ZN2at12hasCallbacksEv() && read();
    std::shared_ptr<KnownCall> call = readable ? known().find(key_) : nullptr;
    if (call == nullptr || !launch(*call)) {
      results_.clear();  // whose memory Python may need
      return by_python(readable && call == nullptr);
    }
    give_back();
    for (size_t i = 0; i < results_.size(); ++i)
      stack_[i] = results_[i].get() != nullptr ? as_value(results_[i].release())
                                               : as_value(call->results[i].number);
  }

 private:
  // The key and the addresses. On false Python must look at it.
  bool read() {
    key_.add(static_cast<uint64_t>(&op_ - operators));
    for (size_t i = 0; i < count_; ++i) {
      const Argument& argument = op_.arguments[i];
      if (argument.role == Role::kUnused) continue;
      Value value = stack_[i];
      if (argument.may_be_none) {
        key_.add(uint64_t{value != 0});
        if (value == 0) continue;
        value = *reinterpret_cast<const Value*>(value);
      }
      if (argument.is_tensor) {
        if (!read(as_handle(value), argument.slot)) return false;
      } else if (argument.role == Role::kMustBeFalse) {
        if (value != 0) return false;
      } else {
        key_.add(value);
      }
    }
    // Of a paged cache the lengths in use are given, else Python computes them.
    if (data_[kSlot_block_table] != nullptr) {
      if (data_[kSlot_seqused_k] == nullptr || data_[kSlot_cu_seqlens_q] == nullptr) return false;
      data_[kSlot_cu_seqlens_k] = nullptr;
    }
    if (device_ == kTorchCpu) {  // whose plans say how many
      uint32_t threads;
      if (shim.torch_get_num_threads(&threads) != 0) return false;
      key_.add(uint64_t{threads});
    } else if (device_ != kTorchCuda || shim.current_stream == nullptr ||
               shim.current_stream(device_index_, &stream_) != 0 || is_capturing(stream_)) {
      return false;
    }
    if (op_.backward)
      key_.add(uint64_t{
          shim._ZNK2at7Context23deterministicAlgorithmsEv(shim._ZN2at13globalContextEv())});
    return key_.fits();
  }

  bool read(Handle tensor, Slot slot) {
    bool is_defined;
    if (shim.aoti_torch_is_defined(tensor, &is_defined) != 0) return false;
    key_.add(uint64_t{is_defined});
    if (!is_defined) return true;
    int64_t ndim, *sizes, *strides;
    int32_t dtype, device, index;
    const void* data;
    if (shim.aoti_torch_get_dim(tensor, &ndim) != 0 || ndim > kMaxAxes ||
        shim.aoti_torch_get_sizes(tensor, &sizes) != 0 ||
        shim.aoti_torch_get_strides(tensor, &strides) != 0 ||
        shim.aoti_torch_get_dtype(tensor, &dtype) != 0 ||
        shim.aoti_torch_get_device_type(tensor, &device) != 0 ||
        shim.aoti_torch_get_device_index(tensor, &index) != 0 ||
        shim.torch_get_const_data_ptr(tensor, &data) != 0)
      return false;
    if (has_no_memory(tensor, dtype, data)) return false;
    key_.add(static_cast<uint64_t>(ndim) | static_cast<uint64_t>(dtype) << 8 |
             static_cast<uint64_t>(device) << 24 | static_cast<uint64_t>(uint32_t(index)) << 32);
    for (int64_t axis = 0; axis < ndim; ++axis) {
      key_.add(static_cast<uint64_t>(sizes[axis]));
      key_.add(static_cast<uint64_t>(strides[axis]));
    }
    data_[slot] = const_cast<void*>(data);
    if (slot == kQ) {
      device_ = device;
      device_index_ = index;
    }
    return true;
  }

  // As tensor.cpp's: a tensor without memory has its offset for an address. (So has one of memory
  // at address 0 that has no elements: Python looks at it.)
  static bool has_no_memory(Handle tensor, int32_t dtype, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) >> 32 != 0) return false;
    int64_t offset;
    return shim.aoti_torch_get_storage_offset(tensor, &offset) != 0 ||
           static_cast<uintptr_t>(offset) * shim.aoti_torch_dtype_element_size(dtype) ==
               reinterpret_cast<uintptr_t>(data);
  }

  bool make(const Shape& shape, Held& tensor, void*& data) const {
    return shim.aoti_torch_empty_strided(shape.ndim, shape.sizes, shape.strides, shape.dtype,
                                         device_, device_index_, tensor.out()) == 0 &&
           shim.aoti_torch_get_data_ptr(tensor.get(), &data) == 0;
  }

  // Computes it. On false nothing has happened, and Python finds the words for it.
  bool launch(const KnownCall& call) {
    void* made[3] = {};
    results_.resize(call.results.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& result = call.results[i];
      Held& tensor = results_[i];
      void* nobody;
      if ((result.kind == Result::kNew && !make(result.shape, tensor, i < 3 ? made[i] : nobody)) ||
          (result.kind == Result::kSame &&
           shim.aoti_torch_new_tensor_handle(result.same, tensor.out()) != 0) ||
          (result.kind == Result::kUndefined &&
           shim.aoti_torch_new_uninitialized_tensor(tensor.out()) != 0))
        return false;
    }
    Held workspace;
    void* memory = nullptr;
    if (call.has_workspace && !call.library_has_it) {
      Shape words;
      words.ndim = words.strides[0] = 1;
      words.sizes[0] = static_cast<int64_t>((call.plan->workspace_bytes + 3) / 4);
      words.dtype = kTorchInt32;
      if (!make(words, workspace, memory)) return false;
    }
    const auto fill = [&](auto& arguments) {
      arguments.struct_size = sizeof arguments;
      arguments.q = data_[kQ];
      arguments.k = data_[kK];
      arguments.v = data_[kV];
      arguments.cu_seqlens_q = static_cast<const int32_t*>(data_[kSlot_cu_seqlens_q]);
      arguments.cu_seqlens_k = static_cast<const int32_t*>(data_[kSlot_cu_seqlens_k]);
      arguments.workspace = memory;
      arguments.workspace_bytes = call.has_workspace ? call.plan->workspace_bytes : 0;
      arguments.stream = stream_;
    };
    strobe_status status;
    if (op_.backward) {
      strobe_backward_args arguments{};
      fill(arguments);
      arguments.out = data_[kOut];
      arguments.lse = static_cast<const float*>(data_[kLse]);
      arguments.dout = data_[kDout];
      arguments.dq = made[0];
      arguments.dk = made[1];
      arguments.dv = made[2];
      status = library.backward(call.plan.get(), &arguments);
    } else {
      strobe_forward_args arguments{};
      fill(arguments);
      arguments.alibi_slopes = static_cast<const float*>(data_[kSlot_alibi_slopes]);
      arguments.seqused_k = static_cast<const int32_t*>(data_[kSlot_seqused_k]);
      arguments.block_table = static_cast<const int32_t*>(data_[kSlot_block_table]);
      arguments.out = made[0];
      arguments.lse = static_cast<float*>(made[1]);
      status = library.forward(call.plan.get(), &arguments);
    }
    if (status != STROBE_OK) return false;
    if (!op_.backward) count_served();
    if (!note_launch(op_.door(), call.plan)) {
      const PyGILState_STATE state = PyGILState_Ensure();
      PyErr_Clear();
      PyGILState_Release(state);
    }
    return true;
  }

  // The arguments, which were this kernel's.
  void give_back() {
    for (size_t i = 0; i < count_; ++i) {
      const Argument& argument = op_.arguments[i];
      Value value = stack_[i];
      if (argument.may_be_none) {
        if (value == 0) continue;
        value = unwrapped(value);
      }
      if (argument.is_tensor) shim.aoti_torch_delete_tensor_object(as_handle(value));
    }
  }

  // Rows of a tensor of four axes.
  int64_t rows_of(Slot slot) const {
    int64_t ndim, *sizes;
    for (size_t i = 0; i < count_; ++i)
      if (op_.arguments[i].slot == slot &&
          shim.aoti_torch_get_dim(as_handle(stack_[i]), &ndim) == 0 && ndim == 4 &&
          shim.aoti_torch_get_sizes(as_handle(stack_[i]), &sizes) == 0)
        return sizes[2];
    return 0;  // whoever computes refuses it
  }

  // The call by the operator that is Python's; known from then on, if Strobe computed it.
  void by_python(bool readable) {
    std::vector<int64_t> rows;
    for (const Slot slot : op_.results) rows.push_back(slot == kSlots ? 0 : rows_of(slot));
    auto call = std::make_shared<KnownCall>();
    KnownCall* const outer = std::exchange(wanted, call.get());
    error.clear();
    const uint64_t began = generation.load(std::memory_order_relaxed);
    const int status = shim.aoti_torch_call_dispatcher(op_.python.c_str(), "", stack_);
    wanted = outer;
    if (status != 0) fail("PyTorch could not call " + op_.python);
    const auto tensors =
        static_cast<int>(std::count(op_.results.begin(), op_.results.end(), kSlots));
    if (!error.empty()) {
      const std::string text = std::exchange(error, {});
      std::vector<Held> raising(static_cast<size_t>(tensors));
      for (int i = 0; i < tensors; ++i) *raising[i].out() = as_handle(stack_[i]);
      if (shim.zero != nullptr) shim.zero(raising[0].get());
      fail(text);
    }
    for (int i = static_cast<int>(rows.size()) - 1, from = tensors; i >= 0; --i)
      stack_[i] = op_.results[i] == kSlots ? stack_[--from] : as_value(rows[i]);
    // Unless all was forgotten meanwhile.
    if (readable && call->plan != nullptr && learn(*call) &&
        generation.load(std::memory_order_relaxed) == began)
      known().keep(key_, std::move(call));
  }

  // Results as they are on the stack.
  bool learn(KnownCall& call) const {
    for (size_t i = 0; i < op_.results.size(); ++i) {
      Result result;
      const Handle tensor = as_handle(stack_[i]);
      bool is_defined = false;
      if (op_.results[i] != kSlots) {
        result.kind = Result::kInteger;
        result.number = static_cast<int64_t>(stack_[i]);
      } else if (shim.aoti_torch_is_defined(tensor, &is_defined) != 0) {
        return false;
      } else if (i < (op_.backward ? 3 : 2)) {
        result.kind = Result::kNew;
        if (!is_defined || !result.shape.read(tensor)) return false;
      } else if (is_defined) {
        // Seed and offset are the same for all calls. The mask has the type of the result, so that
        // autograd could make it a part of a graph: each call gets its own.
        if (!result.shape.read(tensor)) return false;
        result.kind = Result::kNew;
        if (result.shape.dtype != call.results[0].shape.dtype) {
          result.kind = Result::kSame;
          result.same = kept_for_all(i | static_cast<uint64_t>(&op_ - operators) << 8 |
                                         static_cast<uint64_t>(device_) << 16 |
                                         static_cast<uint64_t>(uint32_t(device_index_)) << 32,
                                     tensor);
          if (result.same == nullptr) return false;
        }
      }
      call.results.push_back(std::move(result));
    }
    return true;
  }

  const Operator& op_;
  Value* const stack_;
  const uint64_t count_;
  Key key_;
  void* data_[kSlots] = {};
  int32_t device_ = -1, device_index_ = 0;
  void* stream_ = nullptr;
  std::vector<Held> results_;
};

template <int index>
void kernel(Value* stack, uint64_t count, uint64_t) {
  DirectCall(operators[index], stack, count).run();
}
constexpr Kernel kKernels[kMostOperators] = {kernel<0>, kernel<1>, kernel<2>, kernel<3>};

// Shows whether values come as they are read here: of strobe::aten_probe(Tensor x, Tensor? y,
// SymInt i, SymInt? j, float a, float? b, bool c, int? k) -> (Tensor, SymInt) it gives x, and a sum
// in which each of the others has a decimal place: the axes of y, then i to k.
void probe(Value* stack, uint64_t, uint64_t) {
  const auto real = [](Value value) {
    double number;
    std::memcpy(&number, &value, sizeof number);
    return static_cast<int64_t>(number);
  };
  const auto integer = [](Value value) { return static_cast<int64_t>(value); };
  int64_t digits[7] = {0, integer(stack[2]), 0, real(stack[4]), 0, integer(stack[6]), 0};
  if (stack[1] != 0) {
    Held y;
    *y.out() = as_handle(unwrapped(stack[1]));
    if (shim.aoti_torch_get_dim(y.get(), &digits[0]) != 0) digits[0] = -1;
  }
  if (stack[3] != 0) digits[2] = integer(unwrapped(stack[3]));
  if (stack[5] != 0) digits[4] = real(unwrapped(stack[5]));
  if (stack[7] != 0) digits[6] = integer(unwrapped(stack[7]));
  int64_t sum = 0;
  for (const int64_t digit : digits) sum = 10 * sum + digit;
  stack[1] = as_value(sum);
}

// -------------------------------------------------------------------------------- Python's methods

const char kLibraryCapsule[] = "strobe.torch_library";

void remove_kernel(PyObject* capsule) {
  void* found = PyCapsule_GetPointer(capsule, kLibraryCapsule);
  if (found != nullptr) shim.aoti_torch_delete_library_object(static_cast<OpaqueLibrary*>(found));
}

// An argument of the schema. On false it is one that is not known here.
bool read_argument(const std::string& name, const std::string& type, Argument& argument) {
  for (const NamedRole& known : kRoles) {
    if (name != known.name) continue;
    argument.role = known.role;
    argument.slot = known.slot;
    argument.may_be_none = type.rfind("Optional[", 0) == 0;
    argument.is_tensor = type.find("Tensor") != std::string::npos;
    const bool is_plain = type == "Tensor" || type == "int" || type == "float" || type == "bool";
    return (argument.may_be_none || is_plain) &&
           argument.is_tensor == (argument.role == Role::kArray || argument.role == Role::kUnused);
  }
  return false;
}

// Puts a kernel in its place. What it returns keeps it there; None where PyTorch refuses.
PyObject* in_place(const char* space, const char* key, const char* name, Kernel kernel) {
  OpaqueLibrary* made = nullptr;
  if (shim.aoti_torch_library_init_impl(space, key, __FILE__, __LINE__, &made) != 0) Py_RETURN_NONE;
  Ref capsule(PyCapsule_New(made, kLibraryCapsule, remove_kernel));
  if (!capsule) return nullptr;
  if (shim.aoti_torch_library_impl(made, name, kernel) != 0) Py_RETURN_NONE;
  return capsule.release();
}

// (name, name of Python's operator, dispatch key, whether it is a derivative, ((name, type) of each
// argument), (likewise of each result)): puts the kernel in its place. What it returns keeps it
// there; None where this PyTorch cannot have it.
PyObject* direct_kernel(PyObject*, PyObject* given) {
  const char *name, *python, *key;
  int backward;
  PyObject *arguments, *results;
  if (!PyArg_ParseTuple(given, "ssspO!O!", &name, &python, &key, &backward, &PyTuple_Type,
                        &arguments, &PyTuple_Type, &results))
    return nullptr;
  const auto none = [] { return Ref::borrowed(Py_None).release(); };
  if (!find_shim()) return none();
  Operator op;
  op.name = name;
  op.python = python;
  op.backward = backward != 0;
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments); ++i) {
    const char *argument_name, *type;
    if (!PyArg_ParseTuple(PyTuple_GetItem(arguments, i), "ss", &argument_name, &type))
      return nullptr;
    Argument argument;
    if (!read_argument(argument_name, type, argument)) return none();
    op.arguments.push_back(argument);
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(results); ++i) {
    const char *result_name, *type;
    if (!PyArg_ParseTuple(PyTuple_GetItem(results, i), "ss", &result_name, &type)) return nullptr;
    const std::string result = std::string(result_name) + " " + type;
    const bool is_tensor = std::strcmp(type, "Tensor") == 0;
    if (!is_tensor && result != "max_q int" && result != "max_k int") return none();
    op.results.push_back(is_tensor ? kSlots : result == "max_q int" ? kQ : kK);
  }
  int index = 0;
  while (index < kMostOperators && !operators[index].name.empty() && operators[index].name != name)
    ++index;
  if (index == kMostOperators) return none();
  if (operators[index].name.empty()) operators[index] = std::move(op);
  return in_place("aten", key, name, kKernels[index]);
}

// Puts `probe` in its place: as direct_kernel.
PyObject* direct_probe(PyObject*, PyObject*) {
  if (!find_shim()) Py_RETURN_NONE;
  return in_place("strobe", "CPU", "aten_probe", probe);
}

// What a call by way of Python's operator raised, in words.
PyObject* direct_error(PyObject*, PyObject* text) {
  const char* letters = PyUnicode_AsUTF8AndSize(text, nullptr);
  if (letters == nullptr) return nullptr;
  error = *letters != '\0' ? letters : "an exception without a message";
  Py_RETURN_NONE;
}

PyObject* served_calls(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(served.load(std::memory_order_relaxed));
}

}  // namespace

void count_served() { served.fetch_add(1, std::memory_order_relaxed); }

void forget_direct() { generation.fetch_add(1, std::memory_order_relaxed); }

void offer_to_direct(const Call& call, size_t copies) {
  KnownCall* known = std::exchange(wanted, nullptr);
  const Launch& launch = call.launched();
  // Of what was copied a launch has other addresses than the arguments'; a long one must listen to
  // signals; what a graph's memory holds is the graph's.
  if (known == nullptr || call.copies.size() != copies || launch.is_long || call.was_captured())
    return;
  known->plan = launch.plan;
  known->has_workspace = static_cast<bool>(launch.workspace.function);
  known->library_has_it = launch.small;
}

PyMethodDef direct_methods[] = {
    method<direct_kernel>("direct_kernel", METH_VARARGS,
                          "Puts a kernel without Python in place of one of PyTorch's."),
    method<direct_probe>("direct_probe", METH_NOARGS, "Puts the kernel of aten_probe in place."),
    method<direct_error>("direct_error", METH_O, "What a call by way of Python raised."),
    method<served_calls>("served_calls", METH_NOARGS, "Calls computed in place of PyTorch."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
