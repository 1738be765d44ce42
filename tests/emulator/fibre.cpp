#include "fibre.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if STROBE_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a function has to leave as they are, and the stack; then the same the
// other way round from the other stack. (glibc's swapcontext also asks the system for the mask of
// signals, which takes longer than all else here.)
extern "C" void strobe_emulator_change_stack(void** from, void* to);
asm(R"(
.text
.globl strobe_emulator_change_stack
.hidden strobe_emulator_change_stack
.type strobe_emulator_change_stack, @function
strobe_emulator_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size strobe_emulator_change_stack, . - strobe_emulator_change_stack
)");
#endif

namespace strobe::emulator {

namespace {
[[maybe_unused]] Fibre* came_from = nullptr;
}

Fibre::~Fibre() {
#if STROBE_EMULATOR_TSAN
  if (stack_ && tsan_) __tsan_destroy_fiber(tsan_);
#endif
  if (stack_) munmap(stack_, kStackBytes);
}

void Fibre::start(void (*entry)()) {
  if (!stack_) {
    void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stack_ = static_cast<char*>(memory);
    bottom_ = stack_;
    size_ = kStackBytes;
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_, kStackBytes);
  fake_stack_ = nullptr;
#endif
#if STROBE_EMULATOR_TSAN
  // New memory, so that what another thread has done there is forgotten.
  mmap(stack_, kStackBytes, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (tsan_) __tsan_destroy_fiber(tsan_);
  tsan_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  auto* const words = reinterpret_cast<uint64_t*>(stack_ + kStackBytes);
  std::memset(words - 8, 0, 64);  // six registers, the entry, and where it would return to
  words[-2] = reinterpret_cast<uint64_t>(entry);
  top_ = words - 8;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
}

void Fibre::resume(Fibre& from) {
  came_from = &from;
#if STROBE_EMULATOR_TSAN
  if (!from.stack_) from.tsan_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, bottom_, size_);
#endif
#if defined(__x86_64__)
  strobe_emulator_change_stack(&from.top_, top_);
#else
  swapcontext(&from.context_, &context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* const fake = from.fake_stack_;
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake, &bottom, &size);
  if (!came_from->stack_) came_from->bottom_ = bottom, came_from->size_ = size;
#endif
}

void Fibre::arrived() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (!came_from->stack_) came_from->bottom_ = bottom, came_from->size_ = size;
#endif
}

}  // namespace strobe::emulator
