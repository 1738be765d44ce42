// Which of the decode kernels the planner takes.
#include "cuda/host/instance_choice.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/host/instance_table.h"
#include "emulated_device.h"

namespace strobe::cuda {
namespace {

constexpr int64_t kHopper = 227 << 10, kAmpere = 163 << 10, kAda = 99 << 10;

CachedConfig Chosen(const AttentionProblem& p, int64_t shared_bytes) {
  emulator::machine().forced_instance.clear();  // another test's
  DeviceProperties device;
  device.compute_capability = 80;
  device.multiprocessors = 20;
  device.shared_bytes = shared_bytes;
  const Entry<CachedInstance>* const entry =
      find_cached_instance(80, p, CachedFeatures::of(p), device, nullptr);
  EXPECT_NE(entry, nullptr);
  return entry->instance->config;
}

AttentionProblem Problem(int64_t seqlen_q, int64_t group, int64_t head_dim) {
  AttentionProblem p{};
  p.dtype = STROBE_BFLOAT16;
  p.cache = STROBE_CACHE_PAGED;
  p.page_size = 16;
  p.batch = 64;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = 8192;
  p.heads_kv = 2;
  p.heads = 2 * group;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

TEST(CachedInstanceChoice, TakesTheFewestRowsThatHoldASequences) {
  for (const int64_t head_dim : {40, 64, 96, 128}) {
    EXPECT_EQ(Chosen(Problem(1, 1, head_dim), kHopper).tile_q, 16);
    EXPECT_EQ(Chosen(Problem(4, 4, head_dim), kHopper).tile_q, 16);
    EXPECT_EQ(Chosen(Problem(17, 1, head_dim), kHopper).tile_q, 32);
    EXPECT_EQ(Chosen(Problem(8, 4, head_dim), kHopper).tile_q, 32);
    EXPECT_EQ(Chosen(Problem(3, 11, head_dim), kHopper).tile_q, 64);
    EXPECT_EQ(Chosen(Problem(16, 4, head_dim), kHopper).tile_q, 64);
    EXPECT_EQ(Chosen(Problem(1000, 4, head_dim), kHopper).tile_q, 64);
  }
  // Of what the device has room for.
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kHopper).stages, 3);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAmpere).stages, 2);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAmpere).tile_q, 64);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAda).tile_q, 16);
  EXPECT_EQ(Chosen(Problem(16, 4, 256), kHopper).width, 256);
}

TEST(CachedInstanceChoice, NamesOfBeforeAreUnderstood) {
  EXPECT_EQ(current_name("decode_sm80_bf16_64_16x32x3x4"), "cached_sm80_bf16_64_16x32x3x4");
  EXPECT_EQ(current_name("decode_sm90_"), "cached_sm90_");
  EXPECT_EQ(current_name("cached_sm90_fp16_"), "cached_sm90_fp16_");
  EXPECT_EQ(current_name("_64x64x"), "_64x64x");
  EXPECT_EQ(current_name(""), "");
}

TEST(CachedInstanceChoice, FewKeysAreReadByTwoTilesOf32Rows) {
  AttentionProblem p = Problem(16, 4, 128);
  p.batch = 8;  // 2^17 keys of both heads
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 32);
  p.seqlen_k += 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  p = Problem(17, 4, 128);  // three tiles of 32 would be too many
  p.batch = 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  // The batch does not choose where bits must not depend on it.
  p = Problem(16, 4, 128);
  p.batch = 1, p.batch_invariant = 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
}

TEST(CachedInstanceChoice, TheLongestOfPackedSequencesDoesNotCountWithBatchInvariant) {
  AttentionProblem few = Problem(1, 4, 128), many = Problem(1000, 4, 128);
  few.varlen = many.varlen = few.batch_invariant = many.batch_invariant = 1;
  EXPECT_EQ(Chosen(few, kHopper).tile_q, Chosen(many, kHopper).tile_q);
  EXPECT_EQ(Chosen(few, kHopper).tile_q, 32);
  // Queries of one shape are not others' affair.
  few.varlen = many.varlen = 0;
  EXPECT_NE(Chosen(few, kHopper).tile_q, Chosen(many, kHopper).tile_q);
}

TEST(CachedInstanceChoice, SmallPagesOfShortLaunchesAreReadByMoreWarps) {
  AttentionProblem p = Problem(1, 4, 128);
  p.batch = 16, p.seqlen_k = 4096;
  EXPECT_EQ(Chosen(p, kHopper).warps, 8);
  p.batch = 256, p.seqlen_k = 8192;
  EXPECT_EQ(Chosen(p, kHopper).warps, 4);
  p.page_size = 64;
  EXPECT_EQ(Chosen(p, kHopper).warps, 8);
  // The batch does not choose where bits must not depend on it.
  p.page_size = 16, p.batch_invariant = 1;
  const int warps = Chosen(p, kHopper).warps;
  p.batch = 1, p.seqlen_k = 128;
  EXPECT_EQ(Chosen(p, kHopper).warps, warps);
}

}  // namespace
}  // namespace strobe::cuda
