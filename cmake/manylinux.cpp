// Only in wheels (cmake/manylinux.cmake): what this machine's compiler and headers ask of the run
// times, and run times as old as the wheel's tag promises do not have. Everything is hidden, so it
// serves the one library that it is linked into. scripts/check_wheel.py names what is missing here.
#include <cxxabi.h>

// std::vector and std::string (GCC 11 and newer) call std::__throw_bad_array_new_length, which is
// new in GCC 11's library; the function that it stands for is older.
[[noreturn, gnu::visibility("hidden")]] void throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { abi::__cxa_throw_bad_array_new_length(); }

// Code of .cu files sees this machine's headers, by which std::shared_ptr asks glibc 2.32 whether
// there are other threads. There may always be some.
extern "C" {
[[gnu::visibility("hidden")]] extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// glibc 2.29 has a log that leaves errno alone; the older one computes the same.
[[gnu::visibility("hidden")]] double log_of_any_glibc(double x) __asm__("log");
extern "C" double log_2_2_5(double x);
__asm__(".symver log_2_2_5, log@GLIBC_2.2.5");
double log_of_any_glibc(double x) { return log_2_2_5(x); }
