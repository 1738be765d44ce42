// Quantised rows: strobe_quantize and strobe_dequantize against the oracle, to the bit, and what an
// append to a cache writes against strobe_quantize.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fixture.h"
#include "gtest/gtest.h"
#include "guarded.h"
#include "numeric.h"
#include "quantised.h"
#include "strobe/strobe.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Form;
using oracle::Rng;

constexpr Form kForms[] = {Form::kInt8, Form::kE4m3, Form::kQ8, Form::kQ4, Form::kE5m2};

int32_t CodesOf(Form form) {
  constexpr int32_t kOf[] = {-1,          STROBE_INT8, STROBE_FLOAT8_E4M3,
                             STROBE_Q8_0, STROBE_Q4_0, STROBE_FLOAT8_E5M2};
  return kOf[static_cast<int>(form)];
}

// A tensor of floats, its codes and its scales, each between red zones.
struct Tensors {
  strobe_quantize_args args{};
  std::vector<float> values;
  Guarded x, codes, scale;
  Form form;
  DType dtype;

  static int64_t Scales(const strobe_quantize_args& a) {
    switch (a.kv_scale) {
      case STROBE_KV_SCALE_NONE:
        return 0;
      case STROBE_KV_SCALE_TENSOR:
        return 1;
      case STROBE_KV_SCALE_HEAD:
        return a.heads_kv ? a.heads_kv : a.heads;
      case STROBE_KV_SCALE_BATCH_HEAD:
        return a.batch * (a.heads_kv ? a.heads_kv : a.heads);
      default:
        return a.batch * a.seqlen * a.heads;
    }
  }

  Tensors(Form form_, DType dtype_, strobe_quantize_args a, int64_t shift)
      : args(a),
        x(a.batch * a.seqlen * a.heads * a.head_dim, oracle::ElementSize(dtype_)),
        codes(a.batch * a.seqlen * a.heads * oracle::RowBytes(form_, a.head_dim), 1, shift),
        scale(Scales(a), a.kv_scale_dtype == STROBE_FLOAT16 ? 2 : 4),
        form(form_),
        dtype(dtype_) {
    args.struct_size = sizeof args;
    args.dtype = StrobeDType(dtype);
    args.kv_dtype = CodesOf(form);
    args.x = x.bytes();
    args.codes = codes.bytes();
    args.scale = a.kv_scale ? scale.bytes() : nullptr;
  }
  int64_t rows() const { return args.batch * args.seqlen * args.heads; }
  DType scale_dtype() const {
    return args.kv_scale_dtype == STROBE_FLOAT16 ? DType::kFloat16 : DType::kFloat32;
  }
  // Rows of the same number share a scale, which is at this place; blocks of rows have it at each.
  int64_t SetOf(int64_t row) const {
    if (args.scale_rows <= 1) return ScaleIndex(row);
    const int64_t i = row / args.heads % args.seqlen;
    return row - i % args.scale_rows * args.heads;
  }
  int64_t ScaleIndex(int64_t row) const {
    const int64_t heads_kv = args.heads_kv ? args.heads_kv : args.heads;
    const int64_t head = row % args.heads / (args.heads / heads_kv);
    switch (args.kv_scale) {
      case STROBE_KV_SCALE_ROW:
        return row;
      case STROBE_KV_SCALE_HEAD:
        return head;
      case STROBE_KV_SCALE_BATCH_HEAD:
        return row / args.heads / args.seqlen * heads_kv + head;
      default:
        return 0;
    }
  }
};

strobe_quantize_args Extents(int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim) {
  strobe_quantize_args a{};
  a.batch = batch;
  a.seqlen = seqlen;
  a.heads = heads;
  a.head_dim = head_dim;
  return a;
}

float Value(Rng& rng, bool odd) {
  const float some[] = {0,
                        -0.0f,
                        1e-30f,
                        -1e-42f,
                        3e38f,
                        65504,
                        -1e6f,
                        0.5f,
                        -127,
                        448,
                        464,
                        1e5f,
                        std::numeric_limits<float>::min()};
  if (odd && rng.Chance(0.02)) return rng.Chance(0.5) ? NAN : INFINITY;
  return odd && rng.Chance(0.4) ? rng.Pick(some) : static_cast<float>(rng.Normal());
}

// The same for all NaN.
uint32_t Bits(float x) { return std::isnan(x) ? 0x7FC00000u : std::bit_cast<uint32_t>(x); }

