#include "call.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace strobe_python {

Plans* plans = nullptr;  // never freed: Python may have ended before

#define STROBE_ARRAY(name, ...) #name,
const char* const kSlotNames[kSlots] = {
    "dout",
    "q",
    "k",
    "v",
    "out",
    "lse",
    "dlse",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dq",
    "dk",
    "dv",
#include "core/options.def"
    "block_table",
    "k_new",
    "v_new",
    "cu_seqlens_k_new",
    "rotary_cos",
    "rotary_sin",
#define STROBE_CACHE_ARRAY(name) #name,
#include "core/options.def"
};

// --------------------------------------------------------------------------------------- arguments

Call::~Call() {
  if (!without_gil_) return;
  for (Tensor& tensor : tensors) tensor.forget();
  workspace_tensor_.forget();
  for (Ref& result : results) result.release();
  for (Ref& copy : copies) copy.release();
  workspace_.release();
  scalars.release();
  new std::shared_ptr<Launch>(std::move(launch_));
}

bool Call::give(Slot slot, PyObject* array) {
  return array == Py_None || read(kSlotNames[slot], array, tensors[slot]);
}

namespace {

constexpr const char* kLongest[] = {"max_seqlen_q", "max_seqlen_k"};

// An option that is no array: of which calls, and how it is taken.
struct Option {
  const char* name;
  bool without_cache, with_cache;
  bool (*give)(Call& call, const char* name, PyObject* value);
};

template <bool Call::*member>
bool give_flag(Call& call, const char* name, PyObject* value) {
  return to_flag(name, value, &(call.*member));
}
template <double Call::*member>
bool give_real(Call& call, const char* name, PyObject* value) {
  return to_real(name, value, &(call.*member));
}
template <uint64_t Call::*member>
bool give_seed(Call& call, const char* name, PyObject* value) {
  return to_seed(name, value, &(call.*member));
}
template <int index>
bool give_longest(Call& call, const char*, PyObject* value) {
  return call.give_length(index, value);
}

constexpr Option kOptions[] = {
    {"causal", true, true, give_flag<&Call::causal>},
    {"batch_invariant", true, true, give_flag<&Call::batch_invariant>},
    {"window", true, true, [](Call& call, auto, PyObject* x) { return call.give_window(x); }},
    {"scale", true, true,
     [](Call& call, auto name, PyObject* x) { return call.give_scale(name, x); }},
    {"softcap", true, true, give_real<&Call::softcap>},
    {"dropout_p", true, false, give_real<&Call::dropout_p>},
    {"dropout_seed", true, false, give_seed<&Call::seed>},
    {"dropout_offset", true, false, give_seed<&Call::offset>},
    {kLongest[0], true, true, give_longest<0>},
    {kLongest[1], true, false, give_longest<1>},
    {"threads", true, true,
     [](Call& call, auto name, PyObject* x) { return to_integer(name, x, 32, &call.threads); }},
    {"rotary_interleaved", false, true, give_flag<&Call::rotary_interleaved>},
};
constexpr int kNames = kSlots + static_cast<int>(std::size(kOptions));

const char* name_at(int index) {
  return index < kSlots ? kSlotNames[index] : kOptions[index - kSlots].name;
}

// The index of a name, or kNames. Names in a call are interned: nearly always addresses are equal.
int index_of(PyObject* name) {
  static PyObject* known[kNames];
  if (known[kNames - 1] == nullptr)
    for (int i = 0; i < kNames; ++i) known[i] = PyUnicode_InternFromString(name_at(i));
  for (int i = 0; i < kNames; ++i)
    if (known[i] == name) return i;
  for (int i = 0; i < kNames; ++i)
    if (PyUnicode_CompareWithASCIIString(name, name_at(i)) == 0) return i;
  return kNames;
}

// Whether a call has the array as an option.
bool is_option(bool cached, int slot) {
  if (slot == kAlibi || slot == kCuQ || slot == kCuK) return slot != kCuK || !cached;
  return slot > kDv && (cached || slot < kBlockTable);
}

}  // namespace

