// Fibres: stacks that one thread of the system changes between.
#ifndef STROBE_TESTS_EMULATOR_FIBRE_H_
#define STROBE_TESTS_EMULATOR_FIBRE_H_

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace strobe::emulator {

/// A stack with what runs on it; made without one, the stack that the caller is on.
class Fibre {
 public:
  Fibre() = default;
  ~Fibre();
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  /// Makes this a fibre that begins with `entry`, which never returns; whatever ran on it is
  /// forgotten.
  void start(void (*entry)());
  /// Leaves what runs on `from` and goes on with this one.
  void resume(Fibre& from);
  /// Sanitizers have to be told: at the begin of each entry.
  static void arrived();

 private:
  static constexpr size_t kStackBytes = size_t{256} << 10;
  char* stack_ = nullptr;
  const void* bottom_ = nullptr;  // of the stack, and its size
  size_t size_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;  // AddressSanitizer's
  [[maybe_unused]] void* tsan_ = nullptr;        // ThreadSanitizer's
#if defined(__x86_64__)
  void* top_ = nullptr;  // where the registers are that resume() restores
#else
  ucontext_t context_;
#endif
};

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_FIBRE_H_
