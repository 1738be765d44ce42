#include "tensor.h"

#include <algorithm>
#include <unordered_map>

#include "dlpack.h"

namespace strobe_python {

Torch torch;

// A capsule's tensor, taken over: whose deleter is called once, here.
struct DLManaged {
  DLManagedTensor* old = nullptr;
  DLManagedTensorVersioned* versioned = nullptr;
  DLTensor* tensor = nullptr;

  // The GIL is held: deleters written in C take it themselves, which may nest, and those that
  // forget to are right too.
  ~DLManaged() {
    PyObject *type, *value, *traceback;  // a deleter may be Python's, and must not meet an error
    PyErr_Fetch(&type, &value, &traceback);
    if (old != nullptr && old->deleter != nullptr) old->deleter(old);
    if (versioned != nullptr && versioned->deleter != nullptr) versioned->deleter(versioned);
    PyErr_Restore(type, value, traceback);
  }
};

Tensor::~Tensor() { delete managed; }

void Tensor::forget() {
  managed = nullptr;
  owned.release();
}

bool Layout::rows_contiguous() const {
  return ndim == 0 || strides[ndim - 1] == 1 || shape[ndim - 1] == 1;
}

bool Layout::contiguous() const {
  if (std::find(shape, shape + ndim, 0) != shape + ndim) return true;
  int64_t step = 1;
  for (int axis = ndim - 1; axis >= 0; --axis) {
    if (shape[axis] > 1 && strides[axis] != step) return false;
    step *= shape[axis];
  }
  return true;
}

bool Layout::operator==(const Layout& other) const {
  return dtype == other.dtype && on_cuda == other.on_cuda && read_only == other.read_only &&
         plain == other.plain && ndim == other.ndim && device_index == other.device_index &&
         data == other.data &&
         (!plain || (std::equal(shape, shape + ndim, other.shape) &&
                     std::equal(strides, strides + ndim, other.strides)));
}

namespace {

struct Class {
  Kind kind;
  const DLExchangeApi* exchange;
};

// By type, which is kept alive. Types of foreign libraries are not kept.
std::unordered_map<PyTypeObject*, Class> classes;

const DLExchangeApi* exchange_of(PyTypeObject* type) {
  Ref capsule(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  void* found = capsule ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
  PyErr_Clear();
  const auto* api = static_cast<const DLExchangeApi*>(found);
  const bool known = api != nullptr && api->version.major == 1 &&
                     api->managed_from_object != nullptr && api->current_work_stream != nullptr;
  return known ? api : nullptr;
}

Class torch_class{Kind::kTorch, nullptr};  // of torch.Tensor itself, once it has been met

bool class_of(const char* name, PyObject* object, Class& found) {
  PyTypeObject* type = Py_TYPE(object);
  if (reinterpret_cast<PyObject*>(type) == torch.tensor_type) {
    found = torch_class;
    return true;
  }
  const auto known = classes.find(type);
  if (known != classes.end()) {
    found = known->second;
    return true;
  }
  Ref number = call_python("_arrays", "classify", "(sO)", name, object);
  if (!number) return false;
  found = {static_cast<Kind>(PyLong_AsLong(number.get())), nullptr};
  if (found.kind == Kind::kTorch || found.kind == Kind::kTorchSubclass)
    found.exchange = exchange_of(type);
  // Types that a program makes as it goes, one after the other, are not all kept.
  constexpr size_t kMostClasses = 64;
  if (found.kind != Kind::kShared && classes.size() < kMostClasses) {
    Py_INCREF(type);
    classes.emplace(type, found);
  }
  return true;
}

// Raises what Python says of an object that cannot be read for the exception that is set.
// KeyboardInterrupt and its like stay as they are.
bool unreadable(const char* name, PyObject* object) {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref owned[] = {Ref(type), Ref(value), Ref(traceback)};
  Ref error = call_python("_arrays", "unreadable", "(sOO)", name, object,
                          value == nullptr ? Py_None : value);
  if (error) raise_object(error.get());
  return false;
}

// ------------------------------------------------------------------------------------------ NumPy

// What __array_struct__ points to: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two, ndim;
  char kind;
  int item_size, flags;
  Py_intptr_t *shape, *strides;  // strides in bytes
  void* data;
};
enum : int { kNotSwapped = 0x200, kWriteable = 0x400 };

// bfloat16 and float8 are dtypes of another package's (ml_dtypes), known by their names.
struct ForeignType {
  const char* name;
  PyObject* seen = nullptr;  // the first that was seen; others may be equal to it
};
bool is_of_type(PyObject* array, ForeignType& type) {
  Ref dtype(PyObject_GetAttrString(array, "dtype"));
  bool found = dtype && dtype.get() == type.seen;
  if (dtype && !found) {
    Ref name(PyObject_Str(dtype.get()));
    found = name && PyUnicode_CompareWithASCIIString(name.get(), type.name) == 0;
    if (found && type.seen == nullptr) type.seen = Ref::borrowed(dtype.get()).release();
  }
  PyErr_Clear();
  return found;
}

// The capsule of an array. Of an array of a subclass it is NumPy's own, whatever the subclass says,
// and none of the subclass's code runs. plain: an array of no subclass, which knows NumPy's.
Ref array_struct(PyObject* array, PyObject* plain) {
  static PyObject* const attribute = PyUnicode_InternFromString("__array_struct__");
  if (array == plain) return Ref(PyObject_GetAttr(array, attribute));
  Ref getter(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(plain)), attribute));
  return getter ? Ref(PyObject_CallMethod(getter.get(), "__get__", "O", array)) : Ref();
}

