// What the library says unasked: STROBE_LOG's lines, and ranges of NVTX. Both are looked up once in
// a process, so each test looks at a child of its own, whose parent has not called the library.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "strobe/strobe.hpp"

namespace {

using Environment = std::vector<std::pair<const char*, const char*>>;

/// What a child with these variables writes to stderr while it runs `body`.
std::string StderrOf(const Environment& variables, const std::function<void()>& body) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    dup2(ends[1], STDERR_FILENO);
    for (const auto& [name, value] : variables) setenv(name, value, 1);
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(1);
    }
    std::_Exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t size; (size = read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<size_t>(size));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << text;
  return text;
}

std::vector<std::string> Lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

strobe::Problem ProblemOf(int64_t seqlen) {
  return {.seqlen_q = seqlen, .seqlen_k = seqlen, .heads = 1, .head_dim = 8, .threads = 1};
}

void Launch(strobe::Problem p) {
  const auto rows = static_cast<size_t>(p.seqlen_q);
  std::vector<float> x(rows * 64, 0.5f), out(x), dq(x), dk(x), dv(x), lse(rows);
  if (p.direction == strobe::Direction::kForward) {
    strobe::Plan(p).forward(
        {.q = x.data(), .k = x.data(), .v = x.data(), .out = out.data(), .lse = lse.data()});
    return;
  }
  strobe::Plan(p).backward({.q = x.data(),
                            .k = x.data(),
                            .v = x.data(),
                            .out = out.data(),
                            .lse = lse.data(),
                            .dout = x.data(),
                            .dq = dq.data(),
                            .dk = dk.data(),
                            .dv = dv.data()});
}

void LaunchBoth(int64_t seqlen) {
  strobe::Problem p = ProblemOf(seqlen);
  Launch(p);
  p.direction = strobe::Direction::kBackward;
  Launch(p);
}

/// The line that docs/semantics.md promises, made of what strobe_plan_text says.
std::string Expected(const strobe::Problem& p) {
  std::string problem, kernel, line;
  std::istringstream text(strobe::Plan(p).text());
  while (std::getline(text, line) && line != "why") {
    if (line.starts_with("problem ")) problem = line.substr(11);
    if (line.starts_with("kernel ")) kernel = line.substr(11);
  }
  std::string wanted = "strobe: " + kernel + " computes " + problem;
  std::string names, last;
  const auto end = [&] {
    if (!names.empty()) wanted += "; " + names + " declines: " + last;
    names.clear();
  };
  while (std::getline(text, line) && !line.ends_with(" takes it")) {
    const std::string name = line.substr(2, line.find(' ', 2) - 2);
    const std::string reason = line.substr(line.find("declines: ") + 10);
    if (!names.empty() && reason == last) {
      names += ", " + name;
      continue;
    }
    end();
    names = name;
    last = reason;
  }
  end();
  return wanted;
}

TEST(Log, SaysNothingUnasked) {
  for (const char* off : {"", "0"}) {
    EXPECT_EQ(StderrOf({{"STROBE_LOG", off}}, [] { LaunchBoth(3); }), "") << off;
  }
  EXPECT_EQ(StderrOf({}, [] { LaunchBoth(3); }), "");
}

TEST(Log, HasALineForEachNewProblem) {
  const std::string text = StderrOf({{"STROBE_LOG", "1"}}, [] {
    LaunchBoth(3);
    LaunchBoth(3);
    strobe::Problem apart = ProblemOf(3);  // the same problem in other memory
    apart.q = {.batch = 48, .seqlen = 16, .head = 8, .dim = 1};
    Launch(apart);
    strobe::Problem causal = ProblemOf(3);
    causal.causal = true;
    Launch(causal);
    Launch(ProblemOf(0));              // runs no kernel
    (void)strobe::Plan(ProblemOf(9));  // is never launched
  });
  const std::vector<std::string> lines = Lines(text);
  ASSERT_EQ(lines.size(), 3u) << text;
  // In a child: the parent may not call the library.
  const std::string wanted = StderrOf({}, [] {
    strobe::Problem p = ProblemOf(3);
    std::string all = Expected(p) + "\n";
    p.direction = strobe::Direction::kBackward;
    all += Expected(p) + "\n";
    p = ProblemOf(3);
    p.causal = true;
    std::fputs((all + Expected(p) + "\n").c_str(), stderr);
  });
  EXPECT_EQ(text, wanted);
  EXPECT_NE(text.find(" computes backward fp32, batch 1, heads 1, seqlen 3"), std::string::npos);
}

TEST(Log, SaysWhyKernelsBeforeDeclined) {
  const std::string text =
      StderrOf({{"STROBE_LOG", "1"}, {"STROBE_CPU_ISA", "portable"}}, [] { Launch(ProblemOf(3)); });
  ASSERT_EQ(Lines(text).size(), 1u) << text;
  EXPECT_TRUE(text.starts_with("strobe: cpu_portable computes forward fp32, ")) << text;
  const std::string wanted = StderrOf({{"STROBE_CPU_ISA", "portable"}}, [] {
    std::fputs((Expected(ProblemOf(3)) + "\n").c_str(), stderr);
  });
  EXPECT_EQ(text, wanted);
}

