// The decode kernels on the CPU (run_time.h), planned by the CUDA back end for devices that are not
// there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 400; 60 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "cache_fixture.h"
#include "cuda/host/row_table.h"
#include "emulated_launch.h"
#include "run_time.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kCases = 60;
#else
constexpr uint64_t kCases = 400;
#endif
constexpr int kMostFailuresShown = 5;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

/// A case of cache_case.h that the decode kernels take.
CacheCase DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = GenerateCacheCase(seed + (again << 32));
    if (c.dtype == DType::kFloat32) continue;
    return c;
  }
}

/// Draws a device, an order of threads, and mostly the planner's row.
void DrawMachine(uint64_t seed, const CacheCase& c) {
  Rng rng(seed ^ 0xE111u);
  strobe::cuda::Machine& machine = strobe::emulator::machine();
  const int multiprocessors[] = {1, 2, 3, 7, 20};
  const int64_t shared[] = {99 << 10, 163 << 10, 227 << 10};
  auto& device = machine.devices[0];
  device.compute_capability = 80;
  device.multiprocessors = rng.Pick(multiprocessors);
  device.shared_bytes = rng.Pick(shared);
  machine.forced_row.clear();
  if (rng.Chance(0.3)) {
    const auto rows = strobe::cuda::row_table<strobe::cuda::DecodeRow>();
    const auto& row =
        rows[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(rows.size()) - 1))];
    if (row.row->config.dtype == (c.dtype == DType::kBFloat16 ? STROBE_BFLOAT16 : STROBE_FLOAT16))
      machine.forced_row = row.name;
  }
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Chance(0.5) ? 1 : 3;
}

/// "" or what is wrong with the case.
std::string RunCase(const CacheCase& c, WorkspaceHolds holds = WorkspaceHolds::kNaN) {
  CacheFixture f(c);
  std::string wrong = f.Run(ThroughTheEmulator(holds));
  return wrong.empty() ? f.Judge() : wrong;
}

TEST(EmulatedDecode, RandomProblemsAgreeWithTheOracle) {
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < kMostFailuresShown; ++seed) {
    const CacheCase c = DrawCase(seed);
    DrawMachine(seed, c);
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
