// A sequence split over two GPUs of one process, by a thread for each: attention forward and
// backward, held against one GPU's. docs/distributed.md says how the work is divided.
//
// NCCL is opened when the program runs (libnccl.so.2: PyTorch brings one, and LD_LIBRARY_PATH says
// where). Where there are no two GPUs or no NCCL it says so, and ends without an error.
#include <array>
#include <barrier>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <strobe/ring.hpp>
#include <thread>
#include <vector>

#include "ring_rank.h"

int main() try {
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

  const strobe::Nccl::UniqueId id = nccl->unique_id();
  std::array<double, kRanks> differences = {};
  std::array<std::exception_ptr, kRanks> errors = {};
  // GPUs of one process that wait for each other must not load kernels meanwhile
  // (strobe/nccl.hpp): both have done so before the first message.
  std::barrier<> loaded(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      bool waited = false;
      try {
        strobe::Gpu(rank).make_current();  // NCCL takes the current one
        void* const comm = nccl->init_rank(kRanks, id, rank, kPatience);
        {
          strobe::NcclCommunicator ranks(comm, kPatience);
          const Results mine = ComputeSplit(sequence, ranks, [&] {
            waited = true;
            loaded.arrive_and_wait();
          });
          differences[rank] = Difference(mine, whole, ChunksOf(kRanks, rank));
        }
        nccl->destroy(comm);
      } catch (const std::exception&) {
        errors[rank] = std::current_exception();
        if (!waited) loaded.arrive_and_drop();  // the other one waits for its messages, and throws
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }

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
