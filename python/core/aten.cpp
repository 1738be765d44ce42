// PyTorch's operators of flash attention, as `_flash_impl` puts Strobe in their place: below its
// dispatcher, so that autograd, autocast, modes and transforms have had their turn, and results lie
// in memory as those of PyTorch's own kernels.
#include <map>

#include "call.h"
#include "direct.h"

namespace strobe_python {

namespace {

// What both directions are told besides tensors.
struct Options {
  PyObject *cu_seqlens_q, *cu_seqlens_k, *max_seqlen_q, *max_seqlen_k;
  PyObject *dropout_p, *seed, *offset, *causal, *scale, *left, *right;
};

// PyTorch's torch.empty_like, borrowed. On null an exception is set.
PyObject* empty_like() {
  static PyObject* function = nullptr;
  if (function == nullptr) {
    Ref module(PyImport_ImportModule("torch"));
    function = module ? PyObject_GetAttrString(module.get(), "empty_like") : nullptr;
  }
  return function;
}

Ref like(PyObject* tensor) {
  PyObject* function = empty_like();
  return Ref(function != nullptr ? PyObject_CallFunctionObjArgs(function, tensor, nullptr)
                                 : nullptr);
}

// Reads an argument of the kernel, which may be None.
bool give(Call& call, Slot slot, PyObject* array, bool heads_first = false) {
  if (array == Py_None) return true;
  call.tensors[slot].heads_first = heads_first;
  return read(kSlotNames[slot], array, call.tensors[slot], true);
}

// Likewise, but a contiguous copy of what is not contiguous (whole: anywhere, else in its rows), as
// PyTorch's own backward makes of the gradient of the result.
bool straighten(Call& call, Slot slot, PyObject* array, bool whole, bool heads_first) {
  if (!give(call, slot, array, heads_first)) return false;
  const Tensor& tensor = call.tensors[slot];
  if (!tensor.plain || (whole ? tensor.contiguous() : tensor.rows_contiguous())) return true;
  ++python_calls;  // of a mode, maybe
  call.copies.emplace_back(PyObject_CallMethod(array, "contiguous", nullptr));
  return call.copies.back() && give(call, slot, call.copies.back().get(), heads_first);
}

// Makes a tensor that lies as `model` and has the call write to it.
bool make_like(Call& call, Slot slot, PyObject* model, bool heads_first) {
  call.copies.push_back(like(model));
  call.tensors[slot].is_new = true;
  return call.copies.back() && give(call, slot, call.copies.back().get(), heads_first);
}

// One side of a window: None or any negative number is no limit.
bool to_limit(const char* name, PyObject* value, int64_t* limit) {
  *limit = -1;
  if (value != Py_None && !to_integer(name, value, 64, limit)) return false;
  if (*limit < -1) *limit = -1;
  return true;
}

bool give_options(Call& call, const Options& options) {
  Number& left = call.numbers[kScalar_window];
  Number& right = call.numbers[kWindowRight];
  return give(call, kSlot_cu_seqlens_q, options.cu_seqlens_q) &&
         give(call, kSlot_cu_seqlens_k, options.cu_seqlens_k) &&
         (!call.given(kSlot_cu_seqlens_q) ||
          call.give(kScalar_max_seqlen_q, options.max_seqlen_q)) &&
         (!call.given(kSlot_cu_seqlens_k) ||
          call.give(kScalar_max_seqlen_k, options.max_seqlen_k)) &&
         call.give(kScalar_dropout_p, options.dropout_p) &&
         call.give(kScalar_dropout_seed, options.seed) &&
         call.give(kScalar_dropout_offset, options.offset) &&
         call.give(kScalar_causal, options.causal, "is_causal") &&
         call.give(kScalar_scale, options.scale) &&
         to_limit("window_size_left", options.left, &left.integer) &&
         to_limit("window_size_right", options.right, &right.integer) && call.find_lengths() &&
         call.find_threads();
}

// PyTorch's kernels take key and value of one head_dim, that of query, and results like query are
// right for no other.
bool check_head_dims(const Call& call) {
  const Tensor &q = call.tensors[kQ], &k = call.tensors[kK], &v = call.tensors[kV];
  if (!q.plain || !k.plain || !v.plain || q.ndim == 0 || k.ndim == 0 || v.ndim == 0) return true;
  const int64_t wanted = q.shape[q.ndim - 1];
  if (k.shape[k.ndim - 1] == wanted && v.shape[v.ndim - 1] == wanted) return true;
  raise_error("InvalidArgument", "query, key and value differ in head_dim");
  return false;
}

// Whether nobody sees what is made and asked here; on false the call looks at its tensors twice.
bool is_unwatched(PyObject* q, PyObject* k, PyObject* v) {
  Ref tensors(PyTuple_Pack(3, q, k, v));
  const bool watched = !tensors || has_function_mode(tensors.get());
  PyErr_Clear();
  return !watched;
}

// What PyTorch's forward kernels return besides: seed and offset of a call without dropout, which
// nobody reads, and a debug mask that was not asked for, of no elements. All calls get the same
// seed and offset; only a CUDA graph, which owns all that it returns, gets new ones in its memory.
// The mask has a type that autograd may make a part of a graph, so each call has its own.
Ref auxiliary_of(const Call& call) {
  const Tensor& q = call.tensors[kQ];
  if (call.was_captured())
    return call_python("_flash_impl", "auxiliary", "(OO)", q.object, Py_True);
  static auto& known = *new std::map<uint64_t, PyObject*>;
  PyObject*& kept = known[uint64_t{q.on_cuda} | uint64_t{q.dtype} << 1 |
                          static_cast<uint64_t>(q.device_index) << 16];
  if (kept == nullptr)
    kept = call_python("_flash_impl", "auxiliary", "(OO)", q.object, Py_False).release();
  return Ref::borrowed(kept);
}

// aten::_scaled_dot_product_flash_attention where heads come first, else
// aten::_flash_attention_forward: what each of them returns. out: None, or where to write it.
// rng_state: of dropout, to be returned. heads_first, q, k, v, out, alibi_slopes, seqused_k,
// block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, seed, offset,
// rng_state, causal, scale, left, right, batch_invariant
PyObject* aten_forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 21)) return nullptr;
  const bool heads_first = a[0] == Py_True;
  PyObject *q = a[1], *k = a[2], *v = a[3], *given_out = a[4], *rng_state = a[15];
  Call call(false);
  call.door = "PyTorch's flash attention";
  call.wants_lse = true;
  call.cached = a[7] != Py_None;
  call.watch.unwatched = is_unwatched(q, k, v);
  const Options options{a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[16], a[17], a[18], a[19]};
  if (!give(call, kQ, q, heads_first) || !give(call, kK, k, heads_first) ||
      !give(call, kV, v, heads_first) || !check_head_dims(call))
    return nullptr;
  call.tensors[kOut].is_new = true;  // the dispatcher has seen who may write to it
  if (!(given_out == Py_None ? make_like(call, kOut, q, heads_first)
                             : give(call, kOut, given_out, heads_first)) ||
      !give(call, kSlot_alibi_slopes, a[5]) || !give(call, kSlot_seqused_k, a[6]) ||
      !give(call, kSlot_block_table, a[7]) || !call.give(kScalar_batch_invariant, a[20]) ||
      !give_options(call, options) || !call.run() ||
      (given_out != Py_None && !mark_written(STROBE_OK, call.tensors[kOut])))
    return nullptr;
  count_served();
  if (given_out == Py_None) offer_to_direct(call, 1);
  Ref auxiliary = auxiliary_of(call);
  PyObject *seed, *unused, *mask;
  if (!auxiliary || !PyArg_ParseTuple(auxiliary.get(), "OOO", &seed, &unused, &mask))
    return nullptr;
  if (rng_state != Py_None) seed = rng_state;
  Ref own_mask = like(mask);
  if (!own_mask) return nullptr;
  mask = own_mask.get();
  PyObject *out = call.result(0), *lse = call.result(1);
  if (!heads_first) return PyTuple_Pack(5, out, lse, seed, unused, mask);
  Ref longest[] = {Ref(PyLong_FromLongLong(call.tensors[kQ].shape[1])),
                   Ref(PyLong_FromLongLong(call.tensors[kK].shape[1]))};
  if (!longest[0] || !longest[1]) return nullptr;
  return PyTuple_Pack(9, out, lse, Py_None, Py_None, longest[0].get(), longest[1].get(), seed,
                      unused, mask);
}