bool Call::give_option(const char* function, PyObject* name, PyObject* value) {
  const int index = index_of(name);
  if (index < kSlots && is_option(cached, index)) return give(static_cast<Slot>(index), value);
  if (index >= kSlots && index < kNames) {
    const Option& option = kOptions[index - kSlots];
    if (cached ? option.with_cache : option.without_cache)
      return option.give(*this, option.name, value);
  }
  Ref number = call_python("_options", "scalar", "(sOO)", function, name, value);
  if (number && !scalars) scalars = Ref(PyDict_New());
  return number && scalars && PyDict_SetItem(scalars.get(), name, number.get()) == 0;
}

bool Call::give_options(const char* function, PyObject* options) {
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(options, &at, &name, &value) != 0)
    if (!give_option(function, name, value)) return false;
  static PyObject* const window_signed = PyUnicode_InternFromString("window_signed");
  // Where None says that there is no limit, -1 is one, whatever was given besides.
  if (without_limit && !give_option(function, window_signed, Py_True)) return false;
  return find_lengths() && find_threads();
}

bool Call::give_tail(PyObject* const* tail, Py_ssize_t count) {
  if (count == 0) return true;
  Ref values(PyTuple_New(count));
  for (Py_ssize_t i = 0; values && i < count; ++i)
    PyTuple_SetItem(values.get(), i, Ref::borrowed(tail[i]).release());
  Ref options = call_python("_options", "by_name", "(O)", values.get());
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (options && PyDict_Next(options.get(), &at, &name, &value) != 0)
    if (!give_option("attention", name, value)) return false;
  return static_cast<bool>(options);
}

bool Call::give_window(PyObject* window) {
  Ref pair;
  if (!PyTuple_CheckExact(window) || PyTuple_Size(window) != 2) {
    pair = call_python("_values", "window", "(sO)", "window", window);
    if (!pair) return false;
    window = pair.get();
  }
  PyObject* const limits[] = {PyTuple_GetItem(window, 0), PyTuple_GetItem(window, 1)};
  without_limit = limits[0] == Py_None || limits[1] == Py_None;
  const auto give_limit = [](const char* name, PyObject* limit, int64_t* number) {
    if (limit != Py_None) return to_integer(name, limit, 64, number);
    *number = STROBE_NO_LIMIT;
    return true;
  };
  return give_limit("window[0]", limits[0], &left) && give_limit("window[1]", limits[1], &right);
}

bool Call::give_length(int index, PyObject* value) {
  has_length[index] = value != Py_None;
  return !has_length[index] || to_integer(kLongest[index], value, 64, &lengths[index]);
}

bool Call::give_scale(const char* name, PyObject* value) {
  has_scale = value != Py_None;
  return !has_scale || to_real(name, value, &scale);
}

bool Call::find_lengths() {
  for (int i = 0; i < 2; ++i) {
    const Slot slot = i == 0 ? kCuQ : kCuK;
    const Tensor& offsets = tensors[slot];
    if (has_length[i] || !given(slot)) continue;
    if (!offsets.plain || offsets.on_cuda || offsets.dtype != kInt32 || offsets.ndim != 1 ||
        offsets.shape[0] < 2 || !offsets.contiguous()) {
      Ref spec = described(offsets);
      Ref found =
          spec ? call_python("_plans", "longest", "(sO)", kSlotNames[slot], spec.get()) : Ref();
      if (found) raise_error("InvalidArgument", std::string(kSlotNames[slot]) + " cannot be read");
      return false;
    }
    if (!watch.check(kSlotNames[slot], offsets)) return false;
    const auto* numbers = static_cast<const int32_t*>(offsets.data);
    if (numbers == nullptr || reinterpret_cast<uintptr_t>(numbers) % alignof(int32_t) != 0) {
      raise_error(
          "InvalidArgument",
          std::string(kSlotNames[slot]) +
              (numbers == nullptr ? " has no memory, expected an array with data"
                                  : " lies at an odd address, expected alignment to 4 bytes"));
      return false;
    }
    has_length[i] = true;
    lengths[i] = INT64_MIN;
    for (int64_t at = 1; at < offsets.shape[0]; ++at)
      lengths[i] = std::max<int64_t>(lengths[i], int64_t{numbers[at]} - numbers[at - 1]);
  }
  return true;
}

