#include "cli/flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>

#include "cli/errors.h"
#include "cli/text.h"

namespace strobe::cli {
namespace {

std::string Range(int64_t min, int64_t max) {
  if (max == std::numeric_limits<int64_t>::max()) return fmt::format("a whole number from {}", min);
  return fmt::format("a whole number from {} to {}", min, max);
}

std::optional<int64_t> WholeNumber(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// How many characters have to be put in, left out, replaced or swapped with their neighbour: the
// restricted Damerau-Levenshtein distance.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = last[j] + (a[i] == b[j] ? 0 : 1);
      row[j + 1] = std::min({replaced, row[j] + 1, last[j + 1] + 1});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j])
        row[j + 1] = std::min(row[j + 1], before[j - 1] + 1);
    }
  }
  return row.back();
}

}  // namespace

int64_t ParseInteger(const std::string& flag, const std::string& text, int64_t min, int64_t max) {
  const std::optional<int64_t> value = WholeNumber(text);
  if (value && *value >= min && *value <= max) return *value;
  throw UserError(fmt::format("{} = {}, expected {}", flag, Printable(text), Range(min, max)));
}

int64_t ParseLength(const std::string& flag, const std::string& text, int64_t min, int64_t max) {
  const char unit = text.empty() ? '\0' : text.back();
  const int64_t factor = unit == 'k' || unit == 'K' ? 1024 : unit == 'M' ? 1024 * 1024 : 1;
  const std::string_view digits(text.data(), text.size() - (factor > 1 ? 1 : 0));
  const std::optional<int64_t> value = WholeNumber(digits);
  int64_t length = 0;
  const bool fits = value && !__builtin_mul_overflow(*value, factor, &length);
  if (fits && min <= length && length <= max) return length;
  throw UserError(fmt::format("{} = {}, expected {}, or one with k (1024) or M (1024^2), as 2k",
                              flag, Printable(text), Range(min, max)));
}

double ParseNumber(const std::string& flag, const std::string& text, const NumberRange& range) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool number = error == std::errc() && stop == end && std::isfinite(value);
  if (!number || value < range.min || value > range.max || value >= range.below) {
    throw UserError(fmt::format("{} = {}, expected {}", flag, Printable(text), range.wanted));
  }
  return value;
}

float ParseFloat(const std::string& flag, const std::string& text, const NumberRange& range) {
  const double value = ParseNumber(flag, text, range);
  // Out of float32's range a conversion is undefined.
  constexpr double kMost = std::numeric_limits<float>::max();
  const bool fits = std::fabs(value) <= kMost;
  const float result = fits ? static_cast<float>(value) : 0;
  if (!fits || (result == 0) != (value == 0) || result >= range.below) {
    throw UserError(fmt::format("{} = {}, expected {} that float32 can hold", flag, Printable(text),
                                range.wanted));
  }
  return result;
}

size_t ParseChoice(const std::string& flag, const std::string& text,
                   const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    const bool many = names.size() > 2;  // of two, the message names both as clearly
    const std::string near = many ? Nearest(text, names) : "";
    throw UserError(fmt::format("{} = {}, expected {}{}{}", flag, Printable(text),
                                many ? "one of " : "", fmt::join(names, many ? ", " : " or "),
                                near.empty() ? "" : fmt::format(": did you mean {}?", near)));
  }
  return static_cast<size_t>(found - names.begin());
}

