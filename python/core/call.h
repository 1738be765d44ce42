// One call of attention or of its derivative, from arguments to results.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "options.h"
#include "plans.h"
#include "profiler.h"
#include "tensor.h"
#include "values.h"

namespace strobe_python {

// The value of an option that is a number.
union Number {
  int64_t integer = 0;
  uint64_t word;  // of a seed
  double real;
};
// The other side of a window: kScalar_window has the left one.
constexpr int kWindowRight = kScalars;

struct Call {
  explicit Call(bool is_backward) : backward(is_backward) {
    numbers[kScalar_window].integer = numbers[kWindowRight].integer = -1;
  }
  ~Call();

  // Each returns false where an exception is set.
  bool give(Slot slot, PyObject* array);  // None: not given
  // said: what messages call it, if not by its name in the table.
  bool give(Scalar scalar, PyObject* value, const char* said = nullptr);
  bool give_option(const char* function, PyObject* name, PyObject* value);
  bool give_options(const char* function, PyObject* options);  // a dict, by name
  bool give_tail(PyObject* const* tail, Py_ssize_t count);     // of an operator's arguments
  bool find_lengths();                                         // max_seqlen_q and _k, if not given
  bool find_threads();                                         // where none were given
  bool run();

  bool given(Slot slot) const { return tensors[slot].object != nullptr; }
  // Of a call that has run: out and lse, if that is wanted; or dq, dk, dv, and of dsinks and dbias
  // those that are.
  PyObject* result(int index) const { return results[index].get(); }
  int result_count() const { return result_count_; }
  // Of a call that has run.
  bool was_captured() const;  // into a CUDA graph
  const Launch& launched() const { return *launch_; }

  // Of an option that is a flag whether it is set, of a number that may be None whether it is one.
  bool is_set(Scalar scalar) const { return (bits >> scalar & 1) != 0; }
  void set(Scalar scalar, bool value) {
    bits = (bits & ~(uint64_t{1} << scalar)) | uint64_t{value} << scalar;
  }

  const char* door = "strobe.attention";  // by which function the call came, for `strobe.why()`
  const bool backward;
  bool cached = false;                           // attention_with_kvcache
  bool float_out = false;                        // with a cache
  bool accumulate = false, float_grads = false;  // backward: see attention_backward
  bool wants_dsinks = false;                     // backward: the gradient of sinks too
  bool wants_dbias = false;                      // likewise, of bias
  bool deterministic = false, wants_lse = false;
  bool without_limit = false;  // None in the window
  // What an object of strobe.masks was made for: sequences, heads, queries and keys, as
  // Mask._of_calls has them.
  std::array<long long, 4> mask_of = {};
  PyObject* mask = nullptr;  // that object, borrowed; words that are given as such have none
  uint64_t bits = 0;         // by Scalar: see is_set
  Number numbers[kScalars + 1];
  std::vector<Ref> copies;  // of what cannot be read as it lies, held until the launch has ended
  Tensor tensors[kSlots];
  Watch watch;

 private:
  bool all_plain() const;
  bool give_window(const char* name, PyObject* window);
  bool find_mask(PyObject* object, Ref& packed, Ref& layout);
  bool check_mask() const;
  void write_key(Key& key) const;
  Ref described_arrays() const;
  Ref described_options() const;
  bool make(const Key& key);
  bool allocate();
  bool launch_it();
  bool fail(strobe_status status);
  void* data(Slot slot) const { return tensors[slot].data; }
  template <typename Arguments>
  void fill(Arguments& arguments);

  Slot written_[kMostResults];  // of the arrays that the caller gave
  int writes_ = 0;
  std::shared_ptr<Launch> launch_;
  Ref results[kMostResults];
  int result_count_ = 0;
  Ref workspace_;
  Tensor workspace_tensor_;
  void* workspace_address_ = nullptr;
  void* stream_ = nullptr;
  ProfilerRange range_;
  bool without_gil_ = false;  // as when the interpreter ends a thread that waits for it
};

// Refuses a given array that must not be written to: false, and an exception is set.
bool check_writable(const char* name, const Tensor& tensor);

// Tells autograd that a launch with this status wrote to a given array, if it did and it is a
// tensor of PyTorch's. An exception that is set stays. On false another one is.
bool mark_written(strobe_status status, const Tensor& tensor);

// Whether a CUDA stream is being captured into a graph. Without the GIL too.
bool is_capturing(void* stream);

extern Plans* plans;  // forward, backward

extern PyMethodDef aten_methods[];
extern PyMethodDef merge_methods[];

// Refuses another number of positional arguments: false, and an exception is set.
bool takes(Py_ssize_t given, Py_ssize_t wanted);

// Whether PyTorch's modes for functions, or a tensor's class, see what is called with this tuple of
// tensors; also where that is not known.
bool has_function_mode(PyObject* tensors);

}  // namespace strobe_python
