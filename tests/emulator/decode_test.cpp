// The decode kernels on the CPU (run_time.h), planned by the CUDA back end for devices that are not
// there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 400; 60 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
//   STROBE_CUDA_ROW        instances with this in their name come first (227 KB of shared memory)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "cache_fixture.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "hostile_mask.h"
#include "less_room.h"
#include "one_sequence.h"
#include "random_cases.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

constexpr uint64_t kCases = kSanitized ? 60 : 400;

/// Whether the program has kernels of this type.
bool IsEmulated(DType dtype) {
  return (dtype == DType::kBFloat16 && STROBE_EMULATES_cached_bf16) ||
         (dtype == DType::kFloat16 && STROBE_EMULATES_cached_fp16);
}

/// A case of cache_case.h that the decode kernels take; every sixteenth has long sequences, which
/// several thread blocks share at any width.
CacheCase DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = GenerateCacheCase(seed + (again << 32));
    if (!IsEmulated(c.dtype)) continue;
    if (seed % 16 == 0 && c.most_rows < 300) continue;
    return c;
  }
}

/// The widest head that decode kernels append to and rotate themselves.
int64_t WidestUpdate() {
  int64_t widest = 0;
  for (const auto& entry : strobe::cuda::instance_table<strobe::cuda::CachedInstance>()) {
    const auto& instance = *entry.instance;
    if (instance.config.arch == 80 && !instance.updates_before)
      widest = std::max<int64_t>(widest, instance.config.width);
  }
  return widest;
}

/// The widest head that compute capability 7.5 has kernels for.
constexpr int64_t kWidestOfTuring = 128;

/// Draws a device, one of 7.5 among them where it has kernels for the dtype and the wider of the
/// head dims; an order of threads, and mostly the planner's instance.
void DrawMachine(uint64_t seed, DType dtype, int64_t dim) {
  Rng rng(seed ^ 0xE111u);
  strobe::cuda::Machine& machine = DrawSmallDevice(rng);
  if (dtype == DType::kFloat16 && dim <= kWidestOfTuring && Rng(seed ^ 0x75u).Chance(0.5)) {
    machine.devices[0].compute_capability = strobe::cuda::kTuring;
    machine.devices[0].shared_bytes = strobe::cuda::kTuringSharedBytes;
  }
  machine.forced_instance.clear();
  if (rng.Chance(0.3)) {
    const auto instances = strobe::cuda::instance_table<strobe::cuda::CachedInstance>();
    const auto& entry =
        instances[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(instances.size()) - 1))];
    if (entry.instance->config.dtype ==
        (dtype == DType::kBFloat16 ? STROBE_BFLOAT16 : STROBE_FLOAT16))
      machine.forced_instance = entry.name;
  }
  if (const char* asked = std::getenv("STROBE_CUDA_ROW")) {
    machine.forced_instance = strobe::cuda::current_name(asked);
    machine.devices[0].shared_bytes = 227 << 10;
  }
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Chance(0.5) ? 1 : 3;
}
void DrawMachine(uint64_t seed, const CacheCase& c) {
  DrawMachine(seed, c.dtype, std::max(c.head_dim, c.head_dim_v));
}
void DrawMachine(uint64_t seed, const Case& c) {
  DrawMachine(seed, c.dtype, std::max(c.head_dim, c.head_dim_v));
}
/// What the names of instances begin with that divide the keys of whole tensors on the device.
std::string Dividing() {
  const auto& device = strobe::emulator::machine().devices[0];
  return "cached_sm" + std::to_string(strobe::cuda::mma_sync_arch(device)) + "_";
}

/// "" or what is wrong with the case.
std::string RunCase(const CacheCase& c, WorkspaceHolds holds = WorkspaceHolds::kNaN) {
  CacheFixture f(c);
  std::string wrong = f.Run(ThroughTheEmulator(holds));
  return wrong.empty() ? f.Judge() : wrong;
}

// What the kernels of one launch have left in a workspace is nothing that those of another one, of
// another instance, merge: all launches have numbers of their own. (First of all tests, so that
// both instances are launched for the first time: each of them counting for itself, their numbers
// would be the same.)
TEST(EmulatedDecode, ALaunchMergesNothingThatAnotherInstanceHasLeft) {
  constexpr int64_t kBatch = 3, kKeys = 1500, kDim = 64;
  constexpr int kDtypes[] = {STROBE_BFLOAT16, STROBE_FLOAT16};
  constexpr int64_t kQueries[] = {40, 60};
  constexpr int32_t kUsed[] = {1500, 20};  // the second one's sequences are one thread block's each
  constexpr const char* kRows[] = {"cached_sm80_bf16_64_64x64x4x8",
                                   "cached_sm80_fp16_64_64x64x4x8"};
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = 80;
  machine.devices[0].multiprocessors = 20;
  machine.devices[0].shared_bytes = 227 << 10;
  for (const int cache : {STROBE_CACHE_NONE, STROBE_CACHE_CONTIGUOUS}) {
    std::vector<std::byte> workspace;
    std::vector<uint16_t> outs[2];
    const std::vector<uint16_t> values(static_cast<size_t>(kBatch * kKeys * kDim), 0x3800);
    for (const int i : {0, 1}) {
      machine.forced_instance = kRows[i];
      strobe_problem p;
      ASSERT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
      p.direction = STROBE_FORWARD, p.dtype = kDtypes[i], p.device = STROBE_CUDA;
      p.batch = kBatch, p.seqlen_q = kQueries[i], p.seqlen_k = kKeys;
      p.heads = p.heads_kv = 1, p.head_dim = kDim, p.has_seqused_k = 1;
      p.cache = cache, p.cache_batch = cache ? kBatch : 0;
      strobe::Plan plan{};
      ASSERT_TRUE(strobe::cuda::plan_for(p, machine.devices[0], plan).ok());
      workspace.resize(std::max(workspace.size(), plan.workspace_bytes));
      outs[i].assign(static_cast<size_t>(kBatch * kQueries[i] * kDim), kPoison);
      const std::vector<int32_t> used(kBatch, kUsed[i]);
      strobe_forward_args args{};
      args.struct_size = sizeof args;
      args.q = args.k = args.v = values.data(), args.out = outs[i].data();
      args.seqused_k = used.data();
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      if (i == 1) std::fill(outs[0].begin(), outs[0].end(), uint16_t{kPoison});
      const strobe::Status s = strobe::cuda::launch(80, plan, args);
      ASSERT_TRUE(s.ok()) << s.text();
    }
    EXPECT_EQ(std::count(outs[0].begin(), outs[0].end(), kPoison),
              static_cast<std::ptrdiff_t>(outs[0].size()));
  }
  machine.forced_instance.clear();
}

