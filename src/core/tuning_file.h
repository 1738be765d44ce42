// The file of choices that `strobe tune` measured: a little JSON of one fixed shape, whoever wrote
// it. docs/tuning.md shows one.
#ifndef STROBE_CORE_TUNING_FILE_H_
#define STROBE_CORE_TUNING_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace strobe {

/// What was measured to be faster than the choice of the rules.
struct TunedChoice {
  std::string problems;  // which: as tuning_bucket.h writes them
  std::string kernel, instance;
  int64_t block = 0;
  int64_t gain_percent = 0;  // by so much, for who reads the file
};

/// What was measured on one device.
struct TunedDevice {
  std::string device;  // "cpu" or "cuda"
  std::string name;    // as the device says it
  int64_t compute_capability = 0;
  std::vector<TunedChoice> choices;  // sorted by problems

  /// Null where there is none.
  const TunedChoice* find(std::string_view problems) const;
};

struct TuningFile {
  std::string version;  // of the library that measured
  std::vector<TunedDevice> devices;

  static constexpr size_t kMostBytes = 1 << 20;
  static constexpr size_t kMostDevices = 64;
  static constexpr size_t kMostChoices = 8192;  // of a device
  static constexpr size_t kMostText = 200;      // of a string
  /// In the file's format; the format that parse_tuning reads.
  static constexpr int64_t kFormat = 1;
};

/// Reads the file's text, which may be anything. Returns "" and the file, or what is wrong, in one
/// line, and leaves the file as it was.
std::string parse_tuning(std::string_view text, TuningFile& file);

/// The file that is looked for where nobody names one: in the user's cache folder, as XDG has it.
/// "" where the user has none.
std::string tuning_path_of_user();

/// The text that parse_tuning reads. Characters that a string of the file cannot hold become '?'.
std::string to_text(const TuningFile& file);

}  // namespace strobe

#endif  // STROBE_CORE_TUNING_FILE_H_
