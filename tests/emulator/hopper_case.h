// Problems and devices for the tests of the Hopper kernels in the emulator.
#ifndef STROBE_TESTS_EMULATOR_HOPPER_CASE_H_
#define STROBE_TESTS_EMULATOR_HOPPER_CASE_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "problem_gen.h"
#include "run_time.h"

namespace strobe_test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif
inline constexpr uint64_t kHopperCases = kUnderSanitizer ? 12 : 60;

/// Strides that TMA takes, 16-byte units: those of q, k, v and dout. unit: elements of one.
inline void MakeAligned(Layout& layout, int64_t dim, bool batch_invariant, int64_t unit = 8) {
  layout.shift = layout.shift / unit * unit;
  if (batch_invariant) layout.odd_stride = unit;  // a batch of one goes where a larger one goes
  if (layout.defaulted && dim % unit == 0) return;
  layout.defaulted = false;
  for (int i = 0; i < 3; ++i) {
    layout.pad[i] = layout.pad[i] / unit * unit;
    layout.broadcast[i] = layout.negative[i] = false;
  }
  layout.pad[layout.order[2]] += (unit - dim % unit) % unit;
}

/// Steps of a kernel, at most.
inline int64_t Steps(const Case& c) {
  int64_t steps = 0;
  for (size_t b = 0; b < c.seqlens_q.size(); ++b)
    steps += (c.seqlens_q[b] + 63) / 64 * ((c.seqlens_k[b] + 127) / 128);
  return steps * c.heads;
}

/// Gives the case's inputs and dout strides that TMA takes. False where it is no case for these
/// tests.
inline bool MakeHopperCase(Case& c) {
  if (Steps(c) > 150) return false;  // half a second
  // A stride of 0, where there are no rows, is nothing for TMA.
  if (!c.varlen && std::min(c.longest_q(), c.longest_k()) == 0) return false;
  for (Layout* layout : {&c.q, &c.k}) MakeAligned(*layout, c.head_dim, c.batch_invariant);
  for (Layout* layout : {&c.v, &c.dout}) MakeAligned(*layout, c.head_dim_v, c.batch_invariant);
  if (c.packing != Packing::kSeparate && (c.head_dim % 8 || c.head_dim_v % 8))
    c.packing = Packing::kSeparate;
  if (kUnderTsan) c.special = Special::kNone;  // flags of NaN are set by several threads alike
  return true;
}

/// A case of problem_gen.h in a dtype and with head dims of the instances that there are.
/// change(case, rng) leaves out what the kernels decline. generate(seed): the case.
template <typename Instance, typename Change, typename Generate = Case (*)(uint64_t)>
Case DrawHopperCase(std::span<const strobe::cuda::Entry<Instance>> instances, uint64_t seed,
                    const Change& change, const Generate& generate = GenerateCase) {
  for (uint64_t again = 0;; ++again) {
    Case c = generate(seed + (again << 32)).WithoutBias();
    oracle::Rng rng(seed ^ again << 40 ^ 0xB4C5u);
    const auto& config =
        instances[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(instances.size()) - 1))]
            .instance->config;
    c.dtype = config.dtype == STROBE_BFLOAT16 ? oracle::DType::kBFloat16 : oracle::DType::kFloat16;
    // A dimension of an instance's own more often than the generator draws one.
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(std::max(1, config.width - 63), config.width);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    const int64_t widest = instances.back().instance->config.width;
    change(c, rng);
    if (std::max(c.head_dim, c.head_dim_v) <= widest && MakeHopperCase(c)) {
      return c;
    }
  }
}

/// Gives the case a bias as Hopper's kernels take it, of q's type and in 16-byte units, and the
/// scores that they compute beside one.
inline void DrawBiasForTma(Case& c, oracle::Rng& rng) {
  c.softcap = 0;
  c.alibi = STROBE_ALIBI_NONE;
  c.has_bias = true;
  c.bias = DrawBias(rng);
  c.bias.same_dtype = true;
  if (c.special == Special::kInfinity) c.bias.size = 0.3;
  Layout& l = c.bias.layout;
  if (rng.Chance(0.5)) l.order[1] = 2, l.order[2] = 1;  // [batch, heads, queries, keys]
  l.pad[l.order[1]] = rng.Chance(0.3) ? 8 * rng.Integer(1, 3) : 0;
  l.defaulted = false;
  MakeAligned(l, c.bias_keys(), false);
  l.odd_stride = 8;
  // An expanded bias: it does not move along an axis. (Not the innermost, whose pad aligns.)
  if (rng.Chance(0.2)) l.broadcast[l.order[rng.Integer(0, 1)]] = true;
  // A gradient is written by plain stores, anywhere. [batch, heads, queries, keys]
  Layout& gradient = c.bias.gradient;
  std::swap(gradient.order[1], gradient.order[2]);
  gradient.defaulted = rng.Chance(0.4);
  if (!gradient.defaulted) gradient.pad[gradient.order[rng.Integer(0, 2)]] = rng.Integer(0, 5);
}

/// Draws a device and an order of threads. What nobody has written is mostly large numbers here:
/// rows that are NaN are computed again, pair by pair, and would then be right.
inline void DrawHopper(uint64_t seed) {
  oracle::Rng rng(seed ^ 0x90E111u);
  const int multiprocessors[] = {1, 2, 3, 7, 132};
  const int at_once[] = {1, 2, 3, 5};
  auto& device = strobe::emulator::machine().devices[0];
  device.compute_capability = 90;
  device.multiprocessors = rng.Pick(multiprocessors);
  device.shared_bytes = strobe::emulator::kMostShared;
  strobe::emulator::settings() = {};
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Pick(at_once);
  if (rng.Chance(0.75)) strobe::emulator::settings().unwritten = kNumberByte;
}

inline WorkspaceHolds HoldsOf(uint64_t seed) {
  return seed % 2 ? WorkspaceHolds::kNumbers : static_cast<WorkspaceHolds>(seed / 2 % 3);
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_HOPPER_CASE_H_