bool Call::find_threads() {
  if (threads != 0 || !tensors[kQ].is_torch()) return true;
  Ref number(PyObject_CallObject(torch.number_of_threads, nullptr));
  return number && to_integer("threads", number.get(), 32, &threads);
}

// -------------------------------------------------------------------------------------------- plan

bool Call::all_plain() const {
  for (const Tensor& tensor : tensors)
    if (tensor.object != nullptr && !tensor.plain) return false;
  return true;
}

bool Call::write_key(Key& key) const {
  uint64_t given_slots = 0;
  static_assert(kSlots <= 64);
  static_assert(kSlots * (1 + 2 * kMaxAxes) < Key::kMost - 100);  // options are few words
  for (int slot = 0; slot < kSlots; ++slot) {
    const Tensor& tensor = tensors[slot];
    if (tensor.object == nullptr) continue;
    given_slots |= uint64_t{1} << slot;
    key.add(static_cast<uint64_t>(tensor.kind) << 8 | uint64_t{tensor.dtype} << 16 |
            uint64_t{tensor.on_cuda} << 24 | static_cast<uint64_t>(tensor.ndim) << 28 |
            static_cast<uint64_t>(tensor.device_index) << 32);
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      key.add(static_cast<uint64_t>(tensor.shape[axis]));
      key.add(static_cast<uint64_t>(tensor.strides[axis]));
    }
  }
  key.add(given_slots);
  key.add(uint64_t{causal} | uint64_t{deterministic} << 1 | uint64_t{batch_invariant} << 2 |
          uint64_t{has_scale} << 3 | uint64_t{has_length[0]} << 4 | uint64_t{has_length[1]} << 5 |
          uint64_t{cached} << 6 | uint64_t{rotary_interleaved} << 7 | uint64_t{float_out} << 41 |
          static_cast<uint64_t>(threads) << 8);
  key.add(static_cast<uint64_t>(left));
  key.add(static_cast<uint64_t>(right));
  key.add(static_cast<uint64_t>(lengths[0]));
  key.add(static_cast<uint64_t>(lengths[1]));
  key.add(has_scale ? scale : 0.0);
  key.add(softcap);
  key.add(dropout_p);
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (scalars && PyDict_Next(scalars.get(), &at, &name, &value) != 0) {
    const char* letters = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (letters == nullptr) return false;
    for (; *letters != '\0'; ++letters) key.add(static_cast<uint64_t>(*letters));
    if (PyFloat_Check(value))
      key.add(PyFloat_AsDouble(value));
    else
      key.add(static_cast<uint64_t>(PyLong_AsLongLong(value)));
  }
  return PyErr_Occurred() == nullptr;
}

bool Allocator::take(PyObject* made) {
  if (made == Py_None) return true;
  PyObject *given[3], *sizes;
  int type;
  if (!PyArg_ParseTuple(made, "OOOO!i", &given[0], &given[1], &given[2], &PyTuple_Type, &sizes,
                        &type))
    return false;
  function = Ref::borrowed(given[0]);
  arguments = Ref::borrowed(given[1]);
  if (given[2] != Py_None) keywords = Ref::borrowed(given[2]);
  dtype = static_cast<uint8_t>(type);
  ndim = static_cast<int>(PyTuple_Size(sizes));
  for (int axis = 0; axis < ndim && axis < kMaxAxes; ++axis)
    shape[axis] = PyLong_AsLongLong(PyTuple_GetItem(sizes, axis));
  return PyErr_Occurred() == nullptr;
}

