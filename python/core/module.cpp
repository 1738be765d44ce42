// strobe._core: what runs on each call. Python's part checks, explains and plans; it is asked where
// something is seen for the first time, or is wrong.
#include <cstdarg>
#include <map>
#include <utility>

#include "call.h"
#include "direct.h"
#include "xla.h"

namespace strobe_python {

namespace {

// A function of the package, borrowed: looked up once. On null an exception is set.
PyObject* function_of(const char* module, const char* name) {
  static auto& known = *new std::map<std::pair<const char*, const char*>, PyObject*>;
  const auto found = known.find({module, name});
  if (found != known.end()) return found->second;
  Ref package(PyImport_ImportModule((std::string("strobe.") + module).c_str()));
  Ref function(package ? PyObject_GetAttrString(package.get(), name) : nullptr);
  if (function) known.emplace(std::pair(module, name), function.get());
  return function.release();
}

}  // namespace

uint64_t python_calls = 0;

Ref call_python(const char* module, const char* name, const char* format, ...) {
  PyObject *type, *value, *traceback;  // what is set already is the caller's to judge
  PyErr_Fetch(&type, &value, &traceback);
  ++python_calls;
  va_list list;
  va_start(list, format);
  Ref arguments(Py_VaBuildValue(format, list));
  va_end(list);
  PyObject* function = arguments ? function_of(module, name) : nullptr;
  Ref result(function != nullptr ? PyObject_CallObject(function, arguments.get()) : nullptr);
  if (PyErr_Occurred() != nullptr) {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  } else {
    PyErr_Restore(type, value, traceback);
  }
  return result;
}

void raise_error(const char* kind, const std::string& text) {
  PyErr_Clear();  // of what this is said in place of
  Ref module(PyImport_ImportModule("strobe._errors"));
  Ref type(module ? PyObject_GetAttrString(module.get(), kind) : nullptr);
  if (type) PyErr_SetString(type.get(), text.c_str());
}

void raise_object(PyObject* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
}

bool takes(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
  return false;
}

namespace {

PyObject* results(const Call& call) {
  Ref tuple(PyTuple_New(call.result_count()));
  for (int i = 0; i < call.result_count(); ++i)
    PyTuple_SetItem(tuple.get(), i, Ref::borrowed(call.result(i)).release());
  return tuple.release();
}

// ------------------------------------------------------------------------- attention and backward

bool all_there(std::initializer_list<const char*> names, PyObject* const* arrays) {
  for (const char* name : names) {
    if (*arrays++ != Py_None) continue;
    raise_error("InvalidArgument", std::string(name) + " = None, expected an array");
    return false;
  }
  return true;
}

// a: q, k, v, out, return_lse
PyObject* attend(Call& call, const char* function, PyObject* const* a, PyObject* options) {
  if (!all_there({"q", "k", "v"}, a) || !call.give(kQ, a[0]) || !call.give(kK, a[1]) ||
      !call.give(kV, a[2]) || !call.give(kOut, a[3]) ||
      !to_flag("return_lse", a[4], &call.wants_lse) || !call.give_options(function, options) ||
      !call.run())
    return nullptr;
  return call.wants_lse ? results(call) : Ref::borrowed(call.result(0)).release();
}

// q, k, v, out, return_lse, options
PyObject* forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  Call call(false);
  return takes(count, 6) ? attend(call, "attention", a, a[5]) : nullptr;
}

// q, k, v, out, return_lse, whether out is float32, options
PyObject* kvcache(PyObject*, PyObject* const* a, Py_ssize_t count) {
  Call call(false);
  call.door = "strobe.attention_with_kvcache";
  call.cached = true;
  if (!takes(count, 7) || !to_flag("float_out", a[5], &call.float_out)) return nullptr;
  return attend(call, "attention_with_kvcache", a, a[6]);
}

bool give_gradients(Call& call, PyObject* grads) {
  if (grads == Py_None) return true;
  if (!PyTuple_CheckExact(grads)) ++python_calls;  // of its iterator
  Ref all(PySequence_Tuple(grads));
  const int wanted = 3 + call.wants_dsinks;
  if (!all || PyTuple_Size(all.get()) != wanted) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyErr_Clear();
    raise_error("InvalidArgument",
                call.wants_dsinks
                    ? "grads is no tuple of four, expected (dq, dk, dv, dsinks) with return_dsinks"
                    : "grads is no tuple of three, expected (dq, dk, dv)");
    return false;
  }
  for (int i = 0; i < wanted; ++i) {
    PyObject* array = PyTuple_GetItem(all.get(), i);
    if (array == Py_None) {
      raise_error("InvalidArgument", "grads[" + std::to_string(i) + "] = None, expected an array");
      return false;
    }
    if (!call.give(static_cast<Slot>(kDq + i), array)) return false;
  }
  call.copies.push_back(std::move(all));  // that holds the arrays
  return true;
}

