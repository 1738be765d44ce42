// The options of a call: call_options.def as the extension reads it.
#pragma once

#include <cstdint>

#include "py.h"

namespace strobe_python {

// How a value is taken. Defaults: no array, False, 0, None where there is "OrNone", and a window
// without limits.
enum class OptionKind : uint8_t {
  kArray,
  kFlag,
  kInteger,
  kInteger32,
  kIntegerOrNone,
  kReal,
  kRealOrNone,
  kSeed,
  kWindow,
};
constexpr const char* kOptionKindNames[] = {
    "array",        "flag", "integer", "integer of 32 bits", "integer or None", "real",
    "real or None", "seed", "window",
};

// Which calls have an option; a sum.
enum OptionCalls : uint8_t {
  kWithoutCache = 1,
  kWithCache = 2,
  kEveryCall = kWithoutCache | kWithCache,
  kTail = 4,          // at the end of an operator's arguments
  kForwardAlone = 8,  // no argument of a backward launch; the planner refuses it there
};

// The arrays of a call, in the order in which messages look at them.
enum Slot : int {
  kDout,
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDlse,
  kDelta,
  kDq,
  kDk,
  kDv,
  kDsinks,
  kDbias,
#define STROBE_CALL_ARRAY(name, calls) kSlot_##name,
#include "call_options.def"
  kSlots
};
extern const char* const kSlotNames[kSlots];

// The options that are no arrays.
enum Scalar : int {
#define STROBE_CALL_SCALAR(name, kind, calls) kScalar_##name,
#include "call_options.def"
  kScalars
};

struct Option {
  const char* name;
  OptionKind kind;
  uint8_t calls;
  int index;  // its Slot, if it is an array, else its Scalar
};

constexpr Option kOptions[] = {
#define STROBE_CALL_ARRAY(name, calls) {#name, OptionKind::kArray, calls, kSlot_##name},
#define STROBE_CALL_SCALAR(name, kind, calls) {#name, OptionKind::kind, calls, kScalar_##name},
#include "call_options.def"
};
constexpr int kNumberOfOptions = static_cast<int>(sizeof kOptions / sizeof *kOptions);

struct ScalarOption {
  const char* name;
  OptionKind kind;
  uint8_t calls;
};
constexpr ScalarOption kScalarOptions[kScalars] = {
#define STROBE_CALL_SCALAR(name, kind, calls) {#name, OptionKind::kind, calls},
#include "call_options.def"
};

// The option of that name, or null. Names in a call are interned: nearly always addresses are
// equal.
const Option* find_option(PyObject* name);

// The table for _options.py: a tuple of (name, kind, of a call with a cache, of one without, in the
// tail). On null an exception is set.
Ref options_table();

}  // namespace strobe_python
