// libstrobe, opened at run time: STROBE_LIBRARY may name any build of it.
#pragma once

#include <strobe/strobe.h>

#include "py.h"

namespace strobe_python {

#define STROBE_PYTHON_FUNCTIONS(X) \
  X(problem_init)                  \
  X(plan_make)                     \
  X(plan_text)                     \
  X(why)                           \
  X(forward)                       \
  X(backward)                      \
  X(merge)                         \
  X(mask_bytes)                    \
  X(mask_pack)                     \
  X(dropout_mask_part)             \
  X(quantize)                      \
  X(dequantize)                    \
  X(last_error)                    \
  X(version)                       \
  X(kernel_name)                   \
  X(kernel_unavailable) X(machine_info) X(cuda_device_info) X(tuning_load) X(tuning_text)

struct Library {
#define X(name) decltype(&strobe_##name) name = nullptr;
  STROBE_PYTHON_FUNCTIONS(X)
#undef X
};
extern Library library;

// Raises the exception of a status other than STROBE_OK.
void raise_status(strobe_status status);

// The methods of the module that only hand on: load, make_plan, plan_text, why, ...
extern PyMethodDef library_methods[];

extern const char kPlanCapsule[];

// A plan in words, a str.
PyObject* text_of_plan(const strobe_plan& plan);

}  // namespace strobe_python