// The two operators' derivatives: (dq, dk, dv). heads_first, dout, q, k, v, out, lse, cu_seqlens_q,
// cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, seed, offset, causal, scale, left, right,
// deterministic
PyObject* aten_backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!takes(count, 19)) return nullptr;
  const bool heads_first = a[0] == Py_True;
  PyObject *q = a[2], *k = a[3], *v = a[4];
  Call call(true);
  call.door = "the gradient of PyTorch's flash attention";
  call.watch.unwatched = is_unwatched(q, k, v);
  const Options options{a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17]};
  if (!straighten(call, kDout, a[1], false, heads_first) || !give(call, kQ, q, heads_first) ||
      !give(call, kK, k, heads_first) || !give(call, kV, v, heads_first) ||
      !check_head_dims(call) || !straighten(call, kOut, a[5], false, heads_first) ||
      !straighten(call, kLse, a[6], true, false) || !make_like(call, kDq, q, heads_first) ||
      !make_like(call, kDk, k, heads_first) || !make_like(call, kDv, v, heads_first) ||
      !to_flag("deterministic", a[18], &call.deterministic) || !give_options(call, options) ||
      !call.run())
    return nullptr;
  offer_to_direct(call, 3);
  return PyTuple_Pack(3, call.result(0), call.result(1), call.result(2));
}

}  // namespace

PyMethodDef aten_methods[] = {
    method<aten_forward>("aten_forward", METH_FASTCALL, "PyTorch's forward operators."),
    method<aten_backward>("aten_backward", METH_FASTCALL, "PyTorch's backward operators."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace strobe_python