// dbias: an array to write to, or whether to make one.
bool give_dbias(Call& call, PyObject* dbias) {
  if (PyBool_Check(dbias)) {
    call.wants_dbias = dbias == Py_True;
    return true;
  }
  call.wants_dbias = dbias != Py_None;
  return call.give(kDbias, dbias);
}

// dout, q, k, v, out, lse, dlse, delta, grads, deterministic, accumulate, whether new gradients are
// float32, return_dsinks, dbias, options
PyObject* backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 15) || !all_there({"dout", "q", "k", "v"}, a) ||
      (a[kDelta] == Py_None && !all_there({"out"}, a + kOut)) || !all_there({"lse"}, a + kLse))
    return nullptr;
  Call call(true);
  call.door = "strobe.attention_backward";
  for (int slot = kDout; slot <= kDelta; ++slot)
    if (!call.give(static_cast<Slot>(slot), a[slot])) return nullptr;
  if (!to_flag("return_dsinks", a[12], &call.wants_dsinks) || !give_gradients(call, a[8]) ||
      !to_flag("deterministic", a[9], &call.deterministic) ||
      !to_flag("accumulate", a[10], &call.accumulate) ||
      !to_flag("float_grads", a[11], &call.float_grads) || !give_dbias(call, a[13]))
    return nullptr;
  // The caller's own arrays say themselves what they are.
  const Tensor& dq = call.tensors[kDq];
  if (call.given(kDq) && dq.dtype == kFloat32 && call.tensors[kQ].dtype != kFloat32)
    call.float_grads = true;
  if (!call.give_options("attention_backward", a[14]) || !call.run()) return nullptr;
  return results(call);
}

// ------------------------------------------------------------------------------------- operators

// Makes a tensor's rows (whole: all of it) contiguous where they are not.
bool straighten(Call& call, Slot slot, PyObject* array, bool whole) {
  Tensor& tensor = call.tensors[slot];
  if (!call.give(slot, array)) return false;
  if (!tensor.plain || (whole ? tensor.contiguous() : tensor.rows_contiguous())) return true;
  ++python_calls;  // of a mode, maybe
  call.copies.emplace_back(PyObject_CallMethod(array, "contiguous", nullptr));
  return call.copies.back() && call.give(slot, call.copies.back().get());
}

// The options of an operator, from cu_seqlens_q on: 13, and the table's tail.
bool give_operator_options(Call& call, PyObject* const* a, Py_ssize_t count) {
  if (a[3] != Py_None) {
    Ref pair = call_python("_operators", "seed_and_offset", "(O)", a[3]);
    PyObject *seed, *offset;
    if (!pair || !PyArg_ParseTuple(pair.get(), "OO", &seed, &offset) ||
        !call.give(kScalar_dropout_seed, seed) || !call.give(kScalar_dropout_offset, offset))
      return false;
  }
  return call.give(kSlot_alibi_slopes, a[2]) && call.give(kSlot_cu_seqlens_q, a[0]) &&
         call.give(kSlot_cu_seqlens_k, a[1]) && call.give_tail(a + 13, count - 13) &&
         call.give(kScalar_max_seqlen_q, a[4]) && call.give(kScalar_max_seqlen_k, a[5]) &&
         call.find_lengths() &&
         to_integer("window[0]", a[9], 64, &call.numbers[kScalar_window].integer) &&
         to_integer("window[1]", a[10], 64, &call.numbers[kWindowRight].integer) &&
         call.give(kScalar_causal, a[8]) && call.give(kScalar_scale, a[7]) &&
         call.give(kScalar_softcap, a[11]) && call.give(kScalar_dropout_p, a[6]);
}

