// What a tool's timeline shows of a launch: a range of NVTX, in the domain "strobe". Nsight Systems
// listens to it (nsys profile --trace=cuda,nvtx), as does whatever NVTX_INJECTION64_PATH names.
// Where nobody listens, a launch asks one pointer.
#ifndef STROBE_API_NVTX_RANGE_H_
#define STROBE_API_NVTX_RANGE_H_

#if STROBE_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#endif

namespace strobe {

#if STROBE_HAVE_NVTX

/// While it lives, the calling thread is in the range "strobe::<what> [<kernel>]".
class NvtxRange {
 public:
  NvtxRange(const char* what, const char* kernel) {
    if (domain() == nullptr) return;
    char text[96];
    std::snprintf(text, sizeof text, "strobe::%s [%s]", what, kernel);
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = text;
    nvtxDomainRangePushEx(domain(), &event);
  }
  ~NvtxRange() {
    if (domain() != nullptr) nvtxDomainRangePop(domain());
  }
  /// Looks for a tool, once: when a plan is made, as a launch looks nothing up.
  static void find_tool() { domain(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

 private:
  // Null where no tool listens, which NVTX finds out when it is first asked.
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t found = nvtxDomainCreateA("strobe");
    return found;
  }
};

#else

/// This build has no NVTX: cmake/nvtx.cmake did not find its headers.
struct NvtxRange {
  NvtxRange(const char*, const char*) {}
  static void find_tool() {}
};

#endif

}  // namespace strobe

#endif  // STROBE_API_NVTX_RANGE_H_
