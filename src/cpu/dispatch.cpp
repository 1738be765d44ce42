// The CPU's rows of the kernel table, widest instruction set first, and the choice among them.
#include "cpu/dispatch.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/machine.h"
#include "cpu/decode.h"
#include "cpu/fill_plan.h"
#include "cpu/key_tree.h"
#include "cpu/launch.h"

namespace strobe::cpu {

extern const InstructionSet kAmx, kAvx512Bf16, kAvx512, kAvx2, kNeon,
    kPortable;  // those that are built

namespace {

struct Row {
  const char* kernel;  // name in the kernel table, with the back end in front
  const InstructionSet* isa;
  bool CpuFeatures::*needs;  // null: every CPU
  const char* missing;
  const char* bf16_products = nullptr;  // what makes them, where the row takes bf16 alone
  // Whether the row is faster than those after it. Where it is not, STROBE_CPU_ISA has to name it.
  bool (*is_faster)() = nullptr;  // null: yes
  // It writes bf16 alone and draws dropout for 8 keys at a time, and decodes and reads caches with
  // batch_invariant alone.
  bool is_amx = false;
};

constexpr Row kRows[] = {
#if STROBE_HAVE_AMX
    {"cpu_amx", &kAmx, &CpuFeatures::amx, "this CPU (or its operating system) has no AMX bf16",
     "AMX", nullptr, true},
#endif
#if STROBE_HAVE_AVX512_BF16
    {"cpu_avx512_bf16", &kAvx512Bf16, &CpuFeatures::avx512_bf16, "this CPU has no AVX-512 BF16",
     "vdpbf16ps", has_fast_bf16_products},
#endif
#if STROBE_HAVE_AVX512
    {"cpu_avx512", &kAvx512, &CpuFeatures::avx512, "this CPU has no AVX-512 (F, BW, CD, DQ, VL)"},
#endif
#if STROBE_HAVE_AVX2
    {"cpu_avx2", &kAvx2, &CpuFeatures::avx2, "this CPU has no AVX2 with FMA and F16C"},
#endif
#if STROBE_HAVE_NEON
    {"cpu_neon", &kNeon, &CpuFeatures::neon, "this CPU has no NEON"},
#endif
    {"cpu_portable", &kPortable, nullptr, nullptr},
};
constexpr size_t kRowCount = std::size(kRows);

bool has(const Row& row) { return !row.needs || cpu_features().*row.needs; }

// STROBE_CPU_ISA limits the instruction sets: it names the widest to use. It is read once, so that
// no launch looks at the environment.
struct IsaLimit {
  size_t row = 0;      // first row that may be used
  bool named = false;  // by the variable
  const char* error = nullptr;
  char text[160] = {};

