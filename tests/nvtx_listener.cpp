// A tool that listens to NVTX, for tests: NVTX_INJECTION64_PATH names this library, and the ranges
// of the process go to stderr. What Nsight Systems does with them is more; how it comes by them is
// this.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

nvtxDomainHandle_t CreateDomain(const char* name) {
  std::fprintf(stderr, "domain %s\n", name);
  static int domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  std::fprintf(stderr, "push %s\n", event->message.ascii);
  return 0;
}

int Pop(nvtxDomainHandle_t) {
  std::fprintf(stderr, "pop\n");
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size))
    return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(CreateDomain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(Push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(Pop);
  return 1;
}