TEST(EmulatedDecode, RandomProblemsAgreeWithTheOracle) {
  ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
    const CacheCase c = DrawCase(seed);
    DrawMachine(seed, c);
    return Verdict{RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), ToString(c)};
  });
}

/// The same under a mask as data; the mask asked for, unless its fields are left to chance.
CacheCase DrawMaskedCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    const CacheCase c = GenerateMaskedCacheCase(seed + (again << 32));
    if (IsEmulated(c.dtype) && !c.batch_invariant) return c;  // the plan declines both
  }
}

TEST(EmulatedDecode, MasksAgreeWithTheOracle) {
  const Seeds seeds = Seeds::ByEnvironment(kCases / 2, 300000);
  int unions = 0, several = 0, turing = 0;
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    const CacheCase c = DrawMaskedCase(seed);
    DrawMachine(seed, c);
    turing += strobe::emulator::machine().devices[0].compute_capability == strobe::cuda::kTuring;
    unions += c.mask.of_each_head && c.heads > c.heads_kv;
    several += c.longest_queries() > c.mask.block_q;
    return Verdict{RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), ToString(c)};
  });
  if (seeds.count < 200) return;  // too few for some of each kind
  EXPECT_GT(unions, 5);
  EXPECT_GT(several, 5);
  if (IsEmulated(DType::kFloat16)) {
    EXPECT_GT(turing, 20);
  }
}

// With a bias alone, and under a mask as data too: also rows of which it hides every key.
TEST(EmulatedDecode, BiasesAgreeWithTheOracle) {
  const Seeds seeds = Seeds::ByEnvironment(kCases / 2, 340000);
  int alone = 0, masked = 0, turing = 0, updates = 0;
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    CacheCase c = GenerateBiasedCacheCase(seed);
    for (uint64_t again = 1; !IsEmulated(c.dtype); ++again)
      c = GenerateBiasedCacheCase(seed + (again << 32));
    DrawMachine(seed, c);
    turing += strobe::emulator::machine().devices[0].compute_capability == strobe::cuda::kTuring;
    (c.mask.there ? masked : alone) += 1;
    updates += c.append != STROBE_APPEND_NONE;
    return Verdict{RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), ToString(c)};
  });
  if (seeds.count < 200) return;  // too few for some of each kind
  EXPECT_GT(alone, 50);
  EXPECT_GT(masked, 50);
  EXPECT_GT(updates, 20);
  if (IsEmulated(DType::kFloat16)) {
    EXPECT_GT(turing, 20);
  }
}

/// Whether some query of some head is allowed a key of [begin, end) in some block of the mask that
/// has one of these keys.
bool IsListed(const CacheFixture& f, int64_t b, int64_t begin, int64_t end) {
  const CacheCase& c = f.c();
  const int64_t side = c.mask.block_k;
  const int64_t last = std::min((end + side - 1) / side * side, c.most_rows);
  for (int64_t j = std::max<int64_t>(begin, 0) / side * side; j < last; ++j) {
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t i = 0; i < c.sequences[static_cast<size_t>(b)].queries; ++i)
        if (f.mask().Allows(b, head, i, j)) return true;
    }
  }
  return false;
}

// Pages in no list are not looked at: their numbers lead nowhere, which would show as NaN.
TEST(EmulatedDecode, PagesOfBlocksInNoListAreNotRead) {
  int tried = 0, pages = 0;
  for (uint64_t seed = 310000; tried < static_cast<int>(kCases) / 16; ++seed) {
    CacheCase c = DrawMaskedCase(seed);
    if (!c.paged || c.append != STROBE_APPEND_NONE || c.longest_queries() > 4) continue;
    c.mask.density = 0.1;
    c.mask.full = c.mask.hostile = false;
    ++tried;
    DrawMachine(seed, c);
    CacheFixture f(c);
    for (int64_t b = 0; b < c.batch(); ++b) {
      const CacheSequence& s = c.sequences[static_cast<size_t>(b)];
      for (int64_t n = s.leftpad / c.rows; n * c.rows < s.used; ++n) {
        const int64_t begin = n * c.rows - s.leftpad;
        if (IsListed(f, b, begin, begin + c.rows)) continue;
        f.table[static_cast<size_t>(b * c.table_stride + n)] = n % 2 ? -1 : INT32_MAX;
        ++pages;
      }
    }
    ASSERT_EQ(f.Run(ThroughTheEmulator()), "") << "seed " << seed << "\n" << ToString(c);
    ASSERT_EQ(f.Judge(), "") << "seed " << seed << "\n" << ToString(c);
  }
  if (kSanitized) return;  // too few cases
  EXPECT_GT(pages, 100);
}

