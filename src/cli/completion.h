// Scripts with which a shell completes the tool's commands, flags and their values.
#ifndef STROBE_CLI_COMPLETION_H_
#define STROBE_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>

namespace strobe::cli {

// For "bash" or "zsh", made of what `app` parses. A flag's values are those of its type's name
// where that lists alternatives, "cpu|cuda"; FILE stands for a file.
[[nodiscard]] std::string CompletionScript(const CLI::App& app, const std::string& shell);

}  // namespace strobe::cli

#endif  // STROBE_CLI_COMPLETION_H_
