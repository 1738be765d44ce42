// One call of attention or of its derivative, from arguments to results.
#pragma once

#include <memory>
#include <vector>

#include "plans.h"
#include "tensor.h"
#include "values.h"

namespace strobe_python {

// The arrays of a call, in the order in which messages look at them.
enum Slot {
  kDout,
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDlse,
  kAlibi,
  kCuQ,
  kCuK,
  kDq,
  kDk,
  kDv,
// One number for each sequence: src/core/options.def
#define STROBE_ARRAY(name, ...) kArray_##name,
#include "core/options.def"
  // Of a call with a cache alone, whose k and v are the cache.
  kBlockTable,
  kKNew,
  kVNew,
  kCuKNew,
  kRotaryCos,
  kRotarySin,
#define STROBE_CACHE_ARRAY(name) kArray_##name,
#include "core/options.def"
  kSlots
};
extern const char* const kSlotNames[kSlots];

struct Call {
  explicit Call(bool is_backward) : backward(is_backward) {}
  ~Call();

  // Each returns false where an exception is set.
  bool give(Slot slot, PyObject* array);  // None: not given
  bool give_option(const char* function, PyObject* name, PyObject* value);
  bool give_options(const char* function, PyObject* options);  // a dict, by name
  bool give_tail(PyObject* const* tail, Py_ssize_t count);     // of an operator's arguments
  bool give_window(PyObject* window);
  bool give_scale(const char* name, PyObject* value);  // None: of head_dim
  bool give_length(int index, PyObject* value);        // max_seqlen_q or _k; None: find_lengths
  bool find_lengths();                                 // of those not given
  bool find_threads();                                 // where none were given
  bool run();

  bool given(Slot slot) const { return tensors[slot].object != nullptr; }
  PyObject* result(int index) const { return results[index].get(); }
  // Of a call that has run:
  const char* kernel() const { return launch_->plan.kernel; }
  bool was_captured() const;  // into a CUDA graph

  const bool backward;
  bool cached = false;                                 // attention_with_kvcache
  bool rotary_interleaved = false, float_out = false;  // with a cache
  bool causal = false, deterministic = false, batch_invariant = false, wants_lse = false;
  bool has_scale = false, without_limit = false;  // None in the window
  bool has_length[2] = {};
  int64_t left = -1, right = -1, threads = 0;
  int64_t lengths[2] = {};  // max_seqlen_q, max_seqlen_k
  double scale = 0, softcap = 0, dropout_p = 0;
  uint64_t seed = 0, offset = 0;
  std::vector<Ref> copies;  // of what cannot be read as it lies, held until the launch has ended
  Ref scalars;              // a dict of the rarer options that are numbers
  Tensor tensors[kSlots];
  Watch watch;

 private:
  bool all_plain() const;
  bool write_key(Key& key) const;
  Ref described_arrays() const;
  bool make(const Key& key);
  bool allocate();
  bool launch_it();
  bool fail(strobe_status status);
  void* data(Slot slot) const { return tensors[slot].data; }
  template <typename Arguments>
  void fill(Arguments& arguments);
  void fill_cache(strobe_forward_args& arguments) const;

  Slot written_[3];  // of the arrays that the caller gave
  int writes_ = 0;
  std::shared_ptr<Launch> launch_;
  Ref results[3];
  Ref workspace_;
  Tensor workspace_tensor_;
  void* workspace_address_ = nullptr;
  void* stream_ = nullptr;
  bool without_gil_ = false;  // as when the interpreter ends a thread that waits for it
};

// Refuses a given array that must not be written to: false, and an exception is set.
bool check_writable(const char* name, const Tensor& tensor);

// Tells autograd that a launch with this status wrote to a given array, if it did and it is a
// tensor of PyTorch's. An exception that is set stays. On false another one is.
bool mark_written(strobe_status status, const Tensor& tensor);

extern Plans* plans;  // forward, backward

extern PyMethodDef aten_methods[];
extern PyMethodDef merge_methods[];

// Refuses another number of positional arguments: false, and an exception is set.
bool takes(Py_ssize_t given, Py_ssize_t wanted);

// Whether PyTorch's modes for functions, or a tensor's class, see what is called with this tuple of
// tensors; also where that is not known.
bool has_function_mode(PyObject* tensors);

}  // namespace strobe_python
