// The ladder, for those who run it: main.cu on a GPU, tests/emulator/paper_test.cpp on the CPU.
#ifndef STROBE_EXAMPLES_PAPER_STEPS_H_
#define STROBE_EXAMPLES_PAPER_STEPS_H_

#include "0_online_softmax.cuh"
#include "1_standard.cuh"
#include "2_flash_attention_1.cuh"
#include "3_unscaled.cuh"
#include "4_sequence.cuh"
#include "5_warps.cuh"

namespace strobe::paper {

enum Step { kOnlineSoftmax, kStandard, kFa1, kUnscaled, kSequence, kFa2, kSteps };
inline constexpr const char* kKeys[kSteps] = {"online",   "standard", "fa1",
                                              "unscaled", "sequence", "fa2"};
inline constexpr const char* kNames[kSteps] = {
    "online softmax: one thread to a query",
    "standard attention: S and P in global memory",
    "FlashAttention-1: normalised at each key block, parallel over batch and heads, split keys",
    "+ 3.1 unscaled accumulator, log-sum-exp alone",
    "+ 3.2 parallel over the sequence",
    "+ 3.3 warps split the queries: FlashAttention-2",
};

/// What a step stores besides `out`.
struct Stores {
  bool scores = false, max_and_sum = false, lse = false;
};
constexpr Stores stores_of(Step step) {
  return {step == kStandard, step == kFa1, step != kStandard && step != kFa1};
}

/// The largest shared memory that a thread block of a step asks for.
inline constexpr int kMostSharedBytes =
    std::max({SplitKeys<64>::kBytes, SplitKeys<128>::kBytes, SplitQueries<64>::kBytes,
              SplitQueries<128>::kBytes});

/// Runs a step. launch(kernel, grid, threads, bytes of shared memory, p) launches a kernel of it.
template <int kHeadDim, bool kCausal, typename Launch>
void run(Step step, const Arguments& p, const Launch& launch) {
  switch (step) {
    case kOnlineSoftmax:
      return run_online_softmax<kHeadDim, kCausal>(p, launch);
    case kStandard:
      return run_standard<kHeadDim, kCausal>(p, launch);
    case kFa1:
      return run_schedule<FlashAttention1, kHeadDim, kCausal>(p, launch);
    case kUnscaled:
      return run_schedule<Unscaled, kHeadDim, kCausal>(p, launch);
    case kSequence:
      return run_schedule<Sequence, kHeadDim, kCausal>(p, launch);
    default:
      return run_schedule<FlashAttention2, kHeadDim, kCausal>(p, launch);
  }
}

/// The same; head_dim is 64 or 128.
template <typename Launch>
void run(Step step, int head_dim, bool causal, const Arguments& p, const Launch& launch) {
  if (head_dim == 64) {
    causal ? run<64, true>(step, p, launch) : run<64, false>(step, p, launch);
  } else {
    causal ? run<128, true>(step, p, launch) : run<128, false>(step, p, launch);
  }
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_STEPS_H_
