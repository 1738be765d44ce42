// Typed command line flags whose errors name what was got and what was wanted.
#ifndef STROBE_CLI_FLAGS_H_
#define STROBE_CLI_FLAGS_H_

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/dtype.h"
#include "core/options.h"

namespace strobe::cli {

// One value of a flag: throws UserError with `flag` and `text` in it unless it is a number in
// range.
[[nodiscard]] int64_t ParseInteger(const std::string& flag, const std::string& text, int64_t min,
                                   int64_t max);
// Likewise of a length or a size, which may end with k or K (times 1024) or M (times 1024^2).
[[nodiscard]] int64_t ParseLength(const std::string& flag, const std::string& text, int64_t min,
                                  int64_t max);
// Which numbers a flag takes: from min to max, and less than `below`.
struct NumberRange {
  const char* wanted = "a number";  // the range in words
  double min = std::numeric_limits<double>::lowest();
  double max = std::numeric_limits<double>::max();
  double below = std::numeric_limits<double>::infinity();
};
[[nodiscard]] double ParseNumber(const std::string& flag, const std::string& text,
                                 const NumberRange& range);
// Likewise of a number that the library takes in float32, where it must be neither lost nor
// infinite.
[[nodiscard]] float ParseFloat(const std::string& flag, const std::string& text,
                               const NumberRange& range);
// Index into `names`.
[[nodiscard]] size_t ParseChoice(const std::string& flag, const std::string& text,
                                 const std::vector<std::string>& names);
[[nodiscard]] std::vector<std::string> SplitCommas(const std::string& text);

// `names` is CLI11's: "-o,--output". The first long name stands in errors. `set` gets the flag's
// name and text.
CLI::Option* AddText(CLI::App& app, const std::string& names, const std::string& type,
                     const std::string& help,
                     std::function<void(const std::string& flag, const std::string& text)> set);

CLI::Option* AddFlag(CLI::App& app, const std::string& name, bool* value, const std::string& help);
// A flag that stands for "yes" alone, and takes another value after =, never as the next word.
CLI::Option* AddSwitch(CLI::App& app, const std::string& name, const std::string& type,
                       const std::string& help,
                       std::function<void(const std::string& flag, const std::string& text)> set);
CLI::Option* AddInteger(CLI::App& app, const std::string& names, int64_t* value, int64_t min,
                        const std::string& help, int64_t max = std::numeric_limits<int64_t>::max());
// Lengths and sizes: of one, and of a list.
CLI::Option* AddLength(CLI::App& app, const std::string& names, int64_t* value, int64_t min,
                       const std::string& help, int64_t max = std::numeric_limits<int64_t>::max());
CLI::Option* AddLengths(CLI::App& app, const std::string& names, std::vector<int64_t>* values,
                        int64_t min, int64_t max, const std::string& help);

// Value is float or std::optional<float>.
template <typename Value>
CLI::Option* AddFloat(CLI::App& app, const std::string& names, const char* type,
                      const std::string& help, Value* value, const NumberRange& range) {
  return AddText(app, names, type, help,
                 [value, range](const std::string& flag, const std::string& text) {
                   *value = ParseFloat(flag, text, range);
                 });
}

// The flags of the problem's options (core/options.def) that `app` does not have yet, --window and
// --signed-window.
void AddOptions(CLI::App& app, Options* options);

template <typename T>
using Choices = std::vector<std::pair<std::string, T>>;

template <typename T>
[[nodiscard]] T Chosen(const std::string& flag, const std::string& text,
                       const Choices<T>& choices) {
  std::vector<std::string> names;
  for (const auto& choice : choices) names.push_back(choice.first);
  return choices[ParseChoice(flag, text, names)].second;
}

// Of a list with commas.
template <typename T>
[[nodiscard]] std::vector<T> ChosenList(const std::string& flag, const std::string& text,
                                        const Choices<T>& choices) {
  std::vector<T> values;
  for (const std::string& part : SplitCommas(text)) values.push_back(Chosen(flag, part, choices));
  return values;
}

inline const Choices<bool> kNoYes = {{"no", false}, {"yes", true}};
// What a KV cache holds in place of floats.
inline const Choices<DType> kCodeNames = {{"int8", DType::kInt8},
                                          {"e4m3", DType::kFloat8E4M3},
                                          {"e5m2", DType::kFloat8E5M2},
                                          {"q8_0", DType::kQ8_0},
                                          {"q4_0", DType::kQ4_0}};
// What it holds.
inline const Choices<DType> kKvNames = [] {
  Choices<DType> names = {{"same", DType::kSame}};
  names.insert(names.end(), kCodeNames.begin(), kCodeNames.end());
  return names;
}();

// "q8_0", or "q8_0/q4_0" of keys and values.
[[nodiscard]] KvDTypes ChosenKv(const std::string& flag, const std::string& text);

// What a choice is called in help, and what shells complete: its names, or `some` of them.
template <typename T>
[[nodiscard]] std::string Alternatives(const Choices<T>& choices, size_t some = SIZE_MAX) {
  std::string text;
  for (size_t n = choices.size() - std::min(choices.size(), some); n < choices.size(); ++n)
    text += (text.empty() ? "" : "|") + choices[n].first;
  return text;
}

// One of the choices. Value is T or std::optional<T>. named: how many of them, the last ones, help
// names.
template <typename T, typename Value>
CLI::Option* AddChoice(CLI::App& app, const std::string& names, const Choices<T>& choices,
                       Value* value, const std::string& help, size_t named = SIZE_MAX) {
  return AddText(app, names, Alternatives(choices, named), help,
                 [choices, value](const std::string& flag, const std::string& text) {
                   *value = Chosen(flag, text, choices);
                 });
}

// Some of the choices, separated by commas.
template <typename T>
CLI::Option* AddChoiceList(CLI::App& app, const std::string& names, const Choices<T>& choices,
                           std::vector<T>* values, const std::string& help,
                           size_t named = SIZE_MAX) {
  return AddText(app, names, Alternatives(choices, named) + ",...", help,
                 [choices, values](const std::string& flag, const std::string& text) {
                   *values = ChosenList(flag, text, choices);
                 });
}

// The name in `names` that is closest to `text`, or the only one that begins with it; "" when there
// is neither.
// What follows = in `text` does not count.
[[nodiscard]] std::string Nearest(std::string_view text, const std::vector<std::string>& names);

// What to say of a flag that `app` does not have, with the nearest that it has. program: as it is
// typed, "strobe bench".
[[nodiscard]] std::string NoFlag(const CLI::App& app, const std::string& program,
                                 const std::string& got);

// Parses the arguments of a program without commands. With a value the program ends with that exit
// code: --help was printed, or what was wrong. Throws UserError for an unknown flag or a bad value.
[[nodiscard]] std::optional<int> ParseAll(CLI::App& app, int argc, const char* const* argv);

}  // namespace strobe::cli

#endif  // STROBE_CLI_FLAGS_H_
