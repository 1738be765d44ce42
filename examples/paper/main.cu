// The ladder of README.md on a GPU: checks every step against float64, and times them.
//
//     build/cuda/bin/paper_story --json story.json
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "device.cuh"
#include "reference.h"
#include "steps.h"

namespace strobe::paper {
namespace {

constexpr int64_t kMaxScoresBytes = 8'000'000'000;
constexpr int kTokens = 16384, kHidden = 2048;
static_assert(kTokens <= kMostKeys);
constexpr int kMostKeysOnline =
    512;  // of step 0 when it is timed: it takes a hundred times as long

void run(Step step, const Case& c, const Arguments& p) {
  run(step, c.head_dim, c.causal, p, Launch{});
  must(cudaGetLastError(), kKeys[step]);
}

/// Every step against float64; what is wrong is printed.
bool check(const Case& c) {
  DeviceBuffer<bf16> q(c.elements()), k(c.elements()), v(c.elements());
  DeviceBuffer<bf16> out(c.elements() + kGuard), scores(c.scores() + kGuard);
  DeviceBuffer<float> row_max(c.rows() + kGuard), row_sum(c.rows() + kGuard);
  DeviceBuffer<float> lse(c.rows() + kGuard);
  fill_normal(q, c.elements(), 1), fill_normal(k, c.elements(), 2);
  fill_normal(v, c.elements(), 3);
  const Reference want = reference_of(c, q.to_host(), k.to_host(), v.to_host());
  const Arguments p{q.data(),   k.data(),       v.data(),
                    out.data(), row_max.data(), row_sum.data(),
                    lse.data(), scores.need(),  stride_of_scores(c.seqlen),
                    c.batch,    c.seqlen,       c.heads,
                    c.scale()};
  bool good = true;
  std::printf("%3d %-6s seqlen %4d  ", c.head_dim, c.causal ? "causal" : "full", c.seqlen);
  for (int i = 0; i < kSteps; ++i) {
    const auto step = static_cast<Step>(i);
    out.fill(0xff), row_max.fill(0xff), row_sum.fill(0xff), lse.fill(0xff), scores.fill(0xff);
    run(step, c, p);
    must(cudaDeviceSynchronize(), kKeys[step]);
    const Verdict verdict = judge(
        step, c, want,
        {out.to_host(), scores.to_host(), row_max.to_host(), row_sum.to_host(), lse.to_host()});
    std::printf("  %s %.1e of %.1e", kKeys[step], verdict.error, verdict.allowed);
    if (!verdict.fine()) {
      std::printf(" FAILED (lse %.1e%s)", verdict.lse_error,
                  verdict.wrote_elsewhere ? ", wrote where nothing of it is stored" : "");
    }
    good = good && verdict.fine();
  }
  std::printf("\n");
  return good;
}

// --- Times ---

struct Point {
  Case problem;
  double ms[kSteps] = {};  // 0: not run
  double tflops[kSteps] = {};
  std::string skipped;  // why standard attention was
};

double median(std::vector<float> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return static_cast<double>(*middle);
}

/// Medians of all steps that can be run, in turns, L2 overwritten before each.
Point measure(const Case& c, Arguments p, int rounds, DeviceBuffer<char>& flush) {
  Point point{c, {}, {}, {}};
  p.batch = c.batch, p.seqlen = c.seqlen, p.heads = c.heads;
  p.scale = c.scale();
  p.scores_stride = stride_of_scores(c.seqlen);
  const bool small = c.scores() * 2 <= kMaxScoresBytes;
  const DeviceBuffer<bf16> scores(small ? c.scores() : 0);
  p.scores = scores.data();
  char text[96];
  std::snprintf(text, sizeof text, "S would take %.1f GB, %s",
                static_cast<double>(c.scores()) * 2e-9,
                small ? "and the GPU has not so much left" : "more than 8");
  if (p.scores == nullptr) point.skipped = text;

  std::vector<Step> steps;
  for (int i = 0; i < kSteps; ++i) {
    if (i == kOnlineSoftmax && c.seqlen > kMostKeysOnline) continue;
    if (i == kStandard && p.scores == nullptr) continue;
    steps.push_back(static_cast<Step>(i));
  }
  for (const Step step : steps) run(step, c, p);  // warm
  struct Timed {
    Step step;
    cudaEvent_t begin, end;
  };
  std::vector<Timed> timed;
  for (int round = 0; round < rounds; ++round) {
    for (const Step step : steps) {
      Timed one{step, {}, {}};
      must(cudaEventCreate(&one.begin), "cudaEventCreate");
      must(cudaEventCreate(&one.end), "cudaEventCreate");
      flush.fill(round);
      must(cudaEventRecord(one.begin), "cudaEventRecord");
      run(step, c, p);
      must(cudaEventRecord(one.end), "cudaEventRecord");
      timed.push_back(one);
    }
  }
  must(cudaDeviceSynchronize(), "timing");
  std::vector<float> times[kSteps];
  for (const Timed& one : timed) {
    float ms = 0;
    must(cudaEventElapsedTime(&ms, one.begin, one.end), "cudaEventElapsedTime");
    times[one.step].push_back(ms);
    cudaEventDestroy(one.begin), cudaEventDestroy(one.end);
  }
  const double pairs = static_cast<double>(c.seqlen) * c.seqlen * (c.causal ? 0.5 : 1);
  const double flop = 4 * pairs * c.head_dim * c.heads * c.batch;
  for (const Step step : steps) {
    point.ms[step] = median(times[step]);
    point.tflops[step] = flop / point.ms[step] * 1e-9;
  }
  return point;
}

void print_head() {
  std::printf("\nTFLOP/s (4 seqlen^2 head_dim heads batch, halved when causal), medians\n");
  for (int i = 0; i < kSteps; ++i) std::printf("  %-9s %s\n", kKeys[i], kNames[i]);
  std::printf("head_dim mask   seqlen ");
  for (const char* key : kKeys) std::printf(" %9s", key);
  std::printf("\n");
}

void print(const Point& point) {
  const Case& c = point.problem;
  std::printf("%8d %-6s %6d ", c.head_dim, c.causal ? "causal" : "full", c.seqlen);
  for (int i = 0; i < kSteps; ++i) {
    if (point.ms[i] > 0) {
      std::printf(" %9.1f", point.tflops[i]);
    } else {
      std::printf(" %9s", "-");
    }
  }
  if (!point.skipped.empty()) std::printf("   standard: skipped, %s", point.skipped.c_str());
  std::printf("\n");
  std::fflush(stdout);
}

bool write_json(const std::string& path, const char* gpu, int rounds,
                const std::vector<Point>& points) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  std::fprintf(file, "{\n \"gpu\": \"%s\",\n \"dtype\": \"bf16\",\n \"rounds\": %d,\n", gpu,
               rounds);
  std::fprintf(file, " \"variants\": {");
  for (int i = 0; i < kSteps; ++i) {
    std::fprintf(file, "%s\n  \"%s\": \"%s\"", i == 0 ? "" : ",", kKeys[i], kNames[i]);
  }
  std::fprintf(file, "\n },\n \"points\": [");
  for (size_t n = 0; n < points.size(); ++n) {
    const Case& c = points[n].problem;
    std::fprintf(file,
                 "%s\n  {\"head_dim\": %d, \"causal\": %s, \"seqlen\": %d, \"batch\": %d, "
                 "\"heads\": %d",
                 n == 0 ? "" : ",", c.head_dim, c.causal ? "true" : "false", c.seqlen, c.batch,
                 c.heads);
    const auto object = [&](const char* name, const double(&values)[kSteps]) {
      std::fprintf(file, ", \"%s\": {", name);
      const char* comma = "";
      for (int i = 0; i < kSteps; ++i) {
        if (points[n].ms[i] <= 0) continue;
        std::fprintf(file, "%s\"%s\": %.6g", comma, kKeys[i], values[i]);
        comma = ", ";
      }
      std::fprintf(file, "}");
    };
    object("ms", points[n].ms);
    object("tflops", points[n].tflops);
    if (!points[n].skipped.empty()) {
      std::fprintf(file, ", \"skipped\": {\"standard\": \"%s\"}", points[n].skipped.c_str());
    }
    std::fprintf(file, "}");
  }
  std::fprintf(file, "\n ]\n}\n");
  const bool written = std::ferror(file) == 0;
  return std::fclose(file) == 0 && written;
}

// --- The command line ---

constexpr const char* kHelp =
    "Attention step by step: the online softmax, standard attention, FlashAttention-1's schedule "
    "and\n"
    "FlashAttention-2's changes to it. All steps are checked against float64 and then timed.\n"
    "usage: paper_story [options]\n"
    "  --rounds N        times each step is timed at a point (9)\n"
    "  --seconds X       begin no further point after so long\n"
    "  --head-dim D      64 or 128 (both)\n"
    "  --json FILE       write the result there too\n"
    "  --check-only      check against float64, time nothing\n"
    "  --help            this text\n";

struct Options {
  int rounds = 9;
  double seconds = std::numeric_limits<double>::infinity();
  std::vector<int> head_dims{64, 128};
  std::string json;
  bool check_only = false;
};

[[noreturn]] void refuse(const std::string& got, const char* wanted) {
  std::fprintf(stderr, "paper_story: got %s, expected %s\n", got.c_str(), wanted);
  std::exit(2);
}

/// All of `text` as a number in [low, high].
template <typename T>
T parse(std::string_view flag, std::string_view text, T low, T high, const char* wanted) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || !(value >= low && value <= high)) {
    refuse(std::string(flag) + " '" + std::string(text) + "'", wanted);
  }
  return value;
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&](const char* wanted) -> std::string_view {
      if (i + 1 == argc) refuse(std::string(flag) + " without a value", wanted);
      return argv[++i];
    };
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    } else if (flag == "--rounds") {
      constexpr const char* kWanted = "a whole number from 1 to 10000";
      options.rounds = parse(flag, value(kWanted), 1, 10000, kWanted);
    } else if (flag == "--seconds") {
      constexpr const char* kWanted = "a number of seconds from 0";
      options.seconds = parse(flag, value(kWanted), 0.0, 1e9, kWanted);
    } else if (flag == "--head-dim") {
      constexpr const char* kWanted = "64 or 128";
      const int head_dim = parse(flag, value(kWanted), 64, 128, kWanted);
      if (head_dim != 64 && head_dim != 128)
        refuse("--head-dim " + std::to_string(head_dim), kWanted);
      options.head_dims = {head_dim};
    } else if (flag == "--json") {
      options.json = value("the name of a file");
    } else if (flag == "--check-only") {
      options.check_only = true;
    } else {
      refuse("'" + std::string(flag) + "'",
             "--rounds, --seconds, --head-dim, --json, --check-only or --help");
    }
  }
  return options;
}

