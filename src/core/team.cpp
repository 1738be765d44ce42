// OpenMP's threads, so that programs which use OpenMP too (PyTorch's wheel shares GNU's run time)
// have one pool and not two that fight for the cores. GNU's run time has two habits that a library
// must not pass on to its callers:
//
//  - Where a thread cannot be made, it prints and exits. Before OpenMP is asked for more threads
//    than it is known to have, that many are therefore made and ended here, and OpenMP is asked for
//    no more than could be made.
//  - In the child of a fork it waits for ever for the parent's threads if the thread that forked
//  had
//    a pool, whoever had made that pool. In the child that thread therefore makes threads of its
//    own for each launch.
#include "core/team.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace strobe {

namespace {

using Work = void (*)(void* data, int thread);

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using Memory = std::unique_ptr<T[], Free>;

template <typename T>
Memory<T> allocate(int count, size_t more_bytes = 0) {
  return Memory<T>(
      static_cast<T*>(std::malloc(static_cast<size_t>(count) * sizeof(T) + more_bytes)));
}

// Makes threads for this one call. If some cannot be made, the others do the work.
void run_on_new_threads(int threads, Work work, void* data) {
  struct Member {
    pthread_t thread;
    Work work;
    void* data;
    int number;
  };
  const Memory<Member> members = allocate<Member>(threads);
  int made = 1;
  if (members) {
    for (; made < threads; ++made) {
      Member& m = members[static_cast<size_t>(made)];
      m.work = work;
      m.data = data;
      m.number = made;
      const auto run = [](void* member) -> void* {
        const Member& self = *static_cast<Member*>(member);
        self.work(self.data, self.number);
        return nullptr;
      };
      if (pthread_create(&m.thread, nullptr, run, &m) != 0) break;
    }
  }
  work(data, 0);
  for (int i = 1; i < made; ++i) pthread_join(members[static_cast<size_t>(i)].thread, nullptr);
}

// ThreadSanitizer does not see the barriers of an OpenMP run time that was built without it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kAlwaysNewThreads = true;
#else
constexpr bool kAlwaysNewThreads = false;
#endif

// What is known of the pool that OpenMP keeps for one calling thread.
struct Pool {
  std::atomic<bool> taken;
  // Threads besides the caller that the pool is known to have: those of the caller's latest team,
  // less those that have ended since (another library's smaller team ends the surplus). The number
  // may be too small; it is too large only for the moment in which a thread ends.
  std::atomic<int> workers;
  std::atomic<bool> untracked;  // a worker could not be told to report its end
  int64_t retry;                // no more threads are tried for before this time, in seconds
};

// A fixed number of records, so that nothing is allocated and a worker that ends late still finds
// its record. Nothing is known of the pools of any calling threads beyond that number.
constexpr int kPools = 512;
Pool pools[kPools];

pthread_key_t owner_key;   // of the caller: its Pool, given back when it ends
pthread_key_t worker_key;  // of a worker: the Pool it is in, which counts it out when it ends

// Held from the search for threads that can be made until OpenMP has made them: of two callers at a
// limit, each would otherwise find the same ones.
pthread_mutex_t making_threads = PTHREAD_MUTEX_INITIALIZER;

std::atomic<bool> forked{false};
pthread_t forked_thread;  // the only one that a fork left, when forked

bool watch() {
  const auto in_child = [] {
    making_threads = PTHREAD_MUTEX_INITIALIZER;  // whoever held it is not there any more
    forked_thread = pthread_self();
    forked.store(true, std::memory_order_relaxed);
  };
  const auto give_back = [](void* pool) {
    static_cast<Pool*>(pool)->taken.store(false, std::memory_order_release);
  };
  const auto count_out = [](void* pool) {
    static_cast<Pool*>(pool)->workers.fetch_sub(1, std::memory_order_relaxed);
  };
  return pthread_atfork(nullptr, nullptr, in_child) == 0 &&
         pthread_key_create(&owner_key, give_back) == 0 &&
         pthread_key_create(&worker_key, count_out) == 0;
}

// When the library is loaded: another library may have made its pool long before the first launch.
const bool watching = watch();

// The calling thread's; null when there is none to be had.
Pool* own_pool() {
  if (void* const known = pthread_getspecific(owner_key)) return static_cast<Pool*>(known);
  for (Pool& pool : pools) {
    if (pool.taken.load(std::memory_order_relaxed) ||
        pool.taken.exchange(true, std::memory_order_acquire)) {
      continue;
    }
    pool.workers.store(0, std::memory_order_relaxed);
    pool.untracked.store(false, std::memory_order_relaxed);
    pool.retry = 0;
    if (pthread_setspecific(owner_key, &pool) == 0) return &pool;
    pool.taken.store(false, std::memory_order_relaxed);
    return nullptr;
  }
  return nullptr;
}

// Called by each thread of a team before it works.
void enlist(Pool* pool, int thread) {
  if (thread != 0) {
    if (pthread_getspecific(worker_key) != pool && pthread_setspecific(worker_key, pool) != 0) {
      pool->untracked.store(true, std::memory_order_relaxed);
    }
    return;
  }
  // This is the caller. No worker can end before the caller has reached the end of the work itself.
  // A team of one leaves the pool as it is.
  const int workers = omp_get_num_threads() - 1;
  if (workers > 0 && pool->workers.load(std::memory_order_relaxed) != workers) {
    pool->workers.store(workers, std::memory_order_relaxed);
  }
}

// The size of OpenMP's stacks in bytes; 0: the system's default. OMP_STACKSIZE is a number of
// kilobytes, or of the unit that a letter after it names.
size_t openmp_stack_bytes() {
  for (const char* const name : {"OMP_STACKSIZE", "GOMP_STACKSIZE"}) {
    const char* const text = std::getenv(name);
    if (!text) continue;
    char* end = nullptr;
    errno = 0;
    const unsigned long long number = std::strtoull(text, &end, 10);
    if (end == text || errno != 0) continue;
    while (*end == ' ' || *end == '\t') ++end;
    const int unit = std::tolower(static_cast<unsigned char>(*end));
    const int shift = unit == 'b' ? 0 : unit == 'm' ? 20 : unit == 'g' ? 30 : 10;
    if (number <= SIZE_MAX >> shift) return static_cast<size_t>(number << shift);
  }
  return 0;
}
const size_t stack_bytes = openmp_stack_bytes();

// No less than the memory that OpenMP takes for a team of this size: where it gets none, it exits
// too.
size_t team_bytes(int threads) { return 16384 + 1024 * static_cast<size_t>(threads); }

// A thread that is joined counts against the limits until the kernel has taken it off its lists, a
// few microseconds later.
void wait_until_gone(long id) {
#if defined(__linux__)
  for (int tries = 0; tries < 10000; ++tries) {
    if (syscall(SYS_tgkill, getpid(), id, 0) != 0) return;
    sched_yield();
  }
#else
  (void)id;
#endif
}

// How many more threads could be made, at most `wanted`: found by making them, all at once.
int creatable(int wanted) {
  struct Probe {
    pthread_t thread;
    pthread_mutex_t* gate;
    long id;
  };
  const Memory<Probe> probes = allocate<Probe>(wanted, team_bytes(wanted));
  pthread_attr_t attributes;
  if (!probes || pthread_attr_init(&attributes) != 0) return 0;
  if (stack_bytes != 0) pthread_attr_setstacksize(&attributes, stack_bytes);
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&gate);
  int made = 0;
  for (; made < wanted; ++made) {
    Probe& probe = probes[static_cast<size_t>(made)];
    probe.gate = &gate;
    const auto wait = [](void* data) -> void* {
      Probe& self = *static_cast<Probe*>(data);
#if defined(__linux__)
      self.id = syscall(SYS_gettid);
#endif
      pthread_mutex_lock(self.gate);
      pthread_mutex_unlock(self.gate);
      return nullptr;
    };
    if (pthread_create(&probe.thread, &attributes, wait, &probe) != 0) break;
  }
  pthread_mutex_unlock(&gate);
  for (int i = 0; i < made; ++i) pthread_join(probes[static_cast<size_t>(i)].thread, nullptr);
  for (int i = 0; i < made; ++i) wait_until_gone(probes[static_cast<size_t>(i)].id);
  pthread_attr_destroy(&attributes);
  // At a limit, one thread is left to others that make threads at this moment.
  return made == wanted || made == 0 ? made : made - 1;
}