// plain: the same array, of no subclass.
bool read_numpy(PyObject* array, PyObject* plain, Layout& tensor) {
  Ref capsule = array_struct(array, plain);
  auto* found = capsule ? static_cast<ArrayInterface*>(PyCapsule_GetPointer(capsule.get(), nullptr))
                        : nullptr;
  if (found == nullptr) return false;
  tensor.data = found->data;
  tensor.ndim = found->ndim;
  tensor.read_only = (found->flags & kWriteable) == 0;
  const int size = found->item_size;
  if ((found->flags & kNotSwapped) != 0) {
    if (found->kind == 'f' && size == 4) tensor.dtype = kFloat32;
    if (found->kind == 'f' && size == 2) tensor.dtype = kFloat16;
    if (found->kind == 'i' && size == 4) tensor.dtype = kInt32;
    if (found->kind == 'i' && size == 1) tensor.dtype = kInt8;
    if (found->kind == 'u' && size == 1) tensor.dtype = kByte;
    static ForeignType bfloat16{"bfloat16"}, float8{"float8_e4m3fn"};
    if (found->kind == 'V' && size == 2 && is_of_type(plain, bfloat16)) tensor.dtype = kBfloat16;
    if (found->kind == 'V' && size == 1 && is_of_type(plain, float8)) tensor.dtype = kFloat8E4m3;
    static ForeignType e5m2{"float8_e5m2"};
    if (found->kind == 'f' && size == 1 && is_of_type(plain, e5m2)) tensor.dtype = kFloat8E5m2;
  }
  tensor.plain = tensor.ndim <= kMaxAxes && tensor.dtype != kOtherType;
  if (!tensor.plain) return true;
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    tensor.shape[axis] = found->shape[axis];
    tensor.strides[axis] = found->strides[axis] / size;
    if (found->strides[axis] % size != 0 && found->shape[axis] > 1) tensor.plain = false;
  }
  return true;
}

// ----------------------------------------------------------------------------------------- DLPack

