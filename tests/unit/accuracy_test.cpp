// float32 is chosen for its accuracy, so Strobe may not give any of it away: its error against
// float64 is held against that of attention done in plain steps in float32, on what a transformer
// had in memory (examples/data) and on random tensors.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "../../examples/standard_attention.h"
#include "numeric.h"

namespace {

constexpr double kBar = 1.15;
const char* const kNames[] = {"O", "dQ", "dK", "dV"};

// [tokens, heads, dim]
struct Tensors {
  int64_t tokens, heads, dim;
  std::vector<float> q, k, v, dout;
};

std::string Isa() {
  strobe_machine machine;
  machine.struct_size = sizeof machine;
  EXPECT_EQ(strobe_machine_info(&machine), STROBE_OK);
  return machine.cpu_isa;
}

// A tensor of a safetensors file whose header is known to be well formed.
std::vector<float> ReadTensor(const std::string& file, const std::string& name) {
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const size_t entry = file.find('"' + name + "\":{");
  const size_t offsets = file.find("\"data_offsets\":[", entry);
  if (entry == std::string::npos || offsets == std::string::npos || offsets > header + 8) return {};
  size_t begin = 0, end = 0;
  if (std::sscanf(file.data() + offsets, "\"data_offsets\":[%zu,%zu]", &begin, &end) != 2)
    return {};
  if (begin > end || 8 + header + end > file.size()) return {};
  std::vector<float> values((end - begin) / sizeof(float));
  std::memcpy(values.data(), file.data() + 8 + header + begin, values.size() * sizeof(float));
  return values;
}

template <typename T>
std::array<std::vector<T>, 4> Plain(const Tensors& t, const std::string& isa) {
  const auto convert = [](const std::vector<float>& x) {
    return std::vector<T>(x.begin(), x.end());
  };
  const std::vector<T> q = convert(t.q), k = convert(t.k), v = convert(t.v), dout = convert(t.dout);
  std::array<std::vector<T>, 4> results;
  for (auto& r : results) r.resize(q.size());
  strobe::demo::StandardAttention<T> standard(t.tokens, t.heads, t.dim, true, isa);
  standard.Forward(q.data(), k.data(), v.data(), results[0].data());
  standard.Backward(q.data(), k.data(), v.data(), dout.data(), results[1].data(), results[2].data(),
                    results[3].data());
  return results;
}

std::array<std::vector<float>, 4> Strobe(const Tensors& t) {
  std::array<std::vector<float>, 4> results;
  for (auto& r : results) r.resize(t.q.size());
  std::vector<float> lse(static_cast<size_t>(t.tokens * t.heads));
  strobe::Problem problem = {
      .seqlen_q = t.tokens, .seqlen_k = t.tokens, .heads = t.heads, .head_dim = t.dim};
  strobe::Plan(problem).forward({.q = t.q.data(),
                                 .k = t.k.data(),
                                 .v = t.v.data(),
                                 .out = results[0].data(),
                                 .lse = lse.data()});
  problem.direction = strobe::Direction::kBackward;
  strobe::Plan(problem).backward({.q = t.q.data(),
                                  .k = t.k.data(),
                                  .v = t.v.data(),
                                  .out = results[0].data(),
                                  .lse = lse.data(),
                                  .dout = t.dout.data(),
                                  .dq = results[1].data(),
                                  .dk = results[2].data(),
                                  .dv = results[3].data()});
  return results;
}

struct Error {
  double rms = 0, largest = 0;
};
Error Difference(const std::vector<float>& got, const std::vector<double>& truth) {
  Error e;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double x = std::fabs(got[i] - truth[i]);
    e.rms += x * x;
    e.largest = std::isnan(x) ? HUGE_VAL : std::max(e.largest, x);
  }
  e.rms = std::sqrt(e.rms / static_cast<double>(truth.size()));
  return e;
}

// `largest_bar`: for the one worst element of a tensor, which is a matter of luck on few.
void ExpectAsExactAsPlain(const Tensors& t, double largest_bar) {
  const std::string isa = Isa();
  const auto truth = Plain<double>(t, isa);
  const auto plain = Plain<float>(t, isa);
  const auto ours = Strobe(t);
  for (size_t i = 0; i < 4; ++i) {
    const Error mine = Difference(ours[i], truth[i]), theirs = Difference(plain[i], truth[i]);
    EXPECT_LE(mine.rms, kBar * theirs.rms) << kNames[i] << ", root mean square, " << isa;
    EXPECT_LE(mine.largest, largest_bar * theirs.largest) << kNames[i] << ", largest, " << isa;
    ::testing::Test::RecordProperty(std::string(kNames[i]) + "_rms",
                                    std::to_string(mine.rms / theirs.rms));
    ::testing::Test::RecordProperty(std::string(kNames[i]) + "_largest",
                                    std::to_string(mine.largest / theirs.largest));
  }
}

TEST(Accuracy, OfATransformersTensors) {
  std::ifstream stream(STROBE_CAPTURE, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(stream), {}};
  ASSERT_GT(file.size(), 8u) << STROBE_CAPTURE;
  const Tensors t = {512,
                     12,
                     32,
                     ReadTensor(file, "q"),
                     ReadTensor(file, "k"),
                     ReadTensor(file, "v"),
                     ReadTensor(file, "dout")};
  for (const auto* x : {&t.q, &t.k, &t.v, &t.dout}) ASSERT_EQ(x->size(), 512u * 12 * 32);
  ExpectAsExactAsPlain(t, kBar);
}

// Flat and sharp weights, and tensors whose rows have much in common, where errors of a whole row
// show most.
TEST(Accuracy, OfRandomTensors) {
  struct {
    int64_t tokens, heads, dim;
    double spread, mean;
  } const cases[] = {{512, 2, 64, 1, 0},
                     {512, 2, 64, 2.2, 0},
                     {512, 2, 64, 1, 0.5},
                     {256, 2, 128, 1, 0},
                     {1024, 1, 32, 1.3, 0.3}};
  oracle::Rng rng(3);
  for (const auto& c : cases) {
    Tensors t{c.tokens, c.heads, c.dim, {}, {}, {}, {}};
    for (auto* x : {&t.q, &t.k, &t.v, &t.dout}) {
      const bool scores = x == &t.q || x == &t.k;
      x->resize(static_cast<size_t>(c.tokens * c.heads * c.dim));
      for (float& value : *x)
        value = static_cast<float>(rng.Normal() * (scores ? c.spread : 1) + c.mean);
    }
    SCOPED_TRACE("head_dim " + std::to_string(c.dim) + ", spread " + std::to_string(c.spread) +
                 ", mean " + std::to_string(c.mean));
    ExpectAsExactAsPlain(t, 1.6);
  }
}

}  // namespace