// Masks with room for half of what they need: rows of the lists that lack it are NaN.
TEST(EmulatedDecode, RowsThatAMaskHasNoRoomForAreNaN) {
  int64_t lost = 0, kept = 0;
  for (uint64_t seed = 320000; seed < 320000 + kCases / 8; ++seed) {
    const CacheCase c = DrawMaskedCase(seed);
    if (c.varlen || c.with_used_q || c.append != STROBE_APPEND_NONE) continue;
    DrawMachine(seed, c);
    CacheFixture all(c), part(c);
    ASSERT_EQ(all.Run(ThroughTheEmulator()), "") << ToString(c);
    LessRoom less;
    const auto launch = [&](strobe_problem p, strobe_forward_args& args) {
      args.mask = less.Pack(part.mask(), p, args.mask);
      return ThroughTheEmulator()(p, args);
    };
    ASSERT_EQ(part.Run(launch), "") << ToString(c);
    const strobe_mask m = c.mask.Shape(c.batch(), c.heads);
    const int64_t rows = c.sequences[0].queries;
    part.out.ForEach([&](int64_t row, int64_t head, int64_t, int64_t e) {
      const bool is_lost = less.IsLost(m, rows, row / rows, head, row % rows);
      (is_lost ? lost : kept) += 1;
      const double x = all.out.Get(e), y = part.out.Get(e);
      ASSERT_TRUE(is_lost ? std::isnan(y) : x == y || (std::isnan(x) && std::isnan(y)))
          << "seed " << seed << ", row " << row << ", head " << head << ": " << x << ", " << y
          << "\n"
          << ToString(c);
    });
  }
  EXPECT_GT(lost, 100);
  EXPECT_GT(kept, 100);
}

// Masks whose words are anything: the launch ends, and reads and writes nothing outside.
TEST(EmulatedDecode, HostileMasksLeadNowhere) {
  for (uint64_t seed = 330000; seed < 330000 + kCases / 8; ++seed) {
    const CacheCase c = DrawMaskedCase(seed);
    DrawMachine(seed, c);
    CacheFixture f(c);
    const auto launch = [&](const strobe_problem& p, strobe_forward_args& args) {
      size_t bytes = 0;
      EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
      const FencedWords fenced(bytes / 4);
      std::memcpy(fenced.words().data(), args.mask, bytes);
      MakeHostile(fenced.words(), seed);
      args.mask = fenced.words().data();
      return ThroughTheEmulator()(p, args);
    };
    ASSERT_EQ(f.Run(launch), "") << "seed " << seed << "\n" << ToString(c);
  }
}

// Wide kernels leave appending and rotating to a kernel before them.
TEST(EmulatedDecode, UpdatesOfWideRowsAgreeWithTheOracle) {
  uint64_t tried = 0;
  for (uint64_t seed = 20000; tried < kCases / 8; ++seed) {
    const CacheCase c = DrawCase(seed);
    const bool updates = c.append != STROBE_APPEND_NONE || c.rotary_dim > 0;
    if (!updates || std::max(c.head_dim, c.head_dim_v) <= WidestUpdate()) continue;
    ++tried;
    DrawMachine(seed, c);
    ASSERT_EQ(RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), "") << "seed " << seed << "\n"
                                                                     << ToString(c);
  }
}

// A thread looks at a sequence: in the widest instances there are 64 of them, in others 128.
TEST(EmulatedDecode, BatchesWithMoreSequencesThanThreadsAgreeWithTheOracle) {
  constexpr size_t kSequences = 140;
  int tried = 0;
  for (uint64_t seed = 60000; tried < 6; ++seed) {
    CacheCase c = DrawCase(seed);
    const bool is_wide = std::max(c.head_dim, c.head_dim_v) > 192;
    if (!c.paged || c.append != STROBE_APPEND_NONE || c.rotary_dim > 0 || c.heads_kv > 2 ||
        c.most_rows > 300 || c.longest_queries() > 3 || is_wide != (tried % 3 == 2))
      continue;
    const std::vector<CacheSequence> few = c.sequences;
    for (size_t i = 0; c.sequences.size() < kSequences; ++i)
      c.sequences.push_back(few[i * 7 % few.size()]);
    c.batch_invariant = tried % 2 == 1;
    DrawMachine(seed, c);
    strobe::emulator::machine().forced_instance.clear();
    if (std::max(c.head_dim, c.head_dim_v) <= 128) {
      strobe::emulator::machine().forced_instance = c.dtype == DType::kBFloat16
                                                        ? "cached_sm80_bf16_128_16x16x3x4"
                                                        : "cached_sm80_fp16_128_16x16x3x4";
      strobe::emulator::machine().devices[0].shared_bytes = 227 << 10;
    }
    ++tried;
    ASSERT_EQ(RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), "") << "seed " << seed << "\n"
                                                                     << ToString(c);
  }
}

/// Whether decode kernels take the case, which has no cache.
bool DividesKeysOf(const Case& c) {
  if (!IsEmulated(c.dtype) || c.dropout_p > 0) return false;
  return !c.varlen || (!c.batch_invariant && c.arrays.seqused_k.empty());
}

