// The threads of a launch.
#ifndef STROBE_CPU_TEAM_H_
#define STROBE_CPU_TEAM_H_

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

}  // namespace strobe::cpu

#endif  // STROBE_CPU_TEAM_H_
