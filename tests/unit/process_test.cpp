// What surrounds a launch: forks, and limits on how many threads there may be. Each scenario is a
// run of this program of its own, so that what one leaves behind (a pool, a limit) is not the
// next one's.
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "strobe/strobe.hpp"

// Sanitizers have threads and address space of their own, and ThreadSanitizer none after a fork.
#if defined(__SANITIZE_THREAD__)
#define STROBE_TEST_FORKS 0
#else
#define STROBE_TEST_FORKS 1
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STROBE_TEST_LIMITS 0
#else
#define STROBE_TEST_LIMITS 1
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kHeads = 4, kHeadDim = 64;
// After which a scenario hangs; each takes a second at most where nothing else runs.
constexpr std::chrono::seconds kPatience{300};

struct Results {
  std::vector<float> out, dq, dk, dv;
  bool operator==(const Results&) const = default;
};

// Forward and deterministic backward: the same bits on however many threads. Ends the program if
// the library refuses.
Results Solve(int32_t threads, int64_t seqlen = 512) {
  const std::vector<float> x = [&] {
    std::vector<float> values(static_cast<size_t>(seqlen * kHeads * kHeadDim));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(i * 7919 % 1000) * 1e-3f - 0.5f;
    }
    return values;
  }();
  Results r{std::vector<float>(x.size()), std::vector<float>(x.size()),
            std::vector<float>(x.size()), std::vector<float>(x.size())};
  std::vector<float> lse(static_cast<size_t>(seqlen * kHeads));
  strobe::Problem p{.seqlen_q = seqlen,
                    .seqlen_k = seqlen,
                    .heads = kHeads,
                    .head_dim = kHeadDim,
                    .causal = true,
                    .deterministic = true,
                    .threads = threads};
  try {
    strobe::Plan(p).forward(
        {.q = x.data(), .k = x.data(), .v = x.data(), .out = r.out.data(), .lse = lse.data()});
    p.direction = strobe::Direction::kBackward;
    strobe::Plan(p).backward({.q = x.data(),
                              .k = x.data(),
                              .v = x.data(),
                              .out = r.out.data(),
                              .lse = lse.data(),
                              .dout = x.data(),
                              .dq = r.dq.data(),
                              .dk = r.dk.data(),
                              .dv = r.dv.data()});
  } catch (const strobe::Error& error) {
    std::fprintf(stderr, "threads %d: %s\n", threads, error.what());
    std::_Exit(3);
  }
  return r;
}

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::_Exit(4);
}

int Threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    (void)task;
    ++count;
  }
  return count;
}

// Somebody else's: the library has not been called.
void MakeOpenMPPool(int threads) {
  std::atomic<int> together{0};
#pragma omp parallel num_threads(threads)
  ++together;
  Expect(together == threads, "OpenMP gives the threads asked for");
}

void InAChild(const std::function<void()>& body) {
  const pid_t child = fork();
  Expect(child >= 0, "a fork");
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends well");
}

// --- Scenarios ---

void ForkAfterAnotherLibrarysPool() {
  MakeOpenMPPool(3);
  Results in_parent;
  InAChild([] {
    const Results one = Solve(1);
    Expect(Solve(3) == one, "the same bits in the child");
    // A thread of the child's own has no pool behind it.
    Results elsewhere;
    std::thread([&] { elsewhere = Solve(3); }).join();
    Expect(elsewhere == one, "the same bits in a thread of the child");
    InAChild([&] { Expect(Solve(3) == one, "the same bits in the child's child"); });
  });
  Expect(Solve(3) == Solve(1), "the same bits in the parent");
}

void ForkAfterOwnPool() {
  const Results one = Solve(1);
  Expect(Solve(3) == one, "the same bits in the parent");
  InAChild([&] { Expect(Solve(3) == one, "the same bits in the child"); });
  Expect(Solve(3) == one, "the same bits in the parent afterwards");
}

// In a fork's child the work is still done by several threads.
void ForkedChildHasThreads() {
  MakeOpenMPPool(2);
  InAChild([] {
    std::atomic<bool> done{false};
    std::atomic<int> most{0};
    std::thread watch([&] {
      for (; !done; usleep(50)) most = std::max(most.load(), Threads());
    });
    // On a busy machine the one that counts may miss many calls.
    const auto deadline = Clock::now() + kPatience / 2;
    while (most <= 2 && Clock::now() < deadline) Solve(3);
    done = true;
    watch.join();
    Expect(most > 2, "more threads than the caller and the one that counts");
  });
}

// As under a cgroup's limit on pids: pthread_create fails with EAGAIN.
void LimitThreads(rlim_t most) {
  // A number that nobody else has, as the limit counts all of a user's processes; and root has
  // none.
  if (geteuid() == 0) {
    const auto user = static_cast<uid_t>(70000 + getpid());
    Expect(setresuid(user, user, user) == 0, "another user");
  }
  const rlimit limit{most, most};
  Expect(setrlimit(RLIMIT_NPROC, &limit) == 0, "a limit");
}

void NoThreadCanBeMade() {
  const Results one = Solve(1);
  LimitThreads(1);
  for (const int32_t threads : {2, 8, 256, 1, 2}) Expect(Solve(threads) == one, "the same bits");
  Expect(Threads() == 1, "one thread");
}