// Everything of a DLTensor but its address of the first element.
void read_layout(const DLTensor& found, Layout& tensor) {
  if (found.lanes == 1 && found.bits == 32 && found.code == 2) tensor.dtype = kFloat32;
  if (found.lanes == 1 && found.bits == 16 && found.code == 2) tensor.dtype = kFloat16;
  if (found.lanes == 1 && found.bits == 16 && found.code == 4) tensor.dtype = kBfloat16;
  if (found.lanes == 1 && found.bits == 32 && found.code == 0) tensor.dtype = kInt32;
  if (found.lanes == 1 && found.bits == 8 && found.code == 0) tensor.dtype = kInt8;
  if (found.lanes == 1 && found.bits == 8 && found.code == 1) tensor.dtype = kByte;
  if (found.lanes == 1 && found.bits == 8 && found.code == 10) tensor.dtype = kFloat8E4m3;
  if (found.lanes == 1 && found.bits == 8 && found.code == 12) tensor.dtype = kFloat8E5m2;
  tensor.on_cuda = found.device_type == kDlCuda;
  tensor.device_index = tensor.on_cuda ? found.device_id : 0;
  tensor.ndim = found.ndim;
  tensor.plain =
      found.ndim <= kMaxAxes && tensor.dtype != kOtherType &&
      (tensor.on_cuda || found.device_type == kDlCpu || found.device_type == kDlCudaHost);
  if (!tensor.plain) return;
  int64_t step = 1;
  for (int axis = found.ndim - 1; axis >= 0; --axis) {
    tensor.shape[axis] = found.shape[axis];
    tensor.strides[axis] = found.strides != nullptr ? found.strides[axis] : step;
    if (axis > 0) step *= std::max<int64_t>(found.shape[axis], 1);
  }
}

// Of a DLTensor or a Layout.
template <typename Shaped>
std::string shape_text(const Shaped& tensor) {
  std::string text = "(";
  for (int axis = 0; axis < tensor.ndim; ++axis)
    text += (axis > 0 ? ", " : "") + std::to_string(tensor.shape[axis]);
  return text + (tensor.ndim == 1 ? ",)" : ")");
}

// Refuses what is no tensor before anything of it is used.
bool check_shared(const std::string& name, const DLTensor& tensor) {
  constexpr int kMost = 64;  // as NumPy; an ndim of more is no tensor, and its shape is not read
  const auto invalid = [&](const std::string& text) {
    raise_error("InvalidArgument", name + text);
    return false;
  };
  if (tensor.ndim < 0 || tensor.ndim > kMost)
    return invalid(".ndim = " + std::to_string(tensor.ndim) + ", expected 0 to " +
                   std::to_string(kMost));
  if (tensor.ndim > 0 && tensor.shape == nullptr)
    return invalid(" comes through DLPack without a shape");
  int64_t elements = 1;
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    if (tensor.shape[axis] < 0)
      return invalid(".shape = " + shape_text(tensor) + ", expected no negative sizes");
    if (tensor.strides == nullptr && axis > 0 &&
        __builtin_mul_overflow(elements, std::max<int64_t>(tensor.shape[axis], 1), &elements))
      return invalid(".shape = " + shape_text(tensor) + ": as many elements as no memory has");
  }
  uint64_t end;
  if (__builtin_add_overflow(reinterpret_cast<uint64_t>(tensor.data), tensor.byte_offset, &end))
    return invalid(" comes through DLPack with byte_offset = " +
                   std::to_string(tensor.byte_offset) + ", which passes the end of memory");
  return true;
}

bool take_over(const char* name, PyObject* capsule, Tensor& tensor) {
  delete tensor.managed;  // of an array that was given before in its place
  tensor.managed = new DLManaged;
  DLManaged& managed = *tensor.managed;
  // The capsule is renamed the moment that its tensor is taken over, as DLPack asks.
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") != 0) {
    managed.versioned =
        static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    const DLVersion version = managed.versioned->version;
    if (version.major != 1) {  // to give it back is all that may be done with it
      raise_error("Unsupported", std::string(name) + " comes as DLPack " +
                                     std::to_string(version.major) + "." +
                                     std::to_string(version.minor) + ", expected 1.x");
      return false;
    }
    if ((managed.versioned->flags & kDlCopied) != 0) {
      raise_error("InvalidArgument", std::string(name) +
                                         ".__dlpack__() made a copy, expected memory shared with " +
                                         name + ": make the copy yourself");
      return false;
    }
    tensor.read_only = (managed.versioned->flags & kDlReadOnly) != 0;
    managed.tensor = &managed.versioned->tensor;
  } else if (PyCapsule_IsValid(capsule, "dltensor") != 0) {
    managed.old = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    managed.tensor = &managed.old->tensor;
  } else {
    call_python("_arrays", "refuse_capsule", "(sO)", name, capsule);
    return false;
  }
  if (!check_shared(name, *managed.tensor)) return false;
  read_layout(*managed.tensor, tensor);
  tensor.data = static_cast<char*>(managed.tensor->data) + managed.tensor->byte_offset;
  return true;
}

