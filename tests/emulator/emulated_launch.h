// A problem, planned and launched by the CUDA back end on the emulated device.
#ifndef STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_
#define STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_

#include <cstdio>
#include <string>

#include "cache_fixture.h"
#include "cuda/host/launch.h"
#include "emulated_device.h"
#include "gpu/plan_for.h"
#include "guarded.h"
#include "numeric.h"

namespace strobe_test {

/// Makes device 0 one for the kernels through mma.sync, with few multiprocessors, so that thread
/// blocks share keys in many ways. What is forced stays.
inline strobe::cuda::Machine& DrawSmallDevice(oracle::Rng& rng) {
  strobe::cuda::Machine& machine = strobe::emulator::machine();
  const int multiprocessors[] = {1, 2, 3, 7, 20};
  const int64_t shared[] = {99 << 10, 163 << 10, 227 << 10};
  auto& device = machine.devices[0];
  device.compute_capability = 80;
  device.multiprocessors = rng.Pick(multiprocessors);
  device.shared_bytes = rng.Pick(shared);
  return machine;
}

/// Of the memory that a launch is given as its workspace, which nobody has prepared.
enum class WorkspaceHolds { kNaN, kZeros, kOnes, kNumbers };
/// Of kNumbers each byte: 50,000 as a float and as bfloat16.
inline constexpr unsigned char kNumberByte = 0x47;

/// Plans and launches by the CUDA back end, on the device of emulator::machine(), and expects the
/// plan to be for the kernels of `arch`. "" or what stands in the way. made: receives the plan.
template <typename Args>
std::string LaunchInTheEmulator(int arch, const strobe_problem& given, Args args,
                                WorkspaceHolds holds, strobe::Plan* made = nullptr) {
  strobe_problem p = given;
  p.device = STROBE_CUDA;
  strobe::Plan plan{};
  const auto& device = strobe::emulator::machine().devices[0];
  if (const strobe::Status s = strobe::cuda::plan_for(p, device, plan); !s.ok()) return s.text();
  if (made) *made = plan;
  const std::string kernel = "cuda_sm" + std::to_string(arch);
  if (plan.kernel != kernel) return std::string("the plan is for ") + plan.kernel;
  Guarded workspace(static_cast<int64_t>(plan.workspace_bytes), 1);
  if (holds != WorkspaceHolds::kNaN) {
    const int byte = holds == WorkspaceHolds::kZeros  ? 0
                     : holds == WorkspaceHolds::kOnes ? 0xff
                                                      : kNumberByte;
    std::memset(workspace.bytes(), byte, plan.workspace_bytes);
  }
  workspace.Seal();
  args.workspace = workspace.bytes();
  args.workspace_bytes = plan.workspace_bytes;
  if (const strobe::Status s = strobe::cuda::launch(arch, plan, args); !s.ok()) return s.text();
  return workspace.CheckZones("workspace");
}

/// Of the kernels for keys in a cache; arch 0: of those through mma.sync that the device has. What
/// stands in the way is printed.
inline CacheFixture::Launch ThroughTheEmulator(WorkspaceHolds holds = WorkspaceHolds::kNaN,
                                               int arch = 0) {
  return [holds, arch](const strobe_problem& p,
                       strobe_forward_args& args) -> CacheFixture::Launched {
    strobe::Plan plan{};
    const int of_device = strobe::cuda::mma_sync_arch(strobe::emulator::machine().devices[0]);
    const std::string wrong = LaunchInTheEmulator(arch ? arch : of_device, p, args, holds, &plan);
    if (wrong.empty()) return {STROBE_OK, plan.unpacks_first != 0};
    std::printf("%s\n", wrong.c_str());
    return STROBE_INTERNAL_ERROR;
  };
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_
