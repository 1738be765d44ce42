// Ranges of PyTorch's profiler.
#pragma once

#include "py.h"

namespace strobe_python {

// A call as a range: "strobe::forward [cpu_avx512]". Where no profiler is on, an entry of a dict is
// looked at and that is all.
class ProfilerRange {
 public:
  // Both return false where an exception is set. end() leaves one be that is set already.
  bool begin(const char* what, const char* kernel);
  bool end();
  void forget() { record_.release(); }  // without the GIL

 private:
  Ref record_;
};

extern PyMethodDef profiler_methods[];

}  // namespace strobe_python
