#include "profiler.h"

namespace strobe_python {

namespace {

// The module in which PyTorch says by a flag whether a profiler is on, as a dict, and the flag's
// name.
PyObject *names = nullptr, *flag = nullptr;

PyObject* set_profiler(PyObject*, PyObject* arguments) {
  PyObject *given, *name;
  if (!PyArg_ParseTuple(arguments, "O!U", &PyDict_Type, &given, &name)) return nullptr;
  Py_INCREF(given);
  Py_INCREF(name);
  names = given;
  flag = name;
  Py_RETURN_NONE;
}

}  // namespace

bool ProfilerRange::begin(const char* what, const char* kernel) {
  if (flag == nullptr || PyDict_GetItem(names, flag) != Py_True) return true;
  const std::string name = std::string("strobe::") + what + " [" + kernel + "]";
  record_ = call_python("_profiler", "begin", "(s)", name.c_str());
  return static_cast<bool>(record_);
}

bool ProfilerRange::end() {
  if (!record_) return true;
  Ref ended = call_python("_profiler", "end", "(O)", record_.get());
  record_ = Ref();
  return static_cast<bool>(ended);
}

PyMethodDef profiler_methods[] = {
    method<set_profiler>("set_profiler", METH_VARARGS, "Where PyTorch says that a profiler is on."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
