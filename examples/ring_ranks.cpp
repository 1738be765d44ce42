// One rank of a sequence that is split over GPUs, each with a process of its own: attention forward
// and backward, held against one GPU's. Start it once for each rank, on one machine or several that
// share a folder:
//
//     ring_ranks 0 2 /tmp/ring & ring_ranks 1 2 /tmp/ring
//
// The arguments are the rank, how many there are, and a file that is not there yet, by which the
// ranks meet: rank 0 writes NCCL's id to it. A job's own way of passing 128 bytes (MPI, a store)
// does as well. A rank takes the GPU of its number, modulo those of the machine. Where there is no
// GPU or no NCCL it says so, and ends without an error.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <strobe/ring.hpp>
#include <thread>

#include "ring_rank.h"

namespace {

// Rank 0's id, which the others wait for.
strobe::Nccl::UniqueId Meet(const strobe::Nccl& nccl, int rank, const std::string& path) {
  strobe::Nccl::UniqueId id = {};
  if (rank == 0) {
    id = nccl.unique_id();
    const std::string half = path + ".part";  // a file is there as a whole, or not at all
    std::ofstream file(half, std::ios::binary);
    file.write(id.bytes.data(), static_cast<std::streamsize>(id.bytes.size()));
    file.close();
    if (!file) throw std::runtime_error("cannot write " + half);
    std::filesystem::rename(half, path);
    return id;
  }
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    std::ifstream file(path, std::ios::binary);
    if (file.read(id.bytes.data(), static_cast<std::streamsize>(id.bytes.size()))) return id;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (waited.count() > kPatience) throw std::runtime_error("rank 0 has not written " + path);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::fprintf(stderr, "usage: ring_ranks RANK RANKS FILE\n");
    return 2;
  }
  const int rank = std::atoi(argv[1]), ranks = std::atoi(argv[2]);
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    std::fprintf(stderr, "ring_ranks: rank %d of %d, expected 0 to one less than the ranks\n", rank,
                 ranks);
    return 2;
  }
  if (strobe::Gpu::count() == 0) {
    std::printf("ring_ranks: no GPU here: %s: nothing to show\n",
                strobe::Gpu::unavailable().c_str());
    return 0;
  }
  std::unique_ptr<strobe::Nccl> nccl;
  try {
    nccl = std::make_unique<strobe::Nccl>();
  } catch (const strobe::Error& error) {
    std::printf("ring_ranks: %s: nothing to show\n", error.what());
    return 0;
  }

  const strobe::Gpu gpu(rank % strobe::Gpu::count());
  const Sequence sequence;
  const Results whole = ComputeAlone(sequence, gpu);
  gpu.make_current();  // NCCL takes the current one
  void* const comm = nccl->init_rank(ranks, Meet(*nccl, rank, argv[3]), rank, kPatience);
  double difference = 0;
  {
    strobe::NcclCommunicator communicator(comm, kPatience);
    difference = Difference(ComputeSplit(sequence, communicator), whole, ChunksOf(ranks, rank));
  }
  nccl->destroy(comm);
  const bool good = difference <= kAllowed;
  std::printf("rank %d of %d: differs from one GPU by %.1e of the largest value: %s\n", rank, ranks,
              difference, good ? "as one GPU" : "not as one GPU");
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "ring_ranks: %s\n", error.what());
  return 1;
}
