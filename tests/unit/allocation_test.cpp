// A launch with the caller's workspace allocates nothing and asks the environment nothing, and a
// tiny one is quick.
//
// This program has its own malloc, operator new and getenv, which count while they are told to.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "fixture.h"
#include "gtest/gtest.h"
#include "strobe/ring.hpp"
#include "strobe/ulysses.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define STROBE_TEST_COUNTS 0  // a sanitizer has a malloc of its own
#else
#define STROBE_TEST_COUNTS 1
#endif

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0}, look_ups{0};

}  // namespace

#if STROBE_TEST_COUNTS

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
extern char** environ;

void* malloc(size_t size) {
  if (counting) ++allocations;
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  if (counting) ++allocations;
  return __libc_calloc(count, size);
}
void* realloc(void* pointer, size_t size) {
  if (counting) ++allocations;
  return __libc_realloc(pointer, size);
}
void* memalign(size_t alignment, size_t size) {
  if (counting) ++allocations;
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** pointer, size_t alignment, size_t size) {
  *pointer = memalign(alignment, size);
  return *pointer ? 0 : ENOMEM;
}

char* getenv(const char* name) {
  if (counting) ++look_ups;
  const size_t length = std::strlen(name);
  for (char** entry = environ; entry && *entry; ++entry) {
    if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=')
      return *entry + length + 1;
  }
  return nullptr;
}
char* secure_getenv(const char* name) { return getenv(name); }

}  // extern "C"

#endif

namespace strobe_test {
namespace {

using oracle::DType;

// 64-byte aligned room.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : storage_(bytes + 64) {}
  void* data() {
    return storage_.data() + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64;
  }

 private:
  std::vector<char> storage_;
};

Case SmallCase(DType dtype, int64_t seqlen) {
  Case c;
  c.seed = 2;
  c.dtype = dtype;
  c.scale = std::nanf("");
  c.head_dim = c.head_dim_v = 64;
  c.seqlens_q = c.seqlens_k = {seqlen};
  c.threads = 1;
  return c;
}

strobe_plan MakePlan(const strobe_problem& problem) {
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_plan_make(&problem, &plan), STROBE_OK) << strobe_last_error();
  return plan;
}

TEST(Allocation, TheCountersCount) {
  if (!STROBE_TEST_COUNTS) GTEST_SKIP() << "no counters under a sanitizer";
  allocations = look_ups = 0;
  counting = true;
  int* volatile number = new int(3);
  void* volatile memory = std::malloc(10);
  const char* volatile home = std::getenv("HOME");
  counting = false;
  delete number;
  std::free(memory);
  (void)home;
  EXPECT_EQ(allocations, 2);
  EXPECT_EQ(look_ups, 1);
}

TEST(Allocation, ALaunchWithAWorkspaceAllocatesNothing) {
  if (!STROBE_TEST_COUNTS) GTEST_SKIP() << "no counters under a sanitizer";
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int feature : {0, 1, 2, 3, 4}) {
      Case c = SmallCase(dtype, 300);
      // The second time: OpenMP then has its threads, and no others are tried for.
      c.threads = feature == 4 ? 2 : 1;
      c.causal = feature >= 1;
      c.dropout_p = feature == 2 ? 0.3f : 0;
      c.softcap = feature == 2 ? 10.0f : 0;
      c.alibi = feature == 2 ? STROBE_ALIBI_PER_HEAD : STROBE_ALIBI_NONE;
      c.has_dlse = feature == 3;
      c.deterministic = feature == 3;
      c.varlen = feature == 3;
      Fixture f(c);
      const strobe_plan forward = MakePlan(f.MakeProblem(STROBE_FORWARD));
      const strobe_plan backward = MakePlan(f.MakeProblem(STROBE_BACKWARD));
      Workspace room(std::max(forward.workspace_bytes, backward.workspace_bytes));
      strobe_forward_args fa = f.ForwardArgs();
      strobe_backward_args ba = f.BackwardArgs();
      fa.workspace = ba.workspace = room.data();
      fa.workspace_bytes = forward.workspace_bytes;
      ba.workspace_bytes = backward.workspace_bytes;
      if (c.threads > 1) {
        strobe_forward(&forward, &fa);
        strobe_backward(&backward, &ba);
      }
      allocations = look_ups = 0;
      counting = true;
      const strobe_status first = strobe_forward(&forward, &fa);
      const strobe_status second = strobe_backward(&backward, &ba);
      counting = false;
      EXPECT_EQ(first, STROBE_OK);
      EXPECT_EQ(second, STROBE_OK);
      EXPECT_EQ(allocations, 0) << ToString(c);
      EXPECT_EQ(look_ups, 0) << ToString(c);
    }
  }
}

