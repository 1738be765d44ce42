// AMX for bf16: the entry of the instruction-set table. The passes:
//
//     amx-forward-item.h     an item from start to end            amx-backward-item.h
//     amx-forward.h          the pipeline in its middle           amx-backward.h
//     amx-forward-online.h   the online softmax                   amx-backward-unit.h
//
// They are made of amx-product.h (tile products with vector work in between), amx-score.h (softcap,
// ALiBi, bias, dropout), amx-pack.h (operands), amx-math.h and amx-tile.h; the instructions
// themselves stand in amx-instructions.h and, for tests, amx-emulated.h.
#include "cpu/amx-backward-item.h"
#include "cpu/amx-forward-item.h"
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

extern const DecodeKernel kAvx512Decode;  // where it is built
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
    nullptr,
#if STROBE_HAVE_AVX512
    &kAvx512Decode,  // reading K and V takes longer than the products do
#else
    nullptr,
#endif
    nullptr,  // no dbias
    amx::most_decoded,
};

}  // namespace strobe::cpu
