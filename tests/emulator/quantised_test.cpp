// The decode kernels for quantised caches on the CPU (run_time.h), against float64 over what the
// codes stand for; what an append writes, and strobe_quantize on a GPU, against the oracle and the
// CPU.
//
//   STROBE_EMULATOR_CASES, STROBE_EMULATOR_SEED   as in decode_test.cpp
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cache_fixture.h"
#include "core/quantise.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "random_cases.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Form;
using oracle::Rng;

constexpr uint64_t kCases = kSanitized ? 60 : 400;

bool IsEmulated(DType dtype) {
  return (dtype == DType::kBFloat16 && STROBE_EMULATES_cached_bf16_quantised) ||
         (dtype == DType::kFloat16 && STROBE_EMULATES_cached_fp16_quantised);
}

/// A case that these kernels take: heads of 128 dimensions at most. Every sixteenth has long
/// sequences, which several thread blocks share.
CacheCase DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = GenerateQuantisedCase(seed + (again << 32));
    if (!IsEmulated(c.dtype) || std::max(c.head_dim, c.head_dim_v) > 128) continue;
    if (seed % 16 == 0 && c.most_rows < 300) continue;
    return c;
  }
}

std::string NameOf(const CacheCase& c) {
  const char* const forms[] = {"int8", "e4m3", "q8", "q4"};
  const Form all[] = {Form::kInt8, Form::kE4m3, Form::kQ8, Form::kQ4};
  const auto at = std::find(std::begin(all), std::end(all), c.form) - std::begin(all);
  return std::string("cached_sm80_") + (c.dtype == DType::kBFloat16 ? "bf16_" : "fp16_") +
         forms[at] + "_";
}

// The kernels for codes take the case, also where the planner would unpack first, which
// unpacked_test.cpp tests.
void DrawMachine(uint64_t seed, const CacheCase& c) {
  Rng rng(seed ^ 0xE111u);
  strobe::cuda::Machine& machine = DrawSmallDevice(rng);
  machine.forced_instance.clear();
  const bool many = c.queries() * (c.heads / c.heads_kv) > 64 * c.batch();
  if (many || rng.Chance(0.3)) {  // one that cannot take the case leaves the choice to the planner
    std::vector<std::string> own;
    for (const auto& entry : strobe::cuda::instance_table<strobe::cuda::CachedInstance>()) {
      if (std::string(entry.name).rfind(NameOf(c), 0) == 0) own.emplace_back(entry.name);
    }
    machine.forced_instance =
        own[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(own.size()) - 1))];
  }
  if (const char* asked = std::getenv("STROBE_CUDA_ROW")) {
    machine.forced_instance = asked;
    machine.devices[0].shared_bytes = 227 << 10;
  }
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Chance(0.5) ? 1 : 3;
}

std::string RunCase(const CacheCase& c, WorkspaceHolds holds = WorkspaceHolds::kNaN) {
  CacheFixture f(c);
  std::string wrong = f.Run(ThroughTheEmulator(holds));
  return wrong.empty() ? f.Judge() : wrong;
}

TEST(EmulatedQuantised, RandomProblemsAgreeWithTheOracle) {
  ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
    const CacheCase c = DrawCase(seed);
    DrawMachine(seed, c);
    return Verdict{RunCase(c, static_cast<WorkspaceHolds>(seed % 3)), ToString(c)};
  });
}

// The order of threads, and of thread blocks, changes nothing.
TEST(EmulatedQuantised, OrderChangesNoBit) {
  auto& settings = strobe::emulator::settings();
  for (uint64_t seed = 5000; seed < 5000 + kCases / 20; ++seed) {
    const CacheCase c = DrawCase(seed);
    DrawMachine(seed, c);
    std::string first;
    for (uint64_t order = 0; order < 3; ++order) {
      settings.seed = seed + 1000 * order;
      settings.blocks_at_once = order % 2 ? 1 : 4;
      settings.unwritten = order == 1 ? 0x3c : 0xff;
      CacheFixture f(c);
      ASSERT_EQ(f.Run(ThroughTheEmulator(static_cast<WorkspaceHolds>(order))), "") << ToString(c);
      std::string bits;
      for (int64_t b = 0; b < c.batch(); ++b) bits += f.Bits(b);
      if (order == 0) first = bits;
      EXPECT_TRUE(bits == first) << "order " << order << "\n" << ToString(c);
    }
  }
  settings.unwritten = 0xff;
}