/// "" or what is wrong with a case without a cache, by any of the decode kernels that take it.
std::string RunWithoutCache(const Case& c, uint64_t seed) {
  DrawMachine(seed, c);
  Rng rng(seed ^ 0xD17u);
  const auto instances = strobe::cuda::instance_table<strobe::cuda::CachedInstance>();
  std::string& forced = strobe::emulator::machine().forced_instance;
  // One that cannot take it leaves the choice to the planner.
  do {
    forced =
        instances[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(instances.size()) - 1))]
            .name;
  } while (forced.find(Dividing()) == std::string::npos);
  Fixture f(c);
  strobe_forward_args args = f.ForwardArgs();
  const auto launched = ThroughTheEmulator(static_cast<WorkspaceHolds>(seed % 3))(
      f.MakeProblem(STROBE_FORWARD), args);
  if (launched != STROBE_OK) return "not launched";
  return CompareForward(f);
}

// Whole tensors, dense and packed, go the same way: the planner takes their keys for a cache.
TEST(EmulatedDecode, ProblemsWithoutACacheAgreeWithTheOracle) {
  uint64_t tried = 0, infinities = 0;
  for (uint64_t seed = 40000; tried < kCases / 4 || infinities < kCases / 16; ++seed) {
    const Case c = GenerateCase(seed).WithoutBias();
    if (!DividesKeysOf(c) || c.longest_q() > 100) continue;
    const bool infinite = c.special == Special::kInfinity;
    if (tried >= kCases / 4 && !infinite) continue;
    ++tried;
    infinities += infinite;
    ASSERT_EQ(RunWithoutCache(c, seed), "") << "seed " << seed << "\n" << ToString(c);
  }
}
TEST(EmulatedDecode, FewQueriesOnManyKeysAgreeWithTheOracle) {
  int tried = 0;
  for (uint64_t seed = 80000; tried < static_cast<int>(kCases) / 16; ++seed) {
    const Case c = GenerateFewQueriesCase(seed).WithoutBias();
    if (!DividesKeysOf(c)) continue;
    ++tried;
    ASSERT_EQ(RunWithoutCache(c, seed), "") << "seed " << seed << "\n" << ToString(c);
  }
}

/// How a launch divides keys, on the device of emulator::machine().
strobe::cuda::CachedGrid GridOf(strobe_problem p) {
  const strobe::cuda::DeviceProperties& device = strobe::emulator::machine().devices[0];
  strobe::resolve_defaults(p);
  return strobe::cuda::choose_instance(strobe::cuda::mma_sync_arch(device), p, device).grid;
}
/// Of a case without a cache.
strobe::cuda::CachedGrid GridOf(const Fixture& f) { return GridOf(f.MakeProblem(STROBE_FORWARD)); }

// A plan is made without arrays, and what it says of workspace and launches has to hold with them.
TEST(EmulatedDecode, ALaunchDividesKeysAsItsPlanDoes) {
  int with_own_blocks = 0;
  const auto as_tuple = [](const strobe::cuda::CachedGrid& g) {
    return std::tuple(g.x, g.y, g.workspace_bytes, g.unit, g.most_chunks, g.of_span,
                      g.merges_apart);
  };
  for (uint64_t seed = 110000; seed < 110000 + kCases / 4; ++seed) {
    const Case c = (seed % 2 ? GenerateFewQueriesCase(seed) : GenerateCase(seed)).WithoutBias();
    if (!DividesKeysOf(c)) continue;
    Fixture f(c);
    strobe_problem p = f.MakeProblem(STROBE_FORWARD);
    strobe::resolve_defaults(p);
    strobe::cuda::CachedUpdateParams planned{}, launched{};
    strobe::cuda::fill_params(p, strobe::ForwardArgs{}, planned);
    strobe::cuda::fill_params(p, f.ForwardArgs(), launched);
    for (const auto& entry : strobe::cuda::instance_table<strobe::cuda::CachedInstance>()) {
      if (entry.instance->config.arch == 90) continue;
      for (const int64_t multiprocessors : {1, 20, 132}) {
        const auto carve = [&](const strobe::cuda::CachedUpdateParams& params) {
          return entry.instance->carve(params, multiprocessors, 227 << 10);
        };
        const strobe::cuda::CachedGrid grid = carve(planned);
        ASSERT_EQ(as_tuple(grid), as_tuple(carve(launched)))
            << entry.name << ", seed " << seed << "\n"
            << ToString(c);
        if (grid.of_span == 0) continue;
        ++with_own_blocks;
        ASSERT_FALSE(c.varlen || c.batch_invariant || c.has_seqused_q || c.has_seqused_k ||
                     c.has_q_position || c.has_prefix)
            << ToString(c);
      }
    }
  }
  EXPECT_GT(with_own_blocks, 0);
}

