#include "latest.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace strobe_python {

namespace {

// The plan alone, without the allocators of results beside it in a `Launch`: a thread that ends,
// maybe after Python has, may not free objects of Python's.
struct Record {
  uint64_t number = 0;  // among all calls of the process; 0: there was none
  const char* door = nullptr;
  SharedPlan plan;               // null: of a merge
  strobe_merge_args merge = {};  // its sizes: what it points to may be gone
  std::string text;              // where it is not empty, it is all there is to say
};

std::atomic<uint64_t> calls = 0;
thread_local Record own;

// The latest call of threads that Python did not start: those in which PyTorch runs backward passes
// on GPUs, and XLA's.
struct Shared {
  std::mutex mutex;
  Record record;
};
Shared& shared() {
  static Shared* const found = [] {
    auto* made = new Shared;  // never freed: XLA's threads may outlive Python
    static Shared* after_fork;
    after_fork = made;
    // A child may begin while the lock is held by a thread that it does not have.
    pthread_atfork(nullptr, nullptr, [] { new (after_fork) Shared; });
    return made;
  }();
  return *found;
}

void share(const Record& record) {
  const std::lock_guard lock(shared().mutex);
  shared().record = record;
}

// Begins this thread's next record.
Record& next(const char* door) {
  own.number = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  own.door = door;
  if (!own.text.empty()) own.text.clear();
  return own;
}

// The record is complete.
bool publish() {
  thread_local enum { kUnknown, kPythons, kForeign } thread = kUnknown;
  if (thread == kUnknown) {
    const PyGILState_STATE state = PyGILState_Ensure();
    {
      Ref foreign = call_python("_calls", "in_foreign_thread", "()");
      if (foreign) thread = foreign.get() == Py_True ? kForeign : kPythons;
    }
    PyGILState_Release(state);
    if (thread == kUnknown) return false;
  }
  if (thread == kForeign) share(own);
  return true;
}

}  // namespace

bool note_launch(const char* door, const SharedPlan& plan) {
  Record& record = next(door);
  if (record.plan != plan) record.plan = plan;
  return publish();
}

bool note_merge(const strobe_merge_args& arguments) {
  Record& record = next("strobe.merge");
  record.plan = nullptr;
  record.merge = arguments;
  return publish();
}

void note_launch_of_xla(const char* door, const SharedPlan& plan) {
  Record record;
  record.number = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  record.door = door;
  record.plan = plan;
  share(record);
}

// -------------------------------------------------------------------------------- Python's methods

namespace {

// The letters of a string that from now on lives as long as the process: names of functions, of
// which there are few.
const char* letters_of(PyObject* name) {
  static auto& known = *new std::unordered_set<PyObject*>;
  if (known.count(name) == 0) {
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    if (!known.insert(name).second) Py_DECREF(name);
  }
  return PyUnicode_AsUTF8AndSize(name, nullptr);
}

// A function further out, by which the latest call came.
PyObject* came_by(PyObject*, PyObject* name) {
  const char* letters = letters_of(name);
  if (letters == nullptr) return nullptr;
  own.door = letters;
  if (!publish()) return nullptr;
  Py_RETURN_NONE;
}

// What else there is to say of the latest call.
PyObject* say(PyObject*, PyObject* text) {
  const char* letters = PyUnicode_AsUTF8AndSize(text, nullptr);
  if (letters == nullptr) return nullptr;
  std::string copy(letters);
  next(nullptr).plan = nullptr;
  own.text = std::move(copy);
  if (!publish()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* merge_of(const strobe_merge_args& m) {
  const auto integer = [](int64_t number) { return static_cast<long long>(number); };
  return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:i,s:i,s:i}", "parts", integer(m.parts), "batch",
                       integer(m.batch), "seqlen_q", integer(m.seqlen_q), "heads", integer(m.heads),
                       "head_dim_v", integer(m.head_dim_v), "out_dtype", m.out_dtype, "device",
                       m.device, "device_index", m.device_index);
}

PyObject* latest(PyObject*, PyObject*) {
  Record record;
  {
    const std::lock_guard lock(shared().mutex);
    record = shared().record;
  }
  if (record.number < own.number) record = own;
  if (record.number == 0) Py_RETURN_NONE;
  if (!record.text.empty()) return Py_BuildValue("s", record.text.c_str());
  Ref what(record.plan ? text_of_plan(*record.plan) : merge_of(record.merge));
  return what ? Py_BuildValue("(sO)", record.door, what.get()) : nullptr;
}

}  // namespace

PyMethodDef latest_methods[] = {
    method<latest>(
        "latest", METH_NOARGS,
        "The latest call: None, its text, or (function, its plan's text or a dict of the "
        "merge)."),
    method<came_by>("came_by", METH_O, "By which function further out the latest call came."),
    method<say>("say", METH_O, "Makes a text the latest call's."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