// A page of the table that is not there: what a query sees of it makes the query NaN, also where
// new keys would go there, and nothing is written.
TEST(EmulatedQuantised, PagesThatAreNotThereGiveNaN) {
  int tried = 0;
  for (uint64_t seed = 20000; tried < static_cast<int>(kCases) / 16; ++seed) {
    const CacheCase c = DrawCase(seed);
    const auto full = [](const CacheSequence& x) {
      return x.used_queries > 0 && x.used + x.added > x.leftpad;
    };
    if (!c.paged || c.causal || c.window_left >= 0 || c.window_right >= 0 || c.chunk ||
        c.window_signed || !full(c.sequences[0]))
      continue;
    ++tried;
    DrawMachine(seed, c);
    CacheFixture f(c);
    const CacheSequence& s = c.sequences[0];
    const int64_t column = (s.used + s.added - 1) / c.rows;  // the last page
    f.table[static_cast<size_t>(column)] = seed % 2 ? static_cast<int32_t>(c.entries) : -5;
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator()(f.Problem(), args), STROBE_OK) << ToString(c);
    f.out.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < s.used_queries) {
        ASSERT_TRUE(std::isnan(f.out.Get(e))) << "seed " << seed << "\n" << ToString(c);
      }
    });
    for (const Strided* t : {&f.k, &f.v})
      ASSERT_EQ(t->memory->Check("cache", false), "") << ToString(c);
  }
}

// A sequence whose lengths lead out of the cache gets NaN.
TEST(EmulatedQuantised, LengthsOutOfRangeGiveNaN) {
  int tried = 0;
  for (uint64_t seed = 9000; tried < static_cast<int>(kCases) / 16; ++seed) {
    const CacheCase c = DrawCase(seed);
    if (!c.with_lengths || c.sequences[0].used_queries == 0) continue;
    ++tried;
    DrawMachine(seed, c);
    CacheFixture f(c);
    f.used_k[0] = seed % 2 ? -1 : static_cast<int32_t>(c.most_rows) + 1;
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator()(f.Problem(), args), STROBE_OK) << ToString(c);
    f.out.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < c.sequences[0].used_queries) {
        ASSERT_TRUE(std::isnan(f.out.Get(e))) << "seed " << seed << "\n" << ToString(c);
      }
    });
  }
}

/// Arguments of strobe_quantize over memory of their own.
struct Quantising {
  strobe_quantize_args args{};
  std::vector<std::byte> x, codes, scale;

