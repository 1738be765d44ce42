// Success, or a status with its text. Making a success allocates nothing.
#ifndef STROBE_CORE_STATUS_H_
#define STROBE_CORE_STATUS_H_

#include <cstdarg>
#include <string>

#include "strobe/strobe.h"

namespace strobe {

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(strobe_status code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == STROBE_OK; }
  strobe_status code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  strobe_status code_ = STROBE_OK;
  std::string text_;
};

#define STROBE_RETURN_IF_ERROR(expression)                                      \
  do {                                                                          \
    if (::strobe::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

}  // namespace strobe

#endif  // STROBE_CORE_STATUS_H_
