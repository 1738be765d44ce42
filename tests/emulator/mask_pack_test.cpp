// Packing masks as data by the CUDA back end's kernels, in the emulator, against the CPU's packing:
// the same words, to the bit, from the generator's intervals, bools, lists and bits, hostile
// numbers among them, with room for all and without.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/packed_mask.h"
#include "cuda/host/dispatch.h"
#include "emulated_device.h"
#include "fixture.h"
#include "guarded.h"
#include "hopper_case.h"
#include "random_cases.h"

namespace strobe_test {
namespace {

constexpr int32_t kUnwritten = 0x5A5A5A5A;

/// What is packed, in guarded memory that nobody has prepared.
struct Packing {
  Guarded memory;
  std::string wrong;

  template <typename Pack>
  Packing(size_t bytes, strobe_mask_args args, const Pack& pack)
      : memory(static_cast<int64_t>(bytes / 4), 4) {
    std::memset(memory.bytes(), kUnwritten & 0xFF, bytes);
    memory.Seal();
    args.packed = memory.bytes();
    args.packed_bytes = bytes;
    wrong = pack(args);
    if (wrong.empty()) wrong = memory.CheckZones("packed");
  }
  const int32_t* words() { return reinterpret_cast<const int32_t*>(memory.bytes()); }
};

/// Packs a problem's mask by the CPU.
std::string PackByCpu(const strobe_problem& problem, const strobe_mask_args& args) {
  return strobe_mask_pack(&problem, &args) == STROBE_OK ? "" : strobe_last_error();
}
/// The same by the emulated device.
std::string PackByCuda(const strobe_problem& problem, strobe::MaskArgs args) {
  strobe::AttentionProblem p = problem;
  p.device = STROBE_CUDA;
  strobe::Status s = strobe::check_problem(p);
  strobe::resolve_defaults(p);
  if (s.ok()) s = strobe::check_mask_args(p, problem.seqlen_k, args);
  if (s.ok()) s = strobe::cuda::pack_mask(p, args);
  return s.ok() ? "" : s.text();
}

/// Packs by both; "" or where they differ. words: gets the first words.
std::string Compare(const strobe_problem& problem, const strobe_mask_args& args,
                    int32_t (&header)[10]) {
  size_t bytes = 0;
  if (strobe_mask_bytes(&problem, &bytes) != STROBE_OK) return strobe_last_error();
  Packing cpu(bytes, args, [&](const auto& a) { return PackByCpu(problem, a); });
  Packing cuda(bytes, args, [&](const auto& a) { return PackByCuda(problem, a); });
  if (!cpu.wrong.empty()) return "CPU: " + cpu.wrong;
  if (!cuda.wrong.empty()) return "CUDA: " + cuda.wrong;
  std::copy_n(cpu.words(), 10, header);
  for (size_t n = 0; n < bytes / 4; ++n) {
    if (cpu.words()[n] != cuda.words()[n]) {
      return "word " + std::to_string(n) + " of " + std::to_string(bytes / 4) + " is " +
             std::to_string(cuda.words()[n]) + ", expected " + std::to_string(cpu.words()[n]);
    }
  }
  return "";
}

TEST(EmulatedMaskPack, WritesTheWordsOfTheCpu) {
  const Seeds seeds = Seeds::ByEnvironment(kHopperCases);
  int over = 0, in_part = 0;
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    const Case c = GenerateMaskedCase(seed);
    DrawHopper(seed);
    const Fixture f(c);
    strobe_problem problem = f.MakeProblem(STROBE_FORWARD);
    int32_t header[10] = {};
    std::string wrong = Compare(problem, f.mask().Args(), header);
    in_part += header[8] > 0;
    if (wrong.empty() && header[7] > 1) {
      // With less room than it takes.
      oracle::Rng rng(seed ^ 0x9AC3u);
      problem.mask.capacity = rng.Integer(1, header[7] - 1);
      problem.mask.partial_capacity = rng.Integer(1, std::max(1, header[8]));
      problem.mask.partial_capacity =
          std::min(problem.mask.partial_capacity, problem.mask.capacity);
      wrong = Compare(problem, f.mask().Args(), header);
      over += header[9] > 0;
    }
    return Verdict{wrong, ToString(c)};
  });
  if (seeds.count < 10) return;
  EXPECT_GT(over, 0);
  EXPECT_GT(in_part, 0);
}

// Sequences and lists of many blocks: windows after the first, and digits after the first.
TEST(EmulatedMaskPack, ManyBlocks) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.batch = 1;
  p.heads = 1;
  p.seqlen_q = 1100;
  p.seqlen_k = 5000;
  p.head_dim = 8;
  p.mask.kind = STROBE_MASK_PACKED;
  p.mask.block_q = p.mask.block_k = 64;
  p.mask.batch = p.mask.heads = 1;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    MaskChoice choice;
    choice.there = choice.intervals = true;
    choice.keep = seed == 2;
    choice.partial = choice.bits = seed == 3;
    choice.density = 0.7;
    const MaskData data(choice, p, {}, {}, seed);
    for (const int multiprocessors : {1, 132}) {  // a thread block has all windows, or one
      strobe::emulator::machine().devices[0].multiprocessors = multiprocessors;
      int32_t header[10] = {};
      EXPECT_EQ(Compare(p, data.Args(), header), "") << seed << ", " << multiprocessors;
      EXPECT_GT(header[7], 17 * 10);
    }
  }
}

