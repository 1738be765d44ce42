// Memory, streams and events of a GPU through NVIDIA's driver, which is opened when the program
// runs: strobe::Gpu. A program that has this compiles without CUDA's headers, links none of its
// libraries, and starts on machines without a GPU. ring.hpp includes it.
#ifndef STROBE_GPU_HPP_
#define STROBE_GPU_HPP_

#include <dlfcn.h>

#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/strobe.hpp>
#include <utility>

namespace strobe {
inline namespace v0 {
namespace internal {

// A library that is opened at run time. It stays in the process when nobody has it open any more:
// those that are meant have threads of their own.
class OpenLibrary {
 public:
  explicit OpenLibrary(const char* name)
      : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
    if (handle_ == nullptr) {
      const char* const reason = dlerror();
      reason_ = reason ? reason : name;
    }
  }
  OpenLibrary(OpenLibrary&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), reason_(std::move(other.reason_)) {}
  OpenLibrary(const OpenLibrary&) = delete;
  OpenLibrary& operator=(const OpenLibrary&) = delete;
  OpenLibrary& operator=(OpenLibrary&&) = delete;
  ~OpenLibrary() {
    if (handle_) dlclose(handle_);
  }

  // Why there is none, or it lacks a function; "" where all is well.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

  template <typename Function>
  void find(const char* name, Function*& function) {
    if (handle_ == nullptr) return;
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (function == nullptr && reason_.empty()) reason_ = formatted("it has no %s", name);
  }

 private:
  void* handle_;
  std::string reason_;
};

// The driver's functions, by the names and types of its documentation. An address of the GPU's is a
// 64-bit number there; streams, events and contexts are pointers.
struct CudaDriver {
  // cuMemcpy2DAsync's parameters: a rectangle of bytes.
  struct Rectangle {
    size_t from_x = 0, from_y = 0;
    unsigned from_kind = 0;
    const void* from_host = nullptr;
    uint64_t from = 0;
    void* from_array = nullptr;
    size_t from_pitch = 0;
    size_t to_x = 0, to_y = 0;
    unsigned to_kind = 0;
    void* to_host = nullptr;
    uint64_t to = 0;
    void* to_array = nullptr;
    size_t to_pitch = 0;
    size_t width = 0, height = 0;
  };
  static constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE
  static constexpr int kNotReady = 600;         // CUDA_ERROR_NOT_READY

  OpenLibrary library = OpenLibrary("libcuda.so.1");
  int devices = 0;
  std::string reason = {};  // why there are none

  int (*init)(unsigned) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*context_retain)(void**, int) = nullptr;
  int (*context_push)(void*) = nullptr;
  int (*context_pop)(void**) = nullptr;
  int (*context_set)(void*) = nullptr;
  int (*allocate)(uint64_t*, size_t) = nullptr;
  int (*free)(uint64_t) = nullptr;
  int (*copy)(uint64_t, uint64_t, size_t, void*) = nullptr;
  int (*copy_rectangle)(const Rectangle*, void*) = nullptr;
  int (*upload)(uint64_t, const void*, size_t, void*) = nullptr;
  int (*download)(void*, uint64_t, size_t, void*) = nullptr;
  int (*fill)(uint64_t, unsigned char, size_t, void*) = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*stream_destroy)(void*) = nullptr;
  int (*stream_query)(void*) = nullptr;
  int (*stream_synchronize)(void*) = nullptr;
  int (*stream_wait)(void*, void*, unsigned) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_destroy)(void*) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*error_text)(int, const char**) = nullptr;

  CudaDriver() {
    library.find("cuInit", init);
    library.find("cuDeviceGetCount", device_count);
    library.find("cuDeviceGet", device_get);
    library.find("cuDevicePrimaryCtxRetain", context_retain);
    library.find("cuCtxPushCurrent_v2", context_push);
    library.find("cuCtxPopCurrent_v2", context_pop);
    library.find("cuCtxSetCurrent", context_set);
    library.find("cuMemAlloc_v2", allocate);
    library.find("cuMemFree_v2", free);
    library.find("cuMemcpyDtoDAsync_v2", copy);
    library.find("cuMemcpy2DAsync_v2", copy_rectangle);
    library.find("cuMemcpyHtoDAsync_v2", upload);
    library.find("cuMemcpyDtoHAsync_v2", download);
    library.find("cuMemsetD8Async", fill);
    library.find("cuStreamCreate", stream_create);
    library.find("cuStreamDestroy_v2", stream_destroy);
    library.find("cuStreamQuery", stream_query);
    library.find("cuStreamSynchronize", stream_synchronize);
    library.find("cuStreamWaitEvent", stream_wait);
    library.find("cuEventCreate", event_create);
    library.find("cuEventDestroy_v2", event_destroy);
    library.find("cuEventRecord", event_record);
    library.find("cuGetErrorString", error_text);
    reason = library.reason();
    if (!reason.empty()) return;
    int error = init(0);
    if (error == 0) error = device_count(&devices);
    if (error != 0) devices = 0;
    if (devices == 0) reason = error == 0 ? "it has no GPU" : text(error);
  }

  [[nodiscard]] std::string text(int error) const {
    const char* found = nullptr;
    if (error_text && error_text(error, &found) == 0 && found) return found;
    return formatted("error %d", error);
  }

  // Opened at the first call, once.
  [[nodiscard]] static const CudaDriver& get() {
    static const CudaDriver driver;
    return driver;
  }
};

}  // namespace internal

