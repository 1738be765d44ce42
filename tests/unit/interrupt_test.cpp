// args.interrupt: a launch that its caller ends early.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "environment.h"
#include "gtest/gtest.h"
#include "strobe/strobe.hpp"

namespace {

using strobe_test::kSanitized;
constexpr int64_t kWhole = kSanitized ? 384 : 6144;
constexpr int64_t kHeads = 4, kHeadDim = 64;

// What the library's question finds.
struct Asked {
  int times = 0;
  int stop_at = 0;  // the question that is answered with yes; 0: none
  bool elsewhere = false;
  std::thread::id caller = std::this_thread::get_id();

  static int32_t Answer(void* data) {
    Asked& self = *static_cast<Asked*>(data);
    self.elsewhere |= std::this_thread::get_id() != self.caller;
    return ++self.times == self.stop_at;
  }
};

struct Tensors {
  explicit Tensors(int64_t seqlen)
      : x(static_cast<size_t>(seqlen * kHeads * kHeadDim)),
        out(x.size()),
        dq(x.size()),
        dk(x.size()),
        dv(x.size()),
        lse(static_cast<size_t>(seqlen * kHeads)) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1000) * 1e-3f - 0.5f;
  }
  strobe::Status Run(strobe::Direction direction, int32_t threads, Asked* asked) {
    const int64_t seqlen = static_cast<int64_t>(lse.size()) / kHeads;
    const strobe::Plan plan({.direction = direction,
                             .seqlen_q = seqlen,
                             .seqlen_k = seqlen,
                             .heads = kHeads,
                             .head_dim = kHeadDim,
                             .causal = true,
                             .threads = threads});
    const auto ask = asked ? Asked::Answer : nullptr;
    if (direction == strobe::Direction::kForward) {
      return plan.try_forward({.q = x.data(),
                               .k = x.data(),
                               .v = x.data(),
                               .out = out.data(),
                               .lse = lse.data(),
                               .interrupt = ask,
                               .interrupt_data = asked});
    }
    return plan.try_backward({.q = x.data(),
                              .k = x.data(),
                              .v = x.data(),
                              .out = out.data(),
                              .lse = lse.data(),
                              .dout = x.data(),
                              .dq = dq.data(),
                              .dk = dk.data(),
                              .dv = dv.data(),
                              .interrupt = ask,
                              .interrupt_data = asked});
  }

  std::vector<float> x, out, dq, dk, dv, lse;
};

constexpr strobe::Direction kDirections[] = {strobe::Direction::kForward,
                                             strobe::Direction::kBackward};

// Tokens of a launch that takes more than the library's first two questions, which come every tenth
// of a second, whatever the machine and the build: a second at least with as many threads as below.
int64_t LongLaunch() {
  for (int64_t seqlen = 1024;; seqlen *= 2) {
    Tensors t(seqlen);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(t.Run(strobe::Direction::kForward, 5, nullptr), strobe::Status::kOk);
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(1)) return seqlen;
  }
}

// What is left undone says that the launch ended early: how long it took would depend on what else
// the machine does.
TEST(Interrupt, EndsALongLaunchAtTheNextItem) {
  Tensors t(LongLaunch());
  for (const strobe::Direction direction : kDirections) {
    std::vector<float>& result = direction == strobe::Direction::kForward ? t.out : t.dk;
    for (const int32_t threads : {1, 2, 5}) {
      for (const int stop_at : {1, 2}) {
        std::fill(result.begin(), result.end(), std::nanf(""));
        Asked asked;
        asked.stop_at = stop_at;
        ASSERT_EQ(t.Run(direction, threads, &asked), strobe::Status::kInterrupted);
        EXPECT_NE(strobe::last_error().find("incomplete"), std::string::npos);
        EXPECT_STREQ(strobe::name(strobe::Status::kInterrupted), "STROBE_INTERRUPTED");
        EXPECT_EQ(asked.times, stop_at) << "asked again after the answer";
        EXPECT_FALSE(asked.elsewhere);
        EXPECT_TRUE(std::any_of(result.begin(), result.end(), [](float x) { return x != x; }))
            << "everything was computed, threads " << threads;
      }
    }
    std::fill(result.begin(), result.end(), 0.f);  // the backward pass reads `out`
  }
}

TEST(Interrupt, AnAnswerOfNoChangesNothing) {
  Tensors t(kWhole);
  for (const strobe::Direction direction : kDirections) {
    ASSERT_EQ(t.Run(direction, 2, nullptr), strobe::Status::kOk);
    const std::vector<float> out = t.out, dq = t.dq;
    Asked asked;
    ASSERT_EQ(t.Run(direction, 2, &asked), strobe::Status::kOk);
    EXPECT_FALSE(asked.elsewhere);
    EXPECT_TRUE(out == t.out);
    EXPECT_TRUE(dq == t.dq);
  }
}

// A launch that takes less than a tenth of a second. A busy machine may hold one up, but not a
// hundred in turn.
TEST(Interrupt, AShortLaunchDoesNotAsk) {
  Tensors t(64);
  for (const strobe::Direction direction : kDirections) {
    bool asks = true;
    for (int n = 0; n < 100 && asks; ++n) {
      Asked asked;
      EXPECT_EQ(t.Run(direction, 2, &asked), strobe::Status::kOk);
      asks = asked.times > 0;
    }
    EXPECT_FALSE(asks);
  }
}

// A program that was built when the structs ended before `interrupt`: what lies behind is its own.
TEST(Interrupt, AStructWithoutItIsServed) {
  Tensors t(64);
  for (const strobe::Direction direction : kDirections) {
    const strobe::Plan plan({.direction = direction,
                             .seqlen_q = 64,
                             .seqlen_k = 64,
                             .heads = kHeads,
                             .head_dim = kHeadDim});
    if (direction == strobe::Direction::kForward) {
      strobe_forward_args a =
          strobe::ForwardArgs{
              .q = t.x.data(), .k = t.x.data(), .v = t.x.data(), .out = t.out.data()}
              .c();
      a.struct_size = offsetof(strobe_forward_args, interrupt);
      std::memset(reinterpret_cast<char*>(&a) + a.struct_size, 0x5a, sizeof a - a.struct_size);
      EXPECT_EQ(strobe_forward(&plan.c(), &a), STROBE_OK) << strobe_last_error();
      a.struct_size -= sizeof(void*);
      EXPECT_EQ(strobe_forward(&plan.c(), &a), STROBE_INVALID_ARGUMENT);
    } else {
      strobe_backward_args a = strobe::BackwardArgs{.q = t.x.data(),
                                                    .k = t.x.data(),
                                                    .v = t.x.data(),
                                                    .out = t.out.data(),
                                                    .lse = t.lse.data(),
                                                    .dout = t.x.data(),
                                                    .dq = t.dq.data(),
                                                    .dk = t.dk.data(),
                                                    .dv = t.dv.data()}
                                   .c();
      a.struct_size = offsetof(strobe_backward_args, interrupt);
      std::memset(reinterpret_cast<char*>(&a) + a.struct_size, 0x5a, sizeof a - a.struct_size);
      EXPECT_EQ(strobe_backward(&plan.c(), &a), STROBE_OK) << strobe_last_error();
    }
  }
}

}  // namespace
