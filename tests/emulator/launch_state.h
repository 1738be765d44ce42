// What the run time knows of a launch: for run_time.cpp and mbarrier.cpp.
#ifndef STROBE_TESTS_EMULATOR_LAUNCH_STATE_H_
#define STROBE_TESTS_EMULATOR_LAUNCH_STATE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fibre.h"
#include "run_time.h"

#if STROBE_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#define STROBE_TSAN(statement) statement
#else
#define STROBE_TSAN(statement)
#endif

// What kernels declare as `extern __shared__ char shared[]`.
namespace strobe::cuda {
extern char shared[];
}

namespace strobe::emulator {

inline constexpr int kBarriers = 16, kMostWarps = kMostThreads / kLanes;
// Shared addresses begin here, so that a small number, or none, is not one. (A multiple of 1024:
// swizzles look at the bits of addresses.)
inline constexpr uint32_t kSharedBase = 1024;

struct Block;

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t read, bytes;  // what is not read are zeros
  int group;
};

enum class WaitsFor { kWarp, kBarrier, kMbarrier, kCluster, kMemory };

struct Thread {
  Fibre fibre;
  int number = 0;  // in its thread block
  Block* block = nullptr;
  const char* waits_at = nullptr;  // null: it runs, or could
  WaitsFor waits_for = WaitsFor::kWarp;
  int waits_id = 0;  // which barrier
  bool done = false;
  int quiet = 0;  // Quiets that live
  std::vector<Copy> copies;
  int groups = 0;                  // committed
  std::vector<uint32_t> unfenced;  // Block::unfenced that say this thread's number
};

struct Warp {
  const char* name = nullptr;
  int arrived = 0;
  uint32_t phase = 0;
  Words words[2][kLanes];
  char order[2];  // ThreadSanitizer's
};

struct Barrier {
  int arrived = 0, threads = 0;
  uint32_t phase = 0;
  bool any[2];
  char order[2];
};

struct Mbarrier {
  uint32_t address;
  int number;
  uint32_t count, pending;
  int64_t bytes = 0;  // still to be brought
  uint32_t phase = 0;
  char order[2];
};

/// A copy under way: start_copy, arrive_after_copies.
struct AsyncCopy {
  uint32_t to, bytes;  // an offset
  uint32_t arrivals;   // that it makes when it has landed
  Mbarrier* mbarrier;
  std::function<void(char*)> land;
  std::unique_ptr<char> order;
};

struct Block {
  unsigned x = 0, y = 0;
  uint64_t number = 0;
  int running = 0;  // threads that are not done
  std::vector<std::unique_ptr<Thread>> threads;
  uint64_t ready[kMostThreads / 64] = {}, polling[kMostThreads / 64] = {};
  Warp warps[kMostWarps];
  Barrier barriers[kBarriers];
  std::deque<Mbarrier> mbarriers;
  std::vector<AsyncCopy> copies;
  std::vector<char> shared;  // while another block's is in place
  // Of each 16 bytes of shared memory: 1 + the thread that has written there and not fenced; or 0.
  std::vector<uint16_t> unfenced;
  std::shared_ptr<void> products;  // block_products()
  std::vector<Block*> cluster;     // this one among them
  Barrier of_cluster;              // of the first block of a cluster: all blocks'
};

enum class Order { kRandom, kFirst, kLast };

/// One at a time, as there is one thread of the system.
struct Launch {
  Fibre caller;
  const std::function<void()>* body = nullptr;
  int threads = 0;
  unsigned cluster = 1;
  uint32_t shared_bytes = 0;
  std::vector<unsigned> order;  // of clusters
  size_t begun = 0;
  std::vector<Block*> live;
  Block* in_place = nullptr;  // whose shared memory is where kernels look for it
  Thread* now = nullptr;
  uint64_t random = 1;
  Order threads_order = Order::kRandom;
  Order blocks_order = Order::kRandom;  // else the first, or the last, block goes on while it can
  uint64_t block_turn = 64;  // a thread of the same block goes on next but for once in so many
  int64_t polling = 0, copies = 0;  // threads, copies under way: of all blocks
  uint64_t copy_delay = 0;          // 0: a copy lands when nobody could go on without it; else one
                                    // does every so many times that another thread goes on
  int quiet = 0;                    // Quiets that live while no thread runs
  int polls_in_vain = 0;            // since somebody else went on
  std::string failure;
  char begin, end;  // ThreadSanitizer's
  [[maybe_unused]] void* copier = nullptr;
};
extern Launch* launch;

/// A random number, and one below n.
uint64_t draw();
inline uint64_t draw_below(uint64_t n) { return (draw() & 0xffffffff) * n >> 32; }
/// From here on the thread can go on.
void set_ready(Block& b, int thread);
/// Wakes all threads of a block that wait for this.
void wake(Block& b, WaitsFor what, int id);
/// Until somebody sets the thread ready.
void wait_here(const char* at, WaitsFor what, int id);
/// Where a block's shared memory is now.
char* shared_of(Block& b);

// Of what the thread that runs does, for ThreadSanitizer: Quiet.
void ignore_accesses();
void heed_accesses();

// --- mbarrier.cpp ---

void begin_mbarriers(Block& b);
/// Lets one of the copies that are under way land.
void land_some_copy();
std::string describe_mbarrier(const Block& b, int number);

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_LAUNCH_STATE_H_