// A GPU of this machine. Its context is the one that CUDA's runtime has, and so the streams and the
// memory are those of the runtime: a cudaStream_t is a stream here. What fails throws Error with
// kDeviceError. The functions of an object may be called by several threads at once.
class Gpu {
 public:
  // index: as cudaSetDevice counts. Throws Error where there is no driver or no such GPU.
  explicit Gpu(int32_t index = 0) : driver_(&internal::CudaDriver::get()), index_(index) {
    if (driver_->devices == 0) {
      throw Error(Status::kDeviceError,
                  internal::formatted("no GPU: NVIDIA's driver, libcuda.so.1: %s",
                                      driver_->reason.c_str()));
    }
    if (index < 0 || index >= driver_->devices) {
      throw Error(Status::kInvalidArgument,
                  internal::formatted("index = %d, expected 0 to %d: a GPU of this machine", index,
                                      driver_->devices - 1));
    }
    int device = 0;
    expect(driver_->device_get(&device, index), "finding the GPU");
    expect(driver_->context_retain(&context_, device), "the GPU's context");
  }

  // How many there are; 0 without a driver.
  [[nodiscard]] static int32_t count() { return internal::CudaDriver::get().devices; }
  // Why there are none; "" when there are.
  [[nodiscard]] static std::string unavailable() { return internal::CudaDriver::get().reason; }

  // Which one it is.
  [[nodiscard]] int32_t index() const noexcept { return index_; }

  // Has the calling thread work on this GPU from now on, as cudaSetDevice does: for libraries that
  // ask CUDA's runtime for the current one, as NCCL does when a communicator is made.
  void make_current() const { expect(driver_->context_set(context_), "choosing the GPU"); }

  // Memory of the GPU; not null, also where no bytes are asked for.
  [[nodiscard]] void* allocate(size_t bytes) const {
    const Current current(*this);
    uint64_t address = 0;
    expect(driver_->allocate(&address, bytes > 0 ? bytes : 1), "memory on the GPU");
    return reinterpret_cast<void*>(address);
  }
  // Gives memory back that allocate() gave; waits for what the GPU still does.
  void free(void* memory) const {
    const Current current(*this);
    expect(driver_->free(number(memory)), "giving back memory of the GPU");
  }

