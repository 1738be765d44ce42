// strobe._core: what runs on each call. Python's part checks, explains and plans; it is asked where
// something is seen for the first time, or is wrong.
#include <cstdarg>
#include <cstring>
#include <vector>

#include "call.h"

namespace strobe_python {

Ref call_python(const char* module, const char* name, const char* format, ...) {
  PyObject *type, *value, *traceback;  // what is set already is the caller's to judge
  PyErr_Fetch(&type, &value, &traceback);
  va_list list;
  va_start(list, format);
  Ref arguments(Py_VaBuildValue(format, list));
  va_end(list);
  Ref package(PyImport_ImportModule((std::string("strobe.") + module).c_str()));
  Ref function(package ? PyObject_GetAttrString(package.get(), name) : nullptr);
  Ref result(function && arguments ? PyObject_CallObject(function.get(), arguments.get())
                                   : nullptr);
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
  Ref module(PyImport_ImportModule("strobe._errors"));
  Ref type(module ? PyObject_GetAttrString(module.get(), kind) : nullptr);
  if (type) PyErr_SetString(type.get(), text.c_str());
}

void raise_object(PyObject* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
}

namespace {

PyObject* results(const Call& call, int count) {
  Ref tuple(PyTuple_New(count));
  for (int i = 0; i < count; ++i)
    PyTuple_SetItem(tuple.get(), i, Ref::borrowed(call.result(i)).release());
  return tuple.release();
}

bool takes(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
  return false;
}

// ------------------------------------------------------------------------- attention and backward

// What strobe.attention and its derivative have in common: 13 arguments from alibi_slopes on.
bool give_options(Call& call, const char* function, PyObject* const* a) {
  return call.give(kAlibi, a[0]) && call.give(kCuQ, a[1]) && call.give(kCuK, a[2]) &&
         call.give_more(function, a[14]) && call.give_lengths(a[3], a[4]) &&
         call.give_window(a[5]) && call.give_threads(a[6]) &&
         to_flag("causal", a[7], &call.causal) &&
         to_flag("batch_invariant", a[8], &call.batch_invariant) &&
         (a[9] == Py_None || (call.has_scale = true, to_real("scale", a[9], &call.scale))) &&
         to_real("softcap", a[10], &call.softcap) && to_real("dropout_p", a[11], &call.dropout_p) &&
         to_seed("dropout_seed", a[12], &call.seed) &&
         to_seed("dropout_offset", a[13], &call.offset);
}

bool all_there(std::initializer_list<const char*> names, PyObject* const* arrays) {
  for (const char* name : names) {
    if (*arrays++ != Py_None) continue;
    raise_error("InvalidArgument", std::string(name) + " = None, expected an array");
    return false;
  }
  return true;
}

PyObject* forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 20)) return nullptr;
  if (!all_there({"q", "k", "v"}, a)) return nullptr;
  Call call(false);
  if (!call.give(kQ, a[0]) || !call.give(kK, a[1]) || !call.give(kV, a[2]) ||
      !call.give(kOut, a[3]) || !to_flag("return_lse", a[4], &call.wants_lse) ||
      !give_options(call, "attention", a + 5) || !call.run())
    return nullptr;
  return call.wants_lse ? results(call, 2) : Ref::borrowed(call.result(0)).release();
}

PyObject* backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 26)) return nullptr;
  if (!all_there({"dout", "q", "k", "v", "out", "lse"}, a)) return nullptr;
  Call call(true);
  constexpr Slot kSlotsInOrder[] = {kDout, kQ, kK, kV, kOut, kLse, kDlse, kDq, kDk, kDv};
  for (int i = 0; i < 10; ++i)
    if (!call.give(kSlotsInOrder[i], a[i])) return nullptr;
  if (!to_flag("deterministic", a[10], &call.deterministic) ||
      !give_options(call, "attention_backward", a + 11) || !call.run())
    return nullptr;
  return results(call, 3);
}

// ------------------------------------------------------------------------------------- operators

// Makes a tensor's rows (whole: all of it) contiguous where they are not.
bool straighten(Call& call, Slot slot, PyObject* array, bool whole) {
  Tensor& tensor = call.tensors[slot];
  if (!call.give(slot, array)) return false;
  if (!tensor.plain || (whole ? tensor.contiguous() : tensor.rows_contiguous())) return true;
  call.copies.emplace_back(PyObject_CallMethod(array, "contiguous", nullptr));
  return call.copies.back() && call.give(slot, call.copies.back().get());
}