Ref describe_shared(const char* name, const DLTensor& found) {
  Ref shape(PyTuple_New(found.ndim)), strides(PyTuple_New(found.ndim));
  if (!shape || !strides) return Ref();
  int64_t step = 1;
  for (int axis = found.ndim - 1; axis >= 0; --axis) {
    const int64_t stride = found.strides != nullptr ? found.strides[axis] : step;
    PyTuple_SetItem(shape.get(), axis, PyLong_FromLongLong(found.shape[axis]));
    PyTuple_SetItem(strides.get(), axis, PyLong_FromLongLong(stride));
    // Checked for all axes but the first, which this multiplies last and nobody reads.
    if (axis > 0) step *= std::max<int64_t>(found.shape[axis], 1);
  }
  return call_python("_arrays", "shared_spec", "(sOOiiiii)", name, shape.get(), strides.get(),
                     found.code, found.bits, found.lanes, found.device_type, found.device_id);
}

bool read_shared(const char* name, PyObject* object, Tensor& tensor) {
  Ref capsule = call_python("_arrays", "capsule_of", "(sO)", name, object);
  if (!capsule) return false;
  bool taken = take_over(name, capsule.get(), tensor);
  if (taken && (!tensor.plain || tensor.on_cuda)) {  // in words: to be refused
    tensor.plain = false;
    tensor.owned = describe_shared(name, *tensor.managed->tensor);
    taken = static_cast<bool>(tensor.owned);
  }
  PyObject *type, *value, *traceback;  // a capsule's destructor may be Python's as well
  PyErr_Fetch(&type, &value, &traceback);
  capsule = Ref();
  PyErr_Restore(type, value, traceback);
  return taken;
}

// ---------------------------------------------------------------------------------------- PyTorch

// A tensor without memory (freed, fake) has its offset for an address, which is below this. Memory
// itself may lie there in a Python that is not position-independent: such a tensor is asked.
constexpr uintptr_t kLow = uintptr_t{1} << 32;

// Whether an address is none, but an offset. On true an exception may be set.
bool has_no_memory(PyObject* object, const Layout& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data) >= kLow) return false;
  for (int axis = 0; axis < tensor.ndim; ++axis)
    if (tensor.shape[axis] == 0) return false;
  static PyObject* const name = PyUnicode_InternFromString("storage_offset");
  Ref offset(PyObject_CallMethodObjArgs(object, name, nullptr));
  if (!offset) return true;
  const bool four = tensor.dtype == kFloat32 || tensor.dtype == kInt32;
  const bool two = tensor.dtype == kBfloat16 || tensor.dtype == kFloat16;
  const uint64_t size = four ? 4 : two ? 2 : 1;
  return PyLong_AsUnsignedLongLong(offset.get()) * size == reinterpret_cast<uintptr_t>(tensor.data);
}

// PyTorch before 2.10, which has no exchange API.
bool read_attributes(PyObject* object, Layout& tensor) {
  Ref address(PyObject_CallMethod(object, "data_ptr", nullptr));
  Ref shape(address ? PyObject_GetAttrString(object, "shape") : nullptr);
  Ref strides(shape ? PyObject_CallMethod(object, "stride", nullptr) : nullptr);
  Ref dtype(strides ? PyObject_GetAttrString(object, "dtype") : nullptr);
  Ref cpu(dtype ? PyObject_GetAttrString(object, "is_cpu") : nullptr);
  Ref cuda(cpu ? PyObject_GetAttrString(object, "is_cuda") : nullptr);
  if (!cuda) return false;
  tensor.data = PyLong_AsVoidPtr(address.get());
  tensor.on_cuda = cuda.get() == Py_True;
  constexpr uint8_t kTypes[] = {kFloat32, kBfloat16, kFloat16,    kInt32,
                                kInt8,    kByte,     kFloat8E4m3, kFloat8E5m2};
  for (int i = 0; i < 8; ++i)
    if (dtype.get() == torch.dtypes[i]) tensor.dtype = kTypes[i];
  tensor.ndim = static_cast<int>(PyTuple_Size(shape.get()));
  tensor.plain = tensor.dtype != kOtherType && tensor.ndim <= kMaxAxes &&
                 (tensor.on_cuda || cpu.get() == Py_True);
  for (int axis = 0; tensor.plain && axis < tensor.ndim; ++axis) {
    tensor.shape[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), axis));
    tensor.strides[axis] = PyLong_AsLongLong(PyTuple_GetItem(strides.get(), axis));
  }
  if (tensor.plain && tensor.on_cuda) {
    Ref index(PyObject_CallMethod(object, "get_device", nullptr));
    tensor.device_index = index ? static_cast<int>(PyLong_AsLong(index.get())) : 0;
  }
  return PyErr_Occurred() == nullptr;
}

