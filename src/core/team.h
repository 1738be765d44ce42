// The threads of a launch, and of what the tool and the examples compute beside launches.
#ifndef STROBE_CORE_TEAM_H_
#define STROBE_CORE_TEAM_H_

#include <atomic>
#include <cstdint>
#include <exception>

namespace strobe {

/// OpenMP's number of threads (OMP_NUM_THREADS).
int default_threads();
/// Those that a problem asks for, where 0 stands for default_threads().
inline int64_t threads_or_default(int64_t asked) { return asked > 0 ? asked : default_threads(); }

/// Calls work(data, thread) on at most `threads` threads at once, numbered from 0, which is the
/// caller's own. There are fewer where the system makes no more, or where OpenMP gives no more;
/// work must be of a kind that any number of threads completes.
void run_team(int threads, void (*work)(void* data, int thread), void* data);

/// The same for a callable work(thread). What one of the threads throws (std::bad_alloc, say), this
/// throws when all have ended; of several, the first.
template <typename Work>
void parallel(int threads, Work work) {
  struct Shared {
    Work& work;
    std::atomic_flag thrown{};
    std::exception_ptr error{};  // written by the thread that sets `thrown`, read after all
  } shared{work};
  run_team(
      threads,
      [](void* data, int thread) {
        Shared& s = *static_cast<Shared*>(data);
        try {
          s.work(thread);
        } catch (...) {
          // It must not leave the team, where it would end the program.
          if (!s.thrown.test_and_set()) s.error = std::current_exception();
        }
      },
      &shared);
  if (shared.error) std::rethrow_exception(shared.error);
}

/// Calls work(i, thread) for each i of [0, count), handed out in ascending order to `threads`
/// threads at most, until stop(thread), which is asked before each. Every i that was handed out is
/// done, even if the rest never is, so that none waits for ever for another (turnstile.h).
template <typename Stop, typename Work>
void share_out(int64_t count, int64_t threads, Stop&& stop, const Work& work) {
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(threads), [&](int thread) {
    while (!stop(thread)) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      work(i, thread);
    }
  });
}
/// The same for work(i), which nothing stops.
template <typename Work>
void share_out(int64_t count, int64_t threads, const Work& work) {
  const auto never = [](int) { return false; };
  share_out(count, threads, never, [&](int64_t i, int) { work(i); });
}

}  // namespace strobe

#endif  // STROBE_CORE_TEAM_H_