  IsaLimit() {
    const char* const name = std::getenv("STROBE_CPU_ISA");
    if (!name || !*name) return;
    for (row = 0; row < kRowCount && std::strcmp(kRows[row].isa->name, name) != 0;) ++row;
    named = true;
    if (row < kRowCount && has(kRows[row])) return;
    std::string known;
    for (const InstructionSet* isa : instruction_sets()) {
      known += std::string(known.empty() ? "" : ", ") + isa->name;
    }
    error = text;
    std::snprintf(text, sizeof text,
                  "STROBE_CPU_ISA = %.24s, expected one that this CPU and build have: %s", name,
                  known.c_str());
  }
};

const IsaLimit& isa_limit() {
  static const IsaLimit limit;
  return limit;
}

// Why plans may not use a row; null: they may.
const char* unavailable(size_t row) {
  if (isa_limit().error) return isa_limit().error;
  if (!has(kRows[row])) return kRows[row].missing;
  if (row < isa_limit().row) return "STROBE_CPU_ISA limits it to a narrower instruction set";
  const bool named = isa_limit().named && row == isa_limit().row;
  if (kRows[row].is_faster && !kRows[row].is_faster() && !named) {
    return "this CPU is faster without it; STROBE_CPU_ISA can name it";
  }
  return nullptr;
}

// What batch_invariant does not go together with by AMX: null where there is nothing.
const char* beside_own_rows(const AttentionProblem& p) {
  if (p.softcap > 0) return "softcap";
  if (p.alibi != STROBE_ALIBI_NONE) return "alibi";
  if (p.has_bias) return "a bias";
  if (p.mask.kind != STROBE_MASK_NONE) return "a mask as data";
  if (p.dropout_p > 0) return "dropout";
  return nullptr;
}

template <size_t kRow>
std::string declines(const AttentionProblem& problem) {
  // A dtype that the kernels do not know must not be read as one that they know.
  const bool floats = STROBE_FLOAT32 <= problem.dtype && problem.dtype <= STROBE_FLOAT16;
  if (!floats && problem.dtype != STROBE_FLOAT8_E4M3) {
    return format("dtype = %d, expected fp32, bf16, fp16 or float8 e4m3", problem.dtype);
  }
  const char* const bf16_products = kRows[kRow].bf16_products;
  for (const auto& [name, got] :
       {std::pair{"kv_dtype", problem.kv_dtype}, {"v_dtype", v_dtype_of(problem)}}) {
    if (!bf16_products || got == problem.dtype) continue;
    return format("%s = %s, expected that of q, which is %s (%s multiplies bf16)", name,
                  dtype_name(got), dtype_name(problem.dtype), bf16_products);
  }
  if (bf16_products && problem.dtype != STROBE_BFLOAT16) {
    return format("dtype = %s, expected bf16 (%s multiplies bf16)", dtype_name(problem.dtype),
                  bf16_products);
  }
  // Forward passes by AMX have a way for it (amx-forward-own.h).
  // Over caches it is the function of AVX-512 that appends: a build without that has none, and
  // whole tensors then go where caches go.
  const bool own_rows = kRows[kRow].is_amx && kRows[kRow].isa->append && problem.batch_invariant &&
                        problem.direction == STROBE_FORWARD;
  if (bf16_products && problem.batch_invariant && !own_rows) {
    return format(
        "batch_invariant = 1, expected 0 (%s would give a row of a prompt other bits than "
        "a decoded one)",
        bf16_products);
  }
  if (kRows[kRow].is_amx) {
    const char* const what = own_rows ? beside_own_rows(problem) : nullptr;
    if (what) {
      return format(
          "batch_invariant with %s, expected one of them (AMX would give such a row of a "
          "prompt other bits than a decoded one)",
          what);
    }
    AttentionProblem whole = problem;
    if (own_rows) whole.cache = STROBE_CACHE_NONE;
    if (std::string reason = declines_without_cache(whole); !reason.empty()) return reason;
  }
  if (bf16_products && problem.rotary_dim != 0) {
    return format("rotary_dim = %lld, expected 0 (rotated queries are not bf16)",
                  static_cast<long long>(problem.rotary_dim));
  }
  if (kRows[kRow].is_amx && problem.dropout_first_key % 8 != 0) {
    return format("dropout_first_key = %lld, expected a multiple of 8 (bits are drawn for 8 keys)",
                  static_cast<long long>(problem.dropout_first_key));
  }
  if (problem.direction == STROBE_BACKWARD && !kRows[kRow].isa->backward_block) {
    return "direction = backward: this instruction set has a forward kernel only";
  }
  if (problem.has_dbias && !kRows[kRow].isa->dbias_block) {
    return "has_dbias = 1, expected 0: this instruction set computes no gradient of a bias";
  }
  return {};
}

// Whether this row would take the problem if it did not ask for batch_invariant, and does not now.
template <size_t kRow>
bool declines_for_invariance(const AttentionProblem& p) {
  if (!kRows[kRow].bf16_products || unavailable(kRow)) return false;
  AttentionProblem without = p;
  without.batch_invariant = 0;
  return !declines<kRow>(p).empty() && declines<kRow>(without).empty();
}

// What batch_invariant promises of a plan, and what that costs: sums that begin anew with each
// chunk of keys, and the speed of the rows before this one that would take the problem without it.
template <size_t kRow>
std::string remark_on_rows(const Plan& plan) {
  const AttentionProblem& p = plan.problem;
  if (!p.batch_invariant || p.direction != STROBE_FORWARD) return {};
  std::string faster;
  const auto add = [&]<size_t kBefore>(std::integral_constant<size_t, kBefore>) {
    if (declines_for_invariance<kBefore>(p))
      faster += (faster.empty() ? "" : ", ") + std::string(kRows[kBefore].kernel);
  };
  [&]<size_t... kBefore>(std::index_sequence<kBefore...>) {
    (add(std::integral_constant<size_t, kBefore>()), ...);
  }
  (std::make_index_sequence<kRow>());
  std::string text =
      "all rows of a sequence get the same bits here, whatever they are computed with";
  if (const DecodeKernel* const decode = kRows[kRow].isa->decode(p)) {
    text += format("; keys have chunks of %lld",
                   static_cast<long long>(decode->leaf_blocks(p) * kDecodeKeys));
    if (kRows[kRow].is_amx) {
      text +=
          format(", and tiles %lld rows, decoded ones too", static_cast<long long>(decode->width));
    }
  }
  if (!faster.empty()) {
    text += "; in float32 arithmetic, where prompts take several times as long as by " + faster +
            " without batch_invariant";
  }
  return text;
}

template <size_t kRow>
constexpr Kernel kernel() {
  constexpr const Row& row = kRows[kRow];
  return {row.kernel,
          STROBE_CPU,
          [] { return unavailable(kRow); },
          [](Plan& plan, const Choice* choice) {
            std::string reason = declines<kRow>(plan.problem);
            if (!reason.empty()) return reason;
            // To fill a plan the kernels' code is asked for its tiles and its scratch memory: code
            // that a machine without the instructions cannot run. There the reason is all that
            // there is.
            return has(row) ? fill_plan(*row.isa, plan, choice) : std::string();
          },
          [](const AttentionProblem& problem) {
            std::vector<Choice> choices;
            if (!declines<kRow>(problem).empty()) return choices;
            for (const int64_t block : blocks_to_choose(*row.isa, problem))
              choices.push_back({row.kernel, {}, block});
            return choices;
          },
          [](const Plan& plan, const ForwardArgs& args) { return forward(*row.isa, plan, args); },
          [](const Plan& plan, const BackwardArgs& args) { return backward(*row.isa, plan, args); },
          remark_on_rows<kRow>};
}

template <size_t... kRow>
constexpr auto make_kernels(std::index_sequence<kRow...>) {
  return std::array{kernel<kRow>()...};
}

constexpr std::array kKernels = make_kernels(std::make_index_sequence<kRowCount>());

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

std::span<const InstructionSet* const> instruction_sets() {
  static const std::vector<const InstructionSet*> found = [] {
    std::vector<const InstructionSet*> all;
    for (const Row& row : kRows) {
      if (has(row)) all.push_back(row.isa);
    }
    return all;
  }();
  return found;
}

const char* widest_in_use() {
  for (size_t row = 0; row < kRowCount; ++row) {
    if (!unavailable(row)) return kRows[row].isa->name;
  }
  return "none";
}

}  // namespace strobe::cpu