// Where all tiles are alike each has the same number of thread blocks for itself: one, or several,
// some of the launch's being left over; with as many units or fewer, where a window hides the rest.
TEST(EmulatedDecode, TilesWithThreadBlocksOfTheirOwnAgreeWithTheOracle) {
  const int multiprocessors[] = {3, 7, 20, 50};
  auto& settings = strobe::emulator::settings();
  int whole = 0, merged_apart = 0, merged = 0, left_over = 0, fewer_units = 0;
  int tried = 0;
  for (uint64_t seed = 120000; tried < static_cast<int>(kCases) / 10; ++seed) {
    Case c = GenerateFewQueriesCase(seed).WithoutBias();
    if (!DividesKeysOf(c)) continue;
    Rng rng(seed ^ 0x5BA7u);
    const bool narrow = rng.Chance(0.2);
    if (narrow) {
      c.attention_chunk = 0;
      c.window_left = rng.Integer(0, 300);
      c.window_right = 0;
    }
    DrawMachine(seed, c);
    strobe::emulator::machine().devices[0].multiprocessors = rng.Pick(multiprocessors);
    strobe::emulator::machine().forced_instance = Dividing();
    Fixture f(c);
    const strobe::cuda::CachedGrid grid = GridOf(f);
    if (grid.of_span == 0) continue;
    ++tried;
    (grid.of_span == 1 ? whole : grid.merges_apart ? merged_apart : merged) += 1;
    left_over += grid.y % grid.of_span != 0;
    fewer_units += narrow && c.window_left / grid.unit + 2 < grid.of_span;
    if (grid.of_span == 1) {
      EXPECT_FALSE(grid.merges_apart) << "seed " << seed;
    }
    std::string first;
    for (const int at_once : {1, 4}) {
      settings.blocks_at_once = at_once;
      Fixture own(c);
      strobe_forward_args args = own.ForwardArgs();
      const auto launch = ThroughTheEmulator(static_cast<WorkspaceHolds>(seed % 3));
      ASSERT_EQ(launch(own.MakeProblem(STROBE_FORWARD), args), STROBE_OK) << ToString(c);
      ASSERT_EQ(CompareForward(own), "") << "seed " << seed << "\n" << ToString(c);
      const std::string bits = Fixture::Bits(own.out) + own.LseBits();
      if (at_once == 1) first = bits;
      EXPECT_TRUE(bits == first) << "seed " << seed << "\n" << ToString(c);
    }
  }
  if (kSanitized) return;  // too few cases for one of each kind
  EXPECT_TRUE(whole > 0 && merged_apart > 0 && merged > 0 && left_over > 0 && fewer_units > 0)
      << whole << ", " << merged_apart << ", " << merged << ", " << left_over << ", "
      << fewer_units;
}

// The second kernel has a warp for each row: whatever the order of thread blocks and what lay in
// the workspace, it merges the pieces in their order.
TEST(EmulatedDecode, OrderChangesNoBitThatAKernelOfItsOwnMerges) {
  auto& settings = strobe::emulator::settings();
  int tried = 0;
  for (uint64_t seed = 90000; tried < static_cast<int>(kCases) / 40; ++seed) {
    const Case c = GenerateFewQueriesCase(seed).WithoutBias();
    if (!DividesKeysOf(c)) continue;
    DrawMachine(seed, c);
    strobe::emulator::machine().forced_instance = Dividing();
    if (!GridOf(Fixture(c)).merges_apart) continue;
    ++tried;
    std::string first;
    for (uint64_t order = 0; order < 4; ++order) {
      settings.seed = seed + order;
      settings.blocks_at_once = order % 2 ? 1 : 4;
      settings.unwritten = order == 1 ? 0x3c : 0xff;
      Fixture f(c);
      strobe_forward_args args = f.ForwardArgs();
      const auto launch = ThroughTheEmulator(static_cast<WorkspaceHolds>(order));
      ASSERT_EQ(launch(f.MakeProblem(STROBE_FORWARD), args), STROBE_OK) << ToString(c);
      const std::string bits = Fixture::Bits(f.out) + f.LseBits();
      if (order == 0) {
        first = bits;
        ASSERT_EQ(CompareForward(f), "") << "seed " << seed << "\n" << ToString(c);
      }
      EXPECT_TRUE(bits == first) << "order " << order << ", seed " << seed << "\n" << ToString(c);
    }
  }
  settings.unwritten = 0xff;
}

// A graph launches with the same nonce each time, and lengths may be others: the second kernel
// finds no span that an earlier replay has left to it.
TEST(EmulatedDecode, AReplayMergesNoSpanOfTheReplayBefore) {
  constexpr int64_t kBatch = 3, kQueries = 40, kKeys = 1500, kDim = 64;
  constexpr int32_t kLengths[][2][kBatch] = {{{40, 40, 40}, {1500, 1500, 1500}},
                                             {{40, 0, 9}, {1500, 1500, 100}},
                                             {{3, 40, 40}, {20, 900, 1500}},
                                             {{0, 0, 0}, {1500, 1500, 1500}},
                                             {{40, 40, 40}, {1500, 1500, 1500}}};
  Rng rng(3);
  const auto random = [&](int64_t rows) {
    std::vector<uint16_t> values(static_cast<size_t>(rows * kDim));
    for (uint16_t& x : values) x = static_cast<uint16_t>(rng.Integer(0x3e00, 0x3fff));
    return values;
  };
  const auto q = random(kBatch * kQueries), k = random(kBatch * kKeys), v = random(kBatch * kKeys);
  std::vector<uint16_t> out(q.size());
  int32_t used_q[kBatch], used_k[kBatch];
  strobe_problem p;
  ASSERT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
  p.direction = STROBE_FORWARD, p.dtype = STROBE_BFLOAT16;
  p.batch = kBatch, p.seqlen_q = kQueries, p.seqlen_k = kKeys;
  p.heads = p.heads_kv = 1, p.head_dim = kDim;
  p.has_seqused_q = p.has_seqused_k = 1;
  strobe_forward_args args{};
  args.struct_size = sizeof args;
  args.q = q.data(), args.k = k.data(), args.v = v.data(), args.out = out.data();
  args.seqused_q = used_q, args.seqused_k = used_k;
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = 80;
  machine.devices[0].multiprocessors = 20;
  machine.devices[0].shared_bytes = 227 << 10;
  machine.forced_instance = "cached_sm80_bf16_64_64x64x4x8";
  strobe::Plan plan{};
  const auto set_lengths = [&](const int32_t(&lengths)[2][kBatch]) {
    std::copy_n(lengths[0], kBatch, used_q);
    std::copy_n(lengths[1], kBatch, used_k);
  };
  const auto run = [&](std::vector<std::byte>& workspace) {
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    const strobe::Status s = strobe::cuda::launch(80, plan, args);
    EXPECT_TRUE(s.ok()) << s.text();
  };
  p.device = STROBE_CUDA;
  for (const int cache : {STROBE_CACHE_NONE, STROBE_CACHE_CONTIGUOUS}) {
    p.cache = cache, p.cache_batch = cache ? kBatch : 0;
    plan = {};
    ASSERT_TRUE(strobe::cuda::plan_for(p, machine.devices[0], plan).ok());
    ASSERT_TRUE(GridOf(p).merges_apart);
    std::vector<std::byte> of_graph(plan.workspace_bytes);
    set_lengths(kLengths[0]);
    const auto replay = strobe::emulator::capture([&] { run(of_graph); });
    for (const auto& lengths : kLengths) {
      set_lengths(lengths);
      std::fill(out.begin(), out.end(), uint16_t{kPoison});
      ASSERT_EQ(replay(), cudaSuccess) << strobe::emulator::launch_failure();
      const std::vector<uint16_t> replayed = out;
      std::fill(out.begin(), out.end(), uint16_t{kPoison});
      std::vector<std::byte> of_launch(plan.workspace_bytes);
      run(of_launch);
      EXPECT_TRUE(out == replayed)
          << lengths[0][0] << ", " << lengths[0][1] << ", " << lengths[0][2];
    }
  }
}

