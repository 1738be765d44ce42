// Arrays of NumPy, PyTorch and DLPack, read where they lie. Nothing here copies elements.
#pragma once

#include <cstdint>
#include <string>

#include "py.h"

namespace strobe_python {

// As python/strobe/_arrays.py numbers them.
enum class Kind : uint8_t { kNumpy, kNumpySubclass, kTorch, kTorchSubclass, kShared, kDescribed };

// strobe_dtype's, and one more.
enum : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt32 = 8, kOtherType = 255 };

struct DLManaged;  // of a DLPack capsule, either version

constexpr int kMaxAxes = 5;  // no argument has more

struct Tensor {
  PyObject* object = nullptr;  // borrowed: what the caller gave
  Ref owned;                   // what was made of it, or in its place
  Kind kind = Kind::kNumpy;
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
  DLManaged* managed = nullptr;

  Tensor() = default;
  Tensor(const Tensor&) = delete;
  ~Tensor();  // gives back what came through DLPack

  bool is_torch() const { return kind == Kind::kTorch || kind == Kind::kTorchSubclass; }
  bool rows_contiguous() const;  // or of one column
  bool contiguous() const;
  void forget();  // without the GIL nothing is given back
};

// Reads `object`, which messages call `name`. ours: it was made for this call. On false an
// exception is set.
bool read(const char* name, PyObject* object, Tensor& tensor, bool ours = false);

// What Python's planner is given for it: the object, or of a DLPack tensor its description.
Ref described(const char* name, const Tensor& tensor);

// PyTorch, as Python introduced it when the first of its tensors came.
struct Torch {
  PyObject* tensor_type = nullptr;
  PyObject* number_of_threads = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_autocast_enabled = nullptr;
  PyObject* dtypes[4] = {};
};
extern Torch torch;

// cudaStream_t of the framework's current stream. On false an exception is set.
bool current_stream(const Tensor& tensor, void** stream);

extern PyMethodDef tensor_methods[];

}  // namespace strobe_python
