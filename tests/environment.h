// What a test runs under: a sanitizer or none, and the numbers that whoever runs it may set (how
// many cases, from which seed).
#ifndef STROBE_TESTS_ENVIRONMENT_H_
#define STROBE_TESTS_ENVIRONMENT_H_

#include <cstdint>
#include <cstdlib>

namespace strobe_test {

/// AddressSanitizer and ThreadSanitizer make a test some ten times slower, and look for something
/// else than wrong numbers: fewer cases do for them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// The variable's number, or `otherwise` where it is not set.
inline uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_ENVIRONMENT_H_