  explicit Quantising(uint64_t seed) {
    Rng rng(seed);
    const int32_t dtypes[] = {STROBE_FLOAT32, STROBE_BFLOAT16, STROBE_FLOAT16};
    const int32_t forms[] = {STROBE_INT8, STROBE_FLOAT8_E4M3, STROBE_FLOAT8_E5M2, STROBE_Q8_0,
                             STROBE_Q4_0};
    args.struct_size = sizeof args;
    args.dtype = rng.Pick(dtypes);
    args.kv_dtype = rng.Pick(forms);
    const bool blocks = args.kv_dtype == STROBE_Q8_0 || args.kv_dtype == STROBE_Q4_0;
    if (!blocks) {
      args.kv_scale = static_cast<int32_t>(rng.Integer(1, 4));
      const bool of_both = args.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
      args.kv_scale_dtype = rng.Chance(0.5) && !of_both ? STROBE_FLOAT16 : STROBE_FLOAT32;
      args.scale_is_given = rng.Chance(0.2);
    }
    args.batch = rng.Integer(1, 3);
    args.seqlen = rng.Integer(1, 40);
    args.heads = rng.Integer(1, 5);
    args.head_dim = blocks ? 32 * rng.Integer(1, 8) : rng.Integer(1, 256);
    const bool of_heads =
        args.kv_scale == STROBE_KV_SCALE_HEAD || args.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
    if (of_heads && rng.Chance(0.5)) {
      args.heads_kv = args.heads;
      args.heads *= rng.Integer(1, 4);
    }
    if (args.kv_scale == STROBE_KV_SCALE_ROW && !args.scale_is_given && rng.Chance(0.6)) {
      args.scale_rows = rng.Integer(1, 50);
    }
    args.hadamard = rng.Chance(0.3);
    if (args.hadamard) {
      const bool in_blocks = !blocks && rng.Chance(0.4);
      args.head_dim =
          in_blocks ? 16 * rng.Integer(1, 16) : int64_t{1} << rng.Integer(blocks ? 5 : 0, 8);
    }
    const int64_t rows = args.batch * args.seqlen * args.heads;
    const int64_t size = args.dtype == STROBE_FLOAT32 ? 4 : 2;
    x.resize(static_cast<size_t>(rows * args.head_dim * size));
    codes.resize(static_cast<size_t>(rows * args.head_dim * 2));
    scale.resize(static_cast<size_t>(rows * 4));
    const double magnitude = std::exp2(rng.Uniform(-12, 12));
    const bool zeros = rng.Chance(0.1);  // of both signs: none of them is the largest
    const auto put = [&](std::byte* to, int32_t dtype, double value) {
      const auto f = static_cast<float>(value);
      const uint16_t half =
          dtype == STROBE_BFLOAT16 ? oracle::EncodeBFloat16(f) : oracle::EncodeFloat16(f);
      dtype == STROBE_FLOAT32 ? std::memcpy(to, &f, 4) : std::memcpy(to, &half, 2);
    };
    for (int64_t i = 0; i < rows * args.head_dim; ++i) {
      const bool odd = rng.Chance(0.002);
      const double odd_ones[] = {0, -0.0, INFINITY, -INFINITY, NAN, -NAN, 1e-40};
      put(x.data() + i * size, args.dtype,
          zeros ? (rng.Chance(0.5) ? 0. : -0.)
          : odd ? rng.Pick(odd_ones)
                : magnitude * rng.Normal());
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = args.kv_scale_dtype == STROBE_FLOAT16 ? 2 : 4;
      put(scale.data() + i * at, args.kv_scale_dtype, magnitude / 50);
    }
    Point();
  }
  void Point() {
    args.x = x.data();
    args.codes = codes.data();
    args.scale = args.kv_scale ? scale.data() : nullptr;
  }
};

TEST(EmulatedQuantised, QuantisesAsTheCpuDoesToTheBit) {
  DrawMachine(1, DrawCase(1));
  for (uint64_t seed = 1; seed < 1 + kCases / 2; ++seed) {
    Quantising cpu(seed), gpu(seed);
    gpu.args.device = STROBE_CUDA;
    ASSERT_EQ(strobe_quantize(&cpu.args), STROBE_OK) << strobe_last_error();
    ASSERT_TRUE(strobe::check_quantise(gpu.args, true).ok());
    ASSERT_TRUE(strobe::cuda::quantise(gpu.args).ok());
    ASSERT_TRUE(cpu.codes == gpu.codes) << "seed " << seed << ", form " << cpu.args.kv_dtype;
    ASSERT_TRUE(cpu.scale == gpu.scale) << "seed " << seed << ", form " << cpu.args.kv_dtype;
    cpu.args.scale_rows = gpu.args.scale_rows = 0;  // of strobe_quantize alone
    std::fill(cpu.x.begin(), cpu.x.end(), std::byte{0});
    std::fill(gpu.x.begin(), gpu.x.end(), std::byte{0});
    ASSERT_EQ(strobe_dequantize(&cpu.args), STROBE_OK) << strobe_last_error();
    ASSERT_TRUE(strobe::cuda::dequantise(gpu.args).ok());
    const auto value = [&](const Quantising& q, size_t i) {
      if (q.args.dtype == STROBE_FLOAT32) {
        float f;
        std::memcpy(&f, q.x.data() + 4 * i, 4);
        return static_cast<double>(f);
      }
      uint16_t bits;
      std::memcpy(&bits, q.x.data() + 2 * i, 2);
      return static_cast<double>(q.args.dtype == STROBE_BFLOAT16 ? oracle::DecodeBFloat16(bits)
                                                                 : oracle::DecodeFloat16(bits));
    };
    const size_t count = cpu.x.size() / (cpu.args.dtype == STROBE_FLOAT32 ? 4 : 2);
    for (size_t i = 0; i < count; ++i) {
      const double a = value(cpu, i), b = value(gpu, i);
      ASSERT_TRUE(a == b || (a != a && b != b)) << "seed " << seed << ": " << a << ", " << b;
    }
  }
}

