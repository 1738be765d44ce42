// Builds of the library beside each other on the CPU, in one process, on the same tensors, in
// turns: what a change costs or saves on a machine that others use as well.
//
//     scripts/build.sh release -DSTROBE_BUILD_BENCH=ON -- strobe_versus
//     build/release/bin/versus before=old/libstrobe.so after=new/libstrobe.so < problems
//
// A contender is NAME=PATH or NAME=PATH:ISA, where ISA is what STROBE_CPU_ISA takes (each needs a
// file of its own, since a library looks at the environment once). A line of standard input is a
// problem:
//
//     DTYPE DIRECTION BATCH HEADS HEADS_KV SEQLEN_Q SEQLEN_K HEAD_DIM MASK THREADS LAYOUT [SECONDS]
//
// DTYPE: fp32 or bf16. DIRECTION: fwd, bwd or read (fwd beside a plain read of K and V). MASK: full
// or causal. LAYOUT: rows (rows before heads in memory), heads (heads before rows), either with
// "+huge" for huge pages. Printed are the least time of each contender and its median in
// microseconds, and both over the first contender's; with one thread its processor time as well.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cli/streaming_read.h"
#include "strobe/strobe.h"

namespace {

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "versus: %s\n", text.c_str());
  std::exit(1);
}

/// One build of the library.
struct Library {
  std::string name;
  decltype(&strobe_problem_init) problem_init;
  decltype(&strobe_plan_make) plan_make;
  decltype(&strobe_forward) forward;
  decltype(&strobe_backward) backward;
  decltype(&strobe_last_error) last_error;
  size_t problem_bytes = sizeof(strobe_problem);  // an older build's structs end earlier

  explicit Library(const std::string& text);
  void check(strobe_status status) const {
    if (status != STROBE_OK) fail(name + ": " + last_error());
  }
};

/// A plan of a library whose struct may end earlier than this header's.
class Plan {
 public:
  Plan(const Library& library, const strobe_problem& p) : tail_(8 + library.problem_bytes) {
    const size_t bytes = sizeof(strobe_plan) - sizeof(strobe_problem) + library.problem_bytes;
    std::memcpy(plan_, &bytes, sizeof bytes);
    library.check(library.plan_make(&p, get()));
  }
  const strobe_plan* get() const { return reinterpret_cast<const strobe_plan*>(plan_); }
  const char* kernel() const { return tail<const char*>(0); }
  size_t workspace_bytes() const { return tail<size_t>(8); }

 private:
  strobe_plan* get() { return reinterpret_cast<strobe_plan*>(plan_); }
  template <typename T>
  T tail(size_t offset) const {
    T value;
    std::memcpy(&value, plan_ + tail_ + offset, sizeof value);
    return value;
  }
  alignas(strobe_plan) std::byte plan_[sizeof(strobe_plan)] = {};
  size_t tail_;
};

Library::Library(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) fail("a contender is NAME=PATH[:ISA], got " + text);
  name = text.substr(0, equals);
  std::string path = text.substr(equals + 1), isa;
  if (const size_t colon = path.find(':'); colon != std::string::npos) {
    isa = path.substr(colon + 1);
    path.resize(colon);
  }
  isa.empty() ? unsetenv("STROBE_CPU_ISA") : setenv("STROBE_CPU_ISA", isa.c_str(), 1);
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) fail(dlerror());
  const auto find = [&](auto& f, const char* symbol) {
    f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(handle, symbol));
    if (!f) fail(path + " has no " + symbol);
  };
  find(problem_init, "strobe_problem_init");
  find(plan_make, "strobe_plan_make");
  find(forward, "strobe_forward");
  find(backward, "strobe_backward");
  find(last_error, "strobe_last_error");
  strobe_problem p;
  while (problem_init(&p, problem_bytes) != STROBE_OK) {
    if ((problem_bytes -= 8) == 0) fail(path + " is no such library");
  }
  p.batch = p.seqlen_q = p.seqlen_k = p.heads = p.head_dim = 1;
  Plan(*this, p);  // the environment is looked at here
}

