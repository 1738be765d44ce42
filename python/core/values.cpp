#include "values.h"

#include <cmath>

namespace strobe_python {

bool to_integer(const char* name, PyObject* value, int bits, int64_t* number) {
  Ref converted;
  if (!PyLong_CheckExact(value)) {
    converted = call_python("_values", "integer", "(sOi)", name, value, bits);
    if (!converted) return false;
    value = converted.get();
  }
  int overflow = 0;
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  const int64_t most = bits == 64 ? INT64_MAX : (int64_t{1} << (bits - 1)) - 1;
  if (overflow != 0 || *number > most || *number < -most - 1) {
    call_python("_values", "integer", "(sOi)", name, value, bits);
    return false;
  }
  return PyErr_Occurred() == nullptr;
}

bool to_flag(const char* name, PyObject* value, bool* flag) {
  Ref converted;
  if (value != Py_True && value != Py_False) {
    converted = call_python("_values", "flag", "(sO)", name, value);
    value = converted.get();
  }
  *flag = value == Py_True;
  return value != nullptr;
}

bool to_real(const char* name, PyObject* value, double* number) {
  Ref converted;
  // Plans are kept by value: an array of one element may have another the next time.
  if (!PyFloat_CheckExact(value) || std::isnan(PyFloat_AsDouble(value))) {
    converted = call_python("_values", "real", "(sO)", name, value);
    if (!converted) return false;
    value = converted.get();
  }
  *number = PyFloat_AsDouble(value);
  return true;
}

bool to_seed(const char* name, PyObject* value, uint64_t* number) {
  if (PyLong_CheckExact(value)) {
    *number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
  }
  Ref converted = call_python("_values", "seed", "(sO)", name, value);
  if (!converted) return false;
  *number = PyLong_AsUnsignedLongLong(converted.get());
  return PyErr_Occurred() == nullptr;
}

}  // namespace strobe_python
