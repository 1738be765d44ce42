// The launches that `strobe tune` times: one problem, planned in several ways, over the same data.
#ifndef STROBE_CLI_TUNE_TIMING_H_
#define STROBE_CLI_TUNE_TIMING_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/mirror.h"
#include "strobe/strobe.h"

namespace strobe::cli {

// "cuda_sm80 cached_sm80_bf16_128_..." or "cpu_avx512, blocks of 128".
[[nodiscard]] std::string ChoiceText(const strobe_choice& choice);

class TimedProblem {
 public:
  // Takes memory for the problem, which some kernel takes, and fills it. Sequences are as long as
  // they may be, packed ones all alike. Throws std::bad_alloc.
  explicit TimedProblem(const strobe_problem& problem);

  // A plan of this problem, to run; they are numbered from 0.
  size_t Add(const strobe_plan& plan);
  // Seconds that a launch takes: of one, or of as many as take a millisecond. The first time, it
  // runs twice before.
  double Run(size_t number);

  // Whether the memory is within what a tuner may take.
  [[nodiscard]] static bool Fits(const strobe_problem& problem);

 private:
  struct Prepared {
    strobe_plan plan;
    void* workspace;
    int64_t repeats = 0;  // launches of a run; 0: not known yet
  };

  template <typename T>
  T* Take(const std::vector<T>& values);
  std::byte* TakeTensor(double elements, bool filled, int64_t copies = 1);
  void SetNumbers();
  void MakeForwardResults();
  void Launch(const Prepared& prepared);

  strobe_problem problem_;  // resolved
  Mirror mirror_;
  std::deque<Buffer> memory_;
  std::deque<Prepared> prepared_;
  strobe_forward_args forward_{};
  strobe_backward_args backward_{};
  // A cache is read from several copies in turns, as the layers of a model are.
  int64_t copies_ = 1, next_ = 0;
  uint64_t seed_ = 1;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_TUNE_TIMING_H_