TEST(Quantise, IsWhatTheOracleSays) {
  Rng rng(7);
  for (int n = 0; n < 1500; ++n) {
    const Form form = rng.Pick(kForms);
    const bool odd = rng.Chance(0.5), blocks = !oracle::HasScales(form);
    strobe_quantize_args a = Extents(rng.Integer(0, 2), rng.Integer(0, 9), rng.Integer(1, 3),
                                     blocks ? 32 * rng.Integer(1, 8) : rng.Integer(1, 256));
    if (!blocks) {
      a.kv_scale = static_cast<int32_t>(rng.Integer(1, 4));
      const bool of_both = a.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
      a.kv_scale_dtype = rng.Chance(0.5) && !of_both ? STROBE_FLOAT16 : STROBE_FLOAT32;
      // Heads that share a scale.
      if ((of_both || a.kv_scale == STROBE_KV_SCALE_HEAD) && rng.Chance(0.5)) {
        a.heads_kv = a.heads;
        a.heads *= rng.Integer(1, 3);
      }
      a.scale_is_given = rng.Chance(0.3);
      const bool makes_rows = a.kv_scale == STROBE_KV_SCALE_ROW && !a.scale_is_given;
      if (makes_rows && rng.Chance(0.6)) a.scale_rows = rng.Integer(1, 10);
    }
    a.threads = static_cast<int32_t>(rng.Integer(1, 2));
    const auto dtype = static_cast<DType>(rng.Integer(0, 2));
    Tensors t(form, dtype, a, rng.Integer(0, 3));
    std::vector<float> values(static_cast<size_t>(t.x.elements()));
    for (size_t e = 0; e < values.size(); ++e) {
      oracle::Store(dtype, t.x.bytes(), static_cast<int64_t>(e), Value(rng, odd));
      values[e] = oracle::Load(dtype, t.x.bytes(), static_cast<int64_t>(e));
    }
    for (int64_t e = 0; a.scale_is_given && e < t.scale.elements(); ++e) {
      const float some[] = {0, 0.01f, -0.02f, INFINITY, NAN, 1};
      oracle::Store(t.scale_dtype(), t.scale.bytes(), e, rng.Pick(some));
    }
    for (Guarded* memory : {&t.x, &t.codes, &t.scale}) memory->Seal();
    for (int64_t e = 0; e < t.codes.elements(); ++e) t.codes.AllowWrite(e);
    for (int64_t e = 0; !a.scale_is_given && e < t.scale.elements(); ++e) t.scale.AllowWrite(e);
    ASSERT_EQ(strobe_quantize(&t.args), STROBE_OK) << strobe_last_error();
    ASSERT_EQ(t.x.Check("x"), "");
    ASSERT_EQ(t.codes.Check("codes", false), "");
    ASSERT_EQ(t.scale.Check("scale", false), "");
    // Of scales that several rows share: made from all of them, as that of one row is.
    const auto dim = static_cast<size_t>(a.head_dim);
    for (int64_t row = 0; row < t.rows(); ++row) {
      const auto* const x = values.data() + static_cast<size_t>(row) * dim;
      std::optional<float> given;
      float scale = 0;
      if (!blocks) {
        scale = oracle::Load(t.scale_dtype(), t.scale.bytes(), t.ScaleIndex(row));
        given = scale;
        if (!a.scale_is_given) {
          std::vector<float> sharing;
          for (int64_t other = 0; other < t.rows(); ++other) {
            if (t.SetOf(other) != t.SetOf(row)) continue;
            const auto* const more = values.data() + static_cast<size_t>(other) * dim;
            sharing.insert(sharing.end(), more, more + dim);
          }
          const auto made = oracle::Quantise(form, sharing, t.scale_dtype(), {});
          ASSERT_EQ(Bits(scale), Bits(made.scale)) << Name(form) << ", row " << row;
        }
      }
      const auto wanted =
          oracle::Quantise(form, std::vector<float>(x, x + dim), t.scale_dtype(), given);
      const auto* const codes = reinterpret_cast<const uint8_t*>(t.codes.bytes()) +
                                row * oracle::RowBytes(form, a.head_dim);
      for (size_t e = 0; e < wanted.bytes.size(); ++e) {
        // The oracle's NaN of a block's scale has any sign and payload.
        const int64_t block = oracle::RowBytes(form, 32);
        const auto at = static_cast<int64_t>(e) % block;
        if (blocks && at < 2) {
          uint16_t got, want;
          std::memcpy(&got, codes + e - static_cast<size_t>(at), 2);
          std::memcpy(&want, wanted.bytes.data() + e - static_cast<size_t>(at), 2);
          ASSERT_EQ(Bits(oracle::DecodeFloat16(got)), Bits(oracle::DecodeFloat16(want)))
              << Name(form) << ", row " << row << ", byte " << e;
          continue;
        }
        ASSERT_EQ(int{codes[e]}, int{wanted.bytes[e]})
            << Name(form) << ", row " << row << ", byte " << e << ", scale " << scale
            << (blocks ? "" : ", x ") << (blocks ? 0 : x[e]);
      }
    }
  }
}

