// Python's limited API of 3.10, and what every file here needs of it.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>
#include <utility>

namespace strobe_python {

// A reference that this program owns.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Calls function `name` of module strobe.<module>: what is not on the way of a call whose plan is
// known is written in Python. Arguments as Py_BuildValue's, a tuple.
Ref call_python(const char* module, const char* name, const char* format, ...);

// Raises class `kind` of strobe._errors.
void raise_error(const char* kind, const std::string& text);

// Raises an exception that Python made.
void raise_object(PyObject* error);

}  // namespace strobe_python