  // From the host to the GPU, enqueued; what it comes from may change when it has returned.
  void upload(void* to, const void* from, size_t bytes, void* stream = nullptr) const {
    if (bytes == 0) return;
    const Current current(*this);
    expect(driver_->upload(number(to), from, bytes, stream), "copying to the GPU");
  }
  // From the GPU to the host; returns when it is there.
  void download(void* to, const void* from, size_t bytes, void* stream = nullptr) const {
    if (bytes == 0) return;
    const Current current(*this);
    expect(driver_->download(to, number(from), bytes, stream), "copying from the GPU");
    expect(driver_->stream_synchronize(stream), "copying from the GPU");
  }
  // On the GPU, enqueued: so many lines of so many bytes, which begin at multiples of the pitches.
  void copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
            size_t lines, void* stream) const {
    if (bytes == 0 || lines == 0) return;
    const Current current(*this);
    if (lines == 1 || (to_pitch == bytes && from_pitch == bytes)) {
      expect(driver_->copy(number(to), number(from), bytes * lines, stream), "copying on the GPU");
      return;
    }
    internal::CudaDriver::Rectangle r;
    r.from_kind = r.to_kind = internal::CudaDriver::kDeviceMemory;
    r.from = number(from);
    r.from_pitch = from_pitch;
    r.to = number(to);
    r.to_pitch = to_pitch;
    r.width = bytes;
    r.height = lines;
    expect(driver_->copy_rectangle(&r, stream), "copying on the GPU");
  }
  // Zeros, enqueued.
  void clear(void* memory, size_t bytes, void* stream) const {
    if (bytes == 0) return;
    const Current current(*this);
    expect(driver_->fill(number(memory), 0, bytes, stream), "clearing memory of the GPU");
  }

  // A stream beside the default one, which neither waits for the other.
  [[nodiscard]] void* make_stream() const {
    const Current current(*this);
    void* stream = nullptr;
    expect(driver_->stream_create(&stream, 1), "a stream of the GPU");  // CU_STREAM_NON_BLOCKING
    return stream;
  }
  // Of a stream that make_stream() made.
  void destroy_stream(void* stream) const {
    const Current current(*this);
    expect(driver_->stream_destroy(stream), "a stream of the GPU");
  }
  // Whether everything that was enqueued in the stream is done. Throws what a launch ran into.
  [[nodiscard]] bool done(void* stream) const {
    const Current current(*this);
    const int error = driver_->stream_query(stream);
    if (error == internal::CudaDriver::kNotReady) return false;
    expect(error, "on the GPU");
    return true;
  }
  // Returns when everything that was enqueued in the stream is done.
  void synchronize(void* stream) const {
    const Current current(*this);
    expect(driver_->stream_synchronize(stream), "on the GPU");
  }

  // A mark in a stream, without a time.
  [[nodiscard]] void* make_event() const {
    const Current current(*this);
    void* event = nullptr;
    expect(driver_->event_create(&event, 2), "an event of the GPU");  // CU_EVENT_DISABLE_TIMING
    return event;
  }
  // Of an event that make_event() made.
  void destroy_event(void* event) const {
    const Current current(*this);
    expect(driver_->event_destroy(event), "an event of the GPU");
  }
  // The event is what the stream has by now.
  void record(void* event, void* stream) const {
    const Current current(*this);
    expect(driver_->event_record(event, stream), "an event of the GPU");
  }
  // What is enqueued in the stream from now on waits for the event.
  void wait(void* stream, void* event) const {
    const Current current(*this);
    expect(driver_->stream_wait(stream, event, 0), "an event of the GPU");
  }

 private:
  // Has the calling thread work in the GPU's context, as long as it lives.
  class Current {
   public:
    explicit Current(const Gpu& gpu) : driver_(gpu.driver_) {
      gpu.expect(driver_->context_push(gpu.context_), "the GPU's context");
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      void* ours = nullptr;
      driver_->context_pop(&ours);
    }

   private:
    const internal::CudaDriver* driver_;
  };

  static uint64_t number(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
  void expect(int error, const char* what) const {
    if (error == 0) return;
    throw Error(Status::kDeviceError,
                internal::formatted("%s %d: %s", what, index_, driver_->text(error).c_str()));
  }

  const internal::CudaDriver* driver_;
  int32_t index_;
  void* context_ =
      nullptr;  // the primary one; retained until the process ends, as the runtime does
};

// Memory of a GPU that is given back when the object ends.
class GpuMemory {
 public:
  GpuMemory() = default;  // none
  // Of so many bytes. Throws Error.
  GpuMemory(const Gpu& gpu, size_t bytes) : gpu_(gpu), data_(gpu.allocate(bytes)), bytes_(bytes) {}
  // Takes the other's.
  GpuMemory(GpuMemory&& other) noexcept { swap(other); }
  // Takes the other's; its own goes with the other.
  GpuMemory& operator=(GpuMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  GpuMemory(const GpuMemory&) = delete;             // it has one owner
  GpuMemory& operator=(const GpuMemory&) = delete;  // it has one owner
  // Gives it back.
  ~GpuMemory() {
    try {
      if (gpu_) gpu_->free(data_);
    } catch (const std::exception&) {  // the GPU is not there any more, nor is its memory
    }
  }

  // Its first byte.
  [[nodiscard]] void* data() const noexcept { return data_; }
  // The same, of numbers.
  [[nodiscard]] float* floats() const noexcept { return static_cast<float*>(data_); }
  // All of it, for args.workspace.
  [[nodiscard]] std::span<std::byte> span() const noexcept {
    return {static_cast<std::byte*>(data_), bytes_};
  }

 private:
  void swap(GpuMemory& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  std::optional<Gpu> gpu_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_GPU_HPP_