int64_t seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

// How many threads, at most `threads`, OpenMP can be asked for without risk. pool null: nothing is
// known of its threads.
int affordable(Pool* pool, int threads) {
  if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;
  if (threads > omp_get_thread_limit()) threads = omp_get_thread_limit();
  int workers = pool ? pool->workers.load(std::memory_order_relaxed) : 0;
  if (workers < 0 || (pool && pool->untracked.load(std::memory_order_relaxed))) workers = 0;
  if (threads - 1 > workers) {
    if (pool && pool->retry != 0 && seconds() < pool->retry) {
      threads = workers + 1;
    } else {
      const int wanted = threads - 1 - workers, more = creatable(wanted);
      if (pool) pool->retry = more < wanted ? seconds() + 2 : 0;
      threads = workers + more + 1;
    }
  }
  if (threads == 1) return 1;
  void* volatile const room = std::malloc(team_bytes(threads));  // or the compiler leaves it out
  std::free(room);
  return room ? threads : 1;
}

}  // namespace

int default_threads() { return omp_get_max_threads(); }

void run_team(int threads, Work work, void* data) {
  if (threads <= 1) return work(data, 0);
  if (kAlwaysNewThreads || !watching ||
      (forked.load(std::memory_order_relaxed) && pthread_equal(forked_thread, pthread_self()))) {
    return run_on_new_threads(threads, work, data);
  }
  // A team inside another team has threads of its own, which OpenMP does not keep.
  Pool* const pool = omp_get_level() == 0 ? own_pool() : nullptr;
  const bool is_new = !pool || pool->workers.load(std::memory_order_relaxed) != threads - 1 ||
                      pool->untracked.load(std::memory_order_relaxed);
  if (is_new) {
    pthread_mutex_lock(&making_threads);
    threads = affordable(pool, threads);
    if (threads <= 1) {
      pthread_mutex_unlock(&making_threads);
      return work(data, 0);
    }
  }
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    // The caller comes here when all threads of its team have been made.
    if (is_new && thread == 0) pthread_mutex_unlock(&making_threads);
    if (pool) enlist(pool, thread);
    work(data, thread);
  }
}

}  // namespace strobe
