// Memory, launches and random data on the GPU.
#ifndef STROBE_EXAMPLES_PAPER_DEVICE_CUH_
#define STROBE_EXAMPLES_PAPER_DEVICE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common.h"

namespace strobe::paper {

/// Ends the program where something failed.
inline void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "paper_story: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(T)) {
    if (bytes_ > 0 && cudaMalloc(&data_, bytes_) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();  // the caller asks for data(), and later launches are not to blame
    }
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  /// Ends the program where there was no memory.
  T* need() const {
    must(data_ != nullptr ? cudaSuccess : cudaErrorMemoryAllocation, "cudaMalloc");
    return data();
  }
  void fill(int byte) { must(cudaMemset(need(), byte, bytes_), "cudaMemset"); }
  std::vector<T> to_host() const {
    std::vector<T> values(bytes_ / sizeof(T));
    must(cudaMemcpy(values.data(), need(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

/// Launches `kernel` with as much shared memory as it needs: run() of steps.h wants such a
/// function.
struct Launch {
  template <typename Kernel>
  void operator()(Kernel kernel, dim3 grid, int threads, int bytes, const Arguments& p) const {
    if (bytes > 48 << 10) {
      must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
           "cudaFuncSetAttribute");
    }
    kernel<<<grid, static_cast<unsigned>(threads), static_cast<size_t>(bytes)>>>(p);
  }
};

/// Standard normal: Box and Muller's transform of splitmix64's bits.
__global__ void fill_normal_kernel(bf16* to, int64_t count, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint64_t x = (seed << 40) + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  constexpr float kUnit = 1.f / 4294967296.f;
  const float radius = (static_cast<float>(x >> 32) + 0.5f) * kUnit;
  const float angle = static_cast<float>(x & 0xffffffff) * kUnit;
  to[i] = __float2bfloat16(sqrtf(-2.f * logf(radius)) * cospif(2.f * angle));
}
inline void fill_normal(DeviceBuffer<bf16>& buffer, int64_t count, uint64_t seed) {
  const dim3 grid(static_cast<unsigned>((count + 255) / 256));
  fill_normal_kernel<<<grid, 256>>>(buffer.need(), count, seed);
  must(cudaGetLastError(), "fill_normal");
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_DEVICE_CUH_
