// Every CPU kernel of this machine, whatever strobe_plan_make would choose: for tests that compare
// them, or want to see each of them right.
#ifndef STROBE_TESTS_KERNELS_H_
#define STROBE_TESTS_KERNELS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "api/plan.h"
#include "fixture.h"

namespace strobe_test {

struct CpuKernel {
  int32_t index;  // of the kernel table
  std::string name;

  /// In pairs, to which it rounds weights. It takes no other dtype.
  bool MultipliesBf16() const { return name == "cpu_amx" || name == "cpu_avx512_bf16"; }
  bool Takes(const strobe_problem& problem) const {
    strobe_plan plan{};
    plan.struct_size = sizeof plan;
    plan.problem = problem;
    return strobe::kernel_table()[static_cast<size_t>(index)].plan(plan, nullptr).empty();
  }
  /// Makes a plan run this kernel, which takes its problem.
  void Take(strobe_plan& plan) const {
    const strobe::Kernel& kernel = strobe::kernel_table()[static_cast<size_t>(index)];
    strobe_plan other = plan;
    other.kernel = kernel.name;
    other.kernel_index = index;
    const std::string reason = kernel.plan(other, nullptr);
    EXPECT_EQ(reason, "") << name << " does not take this problem";
    if (reason.empty()) plan = other;  // else the plan's own kernel runs, whose workspace it is
  }
  /// Makes the fixture's launches run this kernel.
  void RunIn(Fixture& f) const {
    f.edit_plan = [kernel = *this](strobe_plan& plan) { kernel.Take(plan); };
  }
};

/// Those that this machine can run and that take bf16, widest first.
inline std::vector<CpuKernel> CpuKernels() {
  std::vector<CpuKernel> found;
  int32_t index = 0;
  for (const strobe::Kernel& kernel : strobe::kernel_table()) {
    if (kernel.device == STROBE_CPU && !kernel.unavailable()) found.push_back({index, kernel.name});
    ++index;
  }
  return found;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_KERNELS_H_
