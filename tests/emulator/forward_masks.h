// Masks as data in the forward pass that lack room, or are none.
#ifndef STROBE_TESTS_EMULATOR_FORWARD_MASKS_H_
#define STROBE_TESTS_EMULATOR_FORWARD_MASKS_H_

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

/// Masks with room for half of what they need: rows of the lists that lack it are NaN, and the
/// others have the bits that they have with room for all. Of the seeds from `first` on, each
/// step-th below `end`. draw(seed): a case with a mask, for which it prepares the machine.
template <typename Draw>
void ExpectRowsWithoutRoomAreNaN(int arch, uint64_t first, uint64_t end, uint64_t step,
                                 const Draw& draw) {
  int64_t lost = 0, kept = 0;
  for (uint64_t seed = first; seed < end; seed += step) {
    Case c = draw(seed);
    c.special = Special::kNone;
    Fixture all(c), part(c);
    const strobe_problem whole = all.MakeProblem(STROBE_FORWARD);
    if (whole.varlen || whole.has_seqused_q) continue;
    const auto in_emulator = [&](const strobe_problem& p, const strobe_forward_args& a) {
      return LaunchInTheEmulator(arch, p, a, WorkspaceHolds::kNaN);
    };
    ASSERT_EQ(all.Forward(in_emulator, true), "") << ToString(c);
    LessRoom less;
    const auto launch = [&](strobe_problem p, strobe_forward_args a) -> std::string {
      a.mask = less.Pack(part.mask(), p, a.mask);
      return in_emulator(p, a);
    };
    ASSERT_EQ(part.Forward(launch, true), "") << ToString(c);
    const oracle::Tensor out[] = {all.out.Read(), part.out.Read()};
    const oracle::Tensor lse[] = {all.ReadLse(), part.ReadLse()};
    for (int64_t row = 0; row < lse[0].rows; ++row) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const bool is_lost = less.IsLost(whole.mask, whole.seqlen_q, row / whole.seqlen_q, head,
                                         row % whole.seqlen_q);
        (is_lost ? lost : kept) += 1;
        const double x[] = {lse[0].at(row, head)[0], lse[1].at(row, head)[0]};
        ASSERT_TRUE(is_lost ? std::isnan(x[1]) : x[0] == x[1]) << row << ", " << ToString(c);
        for (int64_t d = 0; d < out[0].dim; ++d) {
          const double y[] = {out[0].at(row, head)[d], out[1].at(row, head)[d]};
          ASSERT_TRUE(is_lost ? std::isnan(y[1]) : y[0] == y[1]) << row << ", " << ToString(c);
        }
      }
    }
  }
  EXPECT_GT(lost, 100);
  EXPECT_GT(kept, 100);
}

/// Masks whose words are anything: the launch ends, and reads and writes nothing outside. (What
/// lies inside may be left as it was: a mask says in which order tiles are computed, so that with
/// such words one may come twice, and another not at all.) Seeds as above.
template <typename Draw>
void ExpectHostileMasksLeadNowhere(int arch, uint64_t first, uint64_t end, uint64_t step,
                                   const Draw& draw) {
  int masks = 0;
  for (uint64_t seed = first; seed < end; seed += step) {
    const Case c = draw(seed);
    Fixture f(c);
    const auto launch = [&](const strobe_problem& p, strobe_forward_args a) -> std::string {
      size_t bytes = 0;
      EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
      const FencedWords fenced(bytes / 4);
      std::memcpy(fenced.words().data(), a.mask, bytes);
      MakeHostile(fenced.words(), seed);
      a.mask = fenced.words().data();
      ++masks;
      return LaunchInTheEmulator(arch, p, a, WorkspaceHolds::kNaN);
    };
    const std::string wrong = f.Forward(launch, true);
    EXPECT_TRUE(wrong.empty() || wrong.find("was not written") != std::string::npos)
        << wrong << "\n"
        << ToString(c);
  }
  EXPECT_GT(masks, 0);
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_FORWARD_MASKS_H_