// As it lies. No Python runs, but in a PyTorch without an exchange API, where a mode may see it.
bool read_as_it_lies(PyObject* object, const DLExchangeApi* exchange, Layout& tensor) {
  if (exchange == nullptr) return read_attributes(object, tensor);
  DLTensor found;
  DLManagedTensorVersioned* managed = nullptr;
  if (exchange->tensor_from_object != nullptr) {
    if (exchange->tensor_from_object(object, &found) != 0) return false;
  } else {
    if (exchange->managed_from_object(object, &managed) != 0) return false;
    found = managed->tensor;
  }
  read_layout(found, tensor);
  tensor.data = static_cast<char*>(found.data) + found.byte_offset;
  if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
  return true;
}

// As `tensor` has its axes. On false an exception may be set.
bool read_torch(const Tensor& tensor, Layout& layout) {
  if (!read_as_it_lies(tensor.object, tensor.exchange, layout)) return false;
  if (tensor.heads_first && layout.plain && layout.ndim == 4) {
    std::swap(layout.shape[1], layout.shape[2]);
    std::swap(layout.strides[1], layout.strides[2]);
  }
  return true;
}

// unwatched: it is known to have no negative bit.
bool read_torch(const char* name, PyObject* object, Tensor& tensor, bool unwatched) {
  if (!read_torch(tensor, tensor)) return unreadable(name, object);
  if (!unwatched) {
    if (tensor.kind == Kind::kTorchSubclass) ++python_calls;  // of its __torch_function__
    Ref negative(PyObject_CallFunctionObjArgs(torch.is_neg, object, nullptr));
    if (!negative) return unreadable(name, object);
    if (negative.get() == Py_True) tensor.plain = false;
  }
  if (tensor.plain && has_no_memory(object, tensor)) return unreadable(name, object);
  return true;
}

// What an array is now, whose memory its library may move. On false an exception may be set.
bool read_again(const Tensor& tensor, Layout& now) {
  switch (tensor.kind) {
    case Kind::kNumpy:
      return read_numpy(tensor.object, tensor.object, now);
    case Kind::kNumpySubclass:
      return read_numpy(tensor.object, tensor.owned.get(), now);
    case Kind::kTorch:
    case Kind::kTorchSubclass:
      if (!read_torch(tensor, now)) return false;
      now.plain = now.plain && tensor.plain;  // is_neg is asked once
      return !now.plain || !has_no_memory(tensor.object, now);
    default:  // whoever shares memory through DLPack keeps it
      now = tensor;
      return true;
  }
}

// ---------------------------------------------------------------------------- methods of Python's

PyObject* set_torch(PyObject*, PyObject* arguments) {
  PyObject *given[6], *dtypes[8];
  if (!PyArg_ParseTuple(arguments, "OOOOOO(OOOOOOOO)", &given[0], &given[1], &given[2], &given[3],
                        &given[4], &given[5], &dtypes[0], &dtypes[1], &dtypes[2], &dtypes[3],
                        &dtypes[4], &dtypes[5], &dtypes[6], &dtypes[7]))
    return nullptr;
  if (!PyType_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "expected torch.Tensor first");
    return nullptr;
  }
  for (PyObject* object : given) Py_INCREF(object);
  torch_class.exchange = exchange_of(reinterpret_cast<PyTypeObject*>(given[0]));
  for (PyObject* object : dtypes) Py_INCREF(object);
  torch = {given[0], given[1], given[2], given[3], given[4], given[5]};
  std::copy(dtypes, dtypes + 8, torch.dtypes);
  Py_RETURN_NONE;
}