std::vector<std::string> SplitCommas(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

KvDTypes ChosenKv(const std::string& flag, const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return {Chosen(flag, text, kKvNames), {}};
  return {Chosen(flag, text.substr(0, slash), kKvNames),
          Chosen(flag, text.substr(slash + 1), kKvNames)};
}

CLI::Option* AddText(CLI::App& app, const std::string& names, const std::string& type,
                     const std::string& help,
                     std::function<void(const std::string& flag, const std::string& text)> set) {
  const size_t dashes = names.find("--");
  const std::string flag = names.substr(dashes == std::string::npos ? 0 : dashes);
  return app
      .add_option_function<std::string>(
          names, [flag, set = std::move(set)](const std::string& text) { set(flag, text); }, help)
      ->type_name(type);
}

CLI::Option* AddFlag(CLI::App& app, const std::string& name, bool* value, const std::string& help) {
  return app.add_flag(name, *value, help)->disable_flag_override();
}

CLI::Option* AddSwitch(CLI::App& app, const std::string& name, const std::string& type,
                       const std::string& help,
                       std::function<void(const std::string& flag, const std::string& text)> set) {
  return app
      .add_option_function<std::string>(
          name,
          [name, set = std::move(set)](const std::string& text) {
            set(name, text == "true" ? "yes" : text);  // CLI11's word for a flag that stands alone
          },
          help)
      ->type_name("[=" + type + "]")
      ->expected(0);
}

CLI::Option* AddInteger(CLI::App& app, const std::string& names, int64_t* value, int64_t min,
                        const std::string& help, int64_t max) {
  return AddText(app, names, "N", help,
                 [value, min, max](const std::string& flag, const std::string& text) {
                   *value = ParseInteger(flag, text, min, max);
                 });
}

void AddOptions(CLI::App& app, Options* options) {
  for_each_option(*options, [&](const Option& row, auto& field) {
    if (row.flag == nullptr || app.get_option_no_throw(row.flag) != nullptr) return;
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, bool>) {
      AddSwitch(app, row.flag, Alternatives(kNoYes), row.help,
                [&field](const std::string& flag, const std::string& text) {
                  field = Chosen(flag, text, kNoYes);
                });
    } else if constexpr (std::is_same_v<Field, int64_t>) {
      AddLength(app, row.flag, &field, row.least, row.help, row.most);
    } else if constexpr (std::is_same_v<Field, float>) {
      AddFloat(app, row.flag, row.value, row.help, &field,
               {.wanted = row.wanted,
                .min = std::max(row.real_least, std::numeric_limits<double>::lowest()),
                .below = row.below});
    }
  });
  app.add_option_function<std::vector<std::string>>(
         "--window",
         [options](const std::vector<std::string>& text) {
           constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
           options->window_left = ParseLength("--window", text[0], -1, kMost);
           options->window_right = ParseLength("--window", text[1], -1, kMost);
         },
         "Keys that a query sees to its left and right; -1: no limit")
      ->type_name("LEFT RIGHT")
      ->type_size(2)
      ->expected(1)
      ->allow_extra_args(false);  // what follows the two is FILE's
  app.add_option_function<std::vector<std::string>>(
         "--signed-window",
         [options](const std::vector<std::string>& text) {
           const auto limit = [](const std::string& word) -> int64_t {
             using Limits = std::numeric_limits<int64_t>;
             if (word == "none") return STROBE_NO_LIMIT;
             return ParseLength("--signed-window", word, Limits::min(), Limits::max());
           };
           options->window_signed = true;
           options->window_left = limit(text[0]);
           options->window_right = limit(text[1]);
         },
         "Limits of either sign; none: no limit")
      ->type_name("LEFT RIGHT")
      ->type_size(2)
      ->expected(1)
      ->allow_extra_args(false)
      ->excludes("--window");
}

CLI::Option* AddLength(CLI::App& app, const std::string& names, int64_t* value, int64_t min,
                       const std::string& help, int64_t max) {
  return AddText(app, names, "N", help,
                 [value, min, max](const std::string& flag, const std::string& text) {
                   *value = ParseLength(flag, text, min, max);
                 });
}

CLI::Option* AddLengths(CLI::App& app, const std::string& names, std::vector<int64_t>* values,
                        int64_t min, int64_t max, const std::string& help) {
  return AddText(app, names, "N,N,...", help,
                 [values, min, max](const std::string& flag, const std::string& text) {
                   values->clear();
                   for (const std::string& part : SplitCommas(text)) {
                     values->push_back(ParseLength(flag, part, min, max));
                   }
                 });
}

std::string Nearest(std::string_view text, const std::vector<std::string>& names) {
  constexpr size_t kMost = 100;  // of kilobytes: the distance takes a time in proportion
  text = text.substr(0, std::min(text.find('='), kMost));
  std::string nearest;
  size_t best = std::max<size_t>(text.size() / 3, 1) + 1;
  for (const std::string& name : names) {
    const size_t distance = EditDistance(text, name);
    if (distance < best) {
      best = distance;
      nearest = name;
    }
  }
  if (!nearest.empty()) return nearest;
  const auto begun = [text](const std::string& name) { return name.starts_with(text); };
  if (std::ranges::count_if(names, begun) != 1 || text.empty()) return "";
  return *std::ranges::find_if(names, begun);
}

std::string NoFlag(const CLI::App& app, const std::string& program, const std::string& got) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::string near = Nearest(got, names);
  return fmt::format("{} is not a flag of `{}`: {}", Printable(got), program,
                     near.empty() ? fmt::format("see `{} --help`", program)
                                  : fmt::format("did you mean {}?", near));
}

std::optional<int> ParseAll(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError& error) {
    const std::vector<std::string> words = app.remaining();
    if (words.empty() || !words.front().starts_with('-')) return app.exit(error), 2;
    throw UserError(NoFlag(app, app.get_name(), words.front()));
  } catch (const CLI::ParseError& error) {  // --help too
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace strobe::cli