// The options of an operator, from cu_seqlens_q on: 13, and the table's tail.
bool give_operator_options(Call& call, PyObject* const* a, Py_ssize_t count) {
  if (a[3] != Py_None) {
    Ref pair = call_python("_generator", "seed_and_offset", "(O)", a[3]);
    PyObject *seed, *offset;
    if (!pair || !PyArg_ParseTuple(pair.get(), "OO", &seed, &offset) ||
        !to_seed("dropout_seed", seed, &call.seed) ||
        !to_seed("dropout_offset", offset, &call.offset))
      return false;
  }
  return call.give(kAlibi, a[2]) && call.give(kCuQ, a[0]) && call.give(kCuK, a[1]) &&
         call.give_tail(a + 13, count - 13) && call.give_lengths(a[4], a[5]) &&
         to_integer("window[0]", a[9], 64, &call.left) &&
         to_integer("window[1]", a[10], 64, &call.right) && to_flag("causal", a[8], &call.causal) &&
         (a[7] == Py_None || (call.has_scale = true, to_real("scale", a[7], &call.scale))) &&
         to_real("softcap", a[11], &call.softcap) && to_real("dropout_p", a[6], &call.dropout_p);
}

bool number_of_threads(Call& call) {
  Ref zero(PyLong_FromLong(0));
  return zero && call.give_threads(zero.get());
}

PyObject* operator_forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count < 16) return takes(count, 16), nullptr;
  Call call(false);
  call.wants_lse = true;
  for (int i = 0; i < 3; ++i)
    if (!straighten(call, static_cast<Slot>(kQ + i), a[i], false)) return nullptr;
  if (!give_operator_options(call, a + 3, count - 3) || !number_of_threads(call) || !call.run())
    return nullptr;
  return results(call, 2);
}

PyObject* operator_backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count < 20) return takes(count, 20), nullptr;
  constexpr Slot kSlotsInOrder[] = {kDout, kDlse, kQ, kK, kV, kOut, kLse};
  Call call(true);
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
      !to_flag("deterministic", a[7 + 12], &call.deterministic) || !number_of_threads(call) ||
      !call.run())
    return nullptr;
  return results(call, 3);
}

// --------------------------------------------------------------------------- flash_attn's
// functions

// Functions that say whether somebody must see each operator: see _watchers of _flash_attn.py. And
// where torch.autograd.forward_ad says it of forward-mode differentiation.
constexpr int kOften = 3;
PyObject *often[kOften], *seldom[2], *forward_ad = nullptr, *level_name = nullptr;
PyObject* device_names[2];

PyObject* set_watchers(PyObject*, PyObject* arguments) {
  PyObject *functions[kOften], *rare[2], *names, *level;
  if (!PyArg_ParseTuple(arguments, "(OOO)(OO)OO", &functions[0], &functions[1], &functions[2],
                        &rare[0], &rare[1], &names, &level))
    return nullptr;
  if (PyDict_GetItem(names, level) == nullptr) {
    PyErr_SetObject(PyExc_KeyError, level);
    return nullptr;
  }
  for (int i = 0; i < kOften; ++i) often[i] = Ref::borrowed(functions[i]).release();
  for (int i = 0; i < 2; ++i) seldom[i] = Ref::borrowed(rare[i]).release();
  level_name = Ref::borrowed(level).release();
  device_names[0] = PyUnicode_InternFromString("cpu");
  device_names[1] = PyUnicode_InternFromString("cuda");
  forward_ad = Ref::borrowed(names).release();
  Py_RETURN_NONE;
}

bool denies(PyObject* function) {
  Ref found(PyObject_CallNoArgs(function));
  return found && PyObject_IsTrue(found.get()) == 0;
}

// Whether nobody watches; on false an exception may be set.
bool unwatched() {
  if (forward_ad == nullptr) return false;
  for (PyObject* function : often)
    if (!denies(function)) return false;
  if (!denies(seldom[0]) && !denies(seldom[1])) return false;
  PyObject* level = PyDict_GetItem(forward_ad, level_name);  // borrowed
  return level != nullptr && PyLong_AsLong(level) < 0 && PyErr_Occurred() == nullptr;
}

PyObject* is_unwatched(PyObject*, PyObject*) {
  const bool found = unwatched();
  if (!found) PyErr_Clear();
  return PyBool_FromLong(found);
}

bool says_yes(PyObject* function, PyObject* argument) {
  Ref found(PyObject_CallFunctionObjArgs(function, argument, nullptr));
  return found.get() == Py_True;
}

bool is_small_integer(PyObject* value) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

// Whether an attribute of a tensor is True.
bool has(PyObject* tensor, PyObject* attribute) {
  Ref found(PyObject_GetAttr(tensor, attribute));
  return found.get() == Py_True;
}

