// A mask as data packed with less room than it needs.
#ifndef STROBE_TESTS_EMULATOR_LESS_ROOM_H_
#define STROBE_TESTS_EMULATOR_LESS_ROOM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mask_case.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// The words of such a mask.
class LessRoom {
 public:
  /// From `data`, with room for numerator / denominator of the entries that the packed mask `all`
  /// says it needs, which becomes p's capacity. Returns the words.
  const void* Pack(const MaskData& data, strobe_problem& p, const void* all, int32_t numerator = 1,
                   int32_t denominator = 2) {
    const int32_t needed = static_cast<const int32_t*>(all)[7];
    p.mask.capacity = p.mask.partial_capacity = std::max(1, needed * numerator / denominator);
    size_t bytes = 0;
    EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
    packed_.resize(bytes / sizeof(Line) + 1);
    strobe_mask_args args = data.Args();
    args.packed = packed_.data();
    args.packed_bytes = bytes;
    EXPECT_EQ(strobe_mask_pack(&p, &args), STROBE_OK) << strobe_last_error();
    return packed_.data();
  }
  /// Whether the list of a query, of a sequence of `rows` queries that is not packed, has got none.
  bool IsLost(const strobe_mask& m, int64_t rows, int64_t sequence, int64_t head,
              int64_t query) const {
    const int64_t lists = (rows + m.block_q - 1) / m.block_q;
    const int64_t plane = (m.batch == 1 ? 0 : sequence) * m.heads + (m.heads == 1 ? 0 : head);
    const int64_t word = 32 + 2 * (plane * lists + query / m.block_q) + 1;  // behind the header
    return packed_[static_cast<size_t>(word / 16)].words[word % 16] < 0;
  }

 private:
  struct alignas(64) Line {
    int32_t words[16];
  };
  std::vector<Line> packed_;
};

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_LESS_ROOM_H_
