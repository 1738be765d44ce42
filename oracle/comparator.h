// The yardstick of the tolerance rule: attention in plain tensor steps in the problem's own dtype,
// as a framework runs it without a fused kernel. Products accumulate in float32; the scores S, the
// weights P, their gradients and the results are rounded to the dtype where a framework would store
// them; the softmax itself works in float32.
#ifndef STROBE_ORACLE_COMPARATOR_H_
#define STROBE_ORACLE_COMPARATOR_H_

#include <cstdint>

#include "numeric.h"
#include "oracle.h"

namespace oracle {

struct Plain {
  Tensor out;         // as in ForwardResult
  Tensor dq, dk, dv;  // as in BackwardResult; empty without dout
  Tensor dsinks;      // likewise
  Tensor dbias;       // likewise; sums in float32 of gradients of the scores in the dtype
};

/// dout, dlse: null where there is none.
///
/// noise_seed 0: the computation as it is. Else: another draw of its rounding errors. Each stored
/// value moves by a random part of the dtype's spacing instead of to the nearest value, and sums
/// start at a random place. On a tiny problem the one computation may be exact by luck (with one
/// key P is 1, and nothing is rounded); the worst of several draws is what the plain computation's
/// error is like. In backward these draws also go through what the interface stores between forward
/// and backward, as no implementation of it can do otherwise: the mean of the softmax's gradient is
/// dout . out with out rounded, and the weights have the rounding error of lse, a float32 (at 500,
/// 3e-5 of each), and of scores that are computed once more, in another order than those in lse.
Plain PlainAttention(const Problem& p, DType dtype, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor* dout, const Tensor* dlse, uint64_t noise_seed);

}  // namespace oracle

#endif  // STROBE_ORACLE_COMPARATOR_H_
