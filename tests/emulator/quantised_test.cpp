// The decode kernels for quantised caches on the CPU (run_time.h), against float64 over what the
// codes stand for; what an append writes, and strobe_quantize on a GPU, against the oracle and the
// CPU.
//
//   STROBE_EMULATOR_CASES, STROBE_EMULATOR_SEED   as in decode_test.cpp
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cache_fixture.h"
#include "cpu/quantise.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Form;
using oracle::Rng;

constexpr uint64_t kCases = kSanitized ? 60 : 400;
constexpr int kMostFailuresShown = 5;

bool IsEmulated(DType dtype) {
  return (dtype == DType::kBFloat16 && STROBE_EMULATES_cached_bf16_quantised) ||
         (dtype == DType::kFloat16 && STROBE_EMULATES_cached_fp16_quantised);
}

/// A case that these kernels take: heads of 128 dimensions at most. Every sixteenth has long
/// sequences, which several thread blocks share.
CacheCase DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = GenerateQuantisedCase(seed + (again << 32));
    if (!IsEmulated(c.dtype) || std::max(c.head_dim, c.head_dim_v) > 128) continue;
    if (seed % 16 == 0 && c.most_rows < 300) continue;
    return c;
  }
}

void DrawMachine(uint64_t seed) {
  Rng rng(seed ^ 0xE111u);
  strobe::cuda::Machine& machine = strobe::emulator::machine();
  const int multiprocessors[] = {1, 2, 3, 7, 20};
  const int64_t shared[] = {99 << 10, 163 << 10, 227 << 10};
  auto& device = machine.devices[0];
  device.compute_capability = 80;
  device.multiprocessors = rng.Pick(multiprocessors);
  device.shared_bytes = rng.Pick(shared);
  machine.forced_instance.clear();
  if (rng.Chance(0.3)) {  // one that cannot take the case leaves the choice to the planner
    const auto instances = strobe::cuda::instance_table<strobe::cuda::CachedInstance>();
    machine.forced_instance =
        instances[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(instances.size()) - 1))]
            .name;
  }
  if (const char* asked = std::getenv("STROBE_CUDA_ROW")) {
    machine.forced_instance = asked;
    device.shared_bytes = 227 << 10;
  }
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Chance(0.5) ? 1 : 3;
}

std::string RunCase(const CacheCase& c, WorkspaceHolds holds = WorkspaceHolds::kNaN) {
  CacheFixture f(c);
  std::string wrong = f.Run(ThroughTheEmulator(holds));
  return wrong.empty() ? f.Judge() : wrong;
}

TEST(EmulatedQuantised, RandomProblemsAgreeWithTheOracle) {
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < kMostFailuresShown; ++seed) {
    const CacheCase c = DrawCase(seed);
    DrawMachine(seed);
    const std::string wrong = RunCase(c, static_cast<WorkspaceHolds>(seed % 3));
    if (wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed << " STROBE_EMULATOR_CASES=1: " << wrong
                  << "\n"
                  << ToString(c);
  }
}

}  // namespace
}  // namespace strobe_test