// What NaN becomes has the same bits wherever it came from: its own sign, and that of infinity over
// infinity, which x86 makes negative and other machines positive, do not show.
TEST(Quantise, NaNHasOneCodeAndOneScale) {
  for (const Form form : kForms) {
    for (const float odd : {NAN, -NAN, INFINITY, -INFINITY}) {
      strobe_quantize_args a = Extents(1, 1, 1, 32);
      if (oracle::HasScales(form)) a.kv_scale = STROBE_KV_SCALE_ROW;
      Tensors t(form, DType::kFloat32, a, 1);
      for (int64_t e = 0; e < 32; ++e) oracle::Store(t.dtype, t.x.bytes(), e, e == 5 ? odd : 1.f);
      ASSERT_EQ(strobe_quantize(&t.args), STROBE_OK) << strobe_last_error();
      const auto* const codes = reinterpret_cast<const uint8_t*>(t.codes.bytes());
      if (form == Form::kE4m3 || form == Form::kE5m2) {
        ASSERT_EQ(int{codes[5]}, 0x7F) << odd;
      }
      if (!std::isnan(odd)) continue;
      if (oracle::HasScales(form)) {
        float scale;
        std::memcpy(&scale, t.scale.bytes(), sizeof scale);
        ASSERT_EQ(std::bit_cast<uint32_t>(scale), 0x7FC00000u) << Name(form) << ", " << odd;
      } else {
        ASSERT_EQ(codes[0] | codes[1] << 8, 0x7E00) << Name(form) << ", " << odd;
      }
    }
  }
}

TEST(Quantise, EveryCodeComesBackAsTheOracleSays) {
  Rng rng(8);
  const float scales[] = {1, 0.37f, 0, -2, 0x1p-24f, 0x1p-14f, 65504, INFINITY, NAN, 1e-40f};
  for (const Form form : kForms) {
    for (const float scale : scales) {
      for (int32_t dtype = 0; dtype <= 2; ++dtype) {
        strobe_quantize_args a = Extents(1, 1, 1, 256);
        const bool blocks = !oracle::HasScales(form);
        if (!blocks) a.kv_scale = STROBE_KV_SCALE_ROW;
        Tensors t(form, static_cast<DType>(dtype), a, 1);
        auto* const codes = reinterpret_cast<uint8_t*>(t.codes.bytes());
        for (int64_t e = 0; e < t.codes.elements(); ++e) codes[e] = static_cast<uint8_t>(e);
        const uint16_t half = oracle::EncodeFloat16(scale);
        for (int64_t at = 0; blocks && at < t.codes.elements(); at += oracle::RowBytes(form, 32)) {
          std::memcpy(codes + at, &half, 2);
        }
        if (!blocks) oracle::Store(DType::kFloat32, t.scale.bytes(), 0, scale);
        ASSERT_EQ(strobe_dequantize(&t.args), STROBE_OK) << strobe_last_error();
        for (int64_t n = 0; n < 256; ++n) {
          const double value = oracle::ValueAt(form, codes, static_cast<double>(scale), n);
          const float wanted = oracle::Round(t.dtype, static_cast<float>(value));
          const float got = oracle::Load(t.dtype, t.x.bytes(), n);
          ASSERT_EQ(Bits(got), Bits(wanted)) << Name(form) << " of " << scale << ", value " << n;
        }
      }
    }
  }
}

