// strobe.hpp: both forms of every call, and that nothing is lost on the way to the C interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <strobe/strobe.hpp>
#include <type_traits>
#include <vector>

namespace {

constexpr strobe::Problem kSmall = {
    .batch = 2, .seqlen_q = 24, .seqlen_k = 24, .heads = 2, .head_dim = 16};

std::vector<float> Tensor(float value) { return std::vector<float>(2 * 24 * 2 * 16, value); }

TEST(Wrapper, DefaultsAreTheCInterfaces) {
  strobe_problem wanted;
  strobe_problem_init(&wanted, sizeof wanted);
  const strobe_problem got = strobe::Problem{}.c();
  EXPECT_TRUE(std::isnan(got.scale));
  EXPECT_EQ(got.struct_size, wanted.struct_size);
  EXPECT_EQ(got.direction, wanted.direction);
  EXPECT_EQ(got.dtype, wanted.dtype);
  EXPECT_EQ(got.device, wanted.device);
  EXPECT_EQ(got.heads_kv, wanted.heads_kv);
  EXPECT_EQ(got.head_dim_v, wanted.head_dim_v);
  EXPECT_EQ(got.window_left, wanted.window_left);
  EXPECT_EQ(got.window_right, wanted.window_right);
  EXPECT_EQ(got.threads, wanted.threads);
}

TEST(Wrapper, EveryFieldArrives) {
  const strobe::Strides s = {.batch = 1000, .seqlen = 100, .head = 10, .dim = 1};
  const strobe_problem p = strobe::Problem{.direction = strobe::Direction::kBackward,
                                           .dtype = strobe::DType::kFloat16,
                                           .device = strobe::Device::kCuda,
                                           .device_index = 1,
                                           .batch = 2,
                                           .seqlen_q = 3,
                                           .seqlen_k = 4,
                                           .heads = 5,
                                           .heads_kv = 6,
                                           .head_dim = 7,
                                           .head_dim_v = 8,
                                           .varlen = true,
                                           .causal = true,
                                           .total_q = 9,
                                           .total_k = 10,
                                           .window_left = 11,
                                           .window_right = 12,
                                           .scale = 13,
                                           .softcap = 14,
                                           .dropout_p = 0.5F,
                                           .alibi = strobe::Alibi::kPerBatchHead,
                                           .deterministic = true,
                                           .has_dlse = true,
                                           .threads = 15,
                                           .q = s,
                                           .k = s,
                                           .v = s,
                                           .out = s,
                                           .dout = s,
                                           .dq = s,
                                           .dk = s,
                                           .dv = s,
                                           .grad_dtype = strobe::DType::kFloat32,
                                           .accumulate = true,
                                           .has_delta = true,
                                           .has_sinks = true,
                                           .sinks_outside_lse = true,
                                           .has_dsinks = true,
                                           .has_bias = true,
                                           .has_dbias = true,
                                           .bias_dtype = strobe::DType::kBFloat16,
                                           .dbias_dtype = strobe::DType::kFloat32,
                                           .bias_batch = 16,
                                           .bias_heads = 17,
                                           .bias_seqlen_q = 18,
                                           .bias = s,
                                           .dbias = s}
                               .c();
  EXPECT_EQ(p.direction, STROBE_BACKWARD);
  EXPECT_EQ(p.dtype, STROBE_FLOAT16);
  EXPECT_EQ(p.device, STROBE_CUDA);
  EXPECT_EQ(p.device_index, 1);
  const int64_t numbers[] = {p.batch,    p.seqlen_q,    p.seqlen_k,    p.heads,
                             p.heads_kv, p.head_dim,    p.head_dim_v,  p.total_q,
                             p.total_k,  p.window_left, p.window_right};
  for (int64_t i = 0; i < 11; ++i) EXPECT_EQ(numbers[i], i + 2);
  EXPECT_EQ(p.scale, 13);
  EXPECT_EQ(p.softcap, 14);
  EXPECT_EQ(p.dropout_p, 0.5F);
  EXPECT_EQ(p.alibi, STROBE_ALIBI_PER_BATCH_HEAD);
  EXPECT_EQ(p.threads, 15);
  EXPECT_EQ(p.varlen + p.causal + p.deterministic + p.has_dlse + p.accumulate + p.has_delta, 6);
  EXPECT_EQ(p.has_sinks + p.sinks_outside_lse + p.has_dsinks, 3);
  EXPECT_EQ(p.has_bias + p.has_dbias, 2);
  EXPECT_EQ(p.bias_dtype, STROBE_BFLOAT16);
  EXPECT_EQ(p.dbias_dtype, STROBE_FLOAT32);
  EXPECT_EQ(p.bias_batch, 16);
  EXPECT_EQ(p.bias_heads, 17);
  EXPECT_EQ(p.bias_seqlen_q, 18);
  EXPECT_EQ(p.grad_dtype, STROBE_FLOAT32);
  for (const strobe::Strides& t :
       {p.q, p.k, p.v, p.out, p.dout, p.dq, p.dk, p.dv, p.bias, p.dbias}) {
    EXPECT_EQ(std::memcmp(&t, &s, sizeof s), 0);
  }
}

TEST(Wrapper, ForwardAndBackward) {
  const std::vector<float> q = Tensor(1), v = Tensor(3);
  std::vector<float> out = Tensor(0), dq = Tensor(7), dk = Tensor(7), dv = Tensor(7);
  std::vector<float> lse(2 * 2 * 24);
  const strobe::Plan forward(kSmall);
  forward.forward(
      {.q = q.data(), .k = q.data(), .v = v.data(), .out = out.data(), .lse = lse.data()});
  for (const float x : out) EXPECT_NEAR(x, 3, 1e-5);
  // 16 products of 1 by 1, a quarter of them, and 24 equal weights.
  for (const float x : lse) EXPECT_NEAR(x, 4 + std::log(24.0F), 1e-5);

  const strobe::Plan backward(kSmall.backward());
  strobe::Workspace workspace;
  backward.backward({.q = q.data(),
                     .k = q.data(),
                     .v = v.data(),
                     .out = out.data(),
                     .lse = lse.data(),
                     .dout = q.data(),
                     .dq = dq.data(),
                     .dk = dk.data(),
                     .dv = dv.data(),
                     .workspace = workspace.of(backward)});
  for (const float x : dq) EXPECT_NEAR(x, 0, 1e-5);
  for (const float x : dk) EXPECT_NEAR(x, 0, 1e-5);
  for (const float x : dv) EXPECT_NEAR(x, 1, 1e-5);
}

TEST(Wrapper, OneProblemHasBothDirections) {
  strobe::Problem problem = kSmall;
  problem.causal = problem.deterministic = true;
  problem.window_left = 5;
  problem.q = {.batch = 768, .seqlen = 16, .head = 384, .dim = 1};

  // All else being equal: put back what differs, and every byte is the same.
  const auto differs_in_direction = [](const strobe::Problem& a, const strobe::Problem& b) {
    strobe_problem first = a.c();
    const strobe_problem second = b.c();
    const bool differs = first.direction != second.direction;
    first.direction = second.direction;
    return differs && std::memcmp(&first, &second, sizeof first) == 0;
  };
  EXPECT_TRUE(differs_in_direction(problem, problem.backward()));
  EXPECT_TRUE(differs_in_direction(problem.backward(), problem.backward().forward()));
  EXPECT_EQ(problem.backward().direction, strobe::Direction::kBackward);
  EXPECT_EQ(problem.direction, strobe::Direction::kForward);

  // A layer whose loss uses lse: forward has no gradient of it, and refuses to be told of one.
  problem.has_dlse = true;
  EXPECT_FALSE(problem.forward().has_dlse);
  for (const auto tell : {+[](strobe::Problem& p) { p.has_dlse = false, p.has_delta = true; },
                          +[](strobe::Problem& p) { p.accumulate = true; },
                          +[](strobe::Problem& p) { p.has_sinks = p.has_dsinks = true; },
                          +[](strobe::Problem& p) {
                            p.dtype = strobe::DType::kBFloat16;
                            p.grad_dtype = strobe::DType::kFloat32;
                          }}) {
    strobe::Problem told = problem;
    tell(told);
    EXPECT_EQ(strobe::Plan(told.forward()).c().problem.direction, STROBE_FORWARD);
  }
  EXPECT_TRUE(problem.backward().has_dlse);
  EXPECT_EQ(strobe::Plan(problem.forward()).c().problem.direction, STROBE_FORWARD);
  EXPECT_EQ(strobe::Plan(problem.backward()).c().problem.direction, STROBE_BACKWARD);
}

TEST(Wrapper, EveryArgumentArrives) {
  const float x[16] = {};
  float y[8] = {};
  int32_t n[16] = {};
  std::byte bytes[8];
  const auto interrupt = [](void*) -> int32_t { return 0; };
  const strobe_forward_args f = strobe::ForwardArgs{.q = x,
                                                    .k = x + 1,
                                                    .v = x + 2,
                                                    .out = y,
                                                    .lse = y + 1,
                                                    .cu_seqlens_q = n,
                                                    .cu_seqlens_k = n + 1,
                                                    .alibi_slopes = x + 3,
                                                    .dropout_seed = 5,
                                                    .dropout_offset = 6,
                                                    .workspace = bytes,
                                                    .stream = y + 2,
                                                    .interrupt = interrupt,
                                                    .interrupt_data = y + 3,
                                                    .block_table = n + 2,
                                                    .k_new = x + 4,
                                                    .v_new = x + 5,
                                                    .cu_seqlens_k_new = n + 3,
                                                    .rotary_cos = x + 6,
                                                    .rotary_sin = x + 7,
                                                    .sinks = x + 11,
                                                    .bias = x + 12}
                                    .c();
  const strobe_backward_args b = strobe::BackwardArgs{.q = x,
                                                      .k = x + 1,
                                                      .v = x + 2,
                                                      .out = y,
                                                      .lse = y + 1,
                                                      .dout = x + 8,
                                                      .dlse = x + 9,
                                                      .dq = y + 4,
                                                      .dk = y + 5,
                                                      .dv = y + 6,
                                                      .cu_seqlens_q = n,
                                                      .cu_seqlens_k = n + 1,
                                                      .alibi_slopes = x + 3,
                                                      .dropout_seed = 5,
                                                      .dropout_offset = 6,
                                                      .workspace = bytes,
                                                      .stream = y + 2,
                                                      .interrupt = interrupt,
                                                      .interrupt_data = y + 3,
                                                      .delta = x + 10,
                                                      .sinks = x + 11,
                                                      .dsinks = y + 7,
                                                      .bias = x + 12,
                                                      .dbias = y + 8}
                                     .c();
  const auto shared = [&](const auto& a) {
    EXPECT_EQ(a.struct_size, sizeof a);
    const void* const got[] = {a.q, a.k, a.v, a.out, a.lse, a.alibi_slopes, a.stream, a.bias};
    const void* const wanted[] = {x, x + 1, x + 2, y, y + 1, x + 3, y + 2, x + 12};
    for (size_t i = 0; i < std::size(got); ++i) EXPECT_EQ(got[i], wanted[i]) << i;
    EXPECT_EQ(a.cu_seqlens_q, n);
    EXPECT_EQ(a.cu_seqlens_k, n + 1);
    EXPECT_EQ(a.dropout_seed, 5U);
    EXPECT_EQ(a.dropout_offset, 6U);
    EXPECT_EQ(a.workspace, bytes);
    EXPECT_EQ(a.workspace_bytes, sizeof bytes);
    EXPECT_NE(a.interrupt, nullptr);
    EXPECT_EQ(a.interrupt_data, y + 3);
  };
  shared(f);
  shared(b);
  const void* const got[] = {f.block_table, f.k_new,      f.v_new,  f.cu_seqlens_k_new,
                             f.rotary_cos,  f.rotary_sin, b.dout,   b.dlse,
                             b.dq,          b.dk,         b.dv,     b.delta,
                             f.sinks,       b.sinks,      b.dsinks, b.dbias};
  const void* const wanted[] = {n + 2, x + 4, x + 5, n + 3,  x + 6,  x + 7,  x + 8, x + 9,
                                y + 4, y + 5, y + 6, x + 10, x + 11, x + 11, y + 7, y + 8};
  for (size_t i = 0; i < std::size(got); ++i) EXPECT_EQ(got[i], wanted[i]) << i;
}

TEST(Wrapper, WorkspaceGrowsAndIsAligned) {
  strobe::Workspace workspace;
  EXPECT_TRUE(workspace.of({}).empty());  // an empty plan needs nothing
  strobe::Problem problem = kSmall;
  const strobe::Plan small(problem);
  problem.batch = 50;
  problem.seqlen_q = problem.seqlen_k = 300;
  problem.direction = strobe::Direction::kBackward;
  const strobe::Plan large(problem);
  ASSERT_LT(small.workspace_bytes(), large.workspace_bytes());
  for (const strobe::Plan* plan : {&small, &large, &small}) {
    const std::span<std::byte> memory = workspace.of(*plan);
    EXPECT_EQ(memory.size(), plan->workspace_bytes());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 64, 0U);
    std::ranges::fill(memory, std::byte{0xff});  // AddressSanitizer knows what is there
  }
  // What is large enough stays.
  EXPECT_EQ(workspace.of(small).data(), workspace.of(large).data());
}