Ref Allocator::make(const char* name, const Tensor& like, Tensor& tensor, bool unwatched) const {
  Ref made(PyObject_Call(function.get(), arguments.get(), keywords.get()));
  if (!made) return Ref();
  const bool was_read = read(name, made.get(), tensor, unwatched);
  if (was_read && tensor.plain && tensor.is_torch() == like.is_torch() && tensor.dtype == dtype &&
      tensor.ndim == ndim && std::equal(shape, shape + ndim, tensor.shape) && tensor.contiguous() &&
      tensor.on_cuda == like.on_cuda && tensor.device_index == like.device_index &&
      !tensor.read_only)
    return made;
  tensor.object = nullptr;
  if (!was_read && !PyErr_ExceptionMatches(PyExc_Exception)) return Ref();
  PyErr_Clear();
  Ref sizes(PyTuple_New(ndim));
  for (int axis = 0; sizes && axis < ndim; ++axis)
    PyTuple_SetItem(sizes.get(), axis, PyLong_FromLongLong(shape[axis]));
  Ref error = sizes ? call_python("_plans", "unlike_result", "(sOOiOii)", name, made.get(),
                                  sizes.get(), static_cast<int>(dtype), function.get(),
                                  static_cast<int>(like.on_cuda), like.device_index)
                    : Ref();
  if (error) raise_object(error.get());
  return Ref();
}

// What Python's planner and its messages are given.
Ref Call::described_arrays() const {
  Ref arrays(PyDict_New());
  for (int slot = 0; arrays && slot < kSlots; ++slot) {
    if (!given(static_cast<Slot>(slot))) continue;
    Ref array = described(tensors[slot]);
    if (!array || PyDict_SetItemString(arrays.get(), kSlotNames[slot], array.get()) != 0)
      return Ref();
  }
  return arrays;
}

namespace {

Ref number_or_none(bool given, double number) {
  return given ? Ref(PyFloat_FromDouble(number)) : Ref::borrowed(Py_None);
}

Ref number_or_none(bool given, int64_t number) {
  return given ? Ref(PyLong_FromLongLong(number)) : Ref::borrowed(Py_None);
}

}  // namespace

// Has Python check the arguments and make the plan, which is then kept.
bool Call::make(const Key& key) {
  Ref arrays = described_arrays();
  const auto truth = [](bool value) { return value ? Py_True : Py_False; };
  Ref options(Py_BuildValue("{s:O,s:(LL),s:N,s:d,s:d,s:N,s:N,s:L,s:O,s:O}", "causal", truth(causal),
                            "window", static_cast<long long>(left), static_cast<long long>(right),
                            "scale", number_or_none(has_scale, scale).release(), "softcap", softcap,
                            "dropout_p", dropout_p, "max_seqlen_q",
                            number_or_none(has_length[0], lengths[0]).release(), "max_seqlen_k",
                            number_or_none(has_length[1], lengths[1]).release(), "threads",
                            static_cast<long long>(threads), "deterministic", truth(deterministic),
                            "batch_invariant", truth(batch_invariant)));
  if (options && scalars && PyDict_Update(options.get(), scalars.get()) != 0) return false;
  if (!arrays) return false;
  if (!options) return false;
  if (cached) {
    Ref more(Py_BuildValue("{s:O,s:O}", "rotary_interleaved", truth(rotary_interleaved),
                           "float_out", truth(float_out)));
    if (!more || PyDict_Update(options.get(), more.get()) != 0) return false;
  }
  Ref made = call_python(cached ? "_kvcache" : "_plans", "make", "(OOO)", truth(backward),
                         arrays.get(), options.get());
  if (!made) return false;
  for (int slot = 0; slot < kSlots; ++slot)
    if (given(static_cast<Slot>(slot)) && !tensors[slot].plain) {
      raise_error("InvalidArgument", std::string(kSlotNames[slot]) + " cannot be read");
      return false;
    }
  PyObject *capsule, *allocators, *workspace;
  int small, is_long, is_short;
  if (!PyArg_ParseTuple(made.get(), "OOOppp", &capsule, &allocators, &workspace, &small, &is_long,
                        &is_short))
    return false;
  auto launch = std::make_shared<Launch>();
  const void* plan = PyCapsule_GetPointer(capsule, kPlanCapsule);
  if (plan == nullptr) return false;
  std::memcpy(&launch->plan, plan, sizeof launch->plan);
  for (Py_ssize_t i = 0; i < PyTuple_Size(allocators); ++i)
    if (!launch->results[i].take(PyTuple_GetItem(allocators, i))) return false;
  if (!launch->workspace.take(workspace)) return false;
  launch->small = small != 0;
  launch->is_long = is_long != 0;
  launch->is_short = is_short != 0;
  if (key.fits()) plans[backward].keep(key, launch);
  launch_ = std::move(launch);
  return true;
}

