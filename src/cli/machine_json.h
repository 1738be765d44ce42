// What `strobe info --json` and `strobe bench --json` say of the machine.
#ifndef STROBE_CLI_MACHINE_JSON_H_
#define STROBE_CLI_MACHINE_JSON_H_

#include <nlohmann/json.hpp>
#include <strobe/strobe.hpp>

namespace strobe::cli {

[[nodiscard]] nlohmann::ordered_json MachineJson(const Machine& machine);

}  // namespace strobe::cli

#endif  // STROBE_CLI_MACHINE_JSON_H_