// Ranks that never answer: what is received stays as it is.
class SilentCommunicator : public strobe::Communicator {
 public:
  explicit SilentCommunicator(int32_t ranks) : ranks_(ranks) {}

  int32_t ranks() const override { return ranks_; }
  int32_t rank() const override { return 1; }
  void begin(int, std::span<const strobe::RingMessage> sends,
             std::span<const strobe::RingMessage> receives, void*) override {
    messages += sends.size() + receives.size();
  }
  void end(int, void*) override {}

  size_t messages = 0;

 private:
  int32_t ranks_;
};

// Method: strobe::Ring or strobe::Ulysses.
template <typename Method>
void ExpectNoAllocation(int32_t count, int32_t ulysses = 0) {
  for (const bool packed : {false, true}) {
    strobe::RingProblem problem = {.ranks = count, .rank = 1};
    problem.ulysses = ulysses;
    strobe::Problem& layer = problem.layer;
    layer = {.dtype = strobe::DType::kBFloat16, .heads = count, .head_dim = 32, .causal = true};
    layer.has_sinks = layer.has_dsinks = true;
    layer.window_left = 100;
    layer.threads = 1;
    layer.direction = strobe::Direction::kBackward;
    if (packed) {
      problem.lengths = {100, 1, 200};
    } else {
      layer.batch = 2;
      layer.seqlen_q = layer.seqlen_k = 300;
    }
    problem.seqused = packed ? std::vector<int64_t>{90, 1, 0} : std::vector<int64_t>{300, 7};
    std::vector<int32_t> intervals;
    for (int32_t row = 0; row < (packed ? 301 : 300); ++row)
      intervals.insert(intervals.end(), {0, 5, row - 50, row + 1});
    problem.mask = {.intervals = intervals, .all_rows = true};
    const Method forward(problem.forward()), backward(problem);
    const auto elements = static_cast<size_t>(layer.batch * forward.rows() * count * 32);
    std::vector<uint16_t> q(elements), k(q), v(q), out(q), dout(q), dq(q), dk(q), dv(q);
    std::vector<float> lse(elements / 32), sinks(static_cast<size_t>(count)), dsinks(sinks);
    const size_t bytes = std::max(forward.workspace_bytes(), backward.workspace_bytes());
    Workspace room(bytes);
    const std::span<std::byte> workspace(static_cast<std::byte*>(room.data()), bytes);
    strobe::ForwardArgs fa = {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()};
    fa.lse = lse.data();
    fa.sinks = sinks.data();
    fa.workspace = workspace;
    strobe::BackwardArgs ba = {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()};
    ba.lse = lse.data();
    ba.dout = dout.data();
    ba.dq = dq.data();
    ba.dk = dk.data();
    ba.dv = dv.data();
    ba.sinks = sinks.data();
    ba.dsinks = dsinks.data();
    ba.workspace = workspace;
    SilentCommunicator ranks(count);
    forward.forward(fa, ranks);  // the first merge of a process finds out which kernels there are
    allocations = look_ups = 0;
    counting = true;
    forward.forward(fa, ranks);
    backward.backward(ba, ranks);
    counting = false;
    EXPECT_EQ(allocations, 0);
    EXPECT_EQ(look_ups, 0);
    EXPECT_GT(ranks.messages, 8U);
  }
}

