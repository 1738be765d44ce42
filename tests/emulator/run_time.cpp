#include "run_time.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_runtime_api.h"
#include "launch_state.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if STROBE_EMULATOR_TSAN
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
extern "C" void __tsan_read_range(void*, unsigned long);   // NOLINT(bugprone-reserved-identifier)
extern "C" void __tsan_write_range(void*, unsigned long);  // NOLINT(bugprone-reserved-identifier)
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// What kernels declare, under one name or another. Aligned to pages: see begin_block.
namespace strobe::cuda {
alignas(4096) char shared[(emulator::kMostShared + 4095) / 4096 * 4096];
extern char shared_bytes[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
}  // namespace strobe::cuda
namespace strobe::cuda::sm80 {
extern char shared[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
extern char shared_bytes[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
}  // namespace strobe::cuda::sm80
namespace strobe::cuda::sm90 {
extern char shared_bytes[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
}
namespace strobe::cuda::sm90_wide {
extern char shared_bytes[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
}
namespace strobe::paper {
extern char shared[] __attribute__((alias("_ZN6strobe4cuda6sharedE")));
}
using strobe::cuda::shared;

namespace strobe::emulator {

Launch* launch = nullptr;

namespace {

std::deque<Block> blocks;  // kept for their stacks
uint64_t blocks_begun = 0;
Settings own_settings;

}  // namespace

uint64_t draw() {
  uint64_t& x = launch->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x * 0x2545F4914F6CDD1Du >> 16;
}

void set_ready(Block& b, int thread) {
  b.ready[thread / 64] |= uint64_t{1} << thread % 64;
  b.threads[static_cast<size_t>(thread)]->waits_at = nullptr;
}

void wake(Block& b, WaitsFor what, int id) {
  for (int i = 0; i < launch->threads; ++i) {
    const Thread& t = *b.threads[static_cast<size_t>(i)];
    if (!t.done && t.waits_at && t.waits_for == what && t.waits_id == id) set_ready(b, i);
  }
}

char* shared_of(Block& b) { return launch->in_place == &b ? shared : b.shared.data(); }

namespace {

// One of the threads in the set; -1: there is none.
int pick_thread(const uint64_t (&set)[kMostThreads / 64], Order order) {
  const int words = (launch->threads + 63) / 64;
  if (order == Order::kLast) {
    for (int i = words - 1; i >= 0; --i)
      if (set[i]) return 64 * i + 63 - __builtin_clzll(set[i]);
    return -1;
  }
  const int from = order == Order::kFirst
                       ? 0
                       : static_cast<int>(draw_below(static_cast<uint64_t>(launch->threads)));
  for (int n = 0; n <= words; ++n) {
    const int i = (from / 64 + n) % words;
    uint64_t bits = set[i];
    if (n == 0) bits &= ~uint64_t{0} << from % 64;
    if (bits) return 64 * i + __builtin_ctzll(bits);
  }
  return -1;
}

// By hand: a sanitizer would take memcpy for an access of the thread that runs.
void copy_bytes(char* to, const char* from, size_t bytes) {
  for (; bytes % 16 != 0; bytes -= 4) __builtin_memcpy(to + bytes - 4, from + bytes - 4, 4);
  for (size_t i = 0; i < bytes; i += 16) {
    uint64_t x[2];
    __builtin_memcpy(x, from + i, 16);
    __builtin_memcpy(to + i, x, 16);
  }
}

void put_in_place(Block& b) {
  if (launch->in_place == &b) return;
  const size_t bytes = (launch->shared_bytes + 15) / 16 * 16;
  if (launch->in_place) copy_bytes(launch->in_place->shared.data(), shared, bytes);
  copy_bytes(shared, b.shared.data(), bytes);
  launch->in_place = &b;
}

void entry();

void begin_block(Block& b, unsigned index) {
  b.x = index % gridDim.x;
  b.y = index / gridDim.x;
  b.number = ++blocks_begun;
  b.running = launch->threads;
  b.shared.assign((launch->shared_bytes + 15) / 16 * 16, static_cast<char>(own_settings.unwritten));
  std::fill(std::begin(b.ready), std::end(b.ready), 0);
  std::fill(std::begin(b.polling), std::end(b.polling), 0);
  for (Warp& w : b.warps) w.arrived = 0;
  for (Barrier& x : b.barriers) x.arrived = 0;
  b.of_cluster.arrived = 0;
  begin_mbarriers(b);
  while (b.threads.size() < static_cast<size_t>(launch->threads)) {
    b.threads.push_back(std::make_unique<Thread>());
  }
  for (int t = 0; t < launch->threads; ++t) {
    Thread& thread = *b.threads[static_cast<size_t>(t)];
    thread.number = t;
    thread.block = &b;
    thread.done = false;
    thread.copies.clear();
    thread.groups = 0;
    thread.quiet = 0;
    thread.unfenced.clear();
    thread.fibre.start(entry);
    set_ready(b, t);
  }
  launch->live.push_back(&b);
#if STROBE_EMULATOR_TSAN
  // New memory, so that what another block has done there is forgotten.
  mmap(shared, sizeof shared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
       0);
  launch->in_place = nullptr;
  __tsan_release(&launch->begin);
#endif
}

void begin_blocks() {
#if STROBE_EMULATOR_TSAN
  const size_t most = 1;  // it would take another block's shared memory for this one's
#else
  const size_t most = static_cast<size_t>(std::max(1, own_settings.blocks_at_once));
#endif
  while (launch->begun < launch->order.size() &&
         (launch->live.empty() || launch->live.size() + launch->cluster <= most)) {
    const unsigned first = launch->order[launch->begun++] * launch->cluster;
    std::vector<Block*> cluster;
    for (unsigned rank = 0; rank < launch->cluster; ++rank) {
      const auto is_free = [](Block& b) {
        return std::find(launch->live.begin(), launch->live.end(), &b) == launch->live.end();
      };
      auto found = std::find_if(blocks.begin(), blocks.end(), is_free);
      if (found == blocks.end()) found = blocks.emplace(blocks.end());
      begin_block(*found, first + rank);
      cluster.push_back(&*found);
    }
    for (Block* b : cluster) b->cluster = cluster;
  }
}

std::string who_waits() {
  std::string text = "threads wait for ever:";
  for (Block* b : launch->live) {
    int shown = 0;
    for (int t = 0; t < launch->threads; ++t) {
      const Thread& thread = *b->threads[static_cast<size_t>(t)];
      if (thread.done) continue;
      if (++shown > 70) {
        text += " ...";
        break;
      }
      char line[160];
      std::snprintf(line, sizeof line, "\n  block %u,%u thread %d at %s", b->x, b->y, t,
                    thread.waits_at ? thread.waits_at : "nothing");
      text += line;
      if (thread.waits_at && thread.waits_for == WaitsFor::kBarrier) {
        const Barrier& x = b->barriers[thread.waits_id];
        std::snprintf(line, sizeof line, " %d: %d of %d are there", thread.waits_id, x.arrived,
                      x.threads);
        text += line;
      }
      if (thread.waits_at && thread.waits_for == WaitsFor::kMbarrier)
        text += describe_mbarrier(*b, thread.waits_id);
    }
  }
  return text;
}

void leave(Fibre& from) {
  STROBE_TSAN(__tsan_release(&launch->end));
  launch->caller.resume(from);
}

// Calls of pick(block) for the live blocks until one gives a thread.
template <typename Pick>
Thread* pick_of_blocks(Order order, const Pick& pick) {
  const size_t count = launch->live.size();
  const size_t first = order == Order::kRandom && count > 1 ? draw_below(count) : 0;
  for (size_t n = 0; n < count; ++n) {
    const size_t i = (first + n) % count;
    Block& b = *launch->live[order == Order::kLast ? count - 1 - i : i];
    if (const int t = pick(b); t >= 0) return b.threads[static_cast<size_t>(t)].get();
  }
  return nullptr;
}

// One of the threads that poll, of one block or of any; null: there is none. At random, so that
// none is left out.
Thread* pick_poller(Block* of) {
  const auto pick = [&](const Block& b) {
    return of && of != &b ? -1 : pick_thread(b.polling, Order::kRandom);
  };
  Thread* const t = pick_of_blocks(Order::kRandom, pick);
  if (!t) return nullptr;
  t->block->polling[t->number / 64] &= ~(uint64_t{1} << t->number % 64);
  --launch->polling;
  t->waits_at = nullptr;
  return t;
}

// A thread that can go on; null: there is none, nor will there be.
Thread* next_thread() {
  const auto sometimes = [](uint64_t one_of) { return draw_below(one_of) == 0; };
  Block* const own = launch->now ? launch->now->block : nullptr;
  // (Another block's seldom: the blocks' shared memory changes places.)
  if (launch->polling > 0 && sometimes(16)) {
    if (Thread* const t = pick_poller(sometimes(32) ? nullptr : own)) return t;
  }
  if (launch->copies > 0 && launch->copy_delay > 0 && sometimes(launch->copy_delay))
    land_some_copy();
  const Order order = launch->blocks_order;
  const bool stay =
      launch->live.size() == 1 || (order == Order::kRandom && !sometimes(launch->block_turn));
  const auto pick = [](const Block& b) { return pick_thread(b.ready, launch->threads_order); };
  for (;;) {
    Thread* next = nullptr;
    if (own && own->running > 0 && stay) {
      if (const int t = pick(*own); t >= 0) next = own->threads[static_cast<size_t>(t)].get();
    }
    if (!next) next = pick_of_blocks(order, pick);
    if (next) {
      launch->polls_in_vain = 0;
      next->block->ready[next->number / 64] &= ~(uint64_t{1} << next->number % 64);
      return next;
    }
    if (launch->copies > 0) {
      land_some_copy();
      continue;
    }
    // While only threads that poll go on, nobody writes what they wait for: each has had its turn.
    constexpr int kMostPolls = 5000;
    if (launch->polling == 0 || ++launch->polls_in_vain > kMostPolls) return nullptr;
    return pick_poller(nullptr);
  }
}

// Goes on with some thread that can.
void go_on(Fibre& from) {
  Thread* const next = next_thread();
  if (!next) {
    launch->failure = who_waits();
    if (&from != &launch->caller) leave(from);
    return;
  }
  Block& b = *next->block;
  put_in_place(b);
  launch->now = next;
  threadIdx.x = static_cast<unsigned>(next->number);
  blockIdx.x = b.x;
  blockIdx.y = b.y;
  if (&next->fibre != &from) next->fibre.resume(from);
}

void land(const Copy& copy) {
  char* const to = shared + (copy.to - kSharedBase);
  note_write(to, copy.bytes);
  char all[16] = {};
  if (copy.read > 0) {
    note_read(copy.from, copy.read);
    std::memcpy(all, copy.from, copy.read);
  }
  copy_bytes(to, all, copy.bytes);
}

// Lands the copies of all groups below `end`.
void land_groups(Thread& t, int end) {
  size_t left = 0;
  for (const Copy& copy : t.copies) {
    if (copy.group < end) {
      land(copy);
    } else {
      t.copies[left++] = copy;
    }
  }
  t.copies.resize(left);
}

void entry() {
  Fibre::arrived();
  STROBE_TSAN(__tsan_acquire(&launch->begin));
  Thread& own = *launch->now;
  (*launch->body)();
  land_groups(own, own.groups + 1);
  STROBE_TSAN(__tsan_release(&launch->end));
  own.done = true;
  if (--own.block->running == 0) {
    if (!own.block->copies.empty()) {
      launch->failure = "a thread block has ended while copies to its shared memory were under way";
      leave(own.fibre);
    }
    auto& live = launch->live;
    live.erase(std::find(live.begin(), live.end(), own.block));
    if (launch->in_place == own.block) launch->in_place = nullptr;
    launch->now = nullptr;
    leave(own.fibre);  // another block may begin, on this stack too
  }
  go_on(own.fibre);
  std::abort();  // nobody goes on with a thread that is done
}

}  // namespace

void wait_here(const char* at, WaitsFor what, int id) {
  Thread& own = *launch->now;
  own.waits_at = at;
  own.waits_for = what;
  own.waits_id = id;
  go_on(own.fibre);
}

Settings& settings() { return own_settings; }

std::string run(unsigned grid_x, unsigned grid_y, int threads, uint32_t shared_bytes,
                const std::function<void()>& body, unsigned cluster) {
  if (threads % kLanes != 0 || threads <= 0 || threads > kMostThreads) {
    return "threads of a block: expected whole warps, 1024 threads at most";
  }
  if (shared_bytes > kMostShared) return "shared memory: more than a thread block can have";
  if (cluster == 0 || grid_x % cluster != 0) return "a grid that is not made of whole clusters";
#if STROBE_EMULATOR_TSAN
  if (cluster > 1) return "clusters are not emulated under ThreadSanitizer";
#endif
  Launch own;
  launch = &own;
  gridDim = dim3(grid_x, grid_y);
  blockDim = dim3(static_cast<unsigned>(threads));
  own.body = &body;
  own.threads = threads;
  own.cluster = cluster;
  own.shared_bytes = shared_bytes;
  own.random = own_settings.seed * 0x9E3779B97F4A7C15u + 0x632BE59BD9B4E019u;
  for (int i = 0; i < 8; ++i) draw();
  own.threads_order = static_cast<Order>(draw() % 3);
  constexpr uint64_t kDelays[] = {0, 0, 100, 4}, kTurns[] = {64, 500, 4000, 50000};
  own.copy_delay = kDelays[draw() % 4];
  own.block_turn = kTurns[draw() % 4];
  own.blocks_order = static_cast<Order>(draw() % 3);
  STROBE_TSAN(own.copier = __tsan_create_fiber(0));
  for (unsigned i = 0; i < grid_x * grid_y / cluster; ++i) own.order.push_back(i);
  for (size_t n = own.order.size(); n > 1; --n) std::swap(own.order[n - 1], own.order[draw() % n]);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(shared, sizeof shared);
  ASAN_POISON_MEMORY_REGION(shared + (shared_bytes + 15) / 16 * 16,
                            sizeof shared - (shared_bytes + 15) / 16 * 16);
#endif
  for (begin_blocks(); !own.live.empty() && own.failure.empty(); begin_blocks()) {
    go_on(own.caller);
  }
  STROBE_TSAN(__tsan_acquire(&own.end));
  STROBE_TSAN(__tsan_destroy_fiber(own.copier));
  launch = nullptr;
  return own.failure;
}

namespace {

int& quiet() { return launch->now ? launch->now->quiet : launch->quiet; }
}  // namespace

void ignore_accesses() {
  STROBE_TSAN(AnnotateIgnoreReadsBegin(__FILE__, __LINE__));
  STROBE_TSAN(AnnotateIgnoreWritesBegin(__FILE__, __LINE__));
}
void heed_accesses() {
  STROBE_TSAN(AnnotateIgnoreReadsEnd(__FILE__, __LINE__));
  STROBE_TSAN(AnnotateIgnoreWritesEnd(__FILE__, __LINE__));
}

void fail(const std::string& what) {
  Thread& own = *launch->now;
  char text[80];
  std::snprintf(text, sizeof text, "block %u,%u thread %d: ", own.block->x, own.block->y,
                own.number);
  launch->failure = text + what;
  if (own.quiet > 0) heed_accesses();
  own.quiet = 0;
  leave(own.fibre);
  std::abort();
}

const Words* exchange(const char* name, const Words& own, bool orders, void (*for_warp)()) {
  Thread& t = *launch->now;
  Warp& w = t.block->warps[t.number / kLanes];
  if (w.arrived == 0) {
    w.name = name;
  } else if (w.name != name && std::strcmp(w.name, name) != 0) {
    fail(std::string("is at ") + name + ", other lanes of its warp are at " + w.name);
  }
  const uint32_t phase = w.phase % 2;
  w.words[phase][t.number % kLanes] = own;
  if (orders) {
    STROBE_TSAN(__tsan_release(&w.order[phase]));
  }
  if (++w.arrived == kLanes) {
    if (for_warp) for_warp();
    w.arrived = 0;
    ++w.phase;
    const int first = t.number / kLanes * kLanes;
    for (int i = first; i < first + kLanes; ++i)
      if (i != t.number) set_ready(*t.block, i);
    // Whoever comes last may be the first to go on, or not.
    if (draw() % 2) {
      set_ready(*t.block, t.number);
      go_on(t.fibre);
    }
  } else {
    wait_here(name, WaitsFor::kWarp, t.number / kLanes);
  }
  if (orders) {
    STROBE_TSAN(__tsan_acquire(&w.order[phase]));
  }
  return w.words[phase];
}

namespace {

struct Arrival {
  uint32_t phase;
  bool is_last;
};
Arrival arrive(int id, int threads, bool x) {
  if (id < 0 || id >= kBarriers) fail("barrier " + std::to_string(id) + ", expected 0 to 15");
  Thread& t = *launch->now;
  Barrier& b = t.block->barriers[id];
  if (b.arrived > 0 && b.threads != threads) {
    fail("barrier " + std::to_string(id) + " of " + std::to_string(threads) +
         " threads, others wait there for " + std::to_string(b.threads));
  }
  b.threads = threads;
  const uint32_t phase = b.phase % 2;
  if (b.arrived == 0) b.any[phase] = false;
  b.any[phase] |= x;
  STROBE_TSAN(__tsan_release(&b.order[phase]));
  if (++b.arrived < threads) return {phase, false};
  b.arrived = 0;
  ++b.phase;
  wake(*t.block, WaitsFor::kBarrier, id);
  return {phase, true};
}

// The last to come may be the first to go on, or not.
void go_on_as_others() {
  Thread& t = *launch->now;
  set_ready(*t.block, t.number);
  go_on(t.fibre);
}

}  // namespace

bool barrier_or(int id, int threads, bool x) {
  const Arrival arrival = arrive(id, threads, x);
  if (arrival.is_last) {
    go_on_as_others();
  } else {
    wait_here("barrier", WaitsFor::kBarrier, id);
  }
  Barrier& b = launch->now->block->barriers[id];
  STROBE_TSAN(__tsan_acquire(&b.order[arrival.phase]));
  return b.any[arrival.phase];
}
void barrier(int id, int threads) { barrier_or(id, threads, false); }
void barrier_arrive(int id, int threads) { arrive(id, threads, false); }

void cluster_barrier() {
  Thread& t = *launch->now;
  Barrier& b = t.block->cluster[0]->of_cluster;
  if (++b.arrived < launch->threads * static_cast<int>(launch->cluster)) {
    wait_here("the cluster's barrier", WaitsFor::kCluster, 0);
    return;
  }
  b.arrived = 0;
  for (Block* other : t.block->cluster) wake(*other, WaitsFor::kCluster, 0);
  go_on_as_others();
}

void poll() {
  Thread& t = *launch->now;
  t.block->polling[t.number / 64] |= uint64_t{1} << t.number % 64;
  ++launch->polling;
  wait_here("a word in memory", WaitsFor::kMemory, 0);
}

uint64_t block_number() { return launch->now->block->number; }
std::shared_ptr<void>& block_products() { return launch->now->block->products; }
uint64_t drawn_for(uint64_t place) {
  uint64_t x = own_settings.seed * 0x9E3779B97F4A7C15u + place * 0xD6E8FEB86659FD93u;
  x += (uint64_t{launch->now->block->y} << 32) + launch->now->block->x;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  return x ^ x >> 32;
}

uint32_t shared_address(const void* p) {
  const auto at = static_cast<const char*>(p) - shared;
  if (at < 0 || at > static_cast<std::ptrdiff_t>(launch->shared_bytes)) {
    fail("address of something that is not in shared memory");
  }
  return kSharedBase + static_cast<uint32_t>(at);
}

char* shared_at(uint32_t address, uint32_t bytes) {
  const uint32_t at = address - kSharedBase;
  if (address < kSharedBase || at > launch->shared_bytes || launch->shared_bytes - at < bytes) {
    fail(std::to_string(bytes) + " bytes at shared address " + std::to_string(at) + ", of " +
         std::to_string(launch->shared_bytes));
  }
  if (at % bytes != 0) {
    fail(std::to_string(bytes) + " bytes at shared address " + std::to_string(at) +
         ", expected a multiple");
  }
  return shared + at;
}

void Quiet::begin() {
  if (quiet()++ == 0) ignore_accesses();
}
void Quiet::end() {
  if (--quiet() == 0) heed_accesses();
}

void note_read([[maybe_unused]] const void* p, [[maybe_unused]] uint32_t bytes) {
  const bool is_quiet = quiet() > 0;
  if (is_quiet) heed_accesses();
  STROBE_TSAN(__tsan_read_range(const_cast<void*>(p), bytes));
  if (is_quiet) ignore_accesses();
}
void note_write([[maybe_unused]] void* p, [[maybe_unused]] uint32_t bytes) {
  const bool is_quiet = quiet() > 0;
  if (is_quiet) heed_accesses();
  STROBE_TSAN(__tsan_write_range(p, bytes));
  if (is_quiet) ignore_accesses();
}

void copy_async(uint32_t to, const void* from, uint32_t read, uint32_t bytes) {
  Thread& t = *launch->now;
  char* const place = shared_at(to, bytes);
  if (read > 0 && reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    fail("cp.async from an address that is no multiple of " + std::to_string(bytes));
  }
  note_write(place, bytes);
  for (uint32_t i = 0; i < bytes; ++i) place[i] = static_cast<char>(own_settings.unwritten);
  if (read > 0) {  // a source that is not there shows here
    volatile char byte = static_cast<const char*>(from)[0];
    byte = static_cast<const char*>(from)[read - 1];
    (void)byte;
  }
  t.copies.push_back({to, from, read, bytes, t.groups});
}
void commit_copies() { ++launch->now->groups; }
void wait_for_copies(int pending) {
  Thread& t = *launch->now;
  land_groups(t, t.groups - pending);
}

}  // namespace strobe::emulator
