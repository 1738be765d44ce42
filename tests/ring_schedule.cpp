// Prints schedules (strobe/ring_schedule.hpp), for tests/python/test_ring.py, which compares them
// with Python's. Each line of stdin is a problem: ranks, rank, 1 if the order is zigzag, which
// documents (a RingDocuments), the mask's left, right, by_distance and attention_chunk, 1 if the
// calls are those of packed sequences, how many ranks a group has (ranks and rank are groups), and
// lengths. Of rank -1 it prints what all hold, and nothing else.
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <strobe/ring_cost.hpp>
#include <strobe/ring_schedule.hpp>
#include <vector>

namespace {

using strobe::RingBlock;
using strobe::RingRows;

void Print(const std::vector<RingRows>& rows) {
  for (const RingRows& part : rows) std::cout << " " << part.begin << "-" << part.end;
}
void Print(const RingBlock& block) {
  std::cout << " " << block.q.begin << "-" << block.q.end << "x" << block.k.begin << "-"
            << block.k.end << "@" << block.position << (block.masked ? "m" : "");
}
void Print(const std::vector<strobe::RingChunk>& chunks) {
  for (const auto& chunk : chunks)
    std::cout << " " << chunk.row << ":" << chunk.begin << "-" << chunk.end << "#"
              << chunk.sequence;
}
// Call by call.
void Print(const char* name, const std::vector<RingBlock>& blocks, bool packed) {
  std::cout << name;
  for (const RingBlock& block : blocks) Print(block);
  std::cout << " |";
  for (const auto& batch : strobe::internal::ring_batched(blocks, packed)) {
    for (const RingBlock& block : batch) Print(block);
    std::cout << " ;";
  }
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    int32_t ranks = 0, rank = 0, inside = 1, documents = 0;
    bool zigzag = false, packed = false;
    strobe::RingMask mask;
    in >> ranks >> rank >> zigzag >> documents >> mask.left >> mask.right >> mask.by_distance >>
        mask.attention_chunk >> packed >> inside;
    std::vector<int64_t> lengths;
    for (int64_t length = 0; in >> length;) lengths.push_back(length);
    const strobe::RingLayout layout(lengths, ranks * inside,
                                    zigzag ? strobe::RingOrder::kZigzag : strobe::RingOrder::kPlain,
                                    static_cast<strobe::RingDocuments>(documents));
    std::cout << "holds";
    for (int32_t n = 0; n < ranks && rank < 0; ++n) Print(layout.chunks(n, inside));
    if (rank < 0) {
      std::cout << "\n";
      continue;
    }
    Print(layout.chunks(rank, inside));
    for (int32_t place = 0; place < inside; ++place) {
      std::cout << " of " << place;
      for (const auto& piece : strobe::internal::ring_within(layout, rank, inside, place))
        Print(std::vector<RingRows>{piece.of_rank, piece.of_group});
    }
    const auto plan = strobe::ring_schedule(layout, rank, mask, inside);
    std::cout << " rows " << plan.rows;
    for (const auto* blocks : plan.of_own_keys()) Print(" own", *blocks, packed);
    std::cout << " sums";
    Print(plan.summed_q());
    std::cout << " and";
    Print(plan.summed_k());
    std::vector<RingRows> some;
    for (const auto& step : plan.steps) {
      std::cout << " step " << step.distance << " " << step.source << " " << step.target << " gets";
      Print(step.receives);
      std::cout << " gives";
      Print(step.sends);
      Print(" computes", step.blocks, packed);
      if (!step.sends.empty()) some.push_back(step.sends.back());
    }
    std::cout << " others";
    Print(strobe::internal::ring_without({0, plan.rows}, some));
    // Of 24 heads and 12 of keys, each way to share them out.
    const strobe::internal::RingSizes sizes = {2, 24, 12, 64, 32, 2};
    const int32_t all = ranks * inside;
    for (int32_t n = 1; n <= all && rank == 0; ++n)
      if (all % n == 0 && 12 % n == 0)
        std::cout << " " << n << " lose " << strobe::internal::ranks_lost(layout, mask, sizes, n);
    if (rank == 0) {
      const auto choice = strobe::internal::ring_choice(layout, mask, sizes);
      std::cout << " so " << choice.inside << " as " << choice.reason;
    }
    std::cout << "\n";
  }
}
