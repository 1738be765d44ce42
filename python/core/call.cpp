#include "call.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace strobe_python {

Plans* plans = nullptr;  // never freed: Python may have ended before

// --------------------------------------------------------------------------------------- arguments

Call::~Call() {
  if (!without_gil_) return;
  for (Tensor& tensor : tensors) tensor.forget();
  workspace_tensor_.forget();
  for (Ref& result : results) result.release();
  for (Ref& copy : copies) copy.release();
  workspace_.release();
  range_.forget();
  new std::shared_ptr<Launch>(std::move(launch_));
}

bool Call::give(Slot slot, PyObject* array) {
  if (array == Py_None) return true;
  if (slot == kSlot_mask) {
    Ref packed, layout;
    if (!find_mask(array, packed, layout)) return false;
    if (packed) {
      copies.push_back(std::move(packed));
      return give(kScalar_mask_layout, layout.get()) &&
             read(kSlotNames[slot], copies.back().get(), tensors[slot]);
    }
  }
  return read(kSlotNames[slot], array, tensors[slot]);
}

// Of an object of strobe.masks its packed array, its layout and what it is for; of others none of
// it.
bool Call::find_mask(PyObject* object, Ref& packed, Ref& layout) {
  static PyObject* const name = PyUnicode_InternFromString("_strobe_mask");
  Ref both(PyObject_GetAttr(object, name));
  if (!both) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
    PyErr_Clear();
    return true;
  }
  PyObject *array, *number;
  auto& [batch, heads, queries, keys] = mask_of;
  if (!PyArg_ParseTuple(both.get(), "OOLLLL", &array, &number, &batch, &heads, &queries, &keys))
    return false;
  packed = Ref::borrowed(array);
  layout = Ref::borrowed(number);
  mask = object;
  return true;
}

// Whether the mask was made for such calls: the words of another may be as many, and on a GPU
// nobody reads them before the kernel does. Where axes are missing, the planner says so.
bool Call::check_mask() const {
  if (mask == nullptr) return true;
  const Tensor &q = tensors[kQ], &k = tensors[kK], &table = tensors[kSlot_block_table];
  const bool packed = given(kSlot_cu_seqlens_q);
  int64_t keys = -1;  // of packed sequences
  if (!packed || cached) {
    if (!k.plain || k.ndim != 4) return true;
    keys = k.shape[1];
    if (given(kSlot_block_table)) {
      if (!table.plain || table.ndim != 2) return true;
      if (__builtin_mul_overflow(keys, table.shape[1], &keys)) return true;
    }
  }
  if (packed) {
    PyObject* const begins_k = tensors[kSlot_cu_seqlens_k].object;
    if (begins_k == nullptr && !cached) return true;  // the planner says so
    // Nobody waits for the numbers of sequences on a GPU.
    if (q.on_cuda && mask_of[2] < 0 && mask_of[3] == keys) return true;
    return static_cast<bool>(call_python(
        "_packed_mask", "check_starts", "(OOOL)", mask, tensors[kSlot_cu_seqlens_q].object,
        begins_k == nullptr ? Py_None : begins_k, static_cast<long long>(keys)));
  }
  if (!q.plain || q.ndim != 4) return true;
  const std::array<long long, 4> wanted = {q.shape[0], q.shape[2], q.shape[1], keys};
  const auto is_for = [&](size_t axis) {
    return mask_of[axis] == wanted[axis] || (axis < 2 && mask_of[axis] == 1);
  };
  if (is_for(0) && is_for(1) && is_for(2) && is_for(3)) return true;
  call_python("_packed_mask", "check_made_for", "((LLLL)(LLLL)O)", mask_of[0], mask_of[1],
              mask_of[2], mask_of[3], wanted[0], wanted[1], wanted[2], wanted[3],
              cached ? Py_True : Py_False);
  return PyErr_Occurred() == nullptr;
}