void FewThreadsCanBeMade() {
  if (geteuid() != 0) return;  // a user's other processes count too
  const Results one = Solve(1);
  // Callers for later: at the limit, the test itself could not be sure of a thread.
  std::atomic<bool> begin{false};
  std::vector<std::thread> callers;
  for (int n = 0; n < 2; ++n) {
    callers.emplace_back([&] {
      while (!begin) usleep(1000);
      Expect(Solve(4) == one, "the same bits in another thread");
    });
  }
  LimitThreads(7);
  for (int n = 0; n < 20; ++n) {
    for (const int32_t threads : {8, 2, 3, 64, 4}) {
      Expect(Solve(threads) == one, "the same bits");
      // The pool is used all the same.
      Expect(Threads() >= 4 && Threads() <= 7, "some threads of the seven");
    }
  }
  // Callers beside each other, each with a pool.
  begin = true;
  for (std::thread& caller : callers) caller.join();
}

// The limit is what is wanted, so that a thread that is ended or joined but still counted is one
// too many for the next.
void GrowsAndShrinksAtTheLimit() {
  if (geteuid() != 0) return;
  const Results one = Solve(1, 96);
  LimitThreads(6);
  for (int n = 0; n < 60; ++n) {
    for (const int32_t threads : {2, 6}) Expect(Solve(threads, 96) == one, "the same bits");
    while (Threads() > 6) usleep(100);
  }
}

// Another library's smaller team ends threads of the pool, and the limit falls meanwhile.
void ThreadsThatAreGoneAreMissed() {
  if (geteuid() != 0) return;
  const Results one = Solve(1);
  Expect(Solve(6) == one && Threads() == 6, "six threads");
  MakeOpenMPPool(2);
  while (Threads() > 2) usleep(1000);  // libgomp has told them to end
  Expect(Threads() == 2, "two threads");
  LimitThreads(3);
  Expect(Solve(6) == one, "the same bits");
  Expect(Threads() <= 3, "no more than the limit");
}

void NoAddressSpaceForThreads() {
  const Results one = Solve(1);
  long pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  Expect(file && std::fscanf(file, "%ld", &pages) == 1, "/proc/self/statm");
  std::fclose(file);
  const rlim_t used = static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
  for (const rlim_t more : {rlim_t{600}, rlim_t{300}, rlim_t{100}, rlim_t{40}}) {
    const rlimit limit{used + (more << 20), RLIM_INFINITY};
    Expect(setrlimit(RLIMIT_AS, &limit) == 0, "a limit");
    for (const int32_t threads : {2, 256, 64, 256}) {
      Expect(Solve(threads) == one, "the same bits");
    }
  }
}

// A team in a team: OpenMP makes threads for it and ends them each time.
void NestedTeams() {
  const Results one = Solve(1);
  for (const int levels : {1, 2}) {
    omp_set_max_active_levels(levels);
    for (int n = 0; n < 5; ++n) {
      std::atomic<int> wrong{0};
#pragma omp parallel num_threads(2)
      if (Solve(3) != one) ++wrong;
      Expect(wrong == 0, "the same bits in a team");
      Expect(Solve(3) == one, "the same bits outside");
    }
  }
}

// --- The program ---

const std::map<std::string, void (*)()> kScenarios = {
    {"ForkAfterAnotherLibrarysPool", ForkAfterAnotherLibrarysPool},
    {"ForkAfterOwnPool", ForkAfterOwnPool},
    {"ForkedChildHasThreads", ForkedChildHasThreads},
    {"NoThreadCanBeMade", NoThreadCanBeMade},
    {"FewThreadsCanBeMade", FewThreadsCanBeMade},
    {"GrowsAndShrinksAtTheLimit", GrowsAndShrinksAtTheLimit},
    {"ThreadsThatAreGoneAreMissed", ThreadsThatAreGoneAreMissed},
    {"NoAddressSpaceForThreads", NoAddressSpaceForThreads},
    {"NestedTeams", NestedTeams},
};

class Process : public ::testing::TestWithParam<std::string> {};

TEST_P(Process, RunsToItsEnd) {
  const std::string& name = GetParam();
  const bool forks = name.rfind("Fork", 0) == 0;
  if (forks ? !STROBE_TEST_FORKS : !STROBE_TEST_LIMITS) GTEST_SKIP() << "not under this sanitizer";
  int output[2];
  ASSERT_EQ(pipe(output), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    setpgid(0, 0);  // with its own children
    dup2(output[1], STDOUT_FILENO);
    dup2(output[1], STDERR_FILENO);
    close(output[0]);
    close(output[1]);
    execl("/proc/self/exe", "process_test", "--scenario", name.c_str(), nullptr);
    std::_Exit(126);
  }
  close(output[1]);
  std::string text;
  std::thread reader([&] {
    char buffer[512];
    for (ssize_t n; (n = read(output[0], buffer, sizeof buffer)) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
  });
  int status = 0;
  pid_t ended = 0;
  const auto deadline = Clock::now() + kPatience;
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 && Clock::now() < deadline) {
    usleep(2000);
  }
  kill(-child, SIGKILL);
  if (ended == 0) waitpid(child, &status, 0);
  reader.join();
  close(output[0]);
  EXPECT_NE(ended, 0) << "it hangs";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_EQ(text, "") << "the library prints nothing";
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, body] : kScenarios) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Scenario, Process, ::testing::ValuesIn(Names()),
                         [](const auto& scenario) { return scenario.param; });

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--scenario") == 0) {
    kScenarios.at(argv[2])();
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