TEST(Wrapper, ErrorsCarryStatusAndText) {
  strobe::Problem broken = kSmall;
  broken.head_dim = 300;
  try {
    const strobe::Plan plan(broken);
    FAIL() << "not refused";
  } catch (const strobe::Error& error) {
    EXPECT_EQ(error.status(), strobe::Status::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("head_dim = 300"), std::string::npos) << error.what();
    EXPECT_EQ(strobe::last_error(), error.what());
  }
  EXPECT_FALSE(strobe::supports(broken));
  EXPECT_NE(strobe::why(broken).find("head_dim = 300"), std::string::npos);
}

TEST(Wrapper, TryMakeLeavesThePlanOnFailure) {
  strobe::Plan plan(kSmall);
  const strobe_plan before = plan.c();
  strobe::Problem broken = kSmall;
  broken.batch = 0;
  EXPECT_EQ(strobe::Plan::try_make(broken, plan), strobe::Status::kInvalidArgument);
  EXPECT_EQ(plan.c().kernel, before.kernel);
  EXPECT_EQ(plan.c().problem.batch, 2);
  EXPECT_EQ(strobe::Plan::try_make(kSmall, plan), strobe::Status::kOk);
}

TEST(Wrapper, EmptyPlanIsRefused) {
  const strobe::Plan plan;
  EXPECT_STREQ(plan.kernel(), "");
  EXPECT_EQ(plan.try_forward({}), strobe::Status::kInvalidArgument);
  EXPECT_EQ(plan.try_backward({}), strobe::Status::kInvalidArgument);
  EXPECT_THROW(plan.forward({}), strobe::Error);
  EXPECT_NE(strobe::last_error(), "");
  EXPECT_EQ(plan.text(), "invalid: plan: not made by strobe_plan_make\n");
}