// With batch_invariant a sequence has the same bits alone and in a batch, whichever tile it gets.
TEST(EmulatedDecode, TheBatchChangesNoBitOfWholeTensors) {
  constexpr int64_t kBatch = 3, kQueries = 11, kKeys = 1500, kHeads = 6, kHeadsKv = 2, kDim = 64;
  Rng rng(1);
  const auto random = [&](int64_t rows) {
    std::vector<uint16_t> values(static_cast<size_t>(kBatch * rows * kDim));
    for (uint16_t& x : values) {
      const auto value = static_cast<float>(rng.Uniform(-2, 2));
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      x = static_cast<uint16_t>(bits >> 16);  // bfloat16
    }
    return values;
  };
  const auto q = random(kQueries * kHeads), k = random(kKeys * kHeadsKv),
             v = random(kKeys * kHeadsKv);
  const auto run = [&](int64_t first, int64_t batch) {
    std::vector<uint16_t> out(static_cast<size_t>(batch * kQueries * kHeads * kDim));
    strobe_problem p;
    EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
    p.direction = STROBE_FORWARD, p.dtype = STROBE_BFLOAT16, p.batch_invariant = 1;
    p.batch = batch, p.seqlen_q = kQueries, p.seqlen_k = kKeys;
    p.heads = kHeads, p.heads_kv = kHeadsKv, p.head_dim = kDim;
    strobe_forward_args args{};
    args.struct_size = sizeof args;
    args.q = q.data() + first * kQueries * kHeads * kDim;
    args.k = k.data() + first * kKeys * kHeadsKv * kDim;
    args.v = v.data() + first * kKeys * kHeadsKv * kDim;
    args.out = out.data();
    EXPECT_EQ(ThroughTheEmulator()(p, args), STROBE_OK);
    return out;
  };
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = 80;
  machine.devices[0].multiprocessors = 20;
  machine.devices[0].shared_bytes = 227 << 10;
  for (const char* const row : {"cached_sm80_bf16_64_16x32x2x4", "cached_sm80_bf16_64_32x32x4x8"}) {
    machine.forced_instance = row;
    const std::vector<uint16_t> all = run(0, kBatch);
    const auto own = static_cast<int64_t>(all.size()) / kBatch;
    for (int64_t b = 0; b < kBatch; ++b) {
      EXPECT_TRUE(std::equal(all.begin() + b * own, all.begin() + (b + 1) * own, run(b, 1).begin()))
          << row << ", sequence " << b;
    }
  }
}

// With batch_invariant a row has the same bits as part of a prompt, of a few rows, or alone, from
// whole tensors, a contiguous cache or pages, and however keys are shared out.
TEST(EmulatedDecode, ARowHasTheSameBitsWhateverItIsPartOf) {
  auto& device = strobe::emulator::machine().devices[0];
  strobe::emulator::machine().forced_instance.clear();
  device.compute_capability = 80;
  uint64_t seed = 1;
  for (const int64_t dim : {64, 128, 192}) {
    for (const int64_t shared : {dim == 64 ? 99 : 163, 227}) {
      device.shared_bytes = shared << 10;
      for (const int64_t window : {-1, 300}) {
        const bool causal = seed % 3 != 0;
        OneSequence s({.seed = ++seed, .dim = dim, .causal = causal, .window = window});
        device.multiprocessors = 3;
        const OneSequence::Rows all = s.Solve({.count = s.rows(), .keys = s.keys()});
        using Way = OneSequence::Way;
        const struct {
          int64_t first, count, multiprocessors, page, before;
        } ways[] = {{89, 1, 20, Way::kDense, 0}, {89, 1, 3, 16, 1},  {20, 1, 20, 0, 0},
                    {20, 1, 7, 16, 2},           {40, 8, 20, 64, 0}, {61, 8, 2, 48, 1},
                    {60, 8, 5, Way::kDense, 0},  {0, 70, 2, 16, 0},  {0, 90, 20, 64, 0},
                    {30, 33, 1, Way::kDense, 0}};
        for (const auto& way : ways) {
          device.multiprocessors = static_cast<int>(way.multiprocessors);
          const int64_t keys = s.KeysTo(way.first + way.count);
          EXPECT_TRUE(s.Solve({way.first, way.count, keys, way.page, way.before}) ==
                      all.Part(way.first, way.count))
              << "dim " << dim << ", shared " << shared << ", window " << window << ", rows "
              << way.first << " + " << way.count << ", page " << way.page << ", before "
              << way.before;
        }
      }
    }
  }
}

