// strobe::NcclCommunicator over a driver and an NCCL that are no such things (fake_gpu.cpp): which
// calls it makes in which streams, and what it says when NCCL fails. tests/CMakeLists.txt has the
// loader find them.
#include "strobe/nccl.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "strobe/ring.hpp"

namespace strobe_test {
namespace {

using strobe::GpuMemory;
using strobe::NcclCommunicator;
using strobe::RingMessage;

class Nccl : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  void SetUp() override {
    if (std::getenv("STROBE_TEST_FAKE_GPU") == nullptr) GTEST_SKIP() << "ctest sets the fakes up";
    void* const library = dlopen("libnccl.so.2", RTLD_NOW);
    ASSERT_NE(library, nullptr);
    seed_ = reinterpret_cast<void (*)(uint64_t)>(dlsym(library, "fake_seed"));
    error_ = reinterpret_cast<void (*)(void*, int)>(dlsym(library, "fake_error"));
    aborted_ = reinterpret_cast<int (*)(void*)>(dlsym(library, "fake_aborted"));
    ASSERT_TRUE(seed_ && error_ && aborted_);
    comms_.resize(kRanks);
    const std::vector<int> devices = {0, 1, 2};
    strobe::Nccl().init_all(comms_, devices);
  }

  void TearDown() override {
    for (void* const comm : comms_) strobe::Nccl().destroy(comm);  // aborted ones too
  }

  void (*seed_)(uint64_t) = nullptr;
  void (*error_)(void*, int) = nullptr;
  int (*aborted_)(void*) = nullptr;
  std::vector<void*> comms_;
};

// A rank's buffers and stream.
struct Rank {
  explicit Rank(void* comm) : ranks(comm), stream(ranks.gpu().make_stream()) {
    for (GpuMemory* each : {&mine, &out, &got, &kept}) *each = GpuMemory(ranks.gpu(), kBytes);
    std::memset(got.data(), 0, kBytes);
  }
  // What the stream has not done by now it never will.
  ~Rank() { ranks.gpu().destroy_stream(stream); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  void Enqueue(const GpuMemory& to, const GpuMemory& from) const {
    ranks.gpu().copy(to.data(), 0, from.data(), 0, kBytes, 1, stream);
  }
  static constexpr size_t kBytes = 64;

  NcclCommunicator ranks;
  void* stream;
  GpuMemory mine, out, got, kept;
};

// Each rank computes something, sends it to the next one, computes with what it got, and computes
// and sends again, into the same memory: whatever order streams have.
TEST_F(Nccl, StreamsWaitForWhatTheyNeed) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    seed_(seed);
    std::vector<std::unique_ptr<Rank>> ranks;
    for (void* const comm : comms_) ranks.push_back(std::make_unique<Rank>(comm));
    std::vector<GpuMemory> second;
    for (int n = 0; n < kRanks; ++n) {
      Rank& r = *ranks[n];
      EXPECT_EQ(r.ranks.rank(), n);
      EXPECT_EQ(r.ranks.ranks(), kRanks);
      std::memset(r.mine.data(), 10 + n, Rank::kBytes);
      second.emplace_back(r.ranks.gpu(), Rank::kBytes);
      std::memset(second.back().data(), 20 + n, Rank::kBytes);
      const RingMessage send = {r.out.data(), Rank::kBytes, (n + 1) % kRanks};
      const RingMessage receive = {r.got.data(), Rank::kBytes, (n + kRanks - 1) % kRanks};
      r.Enqueue(r.out, r.mine);  // what is sent
      r.ranks.begin(0, {&send, 1}, {&receive, 1}, r.stream);
      r.ranks.end(0, r.stream);
      r.Enqueue(r.kept, r.got);  // what was received
      r.Enqueue(r.out, second.back());
      r.ranks.begin(1, {&send, 1}, {&receive, 1}, r.stream);
      r.ranks.end(1, r.stream);
      r.Enqueue(r.mine, r.got);
    }
    for (const auto& r : ranks) r->ranks.wait(r->stream, 10);
    for (int n = 0; n < kRanks; ++n) {
      const int from = (n + kRanks - 1) % kRanks;
      const auto first = [](const GpuMemory& memory) {
        return static_cast<int>(static_cast<const char*>(memory.data())[Rank::kBytes - 1]);
      };
      ASSERT_EQ(first(ranks[n]->kept), 10 + from) << seed;
      ASSERT_EQ(first(ranks[n]->got), 20 + from) << seed;
      ASSERT_EQ(first(ranks[n]->mine), 20 + from) << seed;
    }
  }
}