TEST(Wrapper, MissingTensorsAreNamed) {
  EXPECT_EQ(strobe::Plan(kSmall).try_forward({}), strobe::Status::kInvalidArgument);
  EXPECT_NE(strobe::last_error().find("q = NULL"), std::string::npos) << strobe::last_error();
}

TEST(Wrapper, TextIsWholeAndEndsWithoutNul) {
  const strobe::Plan plan(kSmall);
  const std::string text = plan.text();
  EXPECT_EQ(text.size(), strobe_plan_text(&plan.c(), nullptr, 0));
  EXPECT_EQ(text.find('\0'), std::string::npos);
  EXPECT_NE(text.find(plan.kernel()), std::string::npos);
  // Longer than any first guess at its length.
  const std::string long_text(5000, 'x');
  int calls = 0;
  EXPECT_EQ(strobe::internal::all_text([&](char* to, size_t capacity) {
              ++calls;
              const size_t n = std::min(capacity - 1, long_text.size());
              std::memcpy(to, long_text.data(), n);
              to[n] = '\0';
              return long_text.size();
            }),
            long_text);
  EXPECT_EQ(calls, 2);
}

TEST(Wrapper, Machine) {
  const strobe::Machine m = strobe::machine();
  EXPECT_GE(m.cpu_threads, 1);
  EXPECT_FALSE(m.kernels.empty());
  EXPECT_EQ(m.cuda_devices.empty(), !m.cuda_reason.empty());
  EXPECT_STREQ(strobe::name(strobe::Status::kUnsupported), "STROBE_UNSUPPORTED");
  EXPECT_EQ(strobe::version(), strobe_version());
}

