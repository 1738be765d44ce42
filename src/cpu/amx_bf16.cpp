// AMX for bf16: the entry of the instruction-set table. The passes:
//
//     amx-forward-item.h     an item from start to end            amx-backward-item.h
//     amx-forward.h          the pipeline in its middle           amx-backward.h
//     amx-forward-online.h   the online softmax                   amx-backward-unit.h
//     amx-forward-own.h      batch_invariant, decoding too
//
// They are made of amx-product.h (tile products with vector work in between), amx-score.h (softcap,
// ALiBi, bias, dropout), amx-pack.h (operands), amx-math.h and amx-tile.h; the instructions
// themselves stand in amx-instructions.h and, for tests, amx-emulated.h.
#include "cpu/amx-backward-item.h"
#include "cpu/amx-forward-item.h"
#include "cpu/amx-forward-own.h"
#include "cpu/decode.h"

namespace strobe::cpu {

namespace amx {

static void exp2_array(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = _mm512_cvtss_f32(exp2(set(x[i])));
}
static void to_floats(int32_t, const void* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = to_float(static_cast<const Bf16*>(x)[i]);
}
static void from_floats(int32_t, const float* x, void* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    write_block(set(x[i]), set(x[i]), set(1), 1, static_cast<Bf16*>(y) + i);
  }
}

// A tile of AMX takes 16 queries, and is faster with half of them than decoding is.
static int64_t most_decoded(const AttentionProblem&) { return kAlwaysDecoded; }

}  // namespace amx

// The instruction set whose functions are taken for what AMX has no use for.
#if STROBE_AVX512_EMULATED
#define STROBE_BESIDE_AMX kAvx2
#elif STROBE_HAVE_AVX512
#define STROBE_BESIDE_AMX kAvx512
#endif
#ifdef STROBE_BESIDE_AMX
extern const InstructionSet STROBE_BESIDE_AMX;
#endif

namespace amx {

constexpr DecodeKernel kOwnDecode = {
    kPair, own_leaf, own_decode_scratch, own_decode_blocks, own_decode_merge, own_decode_finish};

static const DecodeKernel* decode(const AttentionProblem& p) {
  if (own_rows(p)) return &kOwnDecode;
#ifdef STROBE_BESIDE_AMX
  return STROBE_BESIDE_AMX.decode(p);  // reading K and V takes longer than the products do
#else
  return nullptr;
#endif
}

#ifdef STROBE_BESIDE_AMX
static void append(const ForwardContext& c, int64_t batch, Range keys) {
  STROBE_BESIDE_AMX.append(c, batch, keys);
}
#else
constexpr void (*append)(const ForwardContext&, int64_t, Range) = nullptr;
#endif

}  // namespace amx

extern const InstructionSet kAmx;
const InstructionSet kAmx = {
    "amx",
    amx::forward_tiles,
    amx::backward_tiles,
    amx::kPair,  // dQ travels in blocks of 32 dimensions
    amx::forward_scratch,
    amx::backward_scratch,
    amx::forward_block,
    amx::backward_delta,
    amx::backward_block,
    amx::exp2_array,
    amx::to_floats,
    amx::from_floats,
    amx::append,
    amx::decode,
    nullptr,  // no dbias
    amx::most_decoded,
};

}  // namespace strobe::cpu
