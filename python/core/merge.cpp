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

// outs, lses, out, lse of a merge.
struct MergeArrays {
  Tensor arrays[4];
  bool without_gil = false;  // as when the interpreter ends a thread that waits for it

  ~MergeArrays() {
    if (!without_gil) return;
    for (Tensor& array : arrays) array.forget();
  }
  // Whether extents and part agree: [parts,] batch, seqlen, heads, dim and batch, heads, seqlen.
  bool alike() const {
    const Tensor &outs = arrays[0], &lses = arrays[1], &out = arrays[2], &lse = arrays[3];
    if ((outs.ndim != 4 && outs.ndim != 5) || lses.ndim != outs.ndim - 1 ||
        out.ndim != outs.ndim - 1 || lse.ndim != outs.ndim - 2 || lses.shape[0] != outs.shape[0])
      return false;
    const int seqlen = outs.ndim - 3;  // axes of outs, before heads
    if (seqlen == 2 && (lses.shape[1] != outs.shape[1] || lse.shape[0] != outs.shape[1]))
      return false;
    for (int axis = 1; axis < outs.ndim; ++axis)
      if (out.shape[axis - 1] != outs.shape[axis]) return false;
    const int64_t rows = outs.shape[seqlen], heads = outs.shape[seqlen + 1];
    return lses.shape[seqlen] == heads && lses.shape[seqlen + 1] == rows &&
           lse.shape[seqlen - 1] == heads && lse.shape[seqlen] == rows;
  }
};

// outs, lses, out, lse, threads: arrays that strobe._merge.merge has checked.
PyObject* merge(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 5) {
    PyErr_Format(PyExc_TypeError, "expected 5 arguments, got %zd", count);
    return nullptr;
  }
  constexpr const char* kNames[] = {"outs", "lses", "out", "lse"};
  MergeArrays given;
  Tensor* const arrays = given.arrays;
  for (int i = 0; i < 4; ++i)
    if (!read(kNames[i], a[i], arrays[i])) return nullptr;
  const Tensor &outs = arrays[0], &out = arrays[2];
  if (!given.alike()) {  // as strobe._merge found them, but they may be exported anew
    raise_error("InvalidArgument", "outs, lses and out are not of the shapes that they had before");
    return nullptr;
  }
  if (!check_writable("out", out)) return nullptr;
  const bool packed = outs.ndim == 4;
  int64_t threads = 0;
  if (!to_integer("threads", a[4], 32, &threads)) return nullptr;
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
  arguments.lses = static_cast<const float*>(arrays[1].data);
  arguments.out = out.data;
  arguments.lse = static_cast<float*>(arrays[3].data);
  arguments.outs_strides = strides_of(outs, 1, packed);
  arguments.lses_strides = lse_strides_of(arrays[1], 1, packed);
  arguments.out_strides = strides_of(out, 0, packed);
  arguments.lse_strides = lse_strides_of(arrays[3], 0, packed);
  arguments.outs_part = outs.strides[0];
  arguments.lses_part = arrays[1].strides[0];
  if (outs.on_cuda && !current_stream(outs, &arguments.stream)) return nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  given.without_gil = true;
  const strobe_status status = library.merge(&arguments);
  PyEval_RestoreThread(thread);
  given.without_gil = false;
  if (status != STROBE_OK) return raise_status(status), nullptr;
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef merge_methods[] = {
    method<merge>("merge", METH_FASTCALL, "Merges partial results into given arrays."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
