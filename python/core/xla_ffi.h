// The structs of XLA's FFI, by which XLA calls functions of other libraries: those parts of its C
// API, version 0.1, that the handlers here use. Newer versions add to the ends of structs alone.
// tests/python/test_jax.py compares them with the header that jaxlib brings (xla/ffi/api/c_api.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace strobe_python::xla {

constexpr int kVersionMajor = 0, kVersionMinor = 1;

enum DataType : int32_t { kS32 = 4, kS64 = 5, kU8 = 6, kU32 = 8, kF16 = 10, kF32 = 11, kBF16 = 16 };
enum Code : int32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13
};
enum : int32_t { kMetadataExtension = 1, kBufferType = 1, kScalarAttribute = 3, kExecute = 3 };
enum : uint32_t { kCommandBufferCompatible = 1 };

struct Error;    // XLA's own
struct Context;  // likewise

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Text {
  const char* data;
  size_t length;
};

struct Scalar {
  int32_t dtype;
  void* value;
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Values {  // arguments, and likewise results
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  void** values;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  Text** names;
  void** values;
};

struct ErrorArgs {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int32_t code;
};

struct ErrorDestroyArgs {
  size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct StreamArgs {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};

struct DeviceArgs {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t ordinal;  // out
};

// sizeof counts the padding at a struct's end, XLA's sizes do not.
#define STROBE_XLA_SIZE(type, last) (offsetof(type, last) + sizeof(type::last))

struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal;
  Error* (*create_error)(ErrorArgs*);
  void* error_message;
  void (*destroy_error)(ErrorDestroyArgs*);
  void* register_handler;
  Error* (*get_stream)(StreamArgs*);
  void* others[12];
  Error* (*get_device_ordinal)(DeviceArgs*);
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Values arguments, results;
  Attributes attributes;
};

}  // namespace strobe_python::xla
