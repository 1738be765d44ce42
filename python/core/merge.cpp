// The merging of partial results.
#include "call.h"

namespace strobe_python {

namespace {

// Strides of (batch, seqlen, heads, dim) from axis `first` on; packed arrays have no batch.
strobe_strides strides_of(const Tensor& tensor, int first, bool packed) {
  const int64_t* at = tensor.strides + first;
  if (packed) return {0, at[0], at[1], 1};
  return {at[0], at[1], at[2], 1};
}

// Of (batch, heads, seqlen).
strobe_strides lse_strides_of(const Tensor& tensor, int first, bool packed) {
  const int64_t* at = tensor.strides + first;
  if (packed) return {0, at[1], at[0], 1};
  return {at[0], at[2], at[1], 1};
}

enum { kOuts, kLses, kMergedSinks, kMerged, kMergedLse, kMergeArrays };
constexpr const char* kMergeNames[kMergeArrays] = {"outs", "lses", "sinks", "out", "lse"};
constexpr bool may_be_none(int array) { return array >= kMergedSinks; }

struct Merge {
  const Watch watch;
  Ref stacked[2];  // of lists of parts
  Ref results[2];
  Tensor arrays[kMergeArrays];
  ProfilerRange range;
  bool without_gil = false;  // as when the interpreter ends a thread that waits for it

  ~Merge() {
    if (!without_gil) return;
    for (Tensor& array : arrays) array.forget();
    for (Ref& array : stacked) array.release();
    for (Ref& array : results) array.release();
    range.forget();
  }
  // outs, lses, sinks, out and lse, each read once. On false an exception is set, as below.
  bool give(PyObject* const* given);
  // What Python finds of them: allocators of out and lse, and names for messages.
  Ref check(PyObject* out_dtype) const;
  bool run(PyObject* checked, PyObject* threads);
};

bool Merge::give(PyObject* const* given) {
  for (int i = 0; i < kMergeArrays; ++i) {
    PyObject* array = given[i];
    if (may_be_none(i) && array == Py_None) continue;
    if (!may_be_none(i) && (PyList_Check(array) || PyTuple_Check(array))) {
      stacked[i] = call_python("_merge", "stacked", "(sO)", kMergeNames[i], array);
      array = stacked[i].get();
    }
    if (array == nullptr || !read(kMergeNames[i], array, arrays[i])) return false;
  }
  return watch.settle(kMergeNames, arrays, kMergeArrays) &&
         check_writable(kMergeNames[kMerged], arrays[kMerged]) &&
         check_writable(kMergeNames[kMergedLse], arrays[kMergedLse]);
}

Ref Merge::check(PyObject* out_dtype) const {
  Ref specs(PyDict_New());
  for (int i = 0; specs && i < kMergeArrays; ++i) {
    if (arrays[i].object == nullptr) continue;
    Ref spec = described(arrays[i]);
    if (!spec) return Ref();
    // What is not plain comes as it is, and is refused in words.
    spec = call_python("_arrays", "spec_of", "(sO)", kMergeNames[i], spec.get());
    if (!spec || PyDict_SetItemString(specs.get(), kMergeNames[i], spec.get()) != 0) return Ref();
  }
  Ref found = specs ? call_python("_merge", "make", "(OO)", specs.get(), out_dtype) : Ref();
  for (int i = 0; found && i < kMergeArrays; ++i)
    if (arrays[i].object != nullptr && !arrays[i].plain) {
      raise_error("InvalidArgument", std::string(kMergeNames[i]) + " cannot be read");
      return Ref();
    }
  return found;
}

bool Merge::run(PyObject* checked, PyObject* given_threads) {
  PyObject *allocators[2], *names;
  if (!PyArg_ParseTuple(checked, "OOO", &allocators[0], &allocators[1], &names)) return false;
  int64_t threads = 0;
  if (!to_integer("threads", given_threads, 32, &threads)) return false;
  Tensor &outs = arrays[kOuts], &lses = arrays[kLses], &out = arrays[kMerged],
         &lse = arrays[kMergedLse];
  const bool is_given[2] = {out.object != nullptr, lse.object != nullptr};
  for (int i = 0; i < 2; ++i) {
    Allocator allocator;
    if (!allocator.take(allocators[i])) return false;
    Tensor& array = arrays[kMerged + i];
    results[i] = is_given[i] ? Ref::borrowed(array.object)
                             : allocator.make(kMergeNames[kMerged + i], outs, array);
    if (!results[i]) return false;
  }
  const bool packed = outs.ndim == 4;
  strobe_merge_args arguments{};
  arguments.struct_size = sizeof arguments;
  arguments.device = outs.on_cuda ? STROBE_CUDA : STROBE_CPU;
  arguments.device_index = outs.device_index;
  arguments.out_dtype = out.dtype;
  arguments.threads = static_cast<int32_t>(threads);
  arguments.parts = outs.shape[0];
  arguments.batch = packed ? 1 : outs.shape[1];
  arguments.seqlen_q = outs.shape[outs.ndim - 3];
  arguments.heads = outs.shape[outs.ndim - 2];
  arguments.head_dim_v = outs.shape[outs.ndim - 1];
  arguments.outs = static_cast<const float*>(outs.data);
  arguments.lses = static_cast<const float*>(lses.data);
  arguments.sinks = static_cast<const float*>(arrays[kMergedSinks].data);
  arguments.out = out.data;
  arguments.lse = static_cast<float*>(lse.data);
  arguments.outs_strides = strides_of(outs, 1, packed);
  arguments.lses_strides = lse_strides_of(lses, 1, packed);
  arguments.out_strides = strides_of(out, 0, packed);
  arguments.lse_strides = lse_strides_of(lse, 0, packed);
  arguments.outs_part = outs.strides[0];
  arguments.lses_part = lses.strides[0];
  if (outs.on_cuda && !current_stream(outs, &arguments.stream)) return false;
  if (outs.is_torch() && !range.begin("merge", outs.on_cuda ? "cuda" : "cpu")) return false;
  if (!watch.check(kMergeNames, arrays, kMergeArrays)) return false;
  PyThreadState* thread = PyEval_SaveThread();
  without_gil = true;
  const strobe_status status = library.merge(&arguments);
  PyEval_RestoreThread(thread);
  without_gil = false;
  for (int i = 0; i < 2; ++i)
    if (is_given[i] && !mark_written(status, arrays[kMerged + i])) return false;
  if (!range.end()) return false;
  if (status == STROBE_OK) return note_merge(arguments);
  Ref error = call_python("_merge", "launch_error", "(isO)", static_cast<int>(status),
                          library.last_error(), names);
  if (error) raise_object(error.get());
  return false;
}

// outs, lses, sinks, out, lse, the dtype of a new out, threads. outs and lses may be lists of
// parts.
PyObject* merge(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 7) {
    PyErr_Format(PyExc_TypeError, "expected 7 arguments, got %zd", count);
    return nullptr;
  }
  Merge call;
  if (!call.give(a)) return nullptr;
  Ref checked = call.check(a[5]);
  if (!checked || !call.run(checked.get(), a[6])) return nullptr;
  return PyTuple_Pack(2, call.results[0].get(), call.results[1].get());
}

}  // namespace

PyMethodDef merge_methods[] = {
    method<merge>("merge", METH_FASTCALL, "strobe.merge, with every argument."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