bool Call::give_window(const char* name, PyObject* window) {
  Ref pair;
  if (!PyTuple_CheckExact(window) || PyTuple_Size(window) != 2) {
    pair = call_python("_values", "window", "(sO)", name, window);
    if (!pair) return false;
    window = pair.get();
  }
  PyObject* const limits[] = {PyTuple_GetItem(window, 0), PyTuple_GetItem(window, 1)};
  without_limit = limits[0] == Py_None || limits[1] == Py_None;
  const auto give_limit = [](const char* side, PyObject* limit, int64_t* number) {
    if (limit != Py_None) return to_integer(side, limit, 64, number);
    *number = STROBE_NO_LIMIT;
    return true;
  };
  return give_limit("window[0]", limits[0], &numbers[kScalar_window].integer) &&
         give_limit("window[1]", limits[1], &numbers[kWindowRight].integer);
}

bool Call::give(Scalar scalar, PyObject* value, const char* said) {
  const ScalarOption& option = kScalarOptions[scalar];
  const char* name = said != nullptr ? said : option.name;
  Number& number = numbers[scalar];
  bool flag;
  switch (option.kind) {
    case OptionKind::kFlag:
      if (!to_flag(name, value, &flag)) return false;
      set(scalar, flag);
      return true;
    case OptionKind::kInteger:
      return to_integer(name, value, 64, &number.integer);
    case OptionKind::kInteger32:
      return to_integer(name, value, 32, &number.integer);
    case OptionKind::kIntegerOrNone:
      set(scalar, value != Py_None);
      return value == Py_None || to_integer(name, value, 64, &number.integer);
    case OptionKind::kReal:
      return to_real(name, value, &number.real);
    case OptionKind::kRealOrNone:
      set(scalar, value != Py_None);
      return value == Py_None || to_real(name, value, &number.real);
    case OptionKind::kSeed:
      return to_seed(name, value, &number.word);
    case OptionKind::kWindow:
      return give_window(name, value);
    case OptionKind::kArray:
      break;
  }
  return false;
}

bool Call::give_option(const char* function, PyObject* name, PyObject* value) {
  const Option* option = find_option(name);
  if (option == nullptr || (option->calls & (cached ? kWithCache : kWithoutCache)) == 0) {
    call_python("_options", "row_of", "(sO)", function, name);  // which says that there is none
    return false;
  }
  return option->kind == OptionKind::kArray ? give(static_cast<Slot>(option->index), value)
                                            : give(static_cast<Scalar>(option->index), value);
}

bool Call::give_options(const char* function, PyObject* options) {
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(options, &at, &name, &value) != 0)
    if (!give_option(function, name, value)) return false;
  // Where None says that there is no limit, -1 is one, whatever was given besides.
  if (without_limit) set(kScalar_window_signed, true);
  return find_lengths() && find_threads();
}

bool Call::give_tail(PyObject* const* tail, Py_ssize_t count) {
  for (const Option& option : kOptions) {
    if ((option.calls & kTail) == 0) continue;
    if (count-- <= 0) break;
    PyObject* value = *tail++;
    if (!(option.kind == OptionKind::kArray ? give(static_cast<Slot>(option.index), value)
                                            : give(static_cast<Scalar>(option.index), value)))
      return false;
  }
  return true;
}

bool Call::find_lengths() {
  constexpr std::pair<Slot, Scalar> kSides[] = {{kSlot_cu_seqlens_q, kScalar_max_seqlen_q},
                                                {kSlot_cu_seqlens_k, kScalar_max_seqlen_k}};
  for (const auto& [slot, longest] : kSides) {
    const Tensor& offsets = tensors[slot];
    if (is_set(longest) || !given(slot)) continue;
    if (!offsets.plain || offsets.on_cuda || offsets.dtype != kInt32 || offsets.ndim != 1 ||
        offsets.shape[0] < 2 || !offsets.contiguous()) {
      Ref spec = described(offsets);
      Ref found =
          spec ? call_python("_plans", "longest", "(sO)", kSlotNames[slot], spec.get()) : Ref();
      if (found) raise_error("InvalidArgument", std::string(kSlotNames[slot]) + " cannot be read");
      return false;
    }
    if (!watch.check(kSlotNames[slot], offsets)) return false;
    const auto* starts = static_cast<const int32_t*>(offsets.data);
    if (starts == nullptr || reinterpret_cast<uintptr_t>(starts) % alignof(int32_t) != 0) {
      raise_error(
          "InvalidArgument",
          std::string(kSlotNames[slot]) +
              (starts == nullptr ? " has no memory, expected an array with data"
                                 : " lies at an odd address, expected alignment to 4 bytes"));
      return false;
    }
    int64_t most = INT64_MIN;
    for (int64_t at = 1; at < offsets.shape[0]; ++at)
      most = std::max<int64_t>(most, int64_t{starts[at]} - starts[at - 1]);
    set(longest, true);
    numbers[longest].integer = most;
  }
  return true;
}

