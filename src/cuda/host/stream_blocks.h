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

// Small workspaces for callers that bring none: one block a stream, made once and kept. Who has it
// keeps other host threads from it until all kernels of a launch are enqueued: kernels come one
// after another on a stream, and what one leaves there for the next is not overwritten by another
// launch in between. Not while a graph is captured: its replays may run beside launches on the
// stream.
class StreamBlocks {
 public:
  struct Lease {
    void* memory = nullptr;  // null: the launch has to look for memory elsewhere
    std::unique_lock<std::mutex> lock;
  };
  static Lease take(size_t bytes, int device, cudaStream_t stream) {
    if (bytes > kOwnWorkspace) return {};
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;  // a handle comes back when its stream is destroyed; an id does not
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
        cudaStreamGetId(stream, &id) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    if (status != cudaStreamCaptureStatusNone) return {};
    thread_local Block last{};
    if (!last.memory || last.stream != id || last.device != device) {
      static auto& blocks = *new StreamBlocks;  // launches may come while the process ends
      last = blocks.find(id, device, stream);
    }
    if (!last.memory) return {};
    return {last.memory, std::unique_lock(*last.taken)};
  }

 private:
  struct Block {
    unsigned long long stream;
    int device;
    void* memory;
    std::mutex* taken;  // kept as the memory is
  };
  static constexpr size_t kMost = 64;  // streams: 16 MB

  Block find(unsigned long long id, int device, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    for (const Block& block : blocks_) {
      if (block.stream == id && block.device == device) return block;
    }
    Block made{id, device, nullptr, nullptr};
    if (blocks_.size() == kMost) return made;
    // Some virtual GPUs have no memory pools.
    if (cudaMallocAsync(&made.memory, kOwnWorkspace, stream) != cudaSuccess &&
        cudaMalloc(&made.memory, kOwnWorkspace) != cudaSuccess) {
      cudaGetLastError();
      made.memory = nullptr;
      return made;
    }
    made.taken = new std::mutex;
    blocks_.push_back(made);
    return made;
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_STREAM_BLOCKS_H_