// A longest packed sequence that is longer than the problem says: its first queries are computed,
// and nothing is written where the plan has no room.
TEST(EmulatedDecode, MoreQueriesThanThePlanKnowsOfAreLeftOut) {
  int tried = 0;
  for (uint64_t seed = 70000; tried < 12; ++seed) {
    const CacheCase c = DrawCase(seed);
    if (!c.varlen || c.longest_queries() < 8) continue;
    ++tried;
    DrawMachine(seed, c);
    CacheFixture f(c);
    strobe_problem p = f.Problem();
    p.seqlen_q = 1;
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator()(p, args), STROBE_OK) << "seed " << seed << "\n" << ToString(c);
  }
}

/// "" or what differs between runs of a case: in the order of threads and thread blocks, and in
/// what lay in shared memory and in the workspace before.
std::string DifferentBits(const CacheCase& c, uint64_t seed) {
  auto& settings = strobe::emulator::settings();
  std::string first, wrong;
  for (uint64_t order = 0; order < 4 && wrong.empty(); ++order) {
    DrawMachine(seed, c);
    settings.seed = seed + order;
    settings.blocks_at_once = order % 2 ? 1 : 4;
    settings.unwritten = order == 1 ? 0x3c : 0xff;  // small numbers, or NaN
    CacheFixture f(c);
    wrong = f.Run(ThroughTheEmulator(static_cast<WorkspaceHolds>(order % 3)));
    std::string bits;
    for (int64_t b = 0; b < c.batch(); ++b) bits += f.Bits(b);
    if (order == 0) first = bits;
    if (wrong.empty() && bits != first) wrong = "other bits in order " + std::to_string(order);
  }
  settings.unwritten = 0xff;
  return wrong;
}

TEST(EmulatedDecode, OrderChangesNoBit) {
  for (uint64_t seed = 5000; seed < 5000 + kCases / 20; ++seed) {
    const CacheCase c = DrawCase(seed);
    ASSERT_EQ(DifferentBits(c, seed), "") << "seed " << seed << "\n" << ToString(c);
  }
}

TEST(EmulatedDecode, OrderChangesNoBitUnderAMask) {
  for (uint64_t seed = 340000; seed < 340000 + kCases / 20; ++seed) {
    const CacheCase c = DrawMaskedCase(seed);
    ASSERT_EQ(DifferentBits(c, seed), "") << "seed " << seed << "\n" << ToString(c);
  }
}

// Of new keys, those before a window or a chunk are in no row's sight: a tile of keys may be of
// these, of others of the cache, and of others that are new.
TEST(EmulatedDecode, OrderChangesNoBitWhereNewKeysAreOutOfSight) {
  uint64_t tried = 0;
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kCases) / 10;
  for (uint64_t seed = 6000; tried < count; ++seed) {
    const CacheCase c = DrawCase(seed);
    if (c.append == STROBE_APPEND_NONE || (c.window_left < 0 && c.chunk == 0)) continue;
    ++tried;
    ASSERT_EQ(DifferentBits(c, seed), "") << "seed " << seed << "\n" << ToString(c);
  }
}

/// Puts numbers of sequence b out of range; false where the case has no such numbers.
bool Spoil(CacheFixture& f, int64_t b, uint64_t kind) {
  const CacheCase& c = f.c();
  const auto n = static_cast<size_t>(b);
  const auto most = static_cast<int32_t>(c.most_rows);
  switch (kind % 6) {
    case 0:
      if (!c.with_lengths) return false;
      f.used_k[n] = kind % 4 < 2 ? most + 1 : INT32_MAX;
      return true;
    case 1:
      if (!c.with_lengths) return false;
      f.used_k[n] = kind % 4 < 2 ? -1 : INT32_MIN;
      return true;
    case 2:
      if (!c.with_leftpad) return false;
      f.leftpad[n] = kind % 4 < 2 ? -1 : most + 1;
      return true;
    case 3:
      if (!c.with_entries || c.paged) return false;
      f.entries[n] = kind % 4 < 2 ? -1 : static_cast<int32_t>(c.entries);
      return true;
    default:
      if (!c.with_rotary_position || c.sequences[n].used_queries + c.sequences[n].added == 0)
        return false;
      f.rotary_position[n] = kind % 4 < 2 ? -1 : static_cast<int32_t>(c.rotary_rows);
      return true;
  }
}

