// Which instances of the table a plan is for, and why there is none.
#ifndef STROBE_CUDA_HOST_INSTANCE_CHOICE_H_
#define STROBE_CUDA_HOST_INSTANCE_CHOICE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel.h"
#include "core/problem.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// All that a plan needs to know of its instances. Numbers are those of number_of, 0 where there is
/// none.
struct InstanceChoice {
  std::string reason;  // why there is no instance; else empty
  const char* name = nullptr;
  int32_t instance = 0;
  /// In its place where an address is not a multiple of 16 bytes, which only a launch knows.
  int32_t unaligned = 0;
  /// With a cache: of the sequences that have few queries, where `instance` is for those that have
  /// many; and the same where an address of new keys is not a multiple of 16 bytes.
  int32_t few_queries = 0, few_queries_unaligned = 0;
  CachedGrid grid{};  // of a CachedInstance
  size_t workspace_bytes = 0;
};

/// Which instances come first, whatever the rules say, where they take the problem.
struct AskedFor {
  std::string_view name;  // "": the rules choose
  bool whole = false;     // an instance of this name; else any with this in its name

  /// Those that STROBE_CUDA_ROW names: for tests and benches. A problem that they cannot do goes
  /// where it always does.
  static AskedFor by_environment() { return {machine().forced_instance, false}; }
  bool is(std::string_view instance) const {
    if (whole) return instance == name;
    return !name.empty() && instance.find(name) != std::string_view::npos;
  }
  bool has(std::string_view part) const { return name.find(part) != std::string_view::npos; }
};

/// The instances of this architecture for the (resolved) problem on such a device.
InstanceChoice choose_instance(int arch, const AttentionProblem& problem,
                               const DeviceProperties& device,
                               const AskedFor& asked_for = AskedFor::by_environment());

/// The names of all instances of this architecture that take the (resolved) problem where they are
/// asked for by their whole name, in the order of kernels.def; of a row, whose variants do the same
/// with more and more features, the first that does.
std::vector<std::string_view> instances_to_choose(int arch, const AttentionProblem& problem,
                                                  const DeviceProperties& device);

/// What there is to say of a plan of these instances besides its numbers, or "": which lists of a
/// mask as data tiles go through; why keys are divided that are in no cache.
std::string remark_on(const Plan& plan, const DeviceProperties& device);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_INSTANCE_CHOICE_H_
