// A layer of causal attention over a sequence that is split over GPUs, forward and backward: what
// ring_two_gpus.cpp and ring_ranks.cpp have in common.
#ifndef STROBE_EXAMPLES_RING_RANK_H_
#define STROBE_EXAMPLES_RING_RANK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <strobe/ring.hpp>
#include <vector>

#include "cli/dtype.h"

constexpr int64_t kSeqlen = 16384;  // of the whole sequence
constexpr int64_t kHeads = 8, kHeadsKv = 2, kHeadDim = 128;
constexpr double kPatience = 60;  // seconds that a rank waits for the others, each time

using Values = std::vector<uint16_t>;  // bfloat16, [rows, heads, head_dim]

// Tensors of the whole sequence, in the host's memory. Every rank draws the same.
struct Sequence {
  Values q, k, v, dout;

  Sequence() {
    std::mt19937 bits(0);
    std::normal_distribution<float> normal;
    const auto draw = [&](Values& values, int64_t heads) {
      values.resize(static_cast<size_t>(kSeqlen * heads * kHeadDim));
      for (uint16_t& value : values) value = strobe::cli::ToBFloat16(normal(bits));
    };
    draw(q, kHeads);
    draw(k, kHeadsKv);
    draw(v, kHeadsKv);
    draw(dout, kHeads);
  }
};

// What attention makes of it: of some rows.
struct Results {
  Values out, dq, dk, dv;
};

// Rows of the whole sequence, in the order in which a rank holds them.
inline Values RowsOf(const Values& whole, const std::vector<strobe::RingChunk>& chunks) {
  const auto row = static_cast<std::ptrdiff_t>(whole.size() / kSeqlen);
  Values rows;
  for (const strobe::RingChunk& chunk : chunks)
    rows.insert(rows.end(), whole.begin() + chunk.begin * row, whole.begin() + chunk.end * row);
  return rows;
}

// The layer's part of one rank: forward, backward, and back to the host. before: what is waited for
// before the first message; wait: until all is done.
inline Results Compute(const Sequence& sequence, const strobe::Gpu& gpu,
                       strobe::Communicator& ranks, void* stream,
                       const std::function<void()>& before, const std::function<void()>& wait) {
  // One description of the layer. It names the whole sequence; what this rank has of it follows.
  const strobe::RingProblem problem = {.layer = {.dtype = strobe::DType::kBFloat16,
                                                 .device = strobe::Device::kCuda,
                                                 .device_index = gpu.index(),
                                                 .seqlen_q = kSeqlen,
                                                 .seqlen_k = kSeqlen,
                                                 .heads = kHeads,
                                                 .heads_kv = kHeadsKv,
                                                 .head_dim = kHeadDim,
                                                 .causal = true},
                                       .ranks = ranks.ranks(),
                                       .rank = ranks.rank()};
  const strobe::Ring forward(problem), backward(problem.backward());

  const auto room = [&](size_t bytes) { return strobe::GpuMemory(gpu, bytes); };
  const auto rows = static_cast<size_t>(forward.rows());
  const size_t bytes_q = rows * kHeads * kHeadDim * sizeof(uint16_t),
               bytes_k = rows * kHeadsKv * kHeadDim * sizeof(uint16_t);
  const auto upload = [&](const Values& whole) {
    const Values mine = RowsOf(whole, forward.chunks());
    strobe::GpuMemory memory = room(mine.size() * sizeof(uint16_t));
    gpu.upload(memory.data(), mine.data(), mine.size() * sizeof(uint16_t), stream);
    gpu.synchronize(stream);
    return memory;
  };
  const strobe::GpuMemory q = upload(sequence.q), k = upload(sequence.k), v = upload(sequence.v),
                          dout = upload(sequence.dout);
  const strobe::GpuMemory out = room(bytes_q), dq = room(bytes_q), dk = room(bytes_k),
                          dv = room(bytes_k), lse = room(rows * kHeads * sizeof(float));
  const strobe::GpuMemory workspace =
      room(std::max(forward.workspace_bytes(), backward.workspace_bytes()));

  const auto launch = [&](strobe::Communicator& with) {
    forward.forward({.q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .out = out.data(),
                     .lse = lse.floats(),
                     .workspace = workspace.span(),
                     .stream = stream},
                    with);
    backward.backward({.q = q.data(),
                       .k = k.data(),
                       .v = v.data(),
                       .out = out.data(),
                       .lse = lse.floats(),
                       .dout = dout.data(),
                       .dq = dq.data(),
                       .dk = dk.data(),
                       .dv = dv.data(),
                       .workspace = workspace.span(),
                       .stream = stream},
                      with);
  };
  // Once without messages: that loads the kernels, for which a GPU may have to be idle.
  strobe::Rehearsal nobody(ranks.ranks(), ranks.rank());
  launch(nobody);
  gpu.synchronize(stream);
  before();
  launch(ranks);
  wait();  // both are enqueued; here a rank that is gone shows

  const auto download = [&](const strobe::GpuMemory& memory, int64_t heads) {
    Values values(rows * static_cast<size_t>(heads * kHeadDim));
    gpu.download(values.data(), memory.data(), values.size() * sizeof(uint16_t), stream);
    return values;
  };
  return {download(out, kHeads), download(dq, kHeads), download(dk, kHeadsKv),
          download(dv, kHeadsKv)};
}

// The same by NCCL's ranks, and by one GPU alone.
inline Results ComputeSplit(
    const Sequence& sequence, strobe::NcclCommunicator& ranks,
    const std::function<void()>& before = [] {}) {
  void* const stream = ranks.gpu().make_stream();
  Results results =
      Compute(sequence, ranks.gpu(), ranks, stream, before, [&] { ranks.wait(stream, kPatience); });
  ranks.gpu().destroy_stream(stream);
  return results;
}
inline Results ComputeAlone(const Sequence& sequence, const strobe::Gpu& gpu) {
  strobe::OneRank nobody;
  void* const stream = gpu.make_stream();
  Results results = Compute(
      sequence, gpu, nobody, stream, [] {}, [&] { gpu.synchronize(stream); });
  gpu.destroy_stream(stream);
  return results;
}

// The largest difference of a rank's results from one GPU's, over the largest value of the tensor;
// about the rounding of bfloat16, 2^-8.
inline double Difference(const Results& mine, const Results& whole,
                         const std::vector<strobe::RingChunk>& chunks) {
  double worst = 0;
  for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
    const Values wanted = RowsOf(whole.*member, chunks);
    const Values& got = mine.*member;
    double difference = 0, largest = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto x = static_cast<double>(strobe::cli::FromBFloat16(wanted[i]));
      const auto y = static_cast<double>(strobe::cli::FromBFloat16(got[i]));
      if (std::isnan(y)) return HUGE_VAL;
      difference = std::max(difference, std::fabs(x - y));
      largest = std::max(largest, std::fabs(x));
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}
constexpr double kAllowed = 0x1p-7;

// Which rows a rank of so many holds.
inline std::vector<strobe::RingChunk> ChunksOf(int32_t ranks, int32_t rank) {
  const int64_t lengths[] = {kSeqlen};
  return strobe::RingLayout(lengths, ranks, strobe::RingOrder::kZigzag).chunks(rank);
}

#endif  // STROBE_EXAMPLES_RING_RANK_H_
