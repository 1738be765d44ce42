// Workspaces of the library's own.
#ifndef STROBE_CUDA_HOST_STREAM_BLOCKS_H_
#define STROBE_CUDA_HOST_STREAM_BLOCKS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace strobe::cuda {

/// Of a block; launches that need more look elsewhere.
inline constexpr size_t kOwnWorkspace = size_t{256} << 10;

// Small workspaces for callers that bring none: one block a stream, made once and kept. For
// launches in which no kernel leaves anything there for another one: kernels come one after another
// on a stream, but those of two launches, by two host threads, may take turns. Not while a graph is
// captured: its replays may run beside launches on the stream.
class StreamBlocks {
 public:
  // Null: the launch has to look for memory elsewhere.
  static void* get(size_t bytes, int device, cudaStream_t stream) {
    if (bytes > kOwnWorkspace) return nullptr;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;  // a handle comes back when its stream is destroyed; an id does not
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
        cudaStreamGetId(stream, &id) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    if (status != cudaStreamCaptureStatusNone) return nullptr;
    thread_local Block last{};
    if (last.memory && last.stream == id && last.device == device) return last.memory;
    static auto& blocks = *new StreamBlocks;  // launches may come while the process ends
    last = blocks.find(id, device, stream);
    return last.memory;
  }

 private:
  struct Block {
    unsigned long long stream;
    int device;
    void* memory;
  };
  static constexpr size_t kMost = 64;  // streams: 16 MB

  Block find(unsigned long long id, int device, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    for (const Block& block : blocks_) {
      if (block.stream == id && block.device == device) return block;
    }
    Block made{id, device, nullptr};
    if (blocks_.size() == kMost) return made;
    // Some virtual GPUs have no memory pools.
    if (cudaMallocAsync(&made.memory, kOwnWorkspace, stream) != cudaSuccess &&
        cudaMalloc(&made.memory, kOwnWorkspace) != cudaSuccess) {
      cudaGetLastError();
      made.memory = nullptr;
      return made;
    }
    blocks_.push_back(made);
    return made;
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_STREAM_BLOCKS_H_
