// The problems that `strobe tune` measures: those of a file that STROBE_RECORD wrote, or a set by
// kind and size.
#ifndef STROBE_CLI_TUNE_PROBLEMS_H_
#define STROBE_CLI_TUNE_PROBLEMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "strobe/strobe.h"

namespace strobe::cli {

// Problems that a table has one choice for, and what there is to choose.
struct TuneBucket {
  std::string text;
  std::vector<strobe_problem> problems;  // resolved
};

struct TuneProblems {
  std::vector<TuneBucket> buckets;
  int64_t left_out = 0;  // problems that no kernel takes, or for which there is nothing to choose
};

// Throws UserError, which names the line, where the file is none that STROBE_RECORD wrote.
[[nodiscard]] TuneProblems FindTuneProblems(const TuneOptions& options);

// What there is to measure for a problem: the rules' choice first, and those that a table may
// choose.
[[nodiscard]] std::vector<strobe_choice> ChoicesFor(const strobe_problem& problem);

}  // namespace strobe::cli

#endif  // STROBE_CLI_TUNE_PROBLEMS_H_
