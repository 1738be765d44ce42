// A build that has some of a program's instances: for tests of the choice among them.
#ifndef STROBE_TESTS_EMULATOR_SOME_INSTANCES_H_
#define STROBE_TESTS_EMULATOR_SOME_INSTANCES_H_

#include <functional>
#include <string_view>

namespace strobe::emulator {

/// The tables have those of the program's instances that it keeps, by name, from here on. At first
/// they have all.
void keep_instances(const std::function<bool(std::string_view)>& keeps);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_SOME_INSTANCES_H_
