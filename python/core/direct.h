// PyTorch's operators of flash attention without Python: their kernels are functions of C that
// PyTorch's dispatcher calls by its stable interface (torch/csrc/inductor/aoti_torch/c/shim.h).
// They compute calls like one that `aten_forward` or `aten_backward` has computed before in the
// thread, and hand every other call to an operator of Strobe's that has the same schema and is
// Python's.
#pragma once

#include "call.h"

namespace strobe_python {

// A call that Strobe has computed: its plan may compute others like it without Python, if that was
// all there is to it.
void offer_to_direct(const Call& call, size_t copies);

// One more call that Strobe has computed in place of PyTorch.
void count_served();

// Plans that were kept must not be used any more.
void forget_direct();

extern PyMethodDef direct_methods[];

}  // namespace strobe_python