TEST(Wrapper, DropoutMask) {
  const std::vector<uint8_t> mask = strobe::dropout_mask(2, 3, 20, 30, 0.25F, 7);
  ASSERT_EQ(mask.size(), 2U * 3 * 20 * 30);
  double kept = 0;
  for (const uint8_t keep : mask) kept += keep;
  EXPECT_NEAR(kept / static_cast<double>(mask.size()), 0.75, 0.05);
  EXPECT_THROW((void)strobe::dropout_mask(-1, 1, 1, 1, 0.5F, 1), strobe::Error);
  EXPECT_THROW((void)strobe::dropout_mask(1, 1, 1, 1, 1.5F, 1), strobe::Error);
  // 2^64 bytes are 0 when counted in 64 bits, and 2^64 + 2^33 are few.
  constexpr int64_t kHalf = int64_t{1} << 32;
  EXPECT_THROW((void)strobe::dropout_mask(kHalf, 1, 1, kHalf, 0.5F, 1), strobe::Error);
  EXPECT_THROW((void)strobe::dropout_mask(1 << 15, 1 << 15, 1 << 30, 1 << 30, 0.5F, 1),
               strobe::Error);
  EXPECT_THROW((void)strobe::dropout_mask(2, 1, kHalf / 2 + 1, kHalf, 0.5F, 1), strobe::Error);
  EXPECT_NE(strobe::last_error().find("seqlen_q * seqlen_k"), std::string::npos);
  EXPECT_TRUE(strobe::dropout_mask(1, 1, 0, 5, 0.5F, 1).empty());
}

// What a function only reads may be const.
TEST(Wrapper, QuantisesFromConstFloatsAndReadsConstCodes) {
  const std::vector<float> x = {3, -1.5F, 0, 127};
  std::vector<int8_t> codes(4);
  std::vector<float> scale(1), back(4);
  strobe::QuantizeArgs forth{.kv_scale = strobe::KvScale::kRow, .seqlen = 1, .head_dim = 4};
  forth.x = x.data(), forth.codes = codes.data(), forth.scale = scale.data();
  strobe::quantize(forth);
  EXPECT_EQ(codes, (std::vector<int8_t>{3, -2, 0, 127}));
  EXPECT_EQ(scale[0], 1);
  const std::vector<int8_t> read = codes;
  const std::vector<float> by = scale;
  strobe::dequantize({.kv_scale = strobe::KvScale::kRow,
                      .seqlen = 1,
                      .head_dim = 4,
                      .x = back.data(),
                      .codes = read.data(),
                      .scale = by.data()});
  EXPECT_EQ(back, (std::vector<float>{3, -2, 0, 127}));
  static_assert(std::is_same_v<decltype(forth.x), const void*>);
  static_assert(std::is_same_v<decltype(strobe::DequantizeArgs::codes), const void*>);
}

}  // namespace
