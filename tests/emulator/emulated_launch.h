// A problem over a KV cache, planned and launched by the CUDA back end on the emulated device.
#ifndef STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_
#define STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_

#include <cstdio>
#include <string>

#include "cache_fixture.h"
#include "cuda/host/launch.h"
#include "emulated_device.h"
#include "gpu/plan_for.h"
#include "guarded.h"

namespace strobe_test {

/// Of the memory that a launch is given as its workspace, which nobody has prepared.
enum class WorkspaceHolds { kNaN, kZeros, kOnes };

/// Through the CUDA back end's planner and launch, on the device of emulator::machine(). What
/// stands in the way is printed.
inline CacheFixture::Launch ThroughTheEmulator(WorkspaceHolds holds = WorkspaceHolds::kNaN) {
  return [holds](const strobe_problem& given, strobe_forward_args& args) {
    strobe_problem p = given;
    p.device = STROBE_CUDA;
    strobe::Plan plan{};
    const auto& device = strobe::emulator::machine().devices[0];
    if (const strobe::Status s = strobe::cuda::plan_for(p, device, plan); !s.ok()) {
      std::printf("%s\n", s.text().c_str());
      return s.code();
    }
    Guarded workspace(static_cast<int64_t>(plan.workspace_bytes), 1);
    if (holds != WorkspaceHolds::kNaN) {
      std::memset(workspace.bytes(), holds == WorkspaceHolds::kZeros ? 0 : 0xff,
                  plan.workspace_bytes);
    }
    workspace.Seal();
    args.workspace = workspace.bytes();
    args.workspace_bytes = plan.workspace_bytes;
    const strobe::Status s = strobe::cuda::launch(80, plan, args);
    if (!s.ok()) std::printf("%s\n", s.text().c_str());
    if (s.ok() && !workspace.CheckZones("workspace").empty()) return STROBE_INTERNAL_ERROR;
    return s.code();
  };
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_EMULATED_LAUNCH_H_
