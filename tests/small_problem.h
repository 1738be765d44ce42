// A problem of the planner's tests.
#ifndef STROBE_TESTS_SMALL_PROBLEM_H_
#define STROBE_TESTS_SMALL_PROBLEM_H_

#include <cstdint>

#include "strobe/strobe.h"

namespace strobe_test {

/// One sequence of two heads of 64 dimensions, in float32, for two threads.
inline strobe_problem ProblemOf(int64_t seqlen, strobe_direction direction = STROBE_FORWARD) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.direction = direction;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.heads = 2;
  p.head_dim = 64;
  p.threads = 2;
  return p;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_SMALL_PROBLEM_H_
