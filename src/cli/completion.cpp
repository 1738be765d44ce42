#include "cli/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <vector>

namespace strobe::cli {
namespace {

enum class Value { kNone, kAny, kFile, kOneOf, kListOf };

struct Flag {
  std::vector<std::string> names;  // "-o", "--output"
  std::string help;
  Value value = Value::kAny;
  std::vector<std::string> alternatives = {};
  bool two_values = false;
};

struct Command {
  std::string name, help;
  std::vector<Flag> flags = {};
  bool takes_file = false;
  std::vector<std::string> words = {};  // of a positional argument
};

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == '|') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

Flag FlagOf(const CLI::Option& option) {
  Flag flag{{}, option.get_description()};
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  std::string type = option.get_type_name();
  constexpr std::string_view kList = ",...";
  const bool list = type.size() > kList.size() && type.ends_with(kList);
  if (list) type.resize(type.size() - kList.size());
  flag.two_values = type.find(' ') != std::string::npos;
  if (type.empty() || type.starts_with("[=")) {  // of the latter the name alone is completed
    flag.value = Value::kNone;
  } else if (type == "FILE") {
    flag.value = Value::kFile;
  } else if (type.find('|') != std::string::npos) {
    flag.value = list ? Value::kListOf : Value::kOneOf;
    flag.alternatives = Split(type);
  }
  return flag;
}

Command CommandOf(const CLI::App& app) {
  Command command{app.get_name(), app.get_description()};
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_positional()) {
      command.flags.push_back(FlagOf(*option));
    } else if (option->get_name() == "FILE") {
      command.takes_file = true;
    } else {
      command.words = Split(option->get_type_name());
    }
  }
  return command;
}

std::vector<Command> CommandsOf(const CLI::App& app) {
  std::vector<Command> commands;
  for (const CLI::App* each : app.get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(CommandOf(*each));
  return commands;
}

std::vector<std::string> Names(const std::vector<Flag>& flags) {
  std::vector<std::string> names;
  for (const Flag& flag : flags) names.insert(names.end(), flag.names.begin(), flag.names.end());
  return names;
}

std::string Bash(const Command& program, const std::vector<Command>& commands) {
  std::string names, cases;
  for (const Command& command : commands) {
    names += (names.empty() ? "" : " ") + command.name;
    cases += fmt::format("    {})\n      case $previous in\n", command.name);
    for (const Flag& flag : command.flags) {
      const std::string pattern = fmt::format("{}", fmt::join(flag.names, "|"));
      switch (flag.value) {
        case Value::kNone:
          break;
        case Value::kAny:
          cases += fmt::format("        {}) return ;;\n", pattern);
          break;
        case Value::kFile:
          cases += fmt::format(
              "        {}) mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return ;;\n",
              pattern);
          break;
        case Value::kOneOf:
          cases +=
              fmt::format("        {}) COMPREPLY=($(compgen -W \"{}\" -- \"$word\")); return ;;\n",
                          pattern, fmt::join(flag.alternatives, " "));
          break;
        case Value::kListOf:  // what stands before the last comma stays
          cases += fmt::format(
              "        {})\n"
              "          local before=\n"
              "          [[ $word != *,* ]] || before=${{word%,*}},\n"
              "          COMPREPLY=($(compgen -P \"$before\" -W \"{}\" -- \"${{word##*,}}\"))\n"
              "          return ;;\n",
              pattern, fmt::join(flag.alternatives, " "));
          break;
      }
    }
    cases += fmt::format("      esac\n      words=\"{}\"\n", fmt::join(Names(command.flags), " "));
    if (!command.words.empty())
      cases +=
          fmt::format("      [[ $word == -* ]] || words=\"{}\"\n", fmt::join(command.words, " "));
    if (command.takes_file)
      cases +=
          "      [[ $word == -* ]] || { mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return; "
          "}\n";
    cases += "      ;;\n";
  }
  return fmt::format(
      "# bash completion for strobe: . <(strobe completion bash), or as a file named strobe in\n"
      "# ~/.local/share/bash-completion/completions\n"
      "_strobe() {{\n"
      "  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words\n"
      "  COMPREPLY=()\n"
      "  if [[ $COMP_CWORD == 1 ]]; then\n"
      "    COMPREPLY=($(compgen -W \"{} {}\" -- \"$word\"))\n"
      "    return\n"
      "  fi\n"
      "  case ${{COMP_WORDS[1]}} in\n"
      "{}"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}}\n"
      "complete -o filenames -F _strobe strobe\n",
      names, fmt::join(Names(program.flags), " "), cases);
}

// In single quotes within brackets of a specification of _arguments.
std::string Quoted(const std::string& text) {
  std::string quoted;
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else if (c == '[' || c == ']' || c == ':' || c == '\\') {
      quoted += fmt::format("\\{}", c);
    } else {
      quoted += c;
    }
  }
  return quoted;
}

std::string Zsh(const Command& program, const std::vector<Command>& commands) {
  const auto specification = [](const Flag& flag) {
    std::string lines;
    for (const std::string& name : flag.names) {
      std::string value;
      switch (flag.value) {
        case Value::kNone:
          break;
        case Value::kAny:
          value = flag.two_values ? ":left: :right: " : ":value: ";
          break;
        case Value::kFile:
          value = ":file:_files";
          break;
        case Value::kOneOf:
          value = fmt::format(":value:({})", fmt::join(flag.alternatives, " "));
          break;
        case Value::kListOf:
          value = fmt::format(":values:_sequence compadd - {}", fmt::join(flag.alternatives, " "));
          break;
      }
      lines += fmt::format("        '{}[{}]{}' \\\n", name, Quoted(flag.help), value);
    }
    return lines;
  };
  std::string names, cases;
  for (const Command& command : commands) {
    names += fmt::format("    '{}:{}'\n", command.name, Quoted(command.help));
    cases += fmt::format("    {})\n      _arguments -s \\\n", command.name);
    for (const Flag& flag : command.flags) cases += specification(flag);
    if (command.takes_file) {
      cases += "        '1:file:_files' ;;\n";
    } else if (!command.words.empty()) {
      cases += fmt::format("        '1:word:({})' ;;\n", fmt::join(command.words, " "));
    } else {
      cases += "        ;;\n";
    }
  }
  return fmt::format(
      "#compdef strobe\n"
      "# zsh completion for strobe: a file named _strobe in a folder of $fpath, or after compinit\n"
      "# . <(strobe completion zsh)\n"
      "_strobe() {{\n"
      "  local -a commands=(\n"
      "{}"
      "  )\n"
      "  if (( CURRENT == 2 )); then\n"
      "    _describe command commands\n"
      "    compadd -- {}\n"
      "    return\n"
      "  fi\n"
      "  local command=$words[2]\n"
      "  shift words\n"
      "  (( CURRENT-- ))\n"
      "  case $command in\n"
      "{}"
      "  esac\n"
      "}}\n"
      "if [[ $funcstack[1] == _strobe ]]; then _strobe \"$@\"; else compdef _strobe strobe; fi\n",
      names, fmt::join(Names(program.flags), " "), cases);
}

}  // namespace

std::string CompletionScript(const CLI::App& app, const std::string& shell) {
  const Command program = CommandOf(app);
  return shell == "zsh" ? Zsh(program, CommandsOf(app)) : Bash(program, CommandsOf(app));
}

}  // namespace strobe::cli
