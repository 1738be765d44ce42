// The safetensors reader under arbitrary bytes: it gives tensors that lie inside the file, or one
// line of text.
#include "cli/safetensors.h"

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  strobe::cli::SafetensorsView view;
  const auto error = strobe::cli::ParseSafetensors(file, &view);
  bool ok;
  if (error) {
    ok = !error->empty() && error->find('\n') == std::string::npos && view.tensors.empty();
  } else {
    ok = true;
    for (const auto& tensor : view.tensors) {
      ok &= tensor.data.empty() ||
            (tensor.data.data() >= file.data() &&
             tensor.data.data() + tensor.data.size() <= file.data() + file.size());
      for (const int64_t extent : tensor.shape) ok &= extent >= 0;
      ok &= view.Find(tensor.name) != nullptr;
    }
  }
  if (!ok) {
    std::fprintf(stderr, "safetensors: %s\n", error ? error->c_str() : "a tensor outside the file");
    std::abort();
  }
  return 0;
}
