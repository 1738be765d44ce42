// What kernels_<isa>.cpp exports. STROBE_ISA: its namespace; STROBE_ISA_TABLE: the name of its
// InstructionSet.
#include "cpu/backward-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/forward-inl.h"

namespace strobe::cpu {

namespace STROBE_ISA {

static void exp2_array(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = hn::GetLane(exp2(set(x[i]), 1));
}
static void to_float(int32_t dtype, const void* x, float* y, int64_t n) {
  HWY_ALIGN float one[kLanes];
  for_dtype(
      dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n; ++i) {
          row_to_float(static_cast<const T*>(x) + i, 1, one);
          y[i] = one[0];
        }
      });
}
static void from_float(int32_t dtype, const float* x, void* y, int64_t n) {
  HWY_ALIGN float one[kLanes] = {};
  for_dtype(
      dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n; ++i) {
          one[0] = x[i];
          row_from_float(one, 1, 1, static_cast<T*>(y) + i);
        }
      });
}

}  // namespace STROBE_ISA

extern const DecodeKernel HWY_CONCAT(STROBE_ISA_TABLE, Decode);
const DecodeKernel HWY_CONCAT(STROBE_ISA_TABLE, Decode) = {
    STROBE_ISA::kPair,         STROBE_ISA::decode_leaf,  STROBE_ISA::decode_scratch,
    STROBE_ISA::decode_blocks, STROBE_ISA::decode_merge, STROBE_ISA::decode_finish,
};
static const DecodeKernel* HWY_CONCAT(STROBE_ISA_TABLE, DecodeOf)(const AttentionProblem&) {
  return &HWY_CONCAT(STROBE_ISA_TABLE, Decode);
}

extern const InstructionSet STROBE_ISA_TABLE;
const InstructionSet STROBE_ISA_TABLE = {
    HWY_STR(STROBE_ISA),         STROBE_ISA::forward_tiles,
    STROBE_ISA::backward_tiles,  STROBE_ISA::kLanes,
    STROBE_ISA::forward_scratch, STROBE_ISA::backward_scratch,
    STROBE_ISA::forward_block,   STROBE_ISA::backward_delta,
    STROBE_ISA::backward_block,  STROBE_ISA::exp2_array,
    STROBE_ISA::to_float,        STROBE_ISA::from_float,
    STROBE_ISA::append_keys,     HWY_CONCAT(STROBE_ISA_TABLE, DecodeOf),
    STROBE_ISA::dbias_block,     STROBE_ISA::most_decoded,
};

}  // namespace strobe::cpu
