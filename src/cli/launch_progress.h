// The progress line of launches that may take long: how many seconds they still take.
#ifndef STROBE_CLI_LAUNCH_PROGRESS_H_
#define STROBE_CLI_LAUNCH_PROGRESS_H_

#include <cstdint>
#include <string>
#include <strobe/strobe.hpp>

#include "cli/measure.h"

namespace strobe::cli {

class LaunchProgress {
 public:
  // flop: of the launches that are to come at least. Where that is much, a small problem like
  // `like` is timed to tell how long they take, if somebody looks.
  LaunchProgress(std::string label, const Problem& like, double flop);
  ~LaunchProgress() { ClearProgress(); }
  LaunchProgress(const LaunchProgress&) = delete;
  LaunchProgress& operator=(const LaunchProgress&) = delete;

  // What is left, as it has turned out.
  void Left(double seconds);

  // A launch's interrupt and its data: shows the line, and lets the launch go on.
  static int32_t Interrupt(void* progress);

 private:
  void Show() const;

  std::string label_;
  double left_ = 0;  // seconds when `watch_` began; 0: not known
  Stopwatch watch_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_LAUNCH_PROGRESS_H_
