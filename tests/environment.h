// Numbers that whoever runs a test may set: how many cases, from which seed.
#ifndef STROBE_TESTS_ENVIRONMENT_H_
#define STROBE_TESTS_ENVIRONMENT_H_

#include <cstdint>
#include <cstdlib>

namespace strobe_test {

/// The variable's number, or `otherwise` where it is not set.
inline uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_ENVIRONMENT_H_