// Which kernels take which caches, and what is refused.
TEST(QuantisedChoice, KernelsAreThoseOfTheCachesDtype) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.device = STROBE_CUDA;
  p.dtype = STROBE_BFLOAT16;
  p.cache = STROBE_CACHE_CONTIGUOUS;
  p.batch = 4;
  p.seqlen_q = 1;
  p.seqlen_k = 1000;
  p.heads = 8;
  p.heads_kv = 2;
  strobe::cuda::DeviceProperties device = strobe::emulator::machine().devices[0];
  device.compute_capability = 90;
  device.multiprocessors = 132;
  device.shared_bytes = 227 << 10;
  const auto choose = [&](int32_t kv_dtype, int64_t dim, int arch = 80) {
    strobe_problem own = p;
    own.kv_dtype = kv_dtype;
    own.head_dim = dim;
    if (kv_dtype == STROBE_INT8 || kv_dtype == STROBE_FLOAT8_E4M3)
      own.kv_scale = STROBE_KV_SCALE_ROW;
    strobe::resolve_defaults(own);
    return strobe::cuda::choose_instance(arch, own, device, {});
  };
  const auto name = [&](int32_t kv_dtype, int64_t dim) {
    const auto choice = choose(kv_dtype, dim);
    return choice.name ? std::string(choice.name) : choice.reason;
  };
  // Four query heads of one query have room in eight rows, those of three queries need sixteen.
  EXPECT_EQ(name(STROBE_INT8, 128), "cached_sm80_bf16_int8_128_8x32x2x4_plain");
  EXPECT_EQ(name(STROBE_FLOAT8_E4M3, 64), "cached_sm80_bf16_e4m3_64_8x32x4x4_plain");
  EXPECT_EQ(name(STROBE_Q8_0, 96), "cached_sm80_bf16_q8_128_8x32x2x4_plain");
  EXPECT_EQ(name(STROBE_Q4_0, 32), "cached_sm80_bf16_q4_64_8x32x6x4_plain");
  p.seqlen_q = 3;
  EXPECT_EQ(name(STROBE_INT8, 128), "cached_sm80_bf16_int8_128_16x32x3x8_plain");
  EXPECT_EQ(name(STROBE_FLOAT8_E4M3, 64), "cached_sm80_bf16_e4m3_64_16x32x5x8_plain");
  EXPECT_EQ(name(STROBE_Q8_0, 96), "cached_sm80_bf16_q8_128_16x32x3x8_plain");
  EXPECT_EQ(name(STROBE_Q4_0, 32), "cached_sm80_bf16_q4_64_16x32x10x8_plain");
  EXPECT_EQ(name(STROBE_INT8, 100), "cached_sm80_bf16_int8_128_16x32x3x8_elements");
  p.softcap = 10;
  EXPECT_EQ(name(STROBE_INT8, 64), "cached_sm80_bf16_int8_128_16x32x3x8_elements");
  p.softcap = 0;
  device.shared_bytes = 99 << 10;
  EXPECT_EQ(name(STROBE_Q4_0, 128), "cached_sm80_bf16_q4_128_16x32x4x4_elements");
  device.shared_bytes = 227 << 10;
  EXPECT_EQ(choose(STROBE_INT8, 128, 90).reason,
            "kv_dtype = int8, expected that of q, which is bf16: cuda_sm80 has the kernels for "
            "few queries on quantised caches");
  EXPECT_EQ(name(STROBE_Q8_0, 192),
            "max(head_dim, head_dim_v) = 192, expected at most 128 for keys in a cache of q8_0");
}

}  // namespace
}  // namespace strobe_test
