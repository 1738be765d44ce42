// Arrays of NumPy, PyTorch and DLPack, read where they lie. Nothing here copies elements.
#pragma once

#include <cstdint>
#include <string>

#include "py.h"

namespace strobe_python {

// As python/strobe/_arrays.py numbers them.
enum class Kind : uint8_t { kNumpy, kNumpySubclass, kTorch, kTorchSubclass, kShared, kDescribed };

// strobe_dtype's, and two more. kByte: blocks of q8_0 and q4_0, as arrays have them.
enum : uint8_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kFloat8E4m3 = 3,
  kFloat8E5m2 = 4,
  kInt8 = 5,
  kInt32 = 8,
  kByte = 9,
  kOtherType = 255
};

struct DLManaged;      // of a DLPack capsule, either version
struct DLExchangeApi;  // of a type of PyTorch's, which reads its objects without a capsule

constexpr int kMaxAxes = 5;  // no argument has more

// What an array was when it was read. Checks, the plan, its key and the launch go by this alone: an
// array may be another the next time that it is asked.
struct Layout {
  uint8_t dtype = kOtherType;
  bool on_cuda = false;
  bool read_only = false;
  // Whether all that a plan depends on is here. What is not plain, Python looks at and refuses.
  bool plain = false;
  int ndim = 0;
  int device_index = 0;
  void* data = nullptr;
  int64_t shape[kMaxAxes];
  int64_t strides[kMaxAxes];  // in elements

  bool rows_contiguous() const;  // or of one column
  bool contiguous() const;
  bool operator==(const Layout& other) const;
};

struct Tensor : Layout {
  PyObject* object = nullptr;  // borrowed: what the caller gave
  Ref owned;                   // what was made of it, or in its place
  Kind kind = Kind::kNumpy;
  const DLExchangeApi* exchange = nullptr;
  DLManaged* managed = nullptr;
  // A tensor of PyTorch's with (batch, heads, seqlen, head_dim), read as (batch, seqlen, heads,
  // head_dim). Said before it is read.
  bool heads_first = false;
  // Made for this call: nobody else knows it, so nobody has to be told that it is written to.
  bool is_new = false;

  Tensor() = default;
  Tensor(const Tensor&) = delete;
  ~Tensor();  // gives back what came through DLPack

  bool is_torch() const { return kind == Kind::kTorch || kind == Kind::kTorchSubclass; }
  void forget();  // without the GIL nothing is given back
};

// Reads `object`, which messages call `name`. unwatched: it is new, and no mode of PyTorch's has
// seen how it was made, or it is an argument of a kernel of PyTorch's dispatcher, which resolves
// negative bits before. On false an exception is set.
bool read(const char* name, PyObject* object, Tensor& tensor, bool unwatched = false);

// What Python's planner is given for it: its Spec. Of an array that is not plain, which the planner
// refuses, the object itself.
Ref described(const Tensor& tensor);

// The arrays of a call. Between the first that was read and the launch, Python may run: the
// __dlpack__ of another array, a mode of PyTorch's, the handler of a signal, another thread. It can
// change arrays, and give their memory back.
class Watch {
 public:
  Watch() : calls_(python_calls) {}
  // Reads all given arrays anew, if Python has run since the first of them was read, so that all
  // are known as they were at one moment. On false an exception is set.
  bool settle(const char* const* names, Tensor* tensors, int count) const;
  // Refuses arrays that are not as they were read. After this no Python may run before the launch.
  bool check(const char* const* names, const Tensor* tensors, int count) const;
  // Whether this array is as it was read.
  bool check(const char* name, const Tensor& tensor) const { return check(&name, &tensor, 1); }

  bool unwatched = false;  // no mode of PyTorch's is at work

 private:
  uint64_t calls_;
};

// PyTorch, as Python introduced it when the first of its tensors came.
struct Torch {
  PyObject* tensor_type = nullptr;
  PyObject* number_of_threads = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_autocast_enabled = nullptr;
  PyObject* increment_version = nullptr;
  PyObject* dtypes[8] = {};
};
extern Torch torch;

// cudaStream_t of the framework's current stream. On false an exception is set.
bool current_stream(const Tensor& tensor, void** stream);

extern PyMethodDef tensor_methods[];

}  // namespace strobe_python
