// Problems too large to check in full: long sequences by sampled rows, and offsets beyond 2^31
// elements.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "comparator.h"
#include "compare.h"
#include "environment.h"
#include "fixture.h"
#include "gtest/gtest.h"

namespace strobe_test {
namespace {

using oracle::DType;

constexpr int64_t kLong = kSanitized ? 3000 : 20000;

// The rows of out and lse that were computed, as tensors of their own.
oracle::Tensor Pick(const oracle::Tensor& t, const std::vector<int64_t>& rows) {
  oracle::Tensor picked(static_cast<int64_t>(rows.size()), t.heads, t.dim);
  for (size_t n = 0; n < rows.size(); ++n) {
    std::copy(t.at(rows[n], 0), t.at(rows[n], 0) + t.heads * t.dim,
              picked.at(static_cast<int64_t>(n), 0));
  }
  return picked;
}

// Gradients of all keys can be had from a few rows: where dout is zero, nothing flows back.
void CheckLong(DType dtype, bool causal) {
  Case c;
  c.seed = 4;
  c.dtype = dtype;
  c.head_dim = c.head_dim_v = 32;
  c.seqlens_q = c.seqlens_k = {kLong};
  c.causal = causal;
  c.scale = std::nanf("");
  c.threads = 0;
  Fixture f(c);
  const std::vector<int64_t> rows = {0,         1,          63,         64,        511,      1023,
                                     1024,      2047,       2500,       2777,      2900,     2998,
                                     kLong / 2, kLong - 66, kLong - 65, kLong - 2, kLong - 1};
  f.dout.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
    if (std::find(rows.begin(), rows.end(), row) == rows.end()) f.dout.Set(e, 0);
  });
  ASSERT_EQ(f.Forward(), "");
  ASSERT_EQ(f.Backward(), "");

  oracle::Problem p = f.OracleProblem();
  p.only_rows = rows;
  const oracle::Tensor q = f.q.Read(), k = f.k.Read(), v = f.v.Read(), dout = f.dout.Read();
  const oracle::ForwardResult forward = oracle::Forward(p, q, k, v);
  const oracle::BackwardResult backward = oracle::Backward(p, q, k, v, dout);
  const oracle::Plain plain = oracle::PlainAttention(p, dtype, q, k, v, &dout, nullptr, 0);
  const oracle::Tensor plain_out = Pick(plain.out, rows);
  for (const oracle::Worst& worst :
       {oracle::Compare("out", Pick(f.out.Read(), rows), Pick(forward.out, rows), {&plain_out},
                        dtype, oracle::kOutFactor),
        oracle::CompareLse(Pick(f.ReadLse(), rows), Pick(forward.lse, rows),
                           Pick(forward.size, rows)),
        oracle::Compare("dq", f.dq.Read(), backward.dq, {&plain.dq}, dtype,
                        oracle::kGradientFactor),
        oracle::Compare("dk", f.dk.Read(), backward.dk, {&plain.dk}, dtype,
                        oracle::kGradientFactor),
        oracle::Compare("dv", f.dv.Read(), backward.dv, {&plain.dv}, dtype,
                        oracle::kGradientFactor)}) {
    EXPECT_TRUE(worst.ok) << worst.text
                          << " (rows are counted among the sampled ones for out and lse)";
  }
}

TEST(Large, LongSequenceFloat32) { CheckLong(DType::kFloat32, true); }
TEST(Large, LongSequenceBFloat16) { CheckLong(DType::kBFloat16, false); }

// Address space without memory: pages come into being when touched.
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) data_ = static_cast<char*>(p);
  }
  ~Sparse() {
    if (data_) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  char* data() const { return data_; }

 private:
  size_t bytes_;
  char* data_ = nullptr;
};

