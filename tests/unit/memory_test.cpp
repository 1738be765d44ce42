// Where there is no memory: an error, or the same bits with fewer threads; never the program's end.
//
// This program has its own operator new and aligned_alloc, which refuse what they are told to.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "small_problem.h"
#include "strobe/strobe.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define STROBE_TEST_REFUSES 0  // a sanitizer has a malloc of its own
#else
#define STROBE_TEST_REFUSES 1
#endif

namespace {

// operator new succeeds so often from now on, and after the one that it refuses.
std::atomic<int64_t> until_refused{std::numeric_limits<int64_t>::max()};
// The largest that aligned_alloc gives, and how often it refused.
std::atomic<size_t> largest{std::numeric_limits<size_t>::max()};
std::atomic<int> too_large{0};

}  // namespace

#if STROBE_TEST_REFUSES

// Not inlined, or the compiler holds new and delete for functions that do not go together.
[[gnu::noinline]] void* operator new(size_t size) {
  if (until_refused.fetch_sub(1, std::memory_order_relaxed) == 1) throw std::bad_alloc();
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" {

void* __libc_memalign(size_t, size_t);

void* aligned_alloc(size_t alignment, size_t size) {
  if (size <= largest) return __libc_memalign(alignment, size);
  ++too_large;
  return nullptr;
}

}  // extern "C"

#endif

namespace strobe_test {
namespace {

// Calls of the library, and what they wrote.
class Attention {
 public:
  Attention(int64_t queries, int64_t keys, int32_t threads) : problem_(ProblemOf(keys)) {
    problem_.seqlen_q = queries;
    problem_.threads = threads;
    problem_.deterministic = 1;
    const auto width = static_cast<size_t>(problem_.heads * problem_.head_dim);
    for (size_t i = 0; i < width * static_cast<size_t>(std::max(queries, keys)); ++i) {
      x_.push_back(static_cast<float>(i * 7919 % 1000) * 1e-3f - 0.5f);
    }
    out_.resize(width * static_cast<size_t>(queries));
    dq_ = out_;
    dk_.resize(width * static_cast<size_t>(keys));
    dv_ = dk_;
    lse_.resize(static_cast<size_t>(problem_.heads * queries));
  }

  strobe_plan plan(strobe_direction direction) const {
    strobe_problem p = problem_;
    p.direction = direction;
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    EXPECT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
    return plan;
  }
  strobe_status Forward(const strobe_plan& plan) {
    strobe_forward_args a{};
    a.struct_size = sizeof a;
    a.q = a.k = a.v = x_.data();
    a.out = out_.data();
    a.lse = lse_.data();
    return strobe_forward(&plan, &a);
  }
  strobe_status Backward(const strobe_plan& plan) {
    strobe_backward_args a{};
    a.struct_size = sizeof a;
    a.q = a.k = a.v = a.dout = x_.data();
    a.out = out_.data();
    a.lse = lse_.data();
    a.dq = dq_.data();
    a.dk = dk_.data();
    a.dv = dv_.data();
    return strobe_backward(&plan, &a);
  }
  std::vector<std::vector<float>> results() const { return {out_, lse_, dq_, dk_, dv_}; }
  void Poison() {
    for (std::vector<float>* const x : {&out_, &lse_, &dq_, &dk_, &dv_}) {
      std::fill(x->begin(), x->end(), 7.0f);
    }
  }