PyObject* describe(PyObject*, PyObject* arguments) {
  const char* name;
  PyObject* object;
  if (!PyArg_ParseTuple(arguments, "sO", &name, &object)) return nullptr;
  Tensor tensor;
  tensor.kind = Kind::kShared;
  return read_shared(name, object, tensor) ? described(tensor).release() : nullptr;
}

}  // namespace

bool read(const char* name, PyObject* object, Tensor& tensor, bool unwatched) {
  Class found;
  if (!class_of(name, object, found)) return false;
  static_cast<Layout&>(tensor) = Layout{};  // of an array that was given before in its place
  tensor.object = object;
  tensor.kind = found.kind;
  tensor.exchange = found.exchange;
  switch (found.kind) {
    case Kind::kNumpy:
      return read_numpy(object, object, tensor) || unreadable(name, object);
    case Kind::kNumpySubclass: {  // as the array that it is, whatever it says of itself
      tensor.owned = call_python("_arrays", "plain_array", "(O)", object);
      PyObject* plain = tensor.owned.get();
      return plain != nullptr && (read_numpy(plain, plain, tensor) || unreadable(name, object));
    }
    case Kind::kTorch:
    case Kind::kTorchSubclass:
      return read_torch(name, object, tensor, unwatched);
    case Kind::kShared:
      return read_shared(name, object, tensor);
    default:
      return unreadable(name, object);  // an ArraySpec has no data
  }
}

Ref described(const Tensor& tensor) {
  if (!tensor.plain)
    return Ref::borrowed(tensor.kind == Kind::kShared ? tensor.owned.get() : tensor.object);
  Ref shape(PyTuple_New(tensor.ndim)), strides(PyTuple_New(tensor.ndim));
  if (!shape || !strides) return Ref();
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    PyTuple_SetItem(shape.get(), axis, PyLong_FromLongLong(tensor.shape[axis]));
    PyTuple_SetItem(strides.get(), axis, PyLong_FromLongLong(tensor.strides[axis]));
  }
  return call_python("_arrays", "read_spec", "(iOOiii)", static_cast<int>(tensor.kind), shape.get(),
                     strides.get(), static_cast<int>(tensor.dtype),
                     static_cast<int>(tensor.on_cuda), tensor.device_index);
}

bool Watch::settle(const char* const* names, Tensor* tensors, int count) const {
  if (calls_ == python_calls) return true;
  for (int i = 0; i < count; ++i) {
    Tensor& tensor = tensors[i];
    if (tensor.object == nullptr) continue;
    Layout now;
    if (!read_again(tensor, now)) return unreadable(names[i], tensor.object);
    static_cast<Layout&>(tensor) = now;
  }
  return true;
}

bool Watch::check(const char* const* names, const Tensor* tensors, int count) const {
  const bool quiet = calls_ == python_calls;
  for (int i = 0; i < count; ++i) {
    const Tensor& tensor = tensors[i];
    // PyTorch's tensors were made and asked by functions that its modes see.
    if (tensor.object == nullptr || (quiet && (unwatched || !tensor.is_torch()))) continue;
    Layout now;
    if (!read_again(tensor, now)) return unreadable(names[i], tensor.object);
    if (now == tensor) continue;
    raise_error("InvalidArgument",
                std::string(names[i]) + " was changed during the call: its shape was " +
                    shape_text(tensor) + " and is " + (now.plain ? shape_text(now) : "unknown") +
                    (now.data == tensor.data ? "" : ", in other memory") +
                    ", expected an array that stays as it is");
    return false;
  }
  return true;
}

bool current_stream(const Tensor& tensor, void** stream) {
  Class found;
  if (!class_of("q", tensor.object, found)) return false;
  if (found.exchange != nullptr)
    return found.exchange->current_work_stream(kDlCuda, tensor.device_index, stream) == 0;
  Ref address = call_python("_plans", "torch_stream", "(i)", tensor.device_index);
  if (!address) return false;
  *stream = PyLong_AsVoidPtr(address.get());
  return PyErr_Occurred() == nullptr;
}

PyMethodDef tensor_methods[] = {
    method<set_torch>("set_torch", METH_VARARGS, "Introduces PyTorch."),
    method<describe>("describe", METH_VARARGS, "The Spec of an object with __dlpack__."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