// More windows of blocks of keys than a thread block takes, and lists that cross from one thread
// block's to the next's.
TEST(EmulatedMaskPack, MoreWindowsThanAThreadBlockTakes) {
  strobe::emulator::machine().devices[0].multiprocessors = 1;  // which few thread blocks fill
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.batch = 1;
  p.heads = 1;
  p.seqlen_q = 130;
  p.seqlen_k = 64 * 32 * 64 + 3000;
  p.head_dim = 8;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    MaskChoice choice;
    choice.there = true;
    choice.intervals = seed != 2;
    choice.partial = choice.full = seed != 1;
    choice.of_each_head = true;
    choice.density = 0.3;
    p.mask = choice.Shape(p.batch, p.heads);
    const MaskData data(choice, p, {}, {}, seed);
    int32_t header[10] = {};
    EXPECT_EQ(Compare(p, data.Args(), header), "") << seed;
    EXPECT_GT(header[7], 100);
  }
}

/// Which word of a packed mask that is nobody's was written: those behind a section, which begin at
/// multiples of 32 words. "": none.
std::string WrittenBetweenSections(const strobe_problem& problem, const int32_t* words) {
  strobe::AttentionProblem p = problem;
  strobe::resolve_defaults(p);
  const auto l = strobe::MaskLayout::of(p);
  const struct {
    const char* name;
    int64_t begin, size;
  } sections[] = {{"lists", l.lists, 2 * l.blocks_q},
                  {"entries", l.entries, l.capacity * strobe::MaskLayout::kEntry},
                  {"order", l.order, l.blocks_q},
                  {"key_lists", l.key_lists, 2 * l.blocks_k},
                  {"key_entries", l.key_entries, l.capacity * strobe::MaskLayout::kKeyEntry},
                  {"key_order", l.key_order, l.blocks_k}};
  for (const auto& [name, begin, size] : sections) {
    for (int64_t n = begin + size; n % strobe::MaskLayout::kAlignment != 0; ++n)
      if (words[n] != kUnwritten) return std::string("written behind ") + name;
  }
  return "";
}

// Nobody checks on a device where packed sequences begin. Where they overlap, several write the
// lists of the same blocks, and these count what all of them have: more than there is room for.
TEST(EmulatedMaskPack, OverlappingSequencesWriteNothingPastTheirMask) {
  const Seeds seeds = Seeds::ByEnvironment(kHopperCases);
  ExpectNoneIsWrong(seeds, [](uint64_t seed) {
    oracle::Rng rng(seed ^ 0x0E71A9u);
    DrawHopper(seed);
    strobe_problem p;
    strobe_problem_init(&p, sizeof p);
    p.varlen = 1;
    p.batch = rng.Integer(2, 9);
    p.heads = rng.Integer(1, 2);
    p.total_q = p.seqlen_q = rng.Integer(1, 500);
    p.total_k = p.seqlen_k = rng.Integer(1, 900);
    p.head_dim = 8;
    MaskChoice choice = PickMaskChoice(rng, true);
    choice.density = std::max(choice.density, 0.5);
    p.mask = choice.Shape(p.batch, p.heads);
    const auto draw = [&](int64_t rows) {
      std::vector<int32_t> begins;
      for (int64_t b = 0; b <= p.batch; ++b) {
        const int64_t begin = rng.Chance(0.1) ? rng.Integer(-rows, 2 * rows)
                              : b % 2 == 0    ? rng.Integer(0, rows / 4)
                                              : rng.Integer(rows / 2, rows);
        begins.push_back(static_cast<int32_t>(begin));
      }
      begins[0] = static_cast<int32_t>(rng.Integer(1, rows));  // which the CPU refuses
      return begins;
    };
    const auto cu_q = draw(p.total_q), cu_k = draw(p.total_k);
    const MaskData data(choice, p, cu_q, cu_k, seed);
    p.mask.capacity = rng.Integer(1, 40);
    p.mask.partial_capacity = rng.Integer(0, std::min<int64_t>(2, p.mask.capacity));
    size_t bytes = 0;
    EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK) << strobe_last_error();
    Packing cuda(bytes, data.Args(), [&](const auto& a) { return PackByCuda(p, a); });
    std::string wrong = cuda.wrong;
    if (wrong.empty()) wrong = WrittenBetweenSections(p, cuda.words());
    // The CPU looks at the numbers first.
    const Packing cpu(bytes, data.Args(), [&](const auto& a) { return PackByCpu(p, a); });
    if (wrong.empty() && !cpu.wrong.starts_with("cu_seqlens_q[0] = ")) wrong = "CPU: " + cpu.wrong;
    return Verdict{wrong, strobe::to_string(p) + ToString(choice)};
  });
}

}  // namespace
}  // namespace strobe_test