TEST(Log, SaysWhyNoKernelTakesAProblem) {
  const std::string text = StderrOf({{"STROBE_LOG", "1"}, {"STROBE_CPU_ISA", "abacus"}}, [] {
    const strobe_problem p = ProblemOf(3).c();
    strobe_plan plan{};
    plan.struct_size = sizeof plan;
    for (int i = 0; i < 2; ++i) (void)strobe_plan_make(&p, &plan);
  });
  ASSERT_EQ(Lines(text).size(), 1u) << text;
  EXPECT_TRUE(text.starts_with("strobe: no kernel takes forward fp32, batch 1")) << text;
  EXPECT_NE(text.find("cpu_portable declines: STROBE_CPU_ISA = abacus, expected"),
            std::string::npos);
}

TEST(Log, RefusesOtherValuesOnce) {
  for (const char* odd : {"yes", "2", "1 "}) {
    EXPECT_EQ(StderrOf({{"STROBE_LOG", odd}}, [] { LaunchBoth(3); }),
              std::string("strobe: STROBE_LOG = ") + odd +
                  ", expected 0 (off) or 1 (a line for each new problem)\n");
  }
}

TEST(Log, EndsAfter1024Problems) {
  const std::string text = StderrOf({{"STROBE_LOG", "1"}}, [] {
    for (int64_t seqlen = 1; seqlen <= 1100; ++seqlen) Launch(ProblemOf(seqlen));
  });
  const std::vector<std::string> lines = Lines(text);
  ASSERT_EQ(lines.size(), 1025u);
  EXPECT_EQ(lines.back(), "strobe: STROBE_LOG has told of 1024 problems and tells of no more");
}

TEST(Log, HasEachLineOnceFromSeveralThreads) {
  const std::string text = StderrOf({{"STROBE_LOG", "1"}}, [] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([] {
        for (int64_t seqlen = 1; seqlen <= 40; ++seqlen) Launch(ProblemOf(seqlen));
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::vector<std::string> lines = Lines(text);
  EXPECT_EQ(lines.size(), 40u) << text;
  for (const std::string& line : lines) EXPECT_TRUE(line.starts_with("strobe: cpu_")) << line;
}

#ifdef STROBE_NVTX_LISTENER
TEST(Nvtx, ShowsLaunchesToATool) {
  const std::string text = StderrOf(
      {{"NVTX_INJECTION64_PATH", STROBE_NVTX_LISTENER}, {"STROBE_CPU_ISA", "portable"}}, [] {
        LaunchBoth(3);
        LaunchBoth(3);
      });
  const std::string both =
      "push strobe::forward [cpu_portable]\npop\npush strobe::backward [cpu_portable]\npop\n";
  EXPECT_EQ(text, "domain strobe\n" + both + both);
}

TEST(Nvtx, ShowsMerges) {
  const std::string text = StderrOf({{"NVTX_INJECTION64_PATH", STROBE_NVTX_LISTENER}}, [] {
    const float outs[2] = {1, 2}, lses[2] = {0, 0};
    float out = 0, lse = 0;
    strobe_merge_args m{};
    m.struct_size = sizeof m;
    m.parts = 2;
    m.batch = m.seqlen_q = m.heads = m.head_dim_v = 1;
    m.outs = outs;
    m.lses = lses;
    m.out = &out;
    m.lse = &lse;
    if (strobe_merge(&m) != STROBE_OK) std::fprintf(stderr, "%s\n", strobe_last_error());
  });
  EXPECT_EQ(text, "domain strobe\npush strobe::merge [cpu]\npop\n");
}

TEST(Nvtx, EndsARangeWhereALaunchIsRefused) {
  const std::string text = StderrOf({{"NVTX_INJECTION64_PATH", STROBE_NVTX_LISTENER}}, [] {
    strobe::ForwardArgs none{};
    if (strobe::Plan(ProblemOf(3)).try_forward(none) != strobe::Status::kInvalidArgument)
      std::fprintf(stderr, "not refused\n");
    LaunchBoth(3);
  });
  std::vector<std::string> open;
  for (const std::string& line : Lines(text)) {
    if (line.starts_with("push")) open.push_back(line);
    if (line == "pop") {
      ASSERT_FALSE(open.empty());
      open.pop_back();
    }
  }
  EXPECT_TRUE(open.empty()) << text;
}

TEST(Nvtx, IsSilentWithoutATool) {
  EXPECT_EQ(StderrOf({{"NVTX_INJECTION64_PATH", "/nowhere.so"}}, [] { LaunchBoth(3); }), "");
}
#endif

}  // namespace
