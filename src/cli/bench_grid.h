// The problems of a benchmark.
#ifndef STROBE_CLI_BENCH_GRID_H_
#define STROBE_CLI_BENCH_GRID_H_

#include <strobe/strobe.hpp>
#include <vector>

#include "cli/commands.h"

namespace strobe::cli {

// Of every dtype, head_dim, mask and length, in that order. options: with its lists filled in.
[[nodiscard]] std::vector<Problem> Grid(const BenchOptions& options);

}  // namespace strobe::cli

#endif  // STROBE_CLI_BENCH_GRID_H_
