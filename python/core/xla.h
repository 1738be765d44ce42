// Attention as handlers of XLA's FFI, for strobe.jax.
#pragma once

#include "py.h"

namespace strobe_python {

// xla_handlers
extern PyMethodDef xla_methods[];

}  // namespace strobe_python