// Codes of rotated rows are those nearest to the rows, or to their blocks of the largest power of
// two, times Sylvester's matrix, and reading them back rotates once more.
TEST(Quantise, RowsAreRotatedByTheHadamardMatrix) {
  Rng rng(10);
  // Head dims, and their blocks.
  const std::pair<int64_t, size_t> dims[] = {
      {1, 1},   {2, 2},   {4, 4},   {8, 8},    {16, 16},  {32, 32},  {64, 64},  {128, 128},
      {48, 16}, {80, 16}, {96, 32}, {112, 16}, {160, 32}, {192, 64}, {240, 16}, {256, 256}};
  for (const auto& [dim, block] : dims) {
    const auto n = static_cast<size_t>(dim);
    strobe_quantize_args a = Extents(2, 3, 2, dim);
    a.kv_scale = STROBE_KV_SCALE_ROW;
    a.hadamard = 1;
    Tensors t(Form::kInt8, DType::kFloat32, a, 1);
    const auto times_matrix = [n, block = block](const std::vector<double>& x) {
      std::vector<double> y(n);
      for (size_t i = 0; i < n; ++i) {
        const size_t first = i / block * block;
        for (size_t j = 0; j < block; ++j) {
          const double value = x[first + j];
          y[i] += std::popcount((i - first) & j) % 2 ? -value : value;
        }
        y[i] /= std::sqrt(static_cast<double>(block));
      }
      return y;
    };
    std::vector<float> x(static_cast<size_t>(t.x.elements()));
    for (float& value : x) value = static_cast<float>(rng.Normal());
    std::memcpy(t.x.bytes(), x.data(), x.size() * sizeof(float));
    ASSERT_EQ(strobe_quantize(&t.args), STROBE_OK) << strobe_last_error();
    std::memset(t.x.bytes(), 0, x.size() * sizeof(float));
    ASSERT_EQ(strobe_dequantize(&t.args), STROBE_OK) << strobe_last_error();
    const auto* const codes = reinterpret_cast<const uint8_t*>(t.codes.bytes());
    for (size_t row = 0; row < static_cast<size_t>(t.rows()); ++row) {
      const auto scale = static_cast<double>(
          oracle::Load(DType::kFloat32, t.scale.bytes(), static_cast<int64_t>(row)));
      const std::vector<double> rotated =
          times_matrix({x.begin() + static_cast<int64_t>(row * n),
                        x.begin() + static_cast<int64_t>((row + 1) * n)});
      std::vector<double> coded(n);
      for (size_t i = 0; i < n; ++i) {
        coded[i] = oracle::ValueAt(Form::kInt8, codes + row * n, scale, static_cast<int64_t>(i));
        EXPECT_NEAR(coded[i], rotated[i], 0.501 * scale + 1e-6) << dim << ", " << row << ", " << i;
      }
      const std::vector<double> back = times_matrix(coded);
      for (size_t i = 0; i < n; ++i) {
        const auto at = static_cast<int64_t>(row * n + i);
        EXPECT_NEAR(oracle::Load(DType::kFloat32, t.x.bytes(), at), back[i], 1e-5) << dim;
      }
    }
  }
}

