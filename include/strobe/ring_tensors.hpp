// Tensors of a rank and parts of their rows, for rings (ring.hpp), on either device.
#ifndef STROBE_RING_TENSORS_HPP_
#define STROBE_RING_TENSORS_HPP_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <strobe/gpu.hpp>
#include <strobe/ring_schedule.hpp>
#include <strobe/strobe.hpp>
#include <vector>

namespace strobe {
inline namespace v0 {
namespace internal {

[[nodiscard]] inline int64_t ring_element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// Memory of a device: copies and zeros, in a stream or, on the CPU, at once.
class RingMemory {
 public:
  RingMemory(Device device, int32_t index) {
    if (device == Device::kCuda) gpu_.emplace(index);
  }
  void copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
            size_t lines, void* stream) const {
    if (gpu_) return gpu_->copy(to, to_pitch, from, from_pitch, bytes, lines, stream);
    for (size_t n = 0; n < lines && bytes > 0; ++n) {
      std::memcpy(static_cast<std::byte*>(to) + n * to_pitch,
                  static_cast<const std::byte*>(from) + n * from_pitch, bytes);
    }
  }
  void upload(void* to, const void* from, size_t bytes, void* stream) const {
    if (gpu_) return gpu_->upload(to, from, bytes, stream);
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  // A copy of the host's numbers that lasts as long as somebody has it, 16-byte aligned.
  [[nodiscard]] std::shared_ptr<const void> kept(const std::vector<int32_t>& words) const {
    if (!gpu_) {
      const auto copy = std::make_shared<const std::vector<int32_t>>(words);
      return {copy, copy->data()};
    }
    const size_t bytes = words.size() * sizeof(int32_t);
    const auto copy = std::make_shared<const GpuMemory>(*gpu_, bytes);
    gpu_->upload(copy->data(), words.data(), bytes);
    gpu_->synchronize(nullptr);  // streams beside the default one do not wait for it
    return {copy, copy->data()};
  }
  void clear(void* memory, size_t bytes, void* stream) const {
    if (gpu_) return gpu_->clear(memory, bytes, stream);
    if (bytes > 0) std::memset(memory, 0, bytes);
  }

 private:
  std::optional<Gpu> gpu_;
};

// A tensor [batch, rows, heads, dim] of a rank, or a part of its rows.
struct RingTensor {
  std::byte* data = nullptr;
  int64_t batch = 0, rows = 0, heads = 0, dim = 0, size = 0;  // size: bytes of an element
  Strides strides = {};

  // given: all zero is contiguous. packed: there is no stride of a batch.
  [[nodiscard]] static RingTensor of(const void* data, int64_t batch, int64_t rows, int64_t heads,
                                     int64_t dim, DType dtype, Strides given = {},
                                     bool packed = false) {
    if (given.batch == 0 && given.seqlen == 0 && given.head == 0 && given.dim == 0)
      given = {rows * heads * dim, heads * dim, dim, 1};
    if (packed) given.batch = rows * given.seqlen;  // of one sequence; never used to go on
    return {static_cast<std::byte*>(const_cast<void*>(data)),
            batch,
            rows,
            heads,
            dim,
            ring_element_size(dtype),
            given};
  }
  [[nodiscard]] RingTensor part(const RingRows& part) const {
    RingTensor found = *this;
    if (data) found.data += part.begin * strides.seqlen * size;
    found.rows = part.size();
    return found;
  }
  // Some of its heads.
  [[nodiscard]] RingTensor of_heads(int64_t first, int64_t count) const {
    RingTensor found = *this;
    if (data) found.data += first * strides.head * size;
    found.heads = count;
    return found;
  }
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(batch * rows * heads * dim * size);
  }
  // Whether all elements lie one after the other, in order.
  [[nodiscard]] bool contiguous() const {
    const auto follows = [](int64_t count, int64_t stride, int64_t wanted) {
      return count <= 1 || stride == wanted;
    };
    return follows(heads, strides.head, dim) && follows(rows, strides.seqlen, heads * dim) &&
           follows(batch, strides.batch, rows * heads * dim);
  }
  // Copies the elements to a tensor of the same extents.
  void copy_to(const RingTensor& to, const RingMemory& memory, void* stream) const {
    const auto line = [&](int64_t elements) { return static_cast<size_t>(elements * size); };
    if (dim == 1 && strides.seqlen == 1 && to.strides.seqlen == 1) {  // lse: rows are neighbours
      for (int64_t b = 0; b < batch; ++b) {
        memory.copy(to.data + b * to.strides.batch * size, line(to.strides.head),
                    data + b * strides.batch * size, line(strides.head), line(rows),
                    static_cast<size_t>(heads), stream);
      }
      return;
    }
    const bool whole_rows = (heads <= 1 || (strides.head == dim && to.strides.head == dim));
    const int64_t pieces = whole_rows ? 1 : heads, width = whole_rows ? heads * dim : dim;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < pieces; ++h) {
        memory.copy(to.data + (b * to.strides.batch + h * to.strides.head) * size,
                    line(to.strides.seqlen), data + (b * strides.batch + h * strides.head) * size,
                    line(strides.seqlen), line(width), static_cast<size_t>(rows), stream);
      }
    }
  }
};

// lse, or its gradient: [batch, heads, rows] of a rank, contiguous.
struct RingLse {
  float* data = nullptr;
  int64_t lines = 0, rows = 0;  // lines: batch * heads

  // Those of some rows, contiguous: in `room`, or where they are if these are all rows.
  [[nodiscard]] float* part(const RingRows& part, float* room, const RingMemory& memory,
                            void* stream) const {
    if (data == nullptr || part.size() == rows) return data;
    memory.copy(room, bytes(part.size()), data + part.begin, bytes(rows), bytes(part.size()),
                static_cast<size_t>(lines), stream);
    return room;
  }
  // And back a part of those that stand in room.
  void take(const RingRows& part, const RingRows& in_room, const float* room,
            const RingMemory& memory, void* stream) const {
    memory.copy(data + part.begin, bytes(rows), room + part.begin - in_room.begin,
                bytes(in_room.size()), bytes(part.size()), static_cast<size_t>(lines), stream);
  }
  [[nodiscard]] static size_t bytes(int64_t count) {
    return static_cast<size_t>(count) * sizeof(float);
  }
};

// K and V, or their gradients.
struct RingPair {
  RingTensor k, v;
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_TENSORS_HPP_
