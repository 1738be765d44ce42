// CUDA kernels on the CPU, for tests: thread blocks whose threads are fibres of one thread of the
// system. Kernels are compiled by the host compiler, with tests/emulator/include before src in the
// include path: its cuda/ptx/ says in C++ what each instruction does, and calls what is below.
//
// A fibre runs until it comes to something that waits for other threads; then another one runs, in
// an order that a seed draws. What a kernel may not rely on is made as bad as it can be: shared
// memory begins as NaN, a cp.async writes NaN where it is issued and its data where it is waited
// for, and one warp may be far ahead of the others. Under ThreadSanitizer the fibres are threads of
// its own, with no order between them but what barriers and atomics give: it then reports every
// pair of accesses that a barrier should have kept apart, of the orders that ran.
#ifndef STROBE_TESTS_EMULATOR_RUN_TIME_H_
#define STROBE_TESTS_EMULATOR_RUN_TIME_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace strobe::emulator {

struct Settings {
  uint64_t seed = 0;       // of the order of threads and of thread blocks
  int blocks_at_once = 1;  // thread blocks whose threads take turns; 1 under ThreadSanitizer
  // Each byte of memory that nobody has written yet: NaN as floats and as 16-bit values, -1 as
  // integers.
  unsigned char unwritten = 0xff;
};
Settings& settings();

inline constexpr uint32_t kMostShared = 232448;  // bytes that a thread block can have on Hopper
inline constexpr int kMostThreads = 1024, kLanes = 32;

/// Runs grid_x * grid_y thread blocks of `threads`, each of which calls `body`. "" or what went
/// wrong: threads that wait for each other for ever, lanes of a warp at different instructions, an
/// address outside of shared memory. What ran so far stays as it is.
std::string run(unsigned grid_x, unsigned grid_y, int threads, uint32_t shared_bytes,
                const std::function<void()>& body);

// --- For cuda/ptx and CUDA's built-in functions, by the thread that runs ---

/// Ends the launch.
[[noreturn]] void fail(const std::string& what);

/// What a lane gives to its warp at an instruction that all 32 lanes execute together.
struct alignas(16) Words {
  uint32_t w[8];
};
/// Gives `own`, waits for the other lanes, and gets all of theirs; they stay until the second next
/// call. name: of the instruction, a literal. orders: what was written before is known to all lanes
/// afterwards.
const Words* exchange(const char* name, const Words& own, bool orders = false);

/// Waits until `threads` have come to barrier `id`.
void barrier(int id, int threads);

/// The address of something in shared memory, as PTX has it, and back. The range is checked.
uint32_t shared_address(const void* p);
char* shared_at(uint32_t address, uint32_t bytes);
/// What a thread does to shared or global memory in code that a sanitizer does not see.
void note_read(const void* p, uint32_t bytes);
void note_write(void* p, uint32_t bytes);

/// cp.async of 16 bytes, or of zeros; its groups.
void copy_async(uint32_t to, const void* from, bool there);
void commit_copies();
void wait_for_copies(int pending);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_RUN_TIME_H_
