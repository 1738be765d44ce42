// Reads options.def, the table of a problem's options.
#ifndef STROBE_CORE_OPTIONS_H_
#define STROBE_CORE_OPTIONS_H_

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/sequence.h"
#include "strobe/strobe.h"

namespace strobe {

enum class OptionKind { kFlag, kChoice, kInteger, kReal };

/// A row of options.def. Integers and choices have their range in `least` and `most`, reals in
/// `real_least` and `below`.
struct Option {
  const char* field;  // of strobe_problem and of the C++ wrapper's Problem
  OptionKind kind;
  double otherwise;  // the default; every integer's is small
  int64_t least = 0, most = 1;
  double real_least = 0, below = 0;
  const char *wanted = nullptr, *said = nullptr;
  const char *flag = nullptr, *value = "N", *help = nullptr;
};

/// The largest number that an array of one number a sequence may hold.
enum class OptionMost { kRowsQ, kRowsK, kPosition };

/// An array that a launch may carry: one int32 for each sequence.
struct OptionArray {
  const char* name;
  int64_t least;
  OptionMost most;
  const char* without;  // what a problem that has it not says, in words
};

/// visit(Option, field) for each option, in the table's order. P: strobe_problem, or another struct
/// with fields of those names.
template <typename P, typename Visit>
constexpr void for_each_option(P& problem, const Visit& visit) {
  [[maybe_unused]] constexpr double kInfinity = std::numeric_limits<double>::infinity();
  [[maybe_unused]] constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  using enum OptionKind;
#define STROBE_FLAG(field, said, flag, help) \
  visit(Option{#field, kFlag, 0, 0, 1, 0, 0, nullptr, said, flag, "N", help}, problem.field);
#define STROBE_CHOICE(field, most, said) \
  visit(Option{#field, kChoice, 0, 0, most, 0, 0, nullptr, said}, problem.field);
#define STROBE_INTEGER(field, otherwise, least, most, said, flag, help)                         \
  visit(Option{#field, kInteger, otherwise, least, most, 0, 0, nullptr, said, flag, "N", help}, \
        problem.field);
#define STROBE_REAL(field, otherwise, least, below, wanted, said, flag, value, help)           \
  visit(Option{#field, kReal, otherwise, 0, 0, least, below, wanted, said, flag, value, help}, \
        problem.field);
#include "core/options.def"
}

/// Every option at its default: for structs that carry a problem's options.
struct Options {
 private:
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

 public:
#define STROBE_FLAG(field, ...) bool field = false;
#define STROBE_CHOICE(field, ...) int32_t field = 0;
#define STROBE_INTEGER(field, otherwise, ...) int64_t field = otherwise;
#define STROBE_REAL(field, otherwise, ...) float field = otherwise;
#include "core/options.def"
};

/// Copies the options that both structs have.
template <typename From, typename To>
constexpr void copy_options(const From& from, To& to) {
#define STROBE_COPY(field)                                  \
  if constexpr (requires { from.field, to.field; }) {       \
    to.field = static_cast<decltype(to.field)>(from.field); \
  }
#define STROBE_FLAG(field, ...) STROBE_COPY(field)
#define STROBE_CHOICE(field, ...) STROBE_COPY(field)
#define STROBE_INTEGER(field, ...) STROBE_COPY(field)
#define STROBE_REAL(field, ...) STROBE_COPY(field)
#include "core/options.def"
#undef STROBE_COPY
}

/// One T for each array that every launch may carry.
template <typename T>
struct ArraysOf {
#define STROBE_ARRAY(name, ...) T name = {};
#include "core/options.def"
};

/// to.<name> = map(from.<name>) for each array.
template <typename From, typename To, typename Map>
constexpr void map_arrays(From& from, To& to, const Map& map) {
#define STROBE_ARRAY(name, ...) to.name = map(from.name);
#include "core/options.def"
}

/// visit(OptionArray, problem.has_<name>, args.<name>) for each of these arrays. Args: the
/// arguments of a launch, or another struct with fields of those names.
template <typename P, typename Args, typename Visit>
constexpr void for_each_array(P& problem, Args& args, const Visit& visit) {
#define STROBE_ARRAY(name, least, most) \
  visit(OptionArray{#name, least, most, "has_" #name " = 0"}, problem.has_##name, args.name);
#include "core/options.def"
}

/// visit(name, without, problem.has_<name>, args.<name>) for each array that a launch with a cache
/// may carry. without: as in OptionArray.
template <typename P, typename Args, typename Visit>
constexpr void for_each_cache_array(P& problem, Args& args, const Visit& visit) {
#define STROBE_CACHE_ARRAY(name) visit(#name, "has_" #name " = 0", problem.has_##name, args.name);
#include "core/options.def"
}

}  // namespace strobe

#endif  // STROBE_CORE_OPTIONS_H_
