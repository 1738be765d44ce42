// The table of choices that were measured on this machine, which `strobe tune` writes: found in the
// user's cache folder or where STROBE_TUNING says. Without one, plans follow the rules alone.
#ifndef STROBE_API_TUNING_H_
#define STROBE_API_TUNING_H_

#include <optional>
#include <string>

#include "core/kernel.h"
#include "core/tuning_file.h"

namespace strobe {

/// The table in force; null: none. The first call looks for the file. A table stays where it is
/// until the process ends, also when another one takes its place.
const TuningFile* tuning_table();

/// What the table chooses for the (resolved) problem on its device.
std::optional<Choice> tuned_choice(const TuningFile& table, const AttentionProblem& problem);

/// Reads the file and puts it into force; a null path: none is in force from now on. On failure
/// what was in force stays.
Status load_tuning(const char* path);

/// Which table is in force, or why none is, in one line.
std::string describe_tuning();

}  // namespace strobe

#endif  // STROBE_API_TUNING_H_