// A sequence whose numbers lead out of the cache gets NaN and appends nothing, and the others
// notice nothing.
TEST(EmulatedDecode, NumbersOutOfRangeLeadNowhere) {
  int tried = 0;
  for (uint64_t seed = 9000; tried < static_cast<int>(kCases) / 8; ++seed) {
    CacheCase c = DrawCase(seed);
    c.batch_invariant = true;
    DrawMachine(seed, c);
    const int64_t bad = static_cast<int64_t>(seed % static_cast<uint64_t>(c.batch()));
    CacheFixture good(c), spoilt(c);
    if (!Spoil(spoilt, bad, seed / 7)) continue;
    ++tried;
    ASSERT_EQ(good.Run(ThroughTheEmulator()), "") << ToString(c);
    strobe_forward_args args = spoilt.Args();
    ASSERT_EQ(ThroughTheEmulator()(spoilt.Problem(), args), STROBE_OK) << ToString(c);
    const CacheSequence& s = c.sequences[static_cast<size_t>(bad)];
    int64_t first = 0;
    for (int64_t b = 0; b < c.batch(); ++b) {
      if (b != bad) {
        ASSERT_TRUE(spoilt.Bits(b) == good.Bits(b)) << b << "\n" << ToString(c);
      }
      if (b < bad) first += c.sequences[static_cast<size_t>(b)].queries;
    }
    const auto expect_nan = [&](const Strided& t) {
      t.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
        const bool is_its = row >= first && row < first + s.used_queries;
        if (is_its) {
          ASSERT_TRUE(std::isnan(t.Get(e))) << "seed " << seed << "\n" << ToString(c);
        }
      });
    };
    expect_nan(spoilt.out);
    if (c.with_lse) expect_nan(spoilt.lse);
    for (const Strided* t : {&spoilt.k, &spoilt.v}) {
      ASSERT_EQ(t->memory->Check("cache", false), "") << ToString(c);
      for (int64_t n = s.used; n < s.used + s.added; ++n) {  // as it was
        for (int64_t h = 0; h < t->heads; ++h) {
          for (int64_t d = 0; d < t->dim; ++d) {
            uint16_t bits = 0;
            const int64_t e = t->Index(c.Entry(s, n), c.Row(n), h, d);
            std::memcpy(&bits, t->memory->bytes() + 2 * e, 2);
            ASSERT_EQ(bits, kPoison) << "seed " << seed << ", row " << n << "\n" << ToString(c);
          }
        }
      }
    }
  }
}

// An infinite value in the last new key: rows that do not see it are computed again, key by key,
// from the new keys that they do see.
TEST(EmulatedDecode, RowsThatAreComputedAgainTakeNewKeys) {
  int narrow = 0, wide = 0;  // the latter have the queries that were turned in the workspace
  for (uint64_t seed = 60000; narrow < 5 || wide < 2; ++seed) {
    CacheCase c = DrawCase(seed);
    const CacheSequence& s = c.sequences[0];
    const bool is_wide = std::max(c.head_dim, c.head_dim_v) > WidestUpdate();
    if (is_wide ? wide >= 2 : narrow >= 5) continue;
    if (!c.causal || c.chunk || c.window_left >= 0 || c.with_q_position || c.with_prefix) continue;
    if (s.used_queries < 2 || s.added < 2 || s.used_queries > 8) continue;
    ++(is_wide ? wide : narrow);
    DrawMachine(seed, c);
    CacheFixture plain(c), infinite(c);
    infinite.v_new.Set(infinite.v_new.Index(0, s.added - 1, 0, 0), HUGE_VAL);
    for (CacheFixture* f : {&plain, &infinite}) {
      strobe_forward_args args = f->Args();
      ASSERT_EQ(ThroughTheEmulator()(f->Problem(), args), STROBE_OK) << ToString(c);
    }
    plain.out.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) {
      if (row >= s.used_queries - 1) return;  // the last query sees the key
      ASSERT_NEAR(infinite.out.Get(e), plain.out.Get(e), 0.05)
          << "seed " << seed << ", row " << row << ", " << d << "\n"
          << ToString(c);
    });
  }
}

// A page of the table that is not there: what a query sees of it makes the query NaN, also where
// new keys would go there, and nothing is written.
TEST(EmulatedDecode, PagesThatAreNotThereGiveNaN) {
  int tried = 0;
  for (uint64_t seed = 20000; tried < static_cast<int>(kCases) / 16; ++seed) {
    CacheCase c = DrawCase(seed);
    const auto full = [](const CacheSequence& x) { return x.used_queries > 0 && x.added > 0; };
    if (!c.paged || c.causal || c.window_left >= 0 || c.window_right >= 0 || c.chunk ||
        c.window_signed)
      continue;
    if (!full(c.sequences[0])) continue;
    ++tried;
    DrawMachine(seed, c);
    CacheFixture f(c);
    const CacheSequence& s = c.sequences[0];
    // The last page, which new keys go to.
    const int64_t column = (s.used + s.added - 1) / c.rows;
    f.table[static_cast<size_t>(column)] = seed % 2 ? static_cast<int32_t>(c.entries) : -5;
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator()(f.Problem(), args), STROBE_OK) << ToString(c);
    f.out.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < s.used_queries) {
        ASSERT_TRUE(std::isnan(f.out.Get(e))) << "seed " << seed << "\n" << ToString(c);
      }
    });
    for (const Strided* t : {&f.k, &f.v}) {
      ASSERT_EQ(t->memory->Check("cache", false), "") << ToString(c);
      for (int64_t n = std::max(s.used, column * c.rows); n < s.used + s.added; ++n) {
        const int64_t e = t->Index(c.Entry(s, n), c.Row(n), 0, 0);
        uint16_t bits = 0;
        std::memcpy(&bits, t->memory->bytes() + 2 * e, 2);
        ASSERT_EQ(bits, kPoison) << "seed " << seed << ", row " << n << "\n" << ToString(c);
      }
    }
  }
}

}  // namespace
}  // namespace strobe_test