PyObject* operator_forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count < 16) return takes(count, 16), nullptr;
  Call call(false);
  call.door = "torch.ops.strobe.attention_forward";
  call.wants_lse = true;
  for (int i = 0; i < 3; ++i)
    if (!straighten(call, static_cast<Slot>(kQ + i), a[i], false)) return nullptr;
  if (!give_operator_options(call, a + 3, count - 3) || !call.find_threads() || !call.run())
    return nullptr;
  return results(call);
}

PyObject* gradients(Call& call, PyObject* const* a, Py_ssize_t count) {
  if (count < 20) return takes(count, 20), nullptr;
  constexpr Slot kSlotsInOrder[] = {kDout, kDlse, kQ, kK, kV, kOut, kLse};
  call.door = "the backward pass";
  for (int i = 0; i < 7; ++i) {
    const Slot slot = kSlotsInOrder[i];
    PyObject* array = a[i];
    if (slot == kDout && array == Py_None) {  // out was not used
      call.copies.push_back(call_python("_operators", "zeros_like", "(O)", a[5]));
      if (!call.copies.back()) return nullptr;
      array = call.copies.back().get();
    }
    if (!straighten(call, slot, array, slot == kLse || slot == kDlse)) return nullptr;
  }
  if (!give_operator_options(call, a + 7, count - 7) ||
      !to_flag("deterministic", a[7 + 12], &call.deterministic) || !call.find_threads() ||
      !call.run())
    return nullptr;
  return results(call);
}

PyObject* operator_backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  Call call(true);
  return gradients(call, a, count);
}

// dsinks, dbias: whether they are wanted; and what operator_backward takes
PyObject* operator_gradients(PyObject*, PyObject* const* a, Py_ssize_t count) {
  Call call(true);
  if (count < 2) return takes(count, 2), nullptr;
  if (!to_flag("dsinks", a[0], &call.wants_dsinks) || !to_flag("dbias", a[1], &call.wants_dbias))
    return nullptr;
  return gradients(call, a + 2, count - 2);
}

// ------------------------------------------------------------------------ flash_attn's functions

// Of PyTorch: functions that say whether somebody must see each operator (see _flash_attn.py), and
// where torch.autograd.forward_ad says it of forward-mode differentiation.
struct Watchers {
  PyObject *modes, *is_tracing, *has_function_mode, *forward_ad, *level;
};
Watchers watchers;

PyObject* set_watchers(PyObject*, PyObject* arguments) {
  Watchers given;
  if (!PyArg_ParseTuple(arguments, "OOOO!O", &given.modes, &given.is_tracing,
                        &given.has_function_mode, &PyDict_Type, &given.forward_ad, &given.level))
    return nullptr;
  for (PyObject* object :
       {given.modes, given.is_tracing, given.has_function_mode, given.forward_ad, given.level})
    Py_INCREF(object);
  watchers = given;
  Py_RETURN_NONE;
}

bool denies(const Ref& found) { return found && PyObject_IsTrue(found.get()) == 0; }

}  // namespace

bool has_function_mode(PyObject* tensors) {
  return watchers.level == nullptr ||
         !denies(Ref(PyObject_CallFunctionObjArgs(watchers.has_function_mode, tensors, nullptr)));
}

namespace {

// Whether nobody watches a call of these tensors; on false an exception may be set.
bool unwatched(PyObject* q, PyObject* k, PyObject* v) {
  if (watchers.level == nullptr) return false;
  PyObject* level = PyDict_GetItem(watchers.forward_ad, watchers.level);  // borrowed
  if (level == nullptr || PyLong_AsLong(level) >= 0) return false;
  Ref tensors(PyTuple_Pack(3, q, k, v));
  return tensors && denies(Ref(PyObject_CallNoArgs(watchers.modes))) &&
         denies(Ref(PyObject_CallNoArgs(watchers.is_tracing))) && !has_function_mode(tensors.get());
}

PyObject* is_unwatched(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 3)) return nullptr;
  const bool found = unwatched(a[0], a[1], a[2]);
  if (!found) PyErr_Clear();
  return PyBool_FromLong(found);
}