// All tensors with one stride beyond 2^31 elements must give the bits that they give when dense.
void CheckHugeStride(DType dtype, int dimension, bool varlen) {
  Case c;
  c.seed = 6;
  c.dtype = dtype;
  c.varlen = varlen;
  c.head_dim = c.head_dim_v = 40;
  c.heads = c.heads_kv = dimension == 2 ? 3 : 1;
  c.seqlens_q = c.seqlens_k = std::vector<int64_t>(dimension == 0 ? 3 : 1, 3);
  c.causal = true;
  c.scale = std::nanf("");
  c.threads = 2;
  Fixture f(c);
  ASSERT_EQ(f.Forward(), "");
  ASSERT_EQ(f.Backward(), "");

  constexpr int64_t kStride = (int64_t{1} << 31) + 4096;
  const auto stretch = [&](Strided t) {
    (dimension == 0   ? t.strides.batch
     : dimension == 1 ? t.strides.seqlen
                      : t.strides.head) = kStride;
    t.origin = 0;
    return t;
  };
  Strided* const tensors[] = {&f.q, &f.k, &f.v, &f.out, &f.dout, &f.dq, &f.dk, &f.dv};
  const int64_t size = oracle::ElementSize(dtype);
  std::vector<Strided> sparse;
  std::vector<std::unique_ptr<Sparse>> memory;
  for (const Strided* t : tensors) {
    sparse.push_back(stretch(*t));
    memory.push_back(std::make_unique<Sparse>(static_cast<size_t>((2 * kStride + 4096) * size)));
    if (!memory.back()->data())
      GTEST_SKIP() << "no address space for " << 2 * kStride * size << " bytes";
  }
  // Rows are `dim` elements in either; copy them over, and poison the outputs.
  const auto for_rows = [&](int n, auto visit) {
    const Strided &dense = *tensors[n], &wide = sparse[static_cast<size_t>(n)];
    for (int64_t b = 0; b < dense.batch; ++b) {
      for (int64_t row = 0; row < dense.rows; ++row) {
        for (int64_t h = 0; h < dense.heads; ++h) {
          visit(static_cast<char*>(dense.memory->at(dense.Index(b, row, h, 0))),
                memory[static_cast<size_t>(n)]->data() + wide.Index(b, row, h, 0) * size,
                static_cast<size_t>(dense.dim * size));
        }
      }
    }
  };
  for (int n = 0; n < 8; ++n) {
    const bool output = n == 3 || n >= 5;
    for_rows(n, [&](const char* dense, char* wide, size_t bytes) {
      output ? std::memset(wide, 0x7F, bytes) : std::memcpy(wide, dense, bytes);
    });
  }

  strobe_problem p = f.MakeProblem(STROBE_FORWARD);
  p.q = sparse[0].strides;
  p.k = sparse[1].strides;
  p.v = sparse[2].strides;
  p.out = sparse[3].strides;
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
  strobe_forward_args fa = f.ForwardArgs();
  fa.q = memory[0]->data();
  fa.k = memory[1]->data();
  fa.v = memory[2]->data();
  fa.out = memory[3]->data();
  fa.lse = nullptr;
  ASSERT_EQ(strobe_forward(&plan, &fa), STROBE_OK) << strobe_last_error();

  p.direction = STROBE_BACKWARD;
  p.dout = sparse[4].strides;
  p.dq = sparse[5].strides;
  p.dk = sparse[6].strides;
  p.dv = sparse[7].strides;
  ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
  strobe_backward_args ba = f.BackwardArgs();
  ba.q = fa.q;
  ba.k = fa.k;
  ba.v = fa.v;
  ba.out = fa.out;
  ba.dout = memory[4]->data();
  ba.dq = memory[5]->data();
  ba.dk = memory[6]->data();
  ba.dv = memory[7]->data();
  ASSERT_EQ(strobe_backward(&plan, &ba), STROBE_OK) << strobe_last_error();
  const char* const names[] = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"};
  for (int n = 0; n < 8; ++n) {
    for_rows(n, [&](const char* dense, const char* wide, size_t bytes) {
      EXPECT_EQ(std::memcmp(dense, wide, bytes), 0)
          << names[n] << " differs, stride of dimension " << dimension;
    });
  }
}

TEST(Large, OffsetsBeyondTwoToThe31) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int dimension : {0, 1, 2}) CheckHugeStride(dtype, dimension, false);
    CheckHugeStride(dtype, 1, true);
  }
}

}  // namespace
}  // namespace strobe_test
