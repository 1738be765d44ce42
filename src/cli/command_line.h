// `strobe` without its process: from arguments to an exit code.
#ifndef STROBE_CLI_COMMAND_LINE_H_
#define STROBE_CLI_COMMAND_LINE_H_

#include <string>

namespace strobe::cli {

struct Outcome {
  int exit_code = 0;
  std::string error;  // for standard error, without a newline at its end; "" when all is well
};

// Throws nothing; whatever was printed has reached standard output, or there is an error.
[[nodiscard]] Outcome RunCommandLine(int argc, const char* const* argv) noexcept;

}  // namespace strobe::cli

#endif  // STROBE_CLI_COMMAND_LINE_H_
