// Preloaded into a Python: an allocation of C++ that fails when its turn comes.
#include <cstdlib>
#include <new>

namespace {
thread_local long left = 0;
}

// The allocation with this number, from now on in this thread, fails; 0: none.
extern "C" __attribute__((visibility("default"))) void fail_at(long number) { left = number; }

void* operator new(std::size_t size) {
  if (left > 0 && --left == 0) throw std::bad_alloc();
  void* memory = std::malloc(size != 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
