// strobe::NcclCommunicator over a driver and an NCCL that are no such things (fake_gpu.cpp): which
// calls it makes in which streams, and what it says when NCCL fails. tests/CMakeLists.txt has the
// loader find them.
#include "strobe/nccl.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
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
      ranks[n]->ranks.gpu().destroy_stream(ranks[n]->stream);
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

TEST_F(Nccl, WhatNcclRefusesIsAnError) {
  Rank r(comms_[0]);
  const RingMessage own = {r.got.data(), Rank::kBytes, 0};
  EXPECT_EQ(Refusal([&] {
              r.ranks.begin(0, {&own, 1}, {}, r.stream);
            }),
            "ncclSend or ncclRecv: NCCL says: an error of the fake NCCL");
  EXPECT_EQ(Refusal([] { (void)strobe::Nccl().init_rank(2, {}, 0); }),
            "ncclCommInitRank: NCCL says: an error of the fake NCCL");
}

}  // namespace
}  // namespace strobe_test