std::string Refusal(const std::function<void()>& use) {
  try {
    use();
  } catch (const strobe::Error& error) {
    EXPECT_EQ(error.status(), strobe::Status::kDeviceError);
    return error.what();
  }
  return "nothing was refused";
}

TEST_F(Nccl, ARankThatIsLateOrGoneIsAnErrorInTime) {
  Rank r(comms_[0]);
  const RingMessage receive = {r.got.data(), Rank::kBytes, 1};
  r.ranks.begin(0, {}, {&receive, 1}, r.stream);
  r.ranks.end(0, r.stream);
  EXPECT_EQ(Refusal([&] { r.ranks.wait(r.stream, 0.05); }),
            "rank 0 of 3 is not done after 0.05 seconds: another rank is late, gone, or has made "
            "another call");
  EXPECT_EQ(aborted_(comms_[0]), 1);
  EXPECT_TRUE(r.ranks.aborted());
  EXPECT_EQ(Refusal([&] { r.ranks.wait(r.stream, 60); }), "the ring's communicator was aborted");
  EXPECT_EQ(aborted_(comms_[0]), 1);
}

TEST_F(Nccl, WhatNcclSeesLaterEndsTheCommunicator) {
  const auto refused = [&](int rank, const std::function<void(Rank&)>& use) {
    Rank r(comms_[rank]);
    const RingMessage receive = {r.got.data(), Rank::kBytes, (rank + 1) % kRanks};
    r.ranks.begin(0, {}, {&receive, 1}, r.stream);
    error_(comms_[rank], 6);
    EXPECT_EQ(Refusal([&] { use(r); }),
              "messages of the ring: NCCL says: an error of the fake NCCL");
    EXPECT_EQ(aborted_(comms_[rank]), 1);
    EXPECT_TRUE(r.ranks.aborted());
  };
  refused(0, [](Rank& r) { r.ranks.wait(r.stream, 60); });
  refused(1, [](Rank& r) { r.ranks.begin(1, {}, {}, r.stream); });
  Rank other(comms_[2]);
  other.ranks.wait(other.stream, 1);
  EXPECT_FALSE(other.ranks.aborted());
  other.ranks.abort();
  EXPECT_EQ(aborted_(comms_[2]), 1);
}