bool is_small_integer(PyObject* value) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

bool is_zero(PyObject* value) {
  return (PyFloat_CheckExact(value) && PyFloat_AsDouble(value) == 0) ||
         (PyLong_CheckExact(value) && PyObject_IsTrue(value) == 0);
}

// Whether an attribute of a tensor is True.
bool has(PyObject* tensor, PyObject* attribute) {
  Ref found(PyObject_GetAttr(tensor, attribute));
  return found.get() == Py_True;
}

// What flash_attn's functions are called with.
struct FlashArguments {
  PyObject *q, *k, *v;
  PyObject *cu_seqlens_q, *cu_seqlens_k, *max_seqlen_q, *max_seqlen_k;
  PyObject *dropout_p, *scale, *causal, *window, *softcap, *alibi_slopes, *deterministic;

  // Whether each is of the type that it has in nearly every call.
  bool are_usual() const {
    const auto is_tensor = [](PyObject* object) {
      return reinterpret_cast<PyObject*>(Py_TYPE(object)) == torch.tensor_type;
    };
    const auto none_or = [](PyObject* object, bool usual) { return object == Py_None || usual; };
    for (PyObject* tensor : {q, k, v})
      if (!is_tensor(tensor)) return false;
    for (PyObject* tensor : {cu_seqlens_q, cu_seqlens_k, alibi_slopes})
      if (!none_or(tensor, is_tensor(tensor))) return false;
    for (PyObject* length : {max_seqlen_q, max_seqlen_k})
      if (!none_or(length, is_small_integer(length))) return false;
    return is_zero(dropout_p) && none_or(scale, PyFloat_CheckExact(scale)) &&
           PyBool_Check(causal) && PyBool_Check(deterministic) && PyFloat_CheckExact(softcap) &&
           PyTuple_CheckExact(window) && PyTuple_Size(window) == 2 &&
           is_small_integer(PyTuple_GetItem(window, 0)) &&
           is_small_integer(PyTuple_GetItem(window, 1));
  }
};

// Whether autocast is on for the device of these tensors; it is PyTorch's GPU where none is named.
bool is_autocast(bool on_cuda) {
  static PyObject* const cpu = PyUnicode_InternFromString("cpu");
  PyObject* device = on_cuda ? nullptr : cpu;
  return !denies(Ref(PyObject_CallFunctionObjArgs(torch.is_autocast_enabled, device, nullptr)));
}

// A call without dropout of plain tensors that nobody but autograd watches: its out. Where autograd
// does, what the autograd function is given: ((out, lse), the operator's options, False). Else
// None, and the caller goes the general way. q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
// max_seqlen_k), (dropout_p, scale, causal, window, softcap, alibi_slopes, deterministic),
// return_attn_probs
PyObject* flash(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 6)) return nullptr;
  PyObject *lengths = a[3], *options = a[4];
  if (!takes(PyTuple_Size(lengths), 4) || !takes(PyTuple_Size(options), 7)) return nullptr;
  const auto length = [&](int i) { return PyTuple_GetItem(lengths, i); };
  const auto option = [&](int i) { return PyTuple_GetItem(options, i); };
  const FlashArguments given{a[0],      a[1],      a[2],      length(0), length(1),
                             length(2), length(3), option(0), option(1), option(2),
                             option(3), option(4), option(5), option(6)};
  const auto general = []() -> PyObject* {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
    return Ref::borrowed(Py_None).release();
  };
  if (a[5] != Py_False || !given.are_usual() || !unwatched(given.q, given.k, given.v))
    return general();
  Call call(false);
  call.door = given.cu_seqlens_q == Py_None ? "flash_attn_func" : "flash_attn_varlen_func";
  call.watch.unwatched = true;
  // A tensor of torch.func's transforms has no memory: reading it fails.
  if (!call.give(kQ, given.q) || !call.give(kK, given.k) || !call.give(kV, given.v))
    return general();
  for (const Slot slot : {kQ, kK, kV})
    if (!call.tensors[slot].plain || !call.tensors[slot].rows_contiguous()) return general();
  if (is_autocast(call.tensors[kQ].on_cuda)) return general();
  if (!call.give(kSlot_cu_seqlens_q, given.cu_seqlens_q) ||
      !call.give(kSlot_cu_seqlens_k, given.cu_seqlens_k) ||
      !call.give(kSlot_alibi_slopes, given.alibi_slopes))
    return general();
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  call.wants_lse =
      !denies(Ref(PyObject_CallNoArgs(torch.is_grad_enabled))) &&
      (has(given.q, requires_grad) || has(given.k, requires_grad) || has(given.v, requires_grad));
  if (!call.give(kScalar_causal, given.causal) ||
      !call.give(kScalar_max_seqlen_q, given.max_seqlen_q) ||
      !call.give(kScalar_max_seqlen_k, given.max_seqlen_k) ||
      !call.give(kScalar_window, given.window) || !call.find_threads() ||
      !call.give(kScalar_scale, given.scale, "softmax_scale") ||
      !call.give(kScalar_softcap, given.softcap) || !call.run())
    return nullptr;
  if (!call.wants_lse) return Ref::borrowed(call.result(0)).release();
  Ref plain(PyTuple_Pack(13, given.cu_seqlens_q, given.cu_seqlens_k, given.alibi_slopes, Py_None,
                         given.max_seqlen_q, given.max_seqlen_k, given.dropout_p, given.scale,
                         given.causal, PyTuple_GetItem(given.window, 0),
                         PyTuple_GetItem(given.window, 1), given.softcap, given.deterministic));
  Ref both(PyTuple_Pack(2, call.result(0), call.result(1)));
  return plain && both ? PyTuple_Pack(3, both.get(), plain.get(), Py_False) : nullptr;
}

