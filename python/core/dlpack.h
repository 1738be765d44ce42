// DLPack's structs, from its specification (https://dmlc.github.io/dlpack/latest/): tensors in
// capsules, 0.x and 1.x, and the C exchange API of 1.2, by which a type reads its objects without
// any.
#pragma once

#include <cstdint>

namespace strobe_python {

enum : int32_t { kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3 };
enum : uint64_t { kDlReadOnly = 1, kDlCopied = 2 };

struct DLVersion {
  uint32_t major, minor;
};

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

struct DLManagedTensorVersioned {
  DLVersion version;
  void* context;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor tensor;
};

struct DLExchangeApi {
  DLVersion version;
  void* previous;
  void* allocate;
  int (*managed_from_object)(void* object, DLManagedTensorVersioned** tensor);
  void* managed_to_object;
  int (*tensor_from_object)(void* object,
                            DLTensor* tensor);  // may be null; -1: an exception is set
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace strobe_python