 private:
  strobe_problem problem_;
  std::vector<float> x_, out_, lse_, dq_, dk_, dv_;
};

// The workspace of a launch with 64 threads, with room for all, for some, for one and for none.
TEST(Memory, FewerThreadsWhereThereIsNoRoomForAll) {
  if (!STROBE_TEST_REFUSES) GTEST_SKIP() << "no refusals under a sanitizer";
  for (const int64_t queries : {1, 5, 700}) {
    Attention alone(queries, 3000, 1), many(queries, 3000, 64);
    ASSERT_EQ(alone.Forward(alone.plan(STROBE_FORWARD)), STROBE_OK);
    ASSERT_EQ(alone.Backward(alone.plan(STROBE_BACKWARD)), STROBE_OK);
    const strobe_plan forward = many.plan(STROBE_FORWARD), backward = many.plan(STROBE_BACKWARD);
    for (const auto& [plan, first] : {std::pair{&forward, true}, std::pair{&backward, false}}) {
      if (!first) {
        ASSERT_EQ(many.Forward(forward), STROBE_OK);
      }
      const auto launch = [&] { return first ? many.Forward(*plan) : many.Backward(*plan); };
      int refused = 0, fewer = 0;
      for (size_t room = plan->workspace_bytes + 64;; room = room * 3 / 4) {
        if (first) many.Poison();
        too_large = 0;
        largest = room;
        const strobe_status status = launch();
        largest = std::numeric_limits<size_t>::max();
        if (status == STROBE_OK) {
          EXPECT_EQ(too_large > 0, room < plan->workspace_bytes) << room;
          fewer += too_large > 0;
          const auto got = many.results(), wanted = alone.results();
          for (size_t n = first ? 0 : 2; n < (first ? 2 : 5); ++n) EXPECT_EQ(got[n], wanted[n]);
        } else {
          EXPECT_EQ(status, STROBE_OUT_OF_MEMORY);
          EXPECT_NE(std::strstr(strobe_last_error(), "a workspace of "), nullptr)
              << strobe_last_error();
          if (first) {
            EXPECT_EQ(many.results()[0].front(), 7.0f) << "nothing is written";
          }
          if (++refused == 3) break;
        }
      }
      EXPECT_TRUE(fewer > 0 || plan->threads == 1) << queries;
    }
  }
}

// Each call with operator new refusing once: the first time, the second, until there are no more.
// The threads of a team allocate too, at any time, so that some numbers are of other places each
// time.
// least: refusals that there have to be.
void ExpectErrors(const char* what, int least, const std::function<strobe_status()>& call) {
  ASSERT_EQ(call(), STROBE_OK) << what << ": " << strobe_last_error();
  int refused = 0;
  for (int64_t n = 1; n < 2000; n += n < 100 ? 1 : 17) {
    until_refused = n;
    const strobe_status status = call();
    const bool some = until_refused.exchange(std::numeric_limits<int64_t>::max()) <= 0;
    if (status != STROBE_OK) {
      EXPECT_EQ(status, STROBE_OUT_OF_MEMORY) << what << " " << n << ": " << strobe_last_error();
      EXPECT_TRUE(some);
      ++refused;
    }
    if (!some) break;
  }
  ASSERT_EQ(call(), STROBE_OK) << what << ": " << strobe_last_error();
  EXPECT_GE(refused, least) << what;
}

TEST(Memory, ACallThatGetsNoneSaysSo) {
  if (!STROBE_TEST_REFUSES) GTEST_SKIP() << "no refusals under a sanitizer";
  for (const int32_t threads : {1, 3}) {
    Attention attention(300, 300, threads);
    const strobe_plan forward = attention.plan(STROBE_FORWARD),
                      backward = attention.plan(STROBE_BACKWARD);
    ExpectErrors("strobe_forward", 0, [&] { return attention.Forward(forward); });
    ExpectErrors("strobe_backward", 0, [&] { return attention.Backward(backward); });

    int64_t length = 300;
    ExpectErrors("strobe_plan_make", 1, [&] {
      const strobe_problem p = ProblemOf(++length);  // another one each time: none is remembered
      strobe_plan plan;
      plan.struct_size = sizeof plan;
      return strobe_plan_make(&p, &plan);
    });
    ExpectErrors("strobe_plan_choice", 10, [&] {
      const strobe_problem p = ProblemOf(300);
      strobe_choice choice;
      choice.struct_size = sizeof choice;
      return strobe_plan_choice(&p, 0, &choice);
    });
    ExpectErrors("strobe_why", 0, [&] {
      char text[4096];
      const strobe_problem p = ProblemOf(300);
      strobe_why(&p, text, sizeof text);
      strobe_plan_text(&forward, text, sizeof text);
      strobe_tuning_text(text, sizeof text);
      return STROBE_OK;
    });

    strobe_problem masked = ProblemOf(1000);
    masked.threads = threads;
    masked.mask.kind = STROBE_MASK_PACKED;
    masked.mask.block_q = masked.mask.block_k = 64;
    masked.mask.batch = masked.mask.heads = 1;
    std::vector<uint8_t> keep(1000 * 1000);
    for (size_t i = 0; i < keep.size(); ++i) keep[i] = i % 3 == 0;
    std::vector<int32_t> intervals;
    for (int32_t q = 0; q < 1000; ++q) intervals.insert(intervals.end(), {0, 9, q / 2, q + 1});
    size_t bytes = 0;
    ASSERT_EQ(strobe_mask_bytes(&masked, &bytes), STROBE_OK);
    struct alignas(64) Line {
      char bytes[64];
    };
    std::vector<Line> packed(bytes / 64 + 1);
    ExpectErrors("strobe_mask_pack", 50, [&] {
      strobe_mask_args a{};
      a.struct_size = sizeof a;
      a.keep = keep.data();
      a.intervals = intervals.data();
      a.packed = packed.data();
      a.packed_bytes = bytes;
      return strobe_mask_pack(&masked, &a);
    });
  }
}

}  // namespace
}  // namespace strobe_test
