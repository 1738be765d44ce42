// Seeded random problems over the whole feature space.
#ifndef STROBE_CHECK_PROBLEM_GEN_H_
#define STROBE_CHECK_PROBLEM_GEN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/options.h"
#include "core/random_blocks.h"
#include "mask_case.h"
#include "numeric.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// How one tensor lies in memory.
struct Layout {
  bool defaulted = true;  // contiguous, asked for by strides of zero
  // Else: dimensions from the outermost to the innermost, as a permutation of 0 batch, 1 seqlen, 2
  // head.
  int order[3] = {0, 1, 2};
  int64_t pad[3] = {0, 0, 0};                 // unused elements after each entry of the dimension
  bool broadcast[3] = {false, false, false};  // stride 0; inputs only
  bool negative[3] = {false, false, false};
  int64_t dim_step = 1;    // from an element of the last dimension to the next; a bias's alone
  int64_t odd_stride = 0;  // of dimensions with one entry, where the stride means nothing
  int64_t shift = 0;       // elements by which the tensor stands off 64-byte alignment
};

enum class Packing { kSeparate, kQkv, kKv };

/// Of a bias: shape, dtypes and values.
struct BiasCase {
  bool one_batch = false, one_head = false, one_query = false;  // shared by all of them
  bool extents_defaulted = false;  // fields left at 0 where that means the same
  oracle::DType dtype = oracle::DType::kFloat32;
  bool same_dtype = false;  // of q, whatever dtype says, and the field is left at its default
  bool grad_float32 = false;
  double size = 1;      // standard deviation
  double hides = 0;     // probability of -infinity; rows that are -infinity throughout occur too
  bool spoils = false;  // NaN at pairs that the mask hides
  Layout layout, gradient;
};

/// One drawn, but for its layouts.
BiasCase DrawBias(oracle::Rng& rng);

/// Of float8 attention: k and v are e5m2 and not e4m3; k and v have scales (has_q_scale: q has);
/// how the scales lie.
struct Float8Case {
  bool e5m2 = false, scaled = false;
  Layout q_scale, k_scale, v_scale;
};

/// Values that are put at random places of an input.
enum class Special { kNone, kNan, kInfinity };

/// The problem's options are those of core/options.def.
struct Case : strobe::Options {
  Case() { threads = 1; }

  uint64_t seed = 0;  // of this case: generates it again, and its values

  oracle::DType dtype = oracle::DType::kFloat32;  // of float8 attention that of out
  bool float8 = false;                            // forward alone
  Float8Case float8_case;
  int64_t heads = 1, heads_kv = 1, head_dim = 1, head_dim_v = 1;
  bool varlen = false;
  std::vector<int64_t> seqlens_q, seqlens_k;  // one for each sequence; all the same unless varlen
  int64_t slack_q = 0,
          slack_k = 0;  // varlen: by how much the given longest lengths exceed the true ones

  int64_t past_q = 0, past_k = 0;  // varlen: rows past the end of the last sequence

  bool out_float32 = false;     // out is float32, whatever dtype is
  bool grad_float32 = false;    // dq, dk and dv are, likewise
  bool delta_has_dlse = false;  // with has_delta: a gradient of lse is in it

  /// Blocks of pairs that are hidden. The library must have been built for it, with
  /// STROBE_RANDOM_WALKS, and have the same in strobe_random_blocks.
  strobe::RandomBlocks random_blocks;

  MaskChoice mask;

  uint64_t dropout_seed = 0, dropout_offset = 0;
  /// One number a sequence, where the case has the array. What the rows that are not in use hold
  /// must not matter: NaN, where the memory is no other row's too.
  strobe::ArraysOf<std::vector<int32_t>> arrays;
  BiasCase bias;                  // with has_bias
  bool own_workspace = false;     // the library's own, else the caller's
  bool without_lse = false;       // run forward a second time, with lse = NULL
  bool fields_defaulted = false;  // heads_kv and head_dim_v left at 0 where that means the same

  Packing packing = Packing::kSeparate;
  Layout q, k, v, out, dout, dq, dk, dv;
  double size_qk = 1, size_v = 1, size_dout = 1;  // standard deviations
  bool constant_keys = false;                     // all keys alike: all weights of a row are equal
  Special special = Special::kNone;

  /// Leaves dropout out.
  void DropDropout() {
    dropout_p = 0;
    dropout_first_query = dropout_first_key = dropout_first_head = dropout_heads = 0;
  }
  oracle::DType q_dtype() const { return float8 ? oracle::DType::kE4m3 : dtype; }
  oracle::DType kv_dtype() const {
    return float8 && float8_case.e5m2 ? oracle::DType::kE5m2 : q_dtype();
  }
  /// Float8: whether q, or k and v, have scales.
  bool HasScale(bool of_q) const { return of_q ? has_q_scale : float8_case.scaled; }
  oracle::DType out_dtype() const { return out_float32 ? oracle::DType::kFloat32 : dtype; }
  /// What may have been changed is dtype: tests ask for another.
  oracle::DType bias_dtype() const {
    return !bias.same_dtype ? bias.dtype : float8 ? out_dtype() : dtype;
  }
  oracle::DType dbias_dtype() const {
    return bias.grad_float32 ? oracle::DType::kFloat32 : bias_dtype();
  }
  int64_t bias_batch() const { return bias.one_batch ? 1 : batch(); }
  int64_t bias_heads() const { return bias.one_head ? 1 : heads; }
  int64_t bias_queries() const { return bias.one_query ? 1 : longest_q() + slack_q; }
  int64_t bias_keys() const { return longest_k() + slack_k; }
  /// The same without a bias, for kernels that take none.
  Case WithoutBias() const;

  oracle::DType grad_dtype() const { return grad_float32 ? oracle::DType::kFloat32 : dtype; }
  /// Without what few kernels do: out, dq, dk and dv are float32, gradients are added to what is
  /// there, delta is given.
  Case WithPlainGradients() const;
  int64_t batch() const { return static_cast<int64_t>(seqlens_q.size()); }
  int64_t longest_q() const;
  int64_t longest_k() const;
  int64_t rows_q() const;  // of all sequences together, and those past their end
  int64_t rows_k() const;
  /// Multiplications of one of the five matrix products, unmasked.
  int64_t Work() const;
};

Case GenerateCase(uint64_t seed);
/// Float8 attention, of all that a forward pass may be asked for.
Case GenerateFloat8Case(uint64_t seed);
/// Problems in bf16 with batch_invariant, of what kernels compute whose products have rows of their
/// own bits for it (AMX's).
Case GenerateOwnRowsCase(uint64_t seed);
/// Problems of several blocks, some of which nobody sees. blocks: their sizes.
Case GenerateBlocksCase(uint64_t seed, strobe::RandomBlocks blocks = {});
/// 1 to 64 queries, and mostly thousands of keys.
Case GenerateFewQueriesCase(uint64_t seed);
/// Problems with a mask as data, most of which are several blocks long.
Case GenerateMaskedCase(uint64_t seed);
std::string ToString(const Case& c);

}  // namespace strobe_test

#endif  // STROBE_CHECK_PROBLEM_GEN_H_