// A call without dropout of plain tensors that nobody but autograd watches: its out. Where autograd
// does, the operator's options; else None, and the caller goes the general way.
// q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap,
// alibi_slopes, deterministic
PyObject* flash(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 13)) return nullptr;
  const auto general = []() -> PyObject* {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
    return Ref::borrowed(Py_None).release();
  };
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_cuda = PyUnicode_InternFromString("is_cuda");
  PyObject* const type = torch.tensor_type;
  for (int i = 0; i < 3; ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(a[i])) != type) return general();
  PyObject *causal = a[8], *window = a[9];
  if ((causal != Py_True && causal != Py_False) || !PyBool_Check(a[12]) ||
      !PyTuple_CheckExact(window) || PyTuple_Size(window) != 2 ||
      !is_small_integer(PyTuple_GetItem(window, 0)) ||
      !is_small_integer(PyTuple_GetItem(window, 1)) || !PyFloat_CheckExact(a[10]) ||
      (a[7] != Py_None && !PyFloat_CheckExact(a[7])))
    return general();
  for (int i : {3, 4, 11})
    if (a[i] != Py_None && reinterpret_cast<PyObject*>(Py_TYPE(a[i])) != type) return general();
  for (int i : {5, 6})
    if (a[i] != Py_None && !is_small_integer(a[i])) return general();
  if (!unwatched() || says_yes(torch.is_autocast_enabled, device_names[has(a[0], is_cuda)]))
    return general();
  if (says_yes(torch.is_grad_enabled, nullptr) &&
      (has(a[0], requires_grad) || has(a[1], requires_grad) || has(a[2], requires_grad)))
    return Py_BuildValue("(OOOOOOdOOOOOO)", a[3], a[4], a[11], Py_None, a[5], a[6], 0.0, a[7],
                         causal, PyTuple_GetItem(window, 0), PyTuple_GetItem(window, 1), a[10],
                         a[12]);

  Call call(false);
  constexpr Slot kSlotsInOrder[] = {kQ, kK, kV, kCuQ, kCuK};
  for (int i = 0; i < 5; ++i)
    if (!call.give(kSlotsInOrder[i], a[i])) return general();
  for (const Slot slot : {kQ, kK, kV})
    if (!call.tensors[slot].plain || !call.tensors[slot].rows_contiguous()) return general();
  if (!call.give(kAlibi, a[11])) return general();
  if (!to_flag("causal", causal, &call.causal) || !call.give_lengths(a[5], a[6]) ||
      !call.give_window(window) || !number_of_threads(call) ||
      (a[7] != Py_None && (call.has_scale = true, !to_real("softmax_scale", a[7], &call.scale))) ||
      !to_real("softcap", a[10], &call.softcap) || !call.run())
    return nullptr;
  return Ref::borrowed(call.result(0)).release();
}

// ------------------------------------------------------------------------------------ the module

PyObject* kept(PyObject*, PyObject*) {
  return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(plans[0].size()),
                       static_cast<Py_ssize_t>(plans[1].size()));
}

PyObject* forget(PyObject*, PyObject*) {
  plans[0].clear();
  plans[1].clear();
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef call_methods[] = {
    {"forward", fast(forward), METH_FASTCALL, "strobe.attention, with every argument."},
    {"backward", fast(backward), METH_FASTCALL, "strobe.attention_backward, likewise."},
    {"operator_forward", fast(operator_forward), METH_FASTCALL, "(out, lse) of an operator."},
    {"operator_backward", fast(operator_backward), METH_FASTCALL, "(dq, dk, dv) of an operator."},
    {"flash", fast(flash), METH_FASTCALL, "A call of flash_attn's functions, if it is plain."},
    {"set_watchers", set_watchers, METH_VARARGS, "Who may have to see each operator."},
    {"unwatched", is_unwatched, METH_NOARGS, "Whether nobody has to."},
    {"kept", kept, METH_NOARGS, "Number of plans that are kept: forward, backward."},
    {"forget", forget, METH_NOARGS, "Forgets all plans."},
    {nullptr, nullptr, 0, nullptr}};

int execute(PyObject* module) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "strobe: subinterpreters are not supported: plans, and what NumPy and PyTorch "
                    "are, are kept once for the whole process. Import it in the main interpreter");
    return -1;
  }
  for (PyMethodDef* methods : {library_methods, tensor_methods, call_methods, cache_methods})
    if (PyModule_AddFunctions(module, methods) != 0) return -1;
  return PyModule_AddIntConstant(module, "CAPACITY", static_cast<long>(Plans::kCapacity));
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};

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