// Rows that are sent, and parts of lse, are copied on the GPU as in the host's memory.
TEST_F(Nccl, CopiesOnAGpuAreThoseOnTheCpu) {
  using strobe::internal::RingLse;
  using strobe::internal::RingMemory;
  using strobe::internal::RingTensor;
  const strobe::Gpu gpu(0);
  const RingMemory on_gpu(strobe::Device::kCuda, 0), on_cpu(strobe::Device::kCpu, 0);
  void* const stream = gpu.make_stream();
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 bits(seed);
    const auto draw = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
    };
    const int64_t batch = draw(1, 3), rows = draw(1, 9), heads = draw(1, 4), dim = draw(1, 8);
    strobe::Strides strides = {};  // contiguous, heads before rows, with room everywhere
    if (seed % 3 == 1) strides = {rows * heads * dim, dim, rows * dim, 1};
    if (seed % 3 == 2) strides = {rows * heads * (dim + 2) + 5, heads * (dim + 2) + 1, dim + 2, 1};
    std::vector<float> from(static_cast<size_t>(batch * (rows + 1) * (heads + 1) * (dim + 3) + 15));
    for (float& x : from) x = static_cast<float>(draw(0, 1 << 20));
    const int64_t begin = draw(0, rows - 1);
    const strobe::RingRows part = {begin, draw(begin + 1, rows)};
    const auto copied = [&](const RingMemory& memory, std::vector<float>& to) {
      const auto tensor = [&](std::vector<float>& data, int64_t r, const strobe::Strides& s) {
        return RingTensor::of(data.data(), batch, r, heads, dim, strobe::DType::kFloat32, s);
      };
      tensor(from, rows, strides).part(part).copy_to(tensor(to, part.size(), {}), memory, stream);
    };
    std::vector<float> wanted(from.size(), -1), got(wanted);
    copied(on_cpu, wanted);
    copied(on_gpu, got);
    gpu.synchronize(stream);
    ASSERT_EQ(got, wanted) << seed;
    EXPECT_EQ(std::count(wanted.begin(), wanted.end(), -1.0F),
              static_cast<std::ptrdiff_t>(wanted.size()) - batch * part.size() * heads * dim);
    // Some rows of lse go to a place of their own, and come back.
    const auto moved = [&](const RingMemory& memory) {
      std::vector<float> all(from.begin(), from.begin() + batch * heads * rows), room(all.size());
      const RingLse lse = {all.data(), batch * heads, rows};
      float* const there = lse.part(part, room.data(), memory, stream);
      gpu.synchronize(stream);
      EXPECT_EQ(there == all.data(), part.size() == rows);
      for (int64_t n = 0; n < batch * heads * part.size(); ++n) there[n] += 1;
      if (there == room.data()) lse.take(part, part, room.data(), memory, stream);
      gpu.synchronize(stream);
      return all;
    };
    const std::vector<float> expected = moved(on_cpu);
    ASSERT_EQ(moved(on_gpu), expected) << seed;
    for (int64_t n = 0; n < batch * heads * rows; ++n) {
      const bool in_part = part.begin <= n % rows && n % rows < part.end;
      ASSERT_EQ(expected[static_cast<size_t>(n)], from[static_cast<size_t>(n)] + (in_part ? 1 : 0));
    }
  }
  gpu.destroy_stream(stream);
}

TEST_F(Nccl, WhatNcclRefusesIsAnError) {
  Rank r(comms_[0]);
  const RingMessage own = {r.got.data(), Rank::kBytes, 0};
  EXPECT_EQ(Refusal([&] {
              r.ranks.begin(0, {&own, 1}, {}, r.stream);
            }),
            "ncclSend or ncclRecv: NCCL says: an error of the fake NCCL");
  EXPECT_EQ(Refusal([] { (void)strobe::Nccl().init_rank(2, {}, 0); }),
            "ncclCommInitRankConfig: NCCL says: an error of the fake NCCL");
}

// Its ranks meet, and the first messages connect them, within a time that is given.
TEST_F(Nccl, ARankOfACommunicatorThatDoesNotBlockIsWaitedForSoLong) {
  const strobe::Nccl nccl;
  strobe::Nccl::UniqueId id = nccl.unique_id();
  void* comms[2] = {};
  std::thread other([&] { comms[1] = nccl.init_rank(2, id, 1, 60); });
  comms[0] = nccl.init_rank(2, id, 0, 60);
  other.join();
  {
    NcclCommunicator first(comms[0], 60), second(comms[1], 0.05);
    EXPECT_EQ(first.ranks(), 2);
    EXPECT_EQ(second.rank(), 1);
    void* const stream = second.gpu().make_stream();
    const GpuMemory got(second.gpu(), 64);
    const RingMessage receive = {got.data(), 64, 0};
    second.begin(0, {}, {&receive, 1}, stream);
    error_(comms[1], 7);  // ncclInProgress: it connects
    EXPECT_EQ(Refusal([&] {
                second.begin(1, {}, {&receive, 1}, stream);
              }),
              "rank 1 of 2 is not done after 0.05 seconds: another rank is late, gone, or has made "
              "another call");
    EXPECT_TRUE(second.aborted());
    EXPECT_EQ(aborted_(comms[1]), 1);
    second.gpu().destroy_stream(stream);
  }
  for (void* const comm : comms) nccl.destroy(comm);  // the fake's, though it was aborted
  id.bytes[0] = 1;                                    // of a group that nobody else comes to
  EXPECT_EQ(Refusal([&] { (void)nccl.init_rank(2, id, 0, 0.05); }),
            "rank 0 of 2 has not met the others after 0.05 seconds: another rank is late or gone");
}

}  // namespace
}  // namespace strobe_test
