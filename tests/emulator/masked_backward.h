// Masks as data in the tests of the backward kernels in the emulator.
#ifndef STROBE_TESTS_EMULATOR_MASKED_BACKWARD_H_
#define STROBE_TESTS_EMULATOR_MASKED_BACKWARD_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulated_launch.h"
#include "fixture.h"
#include "hostile_mask.h"
#include "less_room.h"
#include "problem_gen.h"

namespace strobe_test {

/// A mask as data of its own for each head and, packed or not, each sequence, that hides and shows
/// whole blocks too.
MaskChoice MakeMask(int32_t block_q, int32_t block_k) {
  MaskChoice mask;
  mask.there = mask.keep = mask.full = mask.of_each_head = mask.of_each_sequence = true;
  mask.block_q = block_q;
  mask.block_k = block_k;
  mask.density = 0.3;
  return mask;
}

/// Backward of a case with room for all of its mask, and for a part: dQ of the queries whose lists
/// are not there is NaN, and has the bits otherwise that it has with room for all. "" or what is
/// wrong; counts rows. One sequence, blocks of 64 x 64 or more.
inline std::string CompareRowsWithLessRoom(Fixture& all, Fixture& part, int arch, int64_t& lost,
                                           int64_t& kept) {
  const Case& c = all.c();
  for (Fixture* const f : {&all, &part}) {
    if (const std::string wrong = f->Forward(); !wrong.empty()) return wrong;
  }
  std::string wrong = all.Backward([&](const strobe_problem& p, const strobe_backward_args& a) {
    return LaunchInTheEmulator(arch, p, a, WorkspaceHolds::kNumbers);
  });
  if (!wrong.empty()) return wrong;
  LessRoom less;
  const auto launch = [&](strobe_problem p, strobe_backward_args a) -> std::string {
    a.mask = less.Pack(part.mask(), p, a.mask, 2, 3);
    return LaunchInTheEmulator(arch, p, a, WorkspaceHolds::kNaN);
  };
  wrong = part.Backward(launch);
  if (!wrong.empty()) return wrong;
  const oracle::Tensor dq[] = {all.dq.Read(), part.dq.Read()};
  const int64_t rows = c.seqlens_q[0];
  const strobe_mask shape = c.mask.Shape(1, c.heads);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < c.heads; ++head) {
      const bool is_lost = less.IsLost(shape, rows, 0, head, row);
      (is_lost ? lost : kept) += 1;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double x = dq[0].at(row, head)[d], y = dq[1].at(row, head)[d];
        if (is_lost ? !std::isnan(y) : x != y)
          return "dq of row " + std::to_string(row) + ", head " + std::to_string(head);
      }
    }
  }
  return {};
}

/// A launch that writes anything over the words of a mask first; counts the masks.
inline Fixture::BackwardLaunch WithHostileMask(int arch, uint64_t seed, int& masks) {
  return [=, &masks](const strobe_problem& p, strobe_backward_args a) -> std::string {
    size_t bytes = 0;
    EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
    const FencedWords fenced(bytes / 4);
    std::memcpy(fenced.words().data(), a.mask, bytes);
    MakeHostile(fenced.words(), seed);
    a.mask = fenced.words().data();
    ++masks;
    return LaunchInTheEmulator(arch, p, a, WorkspaceHolds::kNaN);
  };
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_MASKED_BACKWARD_H_