// ------------------------------------------------------------------------------------------ launch

bool check_writable(const char* name, const Tensor& tensor) {
  if (tensor.object == nullptr || (!tensor.is_torch() && !tensor.read_only)) return true;
  Ref checked = call_python("_arrays", "check_writable", "(sO)", name, tensor.object);
  return static_cast<bool>(checked);
}

bool mark_written(strobe_status status, const Tensor& tensor) {
  if (tensor.object == nullptr || !tensor.is_torch() || status == STROBE_INVALID_ARGUMENT ||
      status == STROBE_UNSUPPORTED || status == STROBE_OUT_OF_MEMORY)
    return true;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  Ref marked(PyObject_CallFunctionObjArgs(torch.increment_version, tensor.object, nullptr));
  if (type != nullptr) PyErr_Restore(type, value, traceback);
  return static_cast<bool>(marked);
}

namespace {

// Whether a stream is being captured into a graph: asked of CUDA's driver, which whoever made the
// stream has loaded. By way of Python this takes longer than a launch.
bool is_capturing(void* stream) {
  static auto* const ask = reinterpret_cast<int (*)(void*, int*)>([] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver != nullptr ? dlsym(driver, "cuStreamIsCapturing") : nullptr;
  }());
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  // It fails where another stream's capture concerns this one: then as if it were captured.
  return ask == nullptr || ask(stream, &status) != 0 || status != 0;
}

}  // namespace

bool Call::was_captured() const {
  return launch_->plan.problem.device == STROBE_CUDA && is_capturing(stream_);
}

bool Call::allocate() {
  constexpr Slot kForward[] = {kOut, kLse}, kBackward[] = {kDq, kDk, kDv};
  const Slot* slots = backward ? kBackward : kForward;
  for (int i = 0; i < (backward ? 3 : 1 + wants_lse); ++i) {
    if (given(slots[i])) {
      results[i] = Ref::borrowed(tensors[slots[i]].object);
      continue;
    }
    const Allocator& allocator = launch_->results[i];
    results[i] =
        allocator.make(kSlotNames[slots[i]], tensors[kQ], tensors[slots[i]], watch.unwatched);
    if (!results[i]) return false;
  }
  if (launch_->plan.problem.device != STROBE_CUDA) return true;
  if (!current_stream(tensors[kQ], &stream_)) return false;
  if (!launch_->workspace.function) return true;
  if (launch_->small && !is_capturing(stream_)) return true;
  workspace_ =
      launch_->workspace.make("workspace", tensors[kQ], workspace_tensor_, watch.unwatched);
  if (!workspace_) return false;
  workspace_address_ = workspace_tensor_.data;
  return true;
}

namespace {

// Asked by the calling thread, the main one: lets the handlers of signals run.
int32_t interrupted(void* state) {
  auto** thread = static_cast<PyThreadState**>(state);
  PyEval_RestoreThread(*thread);
  const int raised = PyErr_CheckSignals();
  *thread = PyEval_SaveThread();
  return raised;
}

}  // namespace

template <typename Arguments>
void Call::fill(Arguments& arguments) {
  arguments.struct_size = sizeof arguments;
  arguments.q = data(kQ);
  arguments.k = data(kK);
  arguments.v = data(kV);
  arguments.cu_seqlens_q = static_cast<const int32_t*>(data(kCuQ));
  arguments.cu_seqlens_k = static_cast<const int32_t*>(data(kCuK));
  arguments.alibi_slopes = static_cast<const float*>(data(kAlibi));
  arguments.dropout_seed = seed;
  arguments.dropout_offset = offset;
  arguments.workspace = workspace_address_;
  arguments.workspace_bytes = launch_->workspace.function ? launch_->plan.workspace_bytes : 0;
  arguments.stream = stream_;
#define STROBE_ARRAY(name, ...) arguments.name = static_cast<const int32_t*>(data(kArray_##name));
#include "core/options.def"
}

