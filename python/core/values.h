// Plain values of a call.
#pragma once

#include <cstdint>

#include "py.h"

namespace strobe_python {

// Plain values: an exact type is taken as it is, what else a caller hands over Python converts or
// refuses by name.
bool to_integer(const char* name, PyObject* value, int bits, int64_t* number);
bool to_flag(const char* name, PyObject* value, bool* flag);
bool to_real(const char* name, PyObject* value, double* number);
bool to_seed(const char* name, PyObject* value, uint64_t* number);

}  // namespace strobe_python
