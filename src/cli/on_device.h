// Launches of a fixture's problem (check/) on a device: what lies in the host's memory is copied
// there and back.
#ifndef STROBE_CLI_ON_DEVICE_H_
#define STROBE_CLI_ON_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "strobe/strobe.h"
#include "strobe/strobe.hpp"

namespace strobe::cli {

class OnDevice {
 public:
  // threads: 0: the problem's own.
  OnDevice(Device device, int64_t device_index, int64_t threads)
      : device_(device), device_index_(device_index), threads_(threads) {}

  // Plans and launches with a workspace between red zones. "" or what went wrong; throws UserError
  // where the device refuses. memory: all that the arguments' tensors lie in.
  std::string Run(const std::vector<std::span<std::byte>>& memory, strobe_problem problem,
                  strobe_forward_args args);
  std::string Run(const std::vector<std::span<std::byte>>& memory, strobe_problem problem,
                  strobe_backward_args args);

  // From now on each launch takes one of the choices that there are for its problem, in turns; or
  // that of the library.
  void TakeEveryChoice(bool every) { every_choice_ = every; }

  // Whether some kernel of the device takes the problem.
  bool Takes(strobe_problem problem) const;

  // Whether the plan of the latest launch unpacks a quantised cache first.
  bool unpacks_first() const { return unpacks_first_; }
  // How many launches each kernel did.
  const std::map<std::string, int64_t>& kernels() const { return kernels_; }

 private:
  strobe_problem On(strobe_problem problem) const;
  strobe_status MakePlan(const strobe_problem& problem, strobe_plan* plan);
  template <typename Args, typename Launch>
  std::string RunWith(const std::vector<std::span<std::byte>>& memory,
                      const strobe_problem& problem, Args args, Launch launch);

  Device device_;
  int64_t device_index_, threads_;
  bool every_choice_ = false;
  bool unpacks_first_ = false;
  uint64_t turn_ = 0;
  std::map<std::string, int64_t> kernels_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_ON_DEVICE_H_
