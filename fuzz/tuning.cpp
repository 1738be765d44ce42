// The parser of tuning files under arbitrary bytes: one line of text, or a table whose own text is
// read again as the same, and which can be asked.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/tuning_file.h"
#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  strobe::TuningFile file{.version = "before", .devices = {}};
  const std::string error = strobe::parse_tuning(text, file);
  if (!error.empty()) {
    REQUIRE(error.find('\n') == std::string::npos && error.size() < 300);
    REQUIRE(file.version == "before" && file.devices.empty());
    return 0;
  }
  REQUIRE(file.devices.size() <= strobe::TuningFile::kMostDevices);
  const std::string written = strobe::to_text(file);
  strobe::TuningFile again;
  REQUIRE(strobe::parse_tuning(written, again).empty());
  REQUIRE(strobe::to_text(again) == written);
  for (const strobe::TunedDevice& device : file.devices) {
    for (const strobe::TunedChoice& choice : device.choices)
      REQUIRE(device.find(choice.problems) == &choice);
  }
  return 0;
}