// ------------------------------------------------------------------------------------ the module

PyObject* kept(PyObject*, PyObject*) {
  return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(plans[0].size()),
                       static_cast<Py_ssize_t>(plans[1].size()));
}

PyObject* forget(PyObject*, PyObject*) {
  plans[0].clear();
  plans[1].clear();
  forget_direct();
  Py_RETURN_NONE;
}

PyMethodDef call_methods[] = {
    method<forward>("forward", METH_FASTCALL, "strobe.attention, with every argument."),
    method<kvcache>("kvcache", METH_FASTCALL, "strobe.attention_with_kvcache, likewise."),
    method<backward>("backward", METH_FASTCALL, "strobe.attention_backward, likewise."),
    method<operator_forward>("operator_forward", METH_FASTCALL, "(out, lse) of an operator."),
    method<operator_backward>("operator_backward", METH_FASTCALL, "(dq, dk, dv) of an operator."),
    method<operator_gradients>("operator_gradients", METH_FASTCALL,
                               "Likewise, and those of dsinks and dbias that are asked for."),
    method<flash>("flash", METH_FASTCALL, "A call of flash_attn's functions, if it is plain."),
    method<set_watchers>("set_watchers", METH_VARARGS, "Who may have to see each operator."),
    method<is_unwatched>("unwatched", METH_FASTCALL, "Whether nobody has to, of q, k, v."),
    method<kept>("kept", METH_NOARGS, "Number of plans that are kept: forward, backward."),
    method<forget>("forget", METH_NOARGS, "Forgets all plans."),
    {nullptr, nullptr, 0, nullptr}};

int execute(PyObject* module) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "strobe: subinterpreters are not supported: plans, and what NumPy and PyTorch "
                    "are, are kept once for the whole process. Import it in the main interpreter");
    return -1;
  }
  if (plans == nullptr) plans = new Plans[2];
  for (PyMethodDef* methods :
       {library_methods, tensor_methods, call_methods, aten_methods, direct_methods, merge_methods,
        xla_methods, latest_methods, profiler_methods})
    if (PyModule_AddFunctions(module, methods) != 0) return -1;
  const Ref table = options_table();
  if (!table || PyModule_AddObjectRef(module, "OPTIONS", table.get()) != 0) return -1;
  return PyModule_AddIntConstant(module, "CAPACITY", static_cast<long>(Plans::kCapacity));
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(Guarded<execute>::call)},
                            {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "strobe._core",
                          "Attention's calls, and the library behind them.",
                          0,
                          nullptr,
                          slots,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace strobe_python

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&strobe_python::definition); }
