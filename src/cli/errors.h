// What a user can do wrong, as an exception: main prints the text as one line and exits with 2.
#ifndef STROBE_CLI_ERRORS_H_
#define STROBE_CLI_ERRORS_H_

#include <stdexcept>

namespace strobe::cli {

class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_ERRORS_H_
