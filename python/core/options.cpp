#include "options.h"

namespace strobe_python {

const char* const kSlotNames[kSlots] = {
    "dout", "q", "k", "v", "out", "lse", "dlse", "delta", "dq", "dk", "dv", "dsinks", "dbias",
#define STROBE_CALL_ARRAY(name, calls) #name,
#include "call_options.def"
};

const Option* find_option(PyObject* name) {
  static PyObject* known[kNumberOfOptions];
  if (known[kNumberOfOptions - 1] == nullptr)
    for (int i = 0; i < kNumberOfOptions; ++i)
      known[i] = PyUnicode_InternFromString(kOptions[i].name);
  for (int i = 0; i < kNumberOfOptions; ++i)
    if (known[i] == name) return kOptions + i;
  for (const Option& option : kOptions)
    if (PyUnicode_CompareWithASCIIString(name, option.name) == 0) return &option;
  return nullptr;
}

Ref options_table() {
  Ref table(PyTuple_New(kNumberOfOptions));
  const auto truth = [](bool value) { return value ? Py_True : Py_False; };
  for (int i = 0; table && i < kNumberOfOptions; ++i) {
    const Option& option = kOptions[i];
    PyObject* row = Py_BuildValue(
        "(ssOOO)", option.name, kOptionKindNames[static_cast<int>(option.kind)],
        truth((option.calls & kWithCache) != 0), truth((option.calls & kWithoutCache) != 0),
        truth((option.calls & kTail) != 0));
    if (row == nullptr) return Ref();
    PyTuple_SetItem(table.get(), i, row);
  }
  return table;
}

}  // namespace strobe_python