TEST(Quantise, BadArgumentsAreRefusedByName) {
  using A = strobe_quantize_args;
  const struct {
    std::function<void(A&)> spoil;
    const char* text;
    strobe_status status = STROBE_INVALID_ARGUMENT;
  } all[] = {
      {[](A& a) { a.struct_size = 8; }, "args.struct_size = 8, expected "},
      {[](A& a) { a.device = 2; }, "device = 2, expected 0 to 1"},
      {[](A& a) { a.device = STROBE_CUDA; }, "device = 1 (CUDA), expected 0 (CPU)",
       STROBE_UNSUPPORTED},
      {[](A& a) { a.device_index = 1; }, "device_index = 1, expected 0 to 0"},
      {[](A& a) { a.dtype = STROBE_INT8; }, "dtype = 5, expected 0 to 2"},
      {[](A& a) { a.kv_dtype = STROBE_FLOAT16; },
       "kv_dtype = 2 (fp16), expected 3 (float8 e4m3), 4 (float8 e5m2), 5 (int8), 6 (q8_0) or 7 "
       "(q4_0)"},
      {[](A& a) { a.kv_dtype = -7; }, "kv_dtype = -7 (?), expected 3"},
      {[](A& a) { a.kv_scale = 0; }, "kv_scale = 0 (none) with kv_dtype = 5 (int8), expected 1"},
      {[](A& a) { a.kv_dtype = STROBE_Q8_0; },
       "kv_scale = 3 with kv_dtype = 6 (q8_0), expected 0 (none)"},
      {[](A& a) { a.kv_scale_dtype = 1; }, "kv_scale_dtype = 1, expected 0 (fp32) or 2 (fp16)"},
      {[](A& a) { a.scale_is_given = 2; }, "scale_is_given = 2, expected 0 to 1"},
      {[](A& a) { a.kv_dtype = STROBE_Q8_0, a.kv_scale = 0, a.scale_is_given = 1; },
       "scale_is_given = 1 with kv_scale = 0 (none), expected 0"},
      {[](A& a) { a.threads = -1; }, "threads = -1, expected 0 to"},
      {[](A& a) { a.seqlen = -1; }, "seqlen = -1, expected 0 to"},
      {[](A& a) { a.head_dim = 257; }, "head_dim = 257, expected 1 to 256"},
      {[](A& a) { a.kv_dtype = STROBE_Q4_0, a.kv_scale = 0, a.head_dim = 33; },
       "head_dim = 33 with kv_dtype = 7 (q4_0), expected a multiple of 32"},
      {[](A& a) {
         a.x_strides = {32, 32, 32, 2};
       },
       "x_strides.dim = 2 elements, expected 1"},
      {[](A& a) {
         a.codes_strides = {0, 16, 32, 1};
       },
       "codes_strides.seqlen = 16 elements"},
      {[](A& a) {
         a.scale_strides = {0, 0, 1, 0};
       },
       "scale_strides.seqlen = 0 elements"},
      {[](A& a) {
         a.kv_scale = 1, a.scale_strides = {0, 0, 1, 0};
       },
       "scale_strides.head = 1 elements with kv_scale = 1, expected 0"},
      {[](A& a) { a.x = nullptr; }, "x = NULL, expected a pointer"},
      {[](A& a) { a.codes = nullptr; }, "codes = NULL, expected a pointer"},
      {[](A& a) { a.scale = nullptr; }, "scale = NULL, expected a pointer"},
      {[](A& a) { a.kv_dtype = STROBE_Q8_0, a.kv_scale = 0; },
       "scale is given with kv_scale = 0 (none), expected NULL"},
      {[](A& a) { a.kv_scale = 4, a.kv_scale_dtype = STROBE_FLOAT16; },
       "kv_scale_dtype = 2, expected 0 (fp32) with kv_scale = 4 (of batch and head)"},
      {[](A& a) { a.heads_kv = 1; },
       "heads_kv = 1 with kv_scale = 3, expected 0, or scales of heads: kv_scale 2 (head) or 4 "
       "(batch and head)"},
      {[](A& a) { a.kv_scale = 2, a.heads_kv = 3; },
       "heads = 2, expected a multiple of heads_kv = 3"},
      {[](A& a) { a.kv_scale = 4, a.heads_kv = -1; }, "heads_kv = -1, expected 1 to"},
      {[](A& a) { a.hadamard = 2; }, "hadamard = 2, expected 0 to 1"},
      {[](A& a) { a.hadamard = 1, a.head_dim = 24; },
       "head_dim = 24 with hadamard = 1, expected a power of two or a multiple of 16"},
      {[](A& a) { a.scale_rows = -1; }, "scale_rows = -1, expected 0 to 2147483647"},
      {[](A& a) { a.scale_rows = 2, a.scale_is_given = 1; },
       "scale_rows = 2 with kv_scale = 3 and scale_is_given = 1, expected 0, or strobe_quantize"},
      {[](A& a) { a.scale_rows = 2, a.kv_scale = STROBE_KV_SCALE_TENSOR; },
       "scale_rows = 2 with kv_scale = 1 and scale_is_given = 0, expected 0, or strobe_quantize"},
      {[](A& a) { a.codes = a.x; }, "codes shares memory with x, expected memory of its own"},
  };
  for (const auto& bad : all) {
    strobe_quantize_args a = Extents(1, 2, 2, 32);
    a.kv_scale = STROBE_KV_SCALE_ROW;
    Tensors t(Form::kInt8, DType::kFloat32, a, 0);
    bad.spoil(t.args);
    EXPECT_EQ(strobe_quantize(&t.args), bad.status) << bad.text;
    EXPECT_EQ(std::string(strobe_last_error()).find(bad.text), 0U)
        << "got: " << strobe_last_error() << "\nwanted: " << bad.text;
  }
  EXPECT_EQ(strobe_quantize(nullptr), STROBE_INVALID_ARGUMENT);
}

