// Where there is no memory: an error, or the same bits with fewer threads; never the program's end.
//
// This program has its own operator new and aligned_alloc, which refuse what they are told to.
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "fixture.h"
#include "gtest/gtest.h"
#include "problem_gen.h"
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

// All zero where no kernel takes the problem.
strobe_plan PlanOf(const strobe_problem& problem) {
  strobe_plan plan{};
  plan.struct_size = sizeof plan;
  strobe_plan_make(&problem, &plan);
  return plan;
}

// A launch with a workspace of the library's own, where there are so many bytes for it at most.
template <typename Args>
std::string LaunchIn(size_t room, const strobe_problem& problem, Args args,
                     strobe_status (*launch)(const strobe_plan*, const Args*)) {
  const strobe_plan plan = PlanOf(problem);
  if (!plan.kernel) return strobe_last_error();
  args.workspace = nullptr;
  too_large = 0;
  largest = room;
  const strobe_status status = launch(&plan, &args);
  largest = std::numeric_limits<size_t>::max();
  return status == STROBE_OK ? "" : strobe_last_error();
}

// Forward, or what comes after it, of a case.
class OneWay {
 public:
  OneWay(Fixture& f, strobe_direction direction)
      : f_(f), direction_(direction), plan_(PlanOf(f.MakeProblem(direction))) {}

  const strobe_plan& plan() const { return plan_; }
  std::string Launch(size_t room) {
    if (direction_ == STROBE_FORWARD) {
      const auto launch = [&](const strobe_problem& p, const strobe_forward_args& a) {
        return LaunchIn(room, p, a, strobe_forward);
      };
      return f_.Forward(launch, true);
    }
    return f_.Backward([&](const strobe_problem& p, const strobe_backward_args& a) {
      return LaunchIn(room, p, a, strobe_backward);
    });
  }
  void Poison() { f_.Poison(direction_); }
  std::string Bits() const {
    if (direction_ == STROBE_FORWARD) return Fixture::Bits(f_.out) + f_.LseBits();
    std::string bits = Fixture::Bits(f_.dq) + Fixture::Bits(f_.dk) + Fixture::Bits(f_.dv);
    if (f_.c().has_dbias) bits += Fixture::Bits(f_.dbias);
    for (const double x : f_.ReadDsinks().data) bits += std::to_string(std::bit_cast<int64_t>(x));
    return bits;
  }

 private:
  Fixture& f_;
  strobe_direction direction_;
  strobe_plan plan_;
};

// Random problems for 16 threads, with room for all of them, for fewer and fewer, and for none.
TEST(Memory, FewerThreadsWhereThereIsNoRoomForAll) {
  if (!STROBE_TEST_REFUSES) GTEST_SKIP() << "no refusals under a sanitizer";
  int fewer = 0, refused = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Case c = seed % 3 == 0   ? GenerateMaskedCase(seed)
             : seed % 3 == 1 ? GenerateFewQueriesCase(seed)
                             : GenerateCase(seed);
    c.threads = 16;
    c.deterministic = true;
    Fixture f(c);
    for (const strobe_direction direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
      OneWay way(f, direction);
      if (way.plan().threads < 2) {
        if (direction == STROBE_FORWARD && way.Launch(largest) != "") break;
        continue;
      }
      ASSERT_EQ(way.Launch(largest), "") << ToString(c);
      const std::string wanted = way.Bits();
      for (size_t room = way.plan().workspace_bytes * 3 / 4;; room = room * 3 / 4) {
        way.Poison();
        const std::string poison = way.Bits(), error = way.Launch(room);
        EXPECT_GT(too_large, 0);
        if (error.empty()) {
          EXPECT_TRUE(way.Bits() == wanted) << ToString(c);
          ++fewer;
          continue;
        }
        EXPECT_EQ(error.rfind("a workspace of ", 0), 0u) << error;
        EXPECT_TRUE(c.accumulate || way.Bits() == poison) << "nothing is written";
        ++refused;
        break;
      }
      // The backward pass takes the forward's.
      ASSERT_EQ(way.Launch(largest), "");
    }
  }
  EXPECT_GT(fewer, 500);
  EXPECT_GT(refused, 50);
}

// Each call with operator new refusing once: the first time, the second, until there are no more.
// The threads of a team allocate too, at any time, so that some numbers are of other places each
// time.
// least: refusals that there have to be, whatever kernels the CPU has.
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
    Case c;
    c.head_dim = c.head_dim_v = 64;
    c.seqlens_q = c.seqlens_k = {300};
    c.threads = threads;
    const Fixture f(c);
    const strobe_plan forward = PlanOf(f.MakeProblem(STROBE_FORWARD)),
                      backward = PlanOf(f.MakeProblem(STROBE_BACKWARD));
    const strobe_forward_args forward_args = f.ForwardArgs();
    const strobe_backward_args backward_args = f.BackwardArgs();
    ExpectErrors("strobe_forward", 0, [&] { return strobe_forward(&forward, &forward_args); });
    ExpectErrors("strobe_backward", 0, [&] { return strobe_backward(&backward, &backward_args); });

    int64_t length = 300;
    ExpectErrors("strobe_plan_make", 0, [&] {
      const strobe_problem p = ProblemOf(++length);  // another one each time: none is remembered
      strobe_plan plan;
      plan.struct_size = sizeof plan;
      return strobe_plan_make(&p, &plan);
    });
    ExpectErrors("strobe_plan_choice", 1, [&] {
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