void Call::fill_cache(strobe_forward_args& arguments) const {
  const auto numbers = [this](Slot slot) { return static_cast<const int32_t*>(data(slot)); };
  arguments.block_table = numbers(kBlockTable);
  arguments.k_new = data(kKNew);
  arguments.v_new = data(kVNew);
  arguments.cu_seqlens_k_new = numbers(kCuKNew);
  arguments.rotary_cos = data(kRotaryCos);
  arguments.rotary_sin = data(kRotarySin);
#define STROBE_CACHE_ARRAY(name) arguments.name = numbers(kArray_##name);
#include "core/options.def"
}

bool Call::launch_it() {
  bool listens = false;
  if (launch_->is_long) {
    // Elsewhere than on the main thread no handler ever runs, and a thread that the interpreter
    // ends must not be inside of the library then.
    Ref is_main = call_python("_values", "on_main_thread", "()");
    if (!is_main) return false;
    listens = is_main.get() == Py_True;
  }
  strobe_forward_args forward{};
  strobe_backward_args gradients{};
  fill(forward);
  if (cached) fill_cache(forward);
  forward.out = data(kOut);
  forward.lse = wants_lse ? static_cast<float*>(data(kLse)) : nullptr;
  if (backward) {
    fill(gradients);
    gradients.out = data(kOut);
    gradients.lse = static_cast<const float*>(data(kLse));
    gradients.dout = data(kDout);
    gradients.dlse = static_cast<const float*>(data(kDlse));
    gradients.dq = data(kDq);
    gradients.dk = data(kDk);
    gradients.dv = data(kDv);
  }
  PyThreadState* thread = launch_->is_short ? nullptr : PyEval_SaveThread();
  without_gil_ = thread != nullptr;
  if (listens) {
    forward.interrupt = gradients.interrupt = interrupted;
    forward.interrupt_data = gradients.interrupt_data = &thread;
  }
  const strobe_status status = backward ? library.backward(&launch_->plan, &gradients)
                                        : library.forward(&launch_->plan, &forward);
  if (thread != nullptr) PyEval_RestoreThread(thread);
  without_gil_ = false;
  for (int i = 0; i < writes_; ++i)
    if (!mark_written(status, tensors[written_[i]])) return false;
  return status == STROBE_OK || fail(status);
}

bool Call::fail(strobe_status status) {
  if (PyErr_Occurred() != nullptr) return false;  // what the handler of a signal raised
  const std::string text = library.last_error();
  Ref arrays = described_arrays(), of_torch(PyDict_New());
  if (!arrays || !of_torch) return false;
  for (int slot = 0; slot < kSlots; ++slot)
    if (given(static_cast<Slot>(slot)) && tensors[slot].is_torch() &&
        PyDict_SetItemString(of_torch.get(), kSlotNames[slot], tensors[slot].object) != 0)
      return false;
  Ref error = call_python(cached ? "_kvcache" : "_plans", "launch_error", "(isOO)",
                          static_cast<int>(status), text.c_str(), arrays.get(), of_torch.get());
  if (error) raise_object(error.get());
  return false;
}

bool Call::run() {
  if (!watch.settle(kSlotNames, tensors, kSlots)) return false;
  const auto writes = [this](Slot slot) {
    if (!given(slot) || tensors[slot].is_new) return true;
    written_[writes_++] = slot;
    return check_writable(kSlotNames[slot], tensors[slot]);
  };
  const bool allowed = backward ? writes(kDq) && writes(kDk) && writes(kDv)
                                : writes(kOut) && (!given(kKNew) || (writes(kK) && writes(kV)));
  if (!allowed) return false;
  Key key;
  if (all_plain()) {
    if (!write_key(key)) return false;
    if (key.fits()) launch_ = plans[backward].find(key);
  }
  if (launch_ == nullptr && !make(key)) return false;
  return allocate() && watch.check(kSlotNames, tensors, kSlots) && launch_it();
}

}  // namespace strobe_python