struct Memory {
  std::byte* at;
  size_t bytes;
  Memory(size_t n, bool huge) : bytes((n + (1 << 21) - 1) >> 21 << 21) {
    at = static_cast<std::byte*>(std::aligned_alloc(1 << 21, bytes));
    madvise(at, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::memset(at, 0, bytes);
  }
  Memory(Memory&& m) noexcept : at(m.at), bytes(m.bytes) { m.at = nullptr; }
  ~Memory() { std::free(at); }
};

struct Problem {
  std::string text, dtype, direction, mask, layout;
  int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim;
  int threads;
  double seconds = 2;
  bool huge = false;

  explicit Problem(const std::string& line) : text(line) {
    std::istringstream in(line);
    in >> dtype >> direction >> batch >> heads >> heads_kv >> seqlen_q >> seqlen_k >> head_dim >>
        mask >> threads >> layout;
    if (!in) fail("not a problem: " + line);
    if (double s; in >> s) seconds = s;
    if (const size_t plus = layout.find("+huge"); plus != std::string::npos) {
      huge = true;
      layout.resize(plus);
    }
  }
  size_t element() const { return dtype == "fp32" ? 4 : 2; }
  Memory random(int64_t rows, int64_t of_heads, std::mt19937& generator) const {
    const int64_t n = batch * rows * of_heads * head_dim;
    Memory m(static_cast<size_t>(n) * element(), huge);
    std::normal_distribution<float> normal;
    std::vector<float> some(65537);
    for (float& x : some) x = normal(generator);
    for (int64_t i = 0; i < n; ++i) {
      const float x = some[static_cast<size_t>(i % 65537)];
      if (element() == 4) {
        reinterpret_cast<float*>(m.at)[i] = x;
      } else {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        reinterpret_cast<uint16_t*>(m.at)[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      }
    }
    return m;
  }
  strobe_strides strides(int64_t rows, int64_t of_heads) const {
    strobe_strides s{};
    s.batch = rows * of_heads * head_dim;
    s.dim = 1;
    s.seqlen = layout == "heads" ? head_dim : of_heads * head_dim;
    s.head = layout == "heads" ? rows * head_dim : head_dim;
    return s;
  }
};

/// Processor time of this thread so far. With one thread on a busy machine it says more than the
/// clock does.
double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Times {
  std::vector<double> all;
  double processor = 1e9;  // least time of the calling thread
  double least() const { return *std::min_element(all.begin(), all.end()); }
  double median() {
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }
};

Plan make_plan(const Library& library, const Problem& p, int32_t direction) {
  strobe_problem s;
  library.problem_init(&s, library.problem_bytes);
  s.direction = direction;
  s.dtype = p.dtype == "fp32" ? STROBE_FLOAT32 : STROBE_BFLOAT16;
  s.batch = p.batch;
  s.seqlen_q = p.seqlen_q;
  s.seqlen_k = p.seqlen_k;
  s.heads = p.heads;
  s.heads_kv = p.heads_kv;
  s.head_dim = p.head_dim;
  s.causal = p.mask == "causal";
  s.threads = p.threads;
  s.q = s.out = s.dq = s.dout = p.strides(p.seqlen_q, p.heads);
  s.k = s.v = s.dk = s.dv = p.strides(p.seqlen_k, p.heads_kv);
  return {library, s};
}

/// args.struct_size becomes what the library knows: the first launch finds out.
template <typename Function, typename Args>
void launch(const Library& library, Function function, const Plan& plan, Args& args) {
  static std::vector<std::pair<const Library*, size_t>> known;
  for (const auto& [one, bytes] : known) {
    if (one != &library) continue;
    args.struct_size = bytes;
    return library.check(function(plan.get(), &args));
  }
  size_t bytes = sizeof args;
  for (args.struct_size = bytes; function(plan.get(), &args) != STROBE_OK;) {
    if (bytes <= 64) library.check(STROBE_INVALID_ARGUMENT);
    args.struct_size = bytes -= 8;
  }
  known.emplace_back(&library, bytes);
}

void run(const Problem& p, const std::vector<Library>& libraries) {
  std::mt19937 generator(1);
  const Memory q = p.random(p.seqlen_q, p.heads, generator),
               k = p.random(p.seqlen_k, p.heads_kv, generator),
               v = p.random(p.seqlen_k, p.heads_kv, generator),
               dout = p.random(p.seqlen_q, p.heads, generator);
  const Memory out(q.bytes, p.huge), dq(q.bytes, p.huge), dk(k.bytes, p.huge), dv(v.bytes, p.huge),
      lse(static_cast<size_t>(p.batch * p.heads * p.seqlen_q) * 4, p.huge);
  strobe_forward_args f{};
  f.q = q.at, f.k = k.at, f.v = v.at, f.out = out.at;
  f.lse = reinterpret_cast<float*>(lse.at);
  strobe_backward_args b{};
  b.q = q.at, b.k = k.at, b.v = v.at, b.out = out.at, b.dout = dout.at;
  b.dq = dq.at, b.dk = dk.at, b.dv = dv.at;
  b.lse = reinterpret_cast<float*>(lse.at);
  const bool backward = p.direction == "bwd", read = p.direction == "read";
  const size_t n = libraries.size(), all = n + (read ? 1 : 0);
  std::vector<Plan> plans;
  std::vector<Memory> workspaces;
  for (const Library& library : libraries) {
    const Plan forward = make_plan(library, p, STROBE_FORWARD);
    launch(library, library.forward, forward, f);
    plans.push_back(backward ? make_plan(library, p, STROBE_BACKWARD) : forward);
    workspaces.emplace_back(plans.back().workspace_bytes() + 64, false);
  }
  const size_t read_bytes =
      static_cast<size_t>(p.batch * p.seqlen_k * p.heads_kv * p.head_dim) * p.element();
  const auto call = [&](size_t i) {
    if (i == n) {
      strobe::cli::StreamingRead({k.at, v.at}, read_bytes, p.threads);
      return;
    }
    if (backward) {
      b.workspace = workspaces[i].at, b.workspace_bytes = plans[i].workspace_bytes();
      launch(libraries[i], libraries[i].backward, plans[i], b);
    } else {
      f.workspace = workspaces[i].at, f.workspace_bytes = plans[i].workspace_bytes();
      launch(libraries[i], libraries[i].forward, plans[i], f);
    }
  };
  std::vector<Times> times(all);
  using clock = std::chrono::steady_clock;
  const auto seconds = [](clock::duration d) { return std::chrono::duration<double>(d).count(); };
  // Short calls are timed several at a time.
  bool quick = false;
  std::vector<int> repeats(all);
  for (size_t i = 0; i < all; ++i) {
    call(i);
    const auto begin = clock::now();
    call(i);
    const double once = seconds(clock::now() - begin);
    repeats[i] = static_cast<int>(std::clamp(50e-6 / once, 1.0, 1000.0));
    quick = quick || once < 2e-3;
  }
  const auto begin = clock::now();
  for (int round = 0; round < 5 || seconds(clock::now() - begin) < p.seconds; ++round) {
    for (size_t turn = 0; turn < all; ++turn) {
      const size_t i = (turn + static_cast<size_t>(round)) % all;
      if (quick) call(i);  // brings its own code and data into the caches
      const double processor = processor_seconds();
      const auto t = clock::now();
      for (int r = 0; r < repeats[i]; ++r) call(i);
      times[i].all.push_back(seconds(clock::now() - t) / repeats[i]);
      times[i].processor =
          std::min(times[i].processor, (processor_seconds() - processor) / repeats[i]);
    }
  }
  std::printf("%s  (%zu rounds)\n", p.text.c_str(), times[0].all.size());
  const double least = times[0].least(), median = times[0].median();
  for (size_t i = 0; i < all; ++i) {
    std::printf("    %-10s %-12s %10.1f %10.1f us   %6.3f %6.3f",
                i == n ? "read" : libraries[i].name.c_str(), i == n ? "" : plans[i].kernel(),
                1e6 * times[i].least(), 1e6 * times[i].median(), times[i].least() / least,
                times[i].median() / median);
    if (p.threads == 1) {
      std::printf("   processor %10.1f us %6.3f", 1e6 * times[i].processor,
                  times[i].processor / times[0].processor);
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Library> libraries;
  for (int i = 1; i < argc; ++i) libraries.emplace_back(argv[i]);
  if (libraries.empty()) fail("usage: versus NAME=PATH[:ISA]... < problems");
  for (std::string line; std::getline(std::cin, line);) {
    if (!line.empty() && line[0] != '#') run(Problem(line), libraries);
  }
}
