// The threads of a launch.
#ifndef STROBE_CPU_TEAM_H_
#define STROBE_CPU_TEAM_H_

#include <atomic>
#include <cstdint>

namespace strobe::cpu {

/// OpenMP's number of threads (OMP_NUM_THREADS).
int default_threads();

/// Calls work(data, thread) on at most `threads` threads at once, numbered from 0, which is the
/// caller's own. There are fewer where the system makes no more, or where OpenMP gives no more;
/// work must be of a kind that any number of threads completes.
void run_team(int threads, void (*work)(void* data, int thread), void* data);

/// The same for a callable work(thread).
template <typename Work>
void parallel(int threads, Work work) {
  run_team(
      threads, [](void* data, int thread) { (*static_cast<Work*>(data))(thread); }, &work);
}

/// Calls work(i) for each i of [0, count), each in one of `threads` threads at most.
template <typename Work>
void share_out(int64_t count, int64_t threads, const Work& work) {
  std::atomic<int64_t> next{0};
  parallel(static_cast<int>(threads), [&](int) {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      work(i);
    }
  });
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_TEAM_H_
