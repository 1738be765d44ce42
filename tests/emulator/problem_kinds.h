// Random problems of every kind that CUDA kernels are for, for tests of plans.
#ifndef STROBE_TESTS_EMULATOR_PROBLEM_KINDS_H_
#define STROBE_TESTS_EMULATOR_PROBLEM_KINDS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cache_fixture.h"
#include "fixture.h"
#include "problem_gen.h"

namespace strobe_test {

/// draw(seed) is a problem, as tensors of the fixtures have it.
struct ProblemKind {
  const char* name;
  std::function<strobe_problem(uint64_t)> draw;
};

inline std::vector<ProblemKind> ProblemKinds() {
  const auto forward = [](const Case& c) { return Fixture(c).MakeProblem(STROBE_FORWARD); };
  const auto backward = [](const Case& c) { return Fixture(c).MakeProblem(STROBE_BACKWARD); };
  const auto cached = [](const CacheCase& c) { return CacheFixture(c).Problem(); };
  const auto of = [](const auto& fixture, auto generate, auto... more) {
    return [=](uint64_t seed) { return fixture(generate(seed, more...)); };
  };
  return {{"forward", of(forward, GenerateCase)},
          {"forward, mask", of(forward, GenerateMaskedCase)},
          {"forward, few queries", of(forward, GenerateFewQueriesCase)},
          {"forward, float8", of(forward, GenerateFloat8Case)},
          {"backward", of(backward, GenerateCase)},
          {"backward, mask", of(backward, GenerateMaskedCase)},
          {"cache", of(cached, GenerateCacheCase)},
          {"cache, mask", of(cached, GenerateMaskedCacheCase)},
          {"cache, bias", of(cached, GenerateBiasedCacheCase)},
          {"quantised cache", of(cached, GenerateQuantisedCase, false)},
          {"quantised cache, mask", of(cached, GenerateQuantisedCase, true)},
          {"mixed cache", of(cached, GenerateMixedCacheCase)},
          {"float8 over a cache", of(cached, GenerateFloat8CacheCase, false)},
          {"float8 over a cache, mask", of(cached, GenerateFloat8CacheCase, true)}};
}

/// The same problem of this type, where it is of one of 16 bits. Those are drawn of either, and
/// rows of kernels.def are for both; but 7.5 has fp16 alone, and of 8.0 programs have those for
/// bf16.
inline strobe_problem OfType(strobe_problem p, int32_t type) {
  const auto retype = [type](auto& dtype) {
    if (dtype == STROBE_BFLOAT16 || dtype == STROBE_FLOAT16) dtype = type;
  };
  retype(p.dtype), retype(p.kv_dtype), retype(p.v_dtype), retype(p.out_dtype), retype(p.grad_dtype);
  return p;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_PROBLEM_KINDS_H_
