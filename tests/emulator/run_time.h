// CUDA kernels on the CPU, for tests: thread blocks whose threads are fibres of one thread of the
// system. Kernels are compiled by the host compiler, with tests/emulator/include before src in the
// include path: its cuda/ptx/ says in C++ what each instruction does, and calls what is below,
// instructions.h, wgmma_products.h and tensor_copies.h.
//
// A fibre runs until it comes to something that waits for other threads; then another one runs, in
// an order that a seed draws. What a kernel may not rely on is made as bad as it can be: shared
// memory begins as NaN, what copies bring is NaN until it may be read, and one warp may be far
// ahead of the others. Under ThreadSanitizer the fibres are threads of its own, with no order
// between them but what barriers and atomics give: it then reports every pair of accesses that a
// barrier should have kept apart, of the orders that ran.
#ifndef STROBE_TESTS_EMULATOR_RUN_TIME_H_
#define STROBE_TESTS_EMULATOR_RUN_TIME_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace strobe::emulator {

struct Settings {
  uint64_t seed = 0;       // of the order of threads, of thread blocks and of copies
  int blocks_at_once = 1;  // thread blocks whose threads take turns; 1 under ThreadSanitizer
  // Each byte of memory that nobody has written yet: NaN as floats and as 16-bit values, -1 as
  // integers.
  unsigned char unwritten = 0xff;
  // For tests of the tests: nobody waits at the mbarrier that is initialised as a thread block's
  // n-th, from 0 on.
  int skipped_mbarrier = -1;
};
Settings& settings();

inline constexpr uint32_t kMostShared = 232448;  // bytes that a thread block can have on Hopper
inline constexpr int kMostThreads = 1024, kLanes = 32;

/// Runs grid_x * grid_y thread blocks of `threads`, each of which calls `body`; `cluster`
/// neighbours begin together and reach each other's shared memory. "" or what went wrong: threads
/// that wait for each other for ever, lanes of a warp at different instructions, an address outside
/// of shared memory. What ran so far stays as it is.
std::string run(unsigned grid_x, unsigned grid_y, int threads, uint32_t shared_bytes,
                const std::function<void()>& body, unsigned cluster = 1);

// --- For cuda/ptx and CUDA's built-in functions, by the thread that runs ---

/// Ends the launch.
[[noreturn]] void fail(const std::string& what);

/// What a lane gives to its warp at an instruction that all 32 lanes execute together.
struct alignas(16) Words {
  uint32_t w[8];
};
/// Gives `own`, waits for the other lanes, and gets all of theirs; they stay until the second next
/// call. name: of the instruction, a literal. orders: what was written before is known to all lanes
/// afterwards. for_warp: what the last lane to come does before anybody goes on.
const Words* exchange(const char* name, const Words& own, bool orders = false,
                      void (*for_warp)() = nullptr);

/// Waits until `threads` have come to barrier `id`.
void barrier(int id, int threads);
/// The same; whether x was true in one of them.
bool barrier_or(int id, int threads, bool x);
/// Counts among those who come, and goes on.
void barrier_arrive(int id, int threads);

/// For a thread that reads memory again and again until another one has written there: others run.
void poll();

/// The address of something in shared memory, as PTX has it, and back. The range is checked.
uint32_t shared_address(const void* p);
char* shared_at(uint32_t address, uint32_t bytes);
/// What a thread does to shared or global memory in code that a sanitizer does not see.
void note_read(const void* p, uint32_t bytes);
void note_write(void* p, uint32_t bytes);

/// While one lives, ThreadSanitizer takes no notice of what the thread that runs does (but of what
/// is noted): it works on the run time's own memory, which is any thread's. No other thread may run
/// meanwhile.
class Quiet {
 public:
  Quiet() { begin(); }
  ~Quiet() { end(); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  static void begin();
  static void end();
};

/// cp.async of 16 bytes or less, of which `read` come from memory and the rest are zeros; its
/// groups.
void copy_async(uint32_t to, const void* from, uint32_t read, uint32_t bytes = 16);
void commit_copies();
void wait_for_copies(int pending);
/// Arrives once at `mbarrier` when all copies that this thread has begun have landed, some time
/// later; the thread goes on. (It cannot wait for them by their groups any more.)
void arrive_after_copies(uint32_t mbarrier);

/// A thread has written to shared memory by an ordinary instruction. What is read there by TMA or
/// wgmma (the asynchronous proxy) has to be fenced by whoever wrote it.
void wrote_shared(uint32_t address, uint32_t bytes);
void fence_proxy_async();
void expect_fenced(const char* name, uint32_t address, uint32_t bytes);

// mbarriers, by the shared address of their eight bytes (cuda/ptx/barrier.h says what they do).
void mbarrier_init(uint32_t address, uint32_t count);
/// Makes `count` arrivals, after `bytes` more are expected to be brought.
void mbarrier_arrive(uint32_t address, uint32_t count, uint32_t bytes);
bool mbarrier_test(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);

/// Begins a copy that nobody's instructions make: `bytes` at the shared address `to` are what
/// nobody has written from now on, and some time `land` is called with where they lie; they count
/// towards `mbarrier` then. Whatever land reads may not change before.
void start_copy(uint32_t to, uint32_t bytes, uint32_t mbarrier, std::function<void(char*)> land);

// Clusters. An address in the shared memory of block `rank` of the own cluster is that of the own
// shared memory with the rank in its upper bits. mbarrier_arrive and start_copy take such ones.
uint32_t cluster_rank();
uint32_t cluster_address(uint32_t address, uint32_t rank);
void cluster_barrier();
/// Bytes of the own shared memory as they are when they are asked for, by a copy from there: also
/// while another thread block runs.
std::function<const char*()> own_shared(uint32_t address, uint32_t bytes);

/// A number that each thread block has for itself.
uint64_t block_number();
/// What wgmma_products.cpp keeps of the thread block; a later one, with another number, finds it
/// there.
std::shared_ptr<void>& block_products();
/// Numbers that the seed draws, one for each `place` of a thread block: the same for all who ask.
uint64_t drawn_for(uint64_t place);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_RUN_TIME_H_
