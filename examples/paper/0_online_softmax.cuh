// Step 0: the online softmax, one thread to a query.
//
// A row of attention is sum_j exp(s_j) v_j / sum_j exp(s_j). Written so, exp overflows, and taking
// the row's maximum off every score first seems to ask for all of the row's scores at once. It does
// not: whoever has seen the keys so far holds
//
//   m   the largest score            l   the sum of exp(s_j - m)         o   that of exp(s_j - m)
//   v_j
//
// and the next key may raise m. Both sums are then too large by the same factor, exp(m_old -
// m_new), so that one multiplication each puts them right (Milakov and Gimelshein,
// arXiv:1805.02867). A row of S therefore never has to be anywhere: this is the idea of
// FlashAttention (arXiv:2205.14135, section 3.1), and the steps from 2 on do nothing else, a block
// of keys at a time and with tensor cores. Here every thread reads all of K and V for its single
// query, which is why nobody does so.
//
// Stores lse.
#ifndef STROBE_EXAMPLES_PAPER_0_ONLINE_SOFTMAX_CUH_
#define STROBE_EXAMPLES_PAPER_0_ONLINE_SOFTMAX_CUH_

#include <cmath>

#include "common.h"
#include "cuda/common/softmax.cuh"

namespace strobe::paper {

/// Grid: (queries / kThreads, batch * heads).
template <int kHeadDim, bool kCausal>
__global__ void __launch_bounds__(kThreads)
    online_softmax_kernel(const __grid_constant__ Arguments p) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= p.seqlen) return;
  const int batch_head = static_cast<int>(blockIdx.y);
  const int64_t first = p.first(batch_head, kHeadDim), stride = p.row_stride(kHeadDim);
  const bf16* const q = p.q + first + row * stride;

  float m = -cuda::infinity(), l = 0.f, o[kHeadDim] = {};
  const int end = kCausal ? row + 1 : p.seqlen;
  for (int key = 0; key < end; ++key) {
    const bf16 *const k = p.k + first + key * stride, *const v = p.v + first + key * stride;
    float s = 0.f;
    for (int d = 0; d < kHeadDim; ++d) s += static_cast<float>(q[d]) * static_cast<float>(k[d]);
    s *= p.scale;

    const float m_new = fmaxf(m, s);
    const float shrink = expf(m - m_new);  // 0 at the first key, as m is -inf
    const float weight = expf(s - m_new);
    l = l * shrink + weight;
#pragma unroll
    for (int d = 0; d < kHeadDim; ++d) o[d] = o[d] * shrink + weight * static_cast<float>(v[d]);
    m = m_new;
  }

#pragma unroll
  for (int d = 0; d < kHeadDim; ++d) p.out[first + row * stride + d] = bf16(o[d] / l);
  p.lse[int64_t{batch_head} * p.seqlen + row] = m + logf(l);
}

template <int kHeadDim, bool kCausal, typename Launch>
void run_online_softmax(const Arguments& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(tiles_of(p.seqlen, kThreads)),
                  static_cast<unsigned>(p.batch * p.heads));
  launch(online_softmax_kernel<kHeadDim, kCausal>, grid, kThreads, 0, p);
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_0_ONLINE_SOFTMAX_CUH_