int run_all(int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("paper_story: skipped (no GPU)\n");
    return 0;
  }
  cudaDeviceProp gpu;
  must(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
  if (gpu.major < 8 || gpu.sharedMemPerBlockOptin < static_cast<size_t>(kMostSharedBytes)) {
    std::printf(
        "paper_story: skipped (%s: compute capability %d.%d with %zu bytes of shared memory per "
        "block, expected 8.0 with %d)\n",
        gpu.name, gpu.major, gpu.minor, gpu.sharedMemPerBlockOptin, kMostSharedBytes);
    return 0;
  }
  std::printf("%s\n\nlargest error against float64, of what is allowed:\n", gpu.name);
  bool good = true;
  for (const int head_dim : options.head_dims) {
    for (const bool causal : {false, true}) {
      for (const int seqlen : {1, 64, 200, 333, 512}) {
        good = check({head_dim, seqlen, causal}) && good;
      }
    }
  }
  if (!good) {
    std::printf("FAILED\n");
    return 1;
  }
  if (options.check_only) return 0;

  constexpr int64_t kElements = int64_t{kTokens} * kHidden;
  DeviceBuffer<bf16> q(kElements), k(kElements), v(kElements), out(kElements);
  constexpr int64_t kMaxRows = kElements / 64;
  DeviceBuffer<float> row_max(kMaxRows), row_sum(kMaxRows), lse(kMaxRows);
  DeviceBuffer<char> flush(256 << 20);  // several times the L2
  fill_normal(q, kElements, 1), fill_normal(k, kElements, 2), fill_normal(v, kElements, 3);
  Arguments p{};
  p.q = q.need(), p.k = k.need(), p.v = v.need(), p.out = out.need();
  p.row_max = row_max.need(), p.row_sum = row_sum.need(), p.lse = lse.need();
  std::vector<Point> points;
  bool out_of_time = false;
  print_head();
  for (const int head_dim : options.head_dims) {
    for (const bool causal : {false, true}) {
      for (int seqlen = 512; seqlen <= kTokens; seqlen *= 2) {
        if (seconds() > options.seconds) {
          out_of_time = true;
          continue;
        }
        const Case problem{head_dim, seqlen, causal, kTokens / seqlen, kHidden / head_dim};
        points.push_back(measure(problem, p, options.rounds, flush));
        print(points.back());
      }
    }
  }
  if (out_of_time) std::printf("out of time after %zu points\n", points.size());
  if (!options.json.empty()) {
    if (!write_json(options.json, gpu.name, options.rounds, points)) {
      std::fprintf(stderr, "paper_story: got --json '%s', expected a file that can be written\n",
                   options.json.c_str());
      return 1;
    }
    std::printf("written to %s\n", options.json.c_str());
  }
  return 0;
}

}  // namespace
}  // namespace strobe::paper

int main(int argc, char** argv) { return strobe::paper::run_all(argc, argv); }