bool Call::find_threads() {
  int64_t& threads = numbers[kScalar_threads].integer;
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

void Call::write_key(Key& key) const {
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
  key.add(uint64_t{deterministic} | uint64_t{cached} << 1 | uint64_t{float_out} << 2 |
          uint64_t{accumulate} << 3 | uint64_t{float_grads} << 4 | uint64_t{wants_dsinks} << 5 |
          uint64_t{wants_dbias} << 6);
  static_assert(kScalars <= 64);
  key.add(bits);
  for (int scalar = 0; scalar <= kScalars; ++scalar)
    if (scalar != kScalar_dropout_seed && scalar != kScalar_dropout_offset) {
      uint64_t word;
      std::memcpy(&word, numbers + scalar, sizeof word);
      key.add(word);
    }
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

// Likewise, the options that are no arrays; seeds belong to no plan.
Ref Call::described_options() const {
  const auto truth = [](bool value) { return Ref::borrowed(value ? Py_True : Py_False); };
  const auto value_of = [&](Scalar scalar) {
    const Number& number = numbers[scalar];
    switch (kScalarOptions[scalar].kind) {
      case OptionKind::kFlag:
        return truth(is_set(scalar));
      case OptionKind::kRealOrNone:
        if (!is_set(scalar)) return Ref::borrowed(Py_None);
        [[fallthrough]];
      case OptionKind::kReal:
        return Ref(PyFloat_FromDouble(number.real));
      case OptionKind::kWindow:
        return Ref(Py_BuildValue("(LL)", static_cast<long long>(number.integer),
                                 static_cast<long long>(numbers[kWindowRight].integer)));
      case OptionKind::kIntegerOrNone:
        if (!is_set(scalar)) return Ref::borrowed(Py_None);
        [[fallthrough]];
      default:
        return Ref(PyLong_FromLongLong(number.integer));
    }
  };
  Ref options(PyDict_New());
  const auto add = [&](const char* name, const Ref& value) {
    return options && value && PyDict_SetItemString(options.get(), name, value.get()) == 0;
  };
  for (int i = 0; i < kScalars; ++i) {
    const ScalarOption& option = kScalarOptions[i];
    if (option.kind == OptionKind::kSeed ||
        (option.calls & (cached ? kWithCache : kWithoutCache)) == 0)
      continue;
    if (!add(option.name, value_of(static_cast<Scalar>(i)))) return Ref();
  }
  if (!add("deterministic", truth(deterministic))) return Ref();
  if (cached && !add("float_out", truth(float_out))) return Ref();
  if (backward &&
      (!add("accumulate", truth(accumulate)) || !add("float_grads", truth(float_grads)) ||
       !add("return_dsinks", truth(wants_dsinks)) || !add("wants_dbias", truth(wants_dbias))))
    return Ref();
  return options;
}

// Has Python check the arguments and make the plan, which is then kept.
bool Call::make(const Key& key) {
  Ref arrays = described_arrays(), options = described_options();
  if (!arrays || !options) return false;
  Ref made = call_python(cached ? "_kvcache" : "_plans", "make", "(OOO)",
                         backward ? Py_True : Py_False, arrays.get(), options.get());
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
  launch->plan = std::make_shared<strobe_plan>(*static_cast<const strobe_plan*>(plan));
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
  // A capsule may not say whether it is read-only, and other libraries' arrays may all be.
  const bool is_asked = tensor.is_torch() || tensor.read_only || tensor.kind == Kind::kShared;
  if (tensor.object == nullptr || !is_asked) return true;
  Ref checked = call_python("_arrays", "check_writable", "(sOi)", name, tensor.object,
                            static_cast<int>(tensor.read_only));
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

bool Call::was_captured() const {
  return launch_->plan->problem.device == STROBE_CUDA && is_capturing(stream_);
}

bool Call::allocate() {
  Slot slots[kMostResults] = {kOut, kLse};
  result_count_ = 1 + wants_lse;
  if (backward) {
    result_count_ = 0;
    for (const Slot slot : {kDq, kDk, kDv}) slots[result_count_++] = slot;
    if (wants_dsinks) slots[result_count_++] = kDsinks;
    if (wants_dbias) slots[result_count_++] = kDbias;
  }
  for (int i = 0; i < result_count_; ++i) {
    if (given(slots[i])) {
      results[i] = Ref::borrowed(tensors[slots[i]].object);
      continue;
    }
    const Allocator& allocator = launch_->results[i];
    results[i] =
        allocator.make(kSlotNames[slots[i]], tensors[kQ], tensors[slots[i]], watch.unwatched);
    if (!results[i]) return false;
  }
  if (launch_->plan->problem.device != STROBE_CUDA) return true;
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
  arguments.workspace = workspace_address_;
  arguments.workspace_bytes = launch_->workspace.function ? launch_->plan->workspace_bytes : 0;
  arguments.stream = stream_;
  // What a call with a cache alone has, or a forward call, is no argument of a backward launch.
#define STROBE_CALL_ARRAY(name, calls)                                          \
  if constexpr (std::is_same_v<Arguments, strobe_forward_args> ||               \
                (((calls)&kWithoutCache) != 0 && ((calls)&kForwardAlone) == 0)) \
    arguments.name = static_cast<decltype(arguments.name)>(data(kSlot_##name));
#define STROBE_CALL_SCALAR(name, kind, calls)          \
  if constexpr (OptionKind::kind == OptionKind::kSeed) \
    arguments.name = numbers[kScalar_##name].word;
#include "call_options.def"
  if constexpr (std::is_same_v<Arguments, strobe_forward_args>) {
    // Arrays without rows may have an address; the library wants none where nothing is appended.
    const strobe_problem& problem = launch_->plan->problem;
    if (problem.append == STROBE_APPEND_DENSE && problem.seqlen_new == 0)
      arguments.k_new = arguments.v_new = nullptr;
  }
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
  forward.out = data(kOut);
  forward.lse = wants_lse ? static_cast<float*>(data(kLse)) : nullptr;
  if (backward) {
    fill(gradients);
    gradients.out = data(kOut);
    gradients.lse = static_cast<const float*>(data(kLse));
    gradients.dout = data(kDout);
    gradients.dlse = static_cast<const float*>(data(kDlse));
    gradients.delta = static_cast<const float*>(data(kDelta));
    gradients.dq = data(kDq);
    gradients.dk = data(kDk);
    gradients.dv = data(kDv);
    gradients.dsinks = static_cast<float*>(data(kDsinks));
    gradients.dbias = data(kDbias);
  }
  PyThreadState* thread = launch_->is_short ? nullptr : PyEval_SaveThread();
  without_gil_ = thread != nullptr;
  if (listens) {
    forward.interrupt = gradients.interrupt = interrupted;
    forward.interrupt_data = gradients.interrupt_data = &thread;
  }
  const strobe_status status = backward ? library.backward(launch_->plan.get(), &gradients)
                                        : library.forward(launch_->plan.get(), &forward);
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
  // An append makes the scales of rows, which have an axis for each; keys or values alone may have
  // some.
  const auto writes_scales = [&](Slot slot) {
    return !given(slot) || tensors[slot].ndim < 3 || writes(slot);
  };
  const bool allowed =
      backward ? writes(kDq) && writes(kDk) && writes(kDv) && writes(kDsinks) && writes(kDbias)
               : writes(kOut) && (!given(kSlot_k_new) ||
                                  (writes(kK) && writes(kV) && writes_scales(kSlot_k_scale) &&
                                   writes_scales(kSlot_v_scale)));
  if (!allowed) return false;
  Key key;
  if (all_plain()) {
    write_key(key);
    if (key.fits()) launch_ = plans[backward].find(key);
  }
  if (!check_mask()) return false;
  if (launch_ == nullptr && !make(key)) return false;
  if (tensors[kQ].is_torch() &&
      !range_.begin(backward ? "backward" : "forward", launch_->plan->kernel))
    return false;
  const bool done = allocate() && watch.check(kSlotNames, tensors, kSlots) && launch_it();
  return range_.end() && done && note_launch(door, launch_->plan);
}

}  // namespace strobe_python
