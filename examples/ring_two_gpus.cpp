// A sequence split over two GPUs of one process, by a thread for each: attention forward and
// backward, held against one GPU's. docs/distributed.md says how the work is divided.
//
// NCCL is opened when the program runs (libnccl.so.2: PyTorch brings one, and LD_LIBRARY_PATH says
// where). Where there are no two GPUs or no NCCL it says so, and ends without an error.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <strobe/ring.hpp>
#include <thread>
#include <vector>

#include "ring_rank.h"

int main() try {
  // Two GPUs that wait for each other must not load kernels meanwhile (strobe/nccl.hpp).
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  constexpr int kRanks = 2;
  if (strobe::Gpu::count() < kRanks) {
    std::printf("ring_two_gpus: no two GPUs here, but %d%s%s: nothing to show\n",
                strobe::Gpu::count(), strobe::Gpu::unavailable().empty() ? "" : "; ",
                strobe::Gpu::unavailable().c_str());
    return 0;
  }
  std::unique_ptr<strobe::Nccl> nccl;
  try {
    nccl = std::make_unique<strobe::Nccl>();
  } catch (const strobe::Error& error) {
    std::printf("ring_two_gpus: %s: nothing to show\n", error.what());
    return 0;
  }

  const Sequence sequence;
  const Results whole = ComputeAlone(sequence, strobe::Gpu(0));

  std::array<void*, kRanks> comms = {};
  const std::array<int, kRanks> devices = {0, 1};
  nccl->init_all(comms, devices);
  std::array<double, kRanks> differences = {};
  std::array<std::exception_ptr, kRanks> errors = {};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      strobe::NcclCommunicator ranks(comms[rank]);
      try {
        const Results mine = ComputeSplit(sequence, ranks);
        differences[rank] = Difference(mine, whole, ChunksOf(kRanks, rank));
      } catch (const std::exception&) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (void* const comm : comms) nccl->destroy(comm);

  bool good = true;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::printf("rank %d of %d: differs from one GPU by %.1e of the largest value\n", rank, kRanks,
                differences[rank]);
    good = good && differences[rank] <= kAllowed;
  }
  std::printf(good ? "as one GPU\n" : "not as one GPU\n");
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "ring_two_gpus: %s\n", error.what());
  return 1;
}
