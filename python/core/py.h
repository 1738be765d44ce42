// Python's limited API of 3.10, and what every file here needs of it.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cxxabi.h>

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>
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

// How often Python's code has been run from here, in any thread: while this stands still, nobody
// has changed an object.
extern uint64_t python_calls;

// Raises class `kind` of strobe._errors.
void raise_error(const char* kind, const std::string& text);

// Raises an exception that Python made.
void raise_object(PyObject* error);

// Every function that Python calls goes by here: no C++ exception may pass into Python.
template <auto function>
struct Guarded;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Guarded<function> {
  static Result call(Arguments... arguments) {
    try {
      return function(arguments...);
    } catch (const abi::__forced_unwind&) {
      throw;  // the C library ends a thread
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& error) {
      raise_error("InternalError", error.what());
    } catch (...) {
      raise_error("InternalError", "an exception of C++");
    }
    if constexpr (std::is_pointer_v<Result>)
      return nullptr;
    else
      return -1;
  }
};

// An entry of a table of methods.
template <auto function>
PyMethodDef method(const char* name, int flags, const char* text) {
  void (*any)() = reinterpret_cast<void (*)()>(Guarded<function>::call);
  return {name, reinterpret_cast<PyCFunction>(any), flags, text};
}

}  // namespace strobe_python