// New rows that pass the border of a page are in the cache what strobe_quantize makes of them, to
// the bit, and a launch that appends gives the bits of one that finds them there.
TEST(Quantise, AnAppendOverABorderOfPages) {
  constexpr int64_t kHeads = 2, kDim = 64, kPage = 4, kPages = 4, kNew = 3, kUsed = 6;
  Rng rng(9);
  for (const Form form : kForms) {
    for (int32_t kind = 1; kind <= 3; ++kind) {
      const bool scaled = oracle::HasScales(form), of_rows = kind == STROBE_KV_SCALE_ROW;
      if (!scaled && kind > 1) continue;
      const int64_t row = oracle::RowBytes(form, kDim);
      std::vector<uint8_t> k(static_cast<size_t>(kPages * kPage * kHeads * row)), v(k);
      std::vector<float> k_scale(kPages * kPage * kHeads, 0.02f), v_scale(k_scale);
      std::vector<float> q(kHeads * kDim), k_new(kNew * kHeads * kDim), v_new(k_new), out(q),
          again(q);
      std::vector<float> old(kPages * kPage * kHeads * kDim);
      for (std::vector<float>* t : {&q, &k_new, &v_new, &old}) {
        for (float& x : *t) x = static_cast<float>(rng.Normal());
      }
      const auto quantise = [&](std::vector<float>& x, int64_t rows, uint8_t* codes, float* scale) {
        strobe_quantize_args a = Extents(1, rows, kHeads, kDim);
        a.struct_size = sizeof a;
        a.kv_dtype = CodesOf(form);
        a.kv_scale = scaled ? kind : 0;
        a.scale_is_given = scaled && !of_rows;
        a.x = x.data();
        a.codes = codes;
        a.scale = scaled ? scale : nullptr;
        ASSERT_EQ(strobe_quantize(&a), STROBE_OK) << strobe_last_error();
      };
      quantise(old, kPages * kPage, k.data(), k_scale.data());
      quantise(old, kPages * kPage, v.data(), v_scale.data());
      const int32_t table[] = {2, 0, 3, 1}, used = kUsed, all = kUsed + kNew;
      strobe_problem p;
      strobe_problem_init(&p, sizeof p);
      p.seqlen_q = 1;
      p.batch = 1;
      p.heads = kHeads;
      p.head_dim = kDim;
      p.kv_dtype = CodesOf(form);
      p.kv_scale = scaled ? kind : 0;
      p.cache = STROBE_CACHE_PAGED;
      p.pages = p.pages_per_sequence = kPages;
      p.page_size = kPage;
      p.seqlen_k = kPages * kPage;
      p.has_seqused_k = 1;
      strobe_forward_args a{};
      a.struct_size = sizeof a;
      a.q = q.data();
      a.k = k.data();
      a.v = v.data();
      a.k_scale = scaled ? k_scale.data() : nullptr;
      a.v_scale = scaled ? v_scale.data() : nullptr;
      a.out = out.data();
      a.block_table = table;
      a.seqused_k = &used;
      p.append = STROBE_APPEND_DENSE;
      p.seqlen_new = kNew;
      a.k_new = k_new.data();
      a.v_new = v_new.data();
      strobe_plan plan;
      plan.struct_size = sizeof plan;
      ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
      ASSERT_EQ(strobe_forward(&plan, &a), STROBE_OK) << strobe_last_error();

      std::vector<uint8_t> codes(static_cast<size_t>(kNew * kHeads * row));
      std::vector<float> scales(kNew * kHeads, 0.02f);
      for (const bool keys : {true, false}) {
        quantise(keys ? k_new : v_new, kNew, codes.data(), scales.data());
        for (int64_t n = 0; n < kNew; ++n) {
          const int64_t at = kUsed + n, place = table[at / kPage] * kPage + at % kPage;
          const auto bytes = static_cast<size_t>(kHeads * row);
          const uint8_t* const cache = (keys ? k : v).data() + static_cast<size_t>(place) * bytes;
          EXPECT_EQ(std::memcmp(cache, codes.data() + static_cast<size_t>(n) * bytes, bytes), 0)
              << Name(form) << ", new row " << n;
          for (int64_t h = 0; scaled && of_rows && h < kHeads; ++h) {
            EXPECT_EQ((keys ? k_scale : v_scale)[static_cast<size_t>(place * kHeads + h)],
                      scales[static_cast<size_t>(n * kHeads + h)]);
          }
        }
      }
      p.append = STROBE_APPEND_NONE;
      p.seqlen_new = 0;
      a.k_new = a.v_new = nullptr;
      a.seqused_k = &all;
      a.out = again.data();
      ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
      ASSERT_EQ(strobe_forward(&plan, &a), STROBE_OK) << strobe_last_error();
      EXPECT_EQ(out, again) << Name(form);
    }
  }
}

}  // namespace
}  // namespace strobe_test
