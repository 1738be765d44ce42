#include "library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

namespace strobe_python {

Library library;
const char kPlanCapsule[] = "strobe_plan";

namespace {

// ------------------------------------------------------------------------ opening and checking it

bool import_error(const std::string& text) {
  PyErr_SetString(PyExc_ImportError, ("strobe: " + text).c_str());
  return false;
}

bool fits(const std::string& path, const char* name, size_t size, strobe_status status) {
  if (status == STROBE_OK) return true;
  return import_error(path + " refuses " + name + " of " + std::to_string(size) +
                      " bytes (version " + library.version() + "): " + library.last_error());
}

// Refuses a library whose version or struct sizes are not those of the header, before any use.
bool check_abi(const std::string& path) {
  const std::string version = library.version();
  const std::string wanted =
      std::to_string(STROBE_VERSION_MAJOR) + "." + std::to_string(STROBE_VERSION_MINOR) + ".";
  if (version.compare(0, wanted.size(), wanted) != 0)
    return import_error(path + " has version " + (version.empty() ? "(none)" : version) +
                        ", expected " + wanted + "x");
  strobe_problem problem{};
  if (!fits(path, "strobe_problem", sizeof problem, library.problem_init(&problem, sizeof problem)))
    return false;
  strobe_machine machine{};
  machine.struct_size = sizeof machine;
  if (!fits(path, "strobe_machine", sizeof machine, library.machine_info(&machine))) return false;

  // A launch with no queries and no keys touches no memory, so it checks the other three structs.
  problem.batch = problem.heads = problem.threads = 1;
  problem.head_dim = 16;
  for (const bool backward : {false, true}) {
    problem.direction = backward ? STROBE_BACKWARD : STROBE_FORWARD;
    strobe_plan plan{};
    plan.struct_size = sizeof plan;
    const strobe_status status = library.plan_make(&problem, &plan);
    // As when STROBE_CPU_ISA names what is not there: not about sizes.
    if (status == STROBE_UNSUPPORTED) continue;
    if (!fits(path, "strobe_plan", sizeof plan, status)) return false;
    strobe_forward_args forward{};
    strobe_backward_args gradients{};
    forward.struct_size = sizeof forward;
    gradients.struct_size = sizeof gradients;
    if (!(backward ? fits(path, "strobe_backward_args", sizeof gradients,
                          library.backward(&plan, &gradients))
                   : fits(path, "strobe_forward_args", sizeof forward,
                          library.forward(&plan, &forward))))
      return false;
  }
  return true;
}

PyObject* load(PyObject*, PyObject* given) {
  Ref encoded;
  PyObject* bytes = nullptr;
  if (!PyUnicode_FSConverter(given, &bytes)) return nullptr;
  encoded = Ref(bytes);
  const std::string path = PyBytes_AsString(bytes);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    PyErr_SetString(PyExc_OSError, reason == nullptr ? "dlopen failed" : reason);
    return nullptr;
  }
  Library found;
#define X(name)                                                                        \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, "strobe_" #name)); \
  if (found.name == nullptr) {                                                         \
    import_error(path + " has no function strobe_" #name                               \
                        ": it is another library or another version");                 \
    return nullptr;                                                                    \
  }
  STROBE_PYTHON_FUNCTIONS(X)
#undef X
  library = found;
  if (!check_abi(path)) return nullptr;
  return PyUnicode_FromString(library.version());
}

// ------------------------------------------------------------------------------- problem and plan

enum class Type { kInt32, kInt64, kFloat, kStrides };

struct Field {
  const char* name;
  size_t offset;
  Type type;
};

constexpr Type type_of(int32_t) { return Type::kInt32; }
constexpr Type type_of(int64_t) { return Type::kInt64; }
constexpr Type type_of(float) { return Type::kFloat; }
constexpr Type type_of(strobe_strides) { return Type::kStrides; }

#define FIELD(name) {#name, offsetof(strobe_problem, name), type_of(strobe_problem{}.name)},
constexpr Field kFields[] = {
    FIELD(direction) FIELD(dtype) FIELD(device) FIELD(device_index) FIELD(batch) FIELD(seqlen_q)
        FIELD(seqlen_k) FIELD(heads) FIELD(heads_kv) FIELD(head_dim) FIELD(head_dim_v) FIELD(varlen)
            FIELD(total_q) FIELD(total_k) FIELD(q) FIELD(k) FIELD(v) FIELD(out) FIELD(dout)
                FIELD(dq) FIELD(dk) FIELD(dv) FIELD(kv_dtype) FIELD(out_dtype) FIELD(grad_dtype)
                    FIELD(cache) FIELD(append) FIELD(cache_batch) FIELD(pages) FIELD(page_size)
                        FIELD(pages_per_sequence) FIELD(block_table_stride) FIELD(seqlen_new)
                            FIELD(total_new) FIELD(k_new) FIELD(v_new) FIELD(rotary_dim)
                                FIELD(rotary_rows) FIELD(rotary_interleaved) FIELD(bias_dtype)
                                    FIELD(dbias_dtype) FIELD(bias_batch) FIELD(bias_heads)
                                        FIELD(bias_seqlen_q) FIELD(bias) FIELD(dbias)
                                            FIELD(kv_scale) FIELD(kv_scale_dtype) FIELD(k_scale)
                                                FIELD(v_scale) FIELD(q_scale) FIELD(v_dtype)
// A mask as data, whose fields are a struct of their own.
#define MASK_FIELD(name) \
  {"mask_" #name, offsetof(strobe_problem, mask.name), type_of(strobe_mask{}.name)},
                                                    MASK_FIELD(kind) MASK_FIELD(block_q)
                                                        MASK_FIELD(block_k) MASK_FIELD(batch)
                                                            MASK_FIELD(heads) MASK_FIELD(capacity)
                                                                MASK_FIELD(partial_capacity)
#undef MASK_FIELD
// The options: one table for the library and all that call it.
#define STROBE_FLAG(field, ...) FIELD(field)
#define STROBE_CHOICE(field, ...) FIELD(field)
#define STROBE_INTEGER(field, ...) FIELD(field)
#define STROBE_REAL(field, ...) FIELD(field)
#include "core/options.def"
};
#undef FIELD

bool set_field(strobe_problem& problem, const Field& field, PyObject* value) {
  char* at = reinterpret_cast<char*>(&problem) + field.offset;
  if (field.type == Type::kFloat) {
    const float number = static_cast<float>(PyFloat_AsDouble(value));
    std::memcpy(at, &number, sizeof number);
  } else if (field.type == Type::kStrides) {
    strobe_strides strides{};
    if (!PyArg_ParseTuple(value, "LLLL", &strides.batch, &strides.seqlen, &strides.head,
                          &strides.dim))
      return false;
    std::memcpy(at, &strides, sizeof strides);
  } else {
    const long long number = PyLong_AsLongLong(value);
    const int32_t half = static_cast<int32_t>(number);
    if (field.type == Type::kInt64)
      std::memcpy(at, &number, sizeof number);
    else
      std::memcpy(at, &half, sizeof half);
  }
  return PyErr_Occurred() == nullptr;
}

// A problem from a dict of its fields by name; others have their defaults.
bool read_problem(PyObject* fields, strobe_problem& problem) {
  const strobe_status status = library.problem_init(&problem, sizeof problem);
  if (status != STROBE_OK) return raise_status(status), false;
  Py_ssize_t known = 0;
  for (const Field& field : kFields) {
    PyObject* value = PyDict_GetItemString(fields, field.name);  // borrowed
    if (value == nullptr) continue;
    ++known;
    if (!set_field(problem, field, value)) return false;
  }
  if (known == PyDict_Size(fields)) return true;
  PyErr_Format(PyExc_KeyError, "a field of no strobe_problem among %R", fields);
  return false;
}

void free_plan(PyObject* capsule) {
  delete static_cast<strobe_plan*>(PyCapsule_GetPointer(capsule, kPlanCapsule));
}

PyObject* make_plan(PyObject*, PyObject* fields) {
  strobe_problem problem;
  if (!read_problem(fields, problem)) return nullptr;
  auto plan = std::make_unique<strobe_plan>();
  plan->struct_size = sizeof(strobe_plan);
  const strobe_status status = library.plan_make(&problem, plan.get());
  if (status != STROBE_OK) return raise_status(status), nullptr;
  PyObject* capsule = PyCapsule_New(plan.get(), kPlanCapsule, free_plan);
  if (capsule != nullptr) plan.release();
  return capsule;
}

// What a C function writes that returns the length of all it has to say.
template <typename Function, typename Argument>
PyObject* long_text(Function function, const Argument* argument) {
  std::string text(4096, '\0');
  size_t length = function(argument, text.data(), text.size());
  if (length >= text.size()) {
    text.resize(length + 1);
    length = function(argument, text.data(), text.size());
  }
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(length), "replace");
}

PyObject* plan_text(PyObject*, PyObject* capsule) {
  auto* plan = static_cast<strobe_plan*>(PyCapsule_GetPointer(capsule, kPlanCapsule));
  return plan == nullptr ? nullptr : text_of_plan(*plan);
}

PyObject* workspace_bytes(PyObject*, PyObject* capsule) {
  auto* plan = static_cast<strobe_plan*>(PyCapsule_GetPointer(capsule, kPlanCapsule));
  return plan == nullptr ? nullptr : PyLong_FromSize_t(plan->workspace_bytes);
}

PyObject* why(PyObject*, PyObject* fields) {
  strobe_problem problem;
  return read_problem(fields, problem) ? long_text(library.why, &problem) : nullptr;
}

// ---------------------------------------------------------------------------------- masks as data

PyObject* mask_bytes(PyObject*, PyObject* fields) {
  strobe_problem problem;
  size_t bytes = 0;
  if (!read_problem(fields, problem)) return nullptr;
  const strobe_status status = library.mask_bytes(&problem, &bytes);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  return PyLong_FromSize_t(bytes);
}

// The fields of strobe_mask_args by name: addresses and numbers; keep's strides in a tuple.
PyObject* pack_mask(PyObject*, PyObject* arguments) {
  PyObject *fields, *numbers;
  strobe_problem problem;
  if (!PyArg_ParseTuple(arguments, "OO!", &fields, &PyDict_Type, &numbers) ||
      !read_problem(fields, problem))
    return nullptr;
  strobe_mask_args args{};
  args.struct_size = sizeof args;
  const auto number = [&](const char* name) {
    PyObject* value = PyDict_GetItemString(numbers, name);  // borrowed
    return value == nullptr ? 0ULL : PyLong_AsUnsignedLongLong(value);
  };
  const auto address = [&](const char* name, auto& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(number(name));
  };
  address("keep", args.keep);
  address("intervals", args.intervals);
  address("partial_counts", args.partial_counts);
  address("partial_blocks", args.partial_blocks);
  address("partial_bits", args.partial_bits);
  address("full_counts", args.full_counts);
  address("full_blocks", args.full_blocks);
  address("cu_seqlens_q", args.cu_seqlens_q);
  address("cu_seqlens_k", args.cu_seqlens_k);
  address("packed", args.packed);
  address("stream", args.stream);
  args.packed_bytes = number("packed_bytes");
  args.partial_columns = static_cast<int64_t>(number("partial_columns"));
  args.full_columns = static_cast<int64_t>(number("full_columns"));
  strobe_strides& s = args.keep_strides;
  PyObject* strides = PyDict_GetItemString(numbers, "keep_strides");  // borrowed
  if (strides != nullptr &&
      !PyArg_ParseTuple(strides, "LLLL", &s.batch, &s.seqlen, &s.head, &s.dim))
    return nullptr;
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  const strobe_status status = library.mask_pack(&problem, &args);
  PyEval_RestoreThread(thread);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  Py_RETURN_NONE;
}

// Quantises arrays at addresses, or reads them back: fields are those of strobe_quantize_args.
PyObject* quantize(PyObject*, PyObject* arguments) {
  int back;
  PyObject* fields;
  if (!PyArg_ParseTuple(arguments, "pO!", &back, &PyDict_Type, &fields)) return nullptr;
  strobe_quantize_args args{};
  args.struct_size = sizeof args;
  const auto number = [&](const char* name) -> int64_t {
    PyObject* value = PyDict_GetItemString(fields, name);  // borrowed
    return value == nullptr ? 0 : PyLong_AsLongLong(value);
  };
  const auto address = [&](const char* name) {
    PyObject* value = PyDict_GetItemString(fields, name);  // borrowed
    return value == nullptr ? nullptr : PyLong_AsVoidPtr(value);
  };
  const auto strides = [&](const char* name, strobe_strides& s) {
    PyObject* value = PyDict_GetItemString(fields, name);  // borrowed
    return value == nullptr ||
           PyArg_ParseTuple(value, "LLLL", &s.batch, &s.seqlen, &s.head, &s.dim) != 0;
  };
  args.device = static_cast<int32_t>(number("device"));
  args.device_index = static_cast<int32_t>(number("device_index"));
  args.dtype = static_cast<int32_t>(number("dtype"));
  args.kv_dtype = static_cast<int32_t>(number("kv_dtype"));
  args.kv_scale = static_cast<int32_t>(number("kv_scale"));
  args.kv_scale_dtype = static_cast<int32_t>(number("kv_scale_dtype"));
  args.scale_is_given = static_cast<int32_t>(number("scale_is_given"));
  args.threads = static_cast<int32_t>(number("threads"));
  args.batch = number("batch");
  args.seqlen = number("seqlen");
  args.heads = number("heads");
  args.head_dim = number("head_dim");
  args.heads_kv = number("heads_kv");
  args.hadamard = number("hadamard");
  args.scale_rows = number("scale_rows");
  args.x = address("x");
  args.codes = address("codes");
  args.scale = address("scale");
  args.stream = address("stream");
  if (!strides("x_strides", args.x_strides) || !strides("codes_strides", args.codes_strides) ||
      !strides("scale_strides", args.scale_strides) || PyErr_Occurred() != nullptr)
    return nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  const strobe_status status = back ? library.dequantize(&args) : library.quantize(&args);
  PyEval_RestoreThread(thread);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  Py_RETURN_NONE;
}

// ------------------------------------------------------------------------------- what else it says

PyObject* dropout_mask(PyObject*, PyObject* arguments) {
  long long batch, heads, seqlen_q, seqlen_k;
  double probability;
  unsigned long long seed, offset, address;
  if (!PyArg_ParseTuple(arguments, "LLLLdKKK", &batch, &heads, &seqlen_q, &seqlen_k, &probability,
                        &seed, &offset, &address))
    return nullptr;
  // The sizes are those of an array in memory. Between two parts, each of some hundredths of a
  // second, handlers of signals run (on the main thread).
  constexpr long long kPart = 1 << 22;
  const auto bytes = static_cast<long long>(1ULL * batch * heads * seqlen_q * seqlen_k);
  for (long long first = 0; first == 0 || first < bytes; first += kPart) {
    PyThreadState* thread = PyEval_SaveThread();
    const strobe_status status = library.dropout_mask_part(
        batch, heads, seqlen_q, seqlen_k, static_cast<float>(probability), seed, offset, first,
        std::min(kPart, bytes - first), reinterpret_cast<uint8_t*>(address) + first);
    PyEval_RestoreThread(thread);
    if (status != STROBE_OK) return raise_status(status), nullptr;
    if (PyErr_CheckSignals() != 0) return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* text_of(const char* text) {
  return PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
}

PyObject* machine(PyObject*, PyObject*) {
  strobe_machine found{};
  found.struct_size = sizeof found;
  const strobe_status status = library.machine_info(&found);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  return Py_BuildValue("{s:N,s:N,s:N,s:i,s:i,s:N,s:N}", "cpu_name", text_of(found.cpu_name),
                       "cpu_isa", text_of(found.cpu_isa), "cpu_isas", text_of(found.cpu_isas),
                       "cpu_threads", found.cpu_threads, "cuda_devices", found.cuda_devices,
                       "cuda_reason", text_of(found.cuda_reason), "compiler",
                       text_of(found.compiler));
}

PyObject* cuda_device(PyObject*, PyObject* index) {
  const long at = PyLong_AsLong(index);
  if (at == -1 && PyErr_Occurred() != nullptr) return nullptr;
  strobe_cuda_device found{};
  found.struct_size = sizeof found;
  const strobe_status status = library.cuda_device_info(static_cast<int32_t>(at), &found);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  return Py_BuildValue("(NiiL)", text_of(found.name), found.compute_capability,
                       found.multiprocessors, static_cast<long long>(found.memory_bytes));
}

PyObject* kernels(PyObject*, PyObject*) {
  Ref list(PyList_New(0));
  for (int32_t index = 0; list; ++index) {
    const char* name = library.kernel_name(index);
    if (name == nullptr) break;
    const char* reason = library.kernel_unavailable(index);
    Ref row(Py_BuildValue("(ss)", name, reason == nullptr ? "" : reason));
    if (!row || PyList_Append(list.get(), row.get()) != 0) return nullptr;
  }
  return list.release();
}

PyObject* load_tuning(PyObject*, PyObject* given) {
  Ref encoded;
  if (given != Py_None) {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(given, &bytes)) return nullptr;
    encoded = Ref(bytes);
  }
  const char* const path = encoded ? PyBytes_AsString(encoded.get()) : nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  const strobe_status status = library.tuning_load(path);
  PyEval_RestoreThread(thread);
  if (status != STROBE_OK) return raise_status(status), nullptr;
  Py_RETURN_NONE;
}

PyObject* tuning_text(PyObject*, PyObject*) {
  std::string text(library.tuning_text(nullptr, 0) + 1, '\0');
  library.tuning_text(text.data(), text.size());
  return text_of(text.c_str());
}

}  // namespace

PyObject* text_of_plan(const strobe_plan& plan) { return long_text(library.plan_text, &plan); }

void raise_status(strobe_status status) {
  Ref error = call_python("_errors", "error_for_status", "(is)", static_cast<int>(status),
                          library.last_error());
  if (error) raise_object(error.get());
}

PyMethodDef library_methods[] = {
    method<load>("load", METH_O, "Opens libstrobe; its version. OSError: it cannot be opened."),
    method<make_plan>("make_plan", METH_O, "The plan of a problem, given by its fields."),
    method<plan_text>("plan_text", METH_O, "A plan in words."),
    method<workspace_bytes>("workspace_bytes", METH_O, "What a launch of this plan needs."),
    method<why>("why", METH_O, "One line a kernel: takes the problem, or why it declines."),
    method<mask_bytes>("mask_bytes", METH_O, "What a problem's packed mask takes."),
    method<pack_mask>("pack_mask", METH_VARARGS, "Packs a mask from arrays at addresses."),
    method<quantize>("quantize", METH_VARARGS,
                     "Quantises arrays at addresses, or reads them back."),
    method<dropout_mask>("dropout_mask", METH_VARARGS, "Writes the mask to an address."),
    method<machine>("machine", METH_NOARGS, "strobe_machine as a dict."),
    method<cuda_device>("cuda_device", METH_O, "strobe_cuda_device as a tuple."),
    method<kernels>("kernels", METH_NOARGS, "(name, why it is unavailable) of each kernel."),
    method<load_tuning>("load_tuning", METH_O, "Puts a file of choices into force; None: none."),
    method<tuning_text>("tuning_text", METH_NOARGS, "Which file of choices is in force."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