TEST(Allocation, ARingAllocatesNothing) {
  if (!STROBE_TEST_COUNTS) GTEST_SKIP() << "no counters under a sanitizer";
  ExpectNoAllocation<strobe::Ring>(3);
}
TEST(Allocation, AnAllToAllAllocatesNothing) {
  if (!STROBE_TEST_COUNTS) GTEST_SKIP() << "no counters under a sanitizer";
  ExpectNoAllocation<strobe::Ulysses>(3);
  ExpectNoAllocation<strobe::Ulysses>(4, 2);
}

// A plan of the caller's and the library's own workspace are no leak either: checked by
// LeakSanitizer in its build.
TEST(Allocation, PlanningAsksTheEnvironmentOnlyOnce) {
  if (!STROBE_TEST_COUNTS) GTEST_SKIP() << "no counters under a sanitizer";
  const Fixture f(SmallCase(DType::kFloat32, 16));
  const strobe_problem problem = f.MakeProblem(STROBE_FORWARD);
  MakePlan(problem);
  allocations = look_ups = 0;
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  counting = true;
  const strobe_status status = strobe_plan_make(&problem, &plan);
  counting = false;
  EXPECT_EQ(status, STROBE_OK);
  EXPECT_EQ(look_ups, 0);
}

double Microseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

// Best of many rounds' medians: other work on the machine can only make it look slower. While it is
// more than `wanted`, there are rounds for a minute, as other work may last.
template <typename Body>
double MedianMicroseconds(double wanted, Body body) {
  const auto patience = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  double best = HUGE_VAL;
  for (int round = 0; round < 50 || (best > wanted && std::chrono::steady_clock::now() < patience);
       ++round) {
    std::vector<double> times(101);
    for (double& t : times) {
      const auto start = std::chrono::steady_clock::now();
      body();
      t = Microseconds(std::chrono::steady_clock::now() - start);
    }
    std::nth_element(times.begin(), times.begin() + 50, times.end());
    best = std::min(best, times[50]);
  }
  return best;
}

TEST(Latency, PlanAndLaunchOfATinyProblem) {
#if !STROBE_TEST_COUNTS || !defined(NDEBUG)
  GTEST_SKIP() << "timed in release builds without sanitizers";
#endif
  constexpr double kForward = 5, kAny = HUGE_VAL;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Fixture f(SmallCase(dtype, 16));
    const strobe_problem forward = f.MakeProblem(STROBE_FORWARD),
                         backward = f.MakeProblem(STROBE_BACKWARD);
    const strobe_plan forward_plan = MakePlan(forward), backward_plan = MakePlan(backward);
    Workspace room(std::max(forward_plan.workspace_bytes, backward_plan.workspace_bytes));
    strobe_forward_args fa = f.ForwardArgs();
    strobe_backward_args ba = f.BackwardArgs();
    fa.workspace = ba.workspace = room.data();
    fa.workspace_bytes = forward_plan.workspace_bytes;
    ba.workspace_bytes = backward_plan.workspace_bytes;
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    bool ok = true;
    const double plan_only =
        MedianMicroseconds(kAny, [&] { ok &= strobe_plan_make(&forward, &plan) == STROBE_OK; });
    const double both = MedianMicroseconds(kForward, [&] {
      ok &=
          strobe_plan_make(&forward, &plan) == STROBE_OK && strobe_forward(&plan, &fa) == STROBE_OK;
    });
    const double back = MedianMicroseconds(kAny, [&] {
      ok &= strobe_plan_make(&backward, &plan) == STROBE_OK &&
            strobe_backward(&plan, &ba) == STROBE_OK;
    });
    EXPECT_TRUE(ok);
    std::printf(
        "1 x 1 x 16 x 64 %s, %s, one thread: plan %.2f us, plan + forward %.2f us, plan + backward "
        "%.2f us\n",
        oracle::Name(dtype), plan.kernel, plan_only, both, back);
    EXPECT_LE(both, kForward) << "plan + forward, microseconds, " << oracle::Name(dtype);
  }
}

}  // namespace
}  // namespace strobe_test
