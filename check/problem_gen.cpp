#include "problem_gen.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <utility>

namespace strobe_test {
namespace {

using oracle::Rng;

int64_t PickHeadDim(Rng& rng) {
  static constexpr int64_t kUsual[] = {32, 64, 64, 80, 96, 128, 192, 256};
  static constexpr int64_t kBorders[] = {1,  2,  3,  5,  7,  8,  9,  15,  16,  17,  24,  31,
                                         33, 40, 48, 63, 65, 72, 97, 127, 129, 160, 255, 256};
  const double u = rng.Uniform();
  return u < 0.3 ? rng.Pick(kUsual) : u < 0.65 ? rng.Pick(kBorders) : rng.Integer(1, 256);
}

// Lengths by profile: most cases are small, some cross the borders of tiles, a few are long.
struct Profile {
  int64_t low, high;  // of lengths
  double both;   // probability that q and k both go up to `high`; else one of them stays below 40
  int64_t work;  // limit of Case::Work()
  bool few_queries = false;  // 1 to 64, and `low` to `high` keys
};

// More keys than a tile's thread block should read alone.
constexpr Profile kFewQueries{500, 6000, 1, 6'000'000, true};

const Profile& PickProfile(Rng& rng) {
  static constexpr Profile kTiny{0, 40, 1, 1'500'000}, kMedium{17, 300, 0.7, 3'500'000},
      kLong{300, 1100, 0, 4'000'000}, kLongest{500, 1100, 1, 24'000'000};
  const double u = rng.Uniform();
  return u < 0.62   ? kTiny
         : u < 0.94 ? kMedium
         : u < 0.98 ? kLong
         : u < 0.99 ? kFewQueries
                    : kLongest;
}

void PickLengths(Rng& rng, const Profile& profile, Case& c) {
  c.varlen = rng.Chance(0.3);
  const int64_t batch = c.varlen ? rng.Integer(1, 6) : rng.Integer(1, 3);
  const bool same = rng.Chance(0.4) && !profile.few_queries;
  const bool both = rng.Chance(profile.both), long_q = rng.Chance(0.5);
  const auto draw = [&](bool is_q) {
    if (rng.Chance(c.varlen ? 0.12 : 0.02)) return int64_t{0};
    if (rng.Chance(0.06)) return int64_t{1};
    if (profile.few_queries && is_q) return rng.Integer(1, 64);
    if (!both && is_q != long_q) return rng.Integer(1, 40);
    return rng.Integer(profile.low, profile.high);
  };
  for (int64_t b = 0; b < batch; ++b) {
    const bool again = b > 0 && !c.varlen;
    c.seqlens_q.push_back(again ? c.seqlens_q[0] : draw(true));
    c.seqlens_k.push_back(again ? c.seqlens_k[0] : same ? c.seqlens_q.back() : draw(false));
  }
  if (c.varlen && rng.Chance(0.3)) {
    c.slack_q = rng.Integer(0, 70);
    c.slack_k = rng.Integer(0, 70);
  }
}

// Makes the problem cheaper where it is too dear, what matters least first.
void Shrink(int64_t limit, Case& c) {
  while (c.Work() > limit) {
    if (c.batch() > 2 || (c.batch() == 2 && !c.varlen)) {
      c.seqlens_q.pop_back();
      c.seqlens_k.pop_back();
    } else if (c.heads > c.heads_kv * 2) {
      c.heads = c.heads_kv * 2;
    } else if (c.heads_kv > 1) {
      c.heads = c.heads / c.heads_kv;
      c.heads_kv = 1;
    } else if (c.heads > 1) {
      c.heads = 1;
    } else if (c.head_dim + c.head_dim_v > 40) {
      c.head_dim = c.head_dim / 2 + 1;
      c.head_dim_v = c.head_dim_v / 2 + 1;
    } else {
      for (int64_t& n : c.seqlens_q) n = n / 2 + n % 2;
    }
  }
}

int64_t PickWindow(Rng& rng, int64_t longest) {
  const double u = rng.Uniform();
  if (u < 0.25) return -1;
  if (u < 0.40) return 0;
  if (u < 0.65) return rng.Integer(1, 8);
  if (u < 0.95) return rng.Integer(0, longest + 10);
  return rng.Chance(0.5) ? int64_t{1} << 40 : std::numeric_limits<int64_t>::max();
}

void PickMask(Rng& rng, Case& c) {
  c.causal = rng.Chance(0.45);
  if (!rng.Chance(0.35)) return;
  const int64_t longest = std::max(c.longest_q(), c.longest_k());
  c.window_left = PickWindow(rng, longest);
  c.window_right = PickWindow(rng, longest);
}

float PickScale(Rng& rng) {
  const double u = rng.Uniform();
  if (u < 0.65) return std::numeric_limits<float>::quiet_NaN();
  if (u < 0.70) return 0;
  if (u < 0.78) return static_cast<float>(-rng.Uniform(0.01, 0.3));
  if (u < 0.84) return static_cast<float>(rng.Uniform(1, 5));
  return static_cast<float>(rng.Uniform(0.01, 0.5));
}

// Now and then the problem is a part of a larger one. Drawn by numbers of its own. Not every kernel
// takes a first key that is no multiple of 8.
void PickDropoutPlace(Case& c) {
  Rng rng(c.dropout_seed);
  if (rng.Chance(0.5)) return;
  c.dropout_first_query = rng.Chance(0.2) ? 0 : rng.Integer(0, 3000);
  c.dropout_first_key = 8 * rng.Integer(0, 400);
  c.dropout_first_head = rng.Chance(0.3) ? 0 : rng.Integer(0, 500);
  c.dropout_heads = rng.Chance(0.5) ? 0 : c.heads + rng.Integer(0, 20);
}

void PickScores(Rng& rng, Case& c) {
  c.scale = PickScale(rng);
  if (rng.Chance(0.2)) {
    static constexpr float kCaps[] = {0.5f, 5, 20, 30, 50};
    c.softcap = rng.Pick(kCaps);
  }
  if (rng.Chance(0.2)) {
    static constexpr float kProbabilities[] = {0.01f, 0.1f, 0.17f, 0.5f, 0.9f};
    c.dropout_p = rng.Pick(kProbabilities);
    c.dropout_seed = rng.Next();
    c.dropout_offset = rng.Chance(0.5) ? rng.Next() : static_cast<uint64_t>(rng.Integer(0, 9));
    PickDropoutPlace(c);
  }
  if (rng.Chance(0.2))
    c.alibi = rng.Chance(0.5) ? STROBE_ALIBI_PER_HEAD : STROBE_ALIBI_PER_BATCH_HEAD;

  static constexpr double kSizes[] = {1, 1, 1, 1, 0.05, 0.3, 3, 8};
  // Scores up to some +-150. Beyond, the rounding of lse to float32 is what the gradients' errors
  // are made of, and how large they are is luck. The unit tests of the softmax go to +-10,000.
  const double root = std::sqrt(static_cast<double>(c.head_dim));
  const double scale = std::isnan(c.scale) ? 1 / root : std::fabs(c.scale);
  c.size_qk = std::min(rng.Pick(kSizes), std::sqrt(40 / std::max(scale * root, 0.1)));
  c.size_v = rng.Pick(kSizes);
  c.size_dout = rng.Pick(kSizes);
  c.constant_keys = rng.Chance(0.03);

  if (rng.Chance(0.12)) {
    c.special = rng.Chance(0.5) ? Special::kNan : Special::kInfinity;
    c.DropDropout();  // whether 0 * NaN stands for a dropped weight is a matter of taste
  }
  if (c.special == Special::kInfinity) {
    // No weight may be so small that float32 or float16 takes it for 0: 0 * infinity would be NaN
    // there, and infinity in float64.
    c.scale = std::numeric_limits<float>::quiet_NaN();
    c.alibi = STROBE_ALIBI_NONE;
    c.softcap = std::min(c.softcap, 5.0f);  // an infinite score becomes c or -c
    c.size_qk = c.size_v = c.size_dout = 1;
  }
}

Layout PickLayout(Rng& rng, bool output) {
  Layout layout;
  static constexpr int64_t kOdd[] = {0, 0, 1, -7, 12345, int64_t{1} << 40};
  layout.shift = rng.Chance(0.5) ? 0 : rng.Integer(1, 31);
  layout.defaulted = rng.Chance(0.3);
  if (layout.defaulted) return layout;
  layout.odd_stride = rng.Pick(kOdd);
  const double u = rng.Uniform();
  if (u < 0.25) {        // (b, s, h, d)
  } else if (u < 0.6) {  // (b, h, s, d)
    std::swap(layout.order[1], layout.order[2]);
  } else {
    for (int i = 2; i > 0; --i) std::swap(layout.order[i], layout.order[rng.Integer(0, i)]);
  }
  const bool padded = rng.Chance(0.4), turned = rng.Chance(0.1),
             spread = !output && rng.Chance(0.1);
  for (int i = 0; i < 3; ++i) {
    if (padded && rng.Chance(0.6)) layout.pad[i] = rng.Integer(1, 20);
    if (turned) layout.negative[i] = rng.Chance(0.5);
    if (spread) layout.broadcast[i] = rng.Chance(0.5);
  }
  return layout;
}

void PickLayouts(Rng& rng, Case& c) {
  const double u = rng.Uniform();
  if (u < 0.12) {
    c.packing = Packing::kKv;
  } else if (u < 0.25 && c.seqlens_q == c.seqlens_k) {
    c.packing = Packing::kQkv;
  }
  for (Layout* layout : {&c.q, &c.k, &c.v, &c.dout}) *layout = PickLayout(rng, false);
  for (Layout* layout : {&c.out, &c.dq, &c.dk, &c.dv}) *layout = PickLayout(rng, true);
}

// What says which rows are in use, where the queries stand and what all of them see.
void PickSequences(Rng& rng, Case& c) {
  const auto numbers = [&](auto draw) {
    std::vector<int32_t> values;
    for (size_t b = 0; b < c.seqlens_q.size(); ++b)
      values.push_back(static_cast<int32_t>(draw(c.seqlens_q[b], c.seqlens_k[b])));
    return values;
  };
  const auto part = [&](int64_t rows) {
    return rng.Chance(0.15) ? 0 : rng.Chance(0.2) ? rows : rng.Integer(0, rows);
  };
  if (rng.Chance(0.2)) c.arrays.seqused_q = numbers([&](int64_t q, int64_t) { return part(q); });
  if (rng.Chance(0.25)) c.arrays.seqused_k = numbers([&](int64_t, int64_t k) { return part(k); });
  if (rng.Chance(0.2)) {
    c.arrays.q_position = numbers([&](int64_t q, int64_t k) {
      // Far away only where no ALiBi makes that a distance of scores.
      if (!c.alibi && rng.Chance(0.1)) return rng.Integer(-(1 << 30), 1 << 30);
      return rng.Integer(-q, k + 3);
    });
  }
  if (rng.Chance(0.15)) {
    const int64_t longest = std::max(c.longest_q(), c.longest_k());
    c.attention_chunk = rng.Chance(0.1)   ? std::numeric_limits<int64_t>::max()
                        : rng.Chance(0.5) ? rng.Integer(1, 20)
                                          : rng.Integer(1, longest + 10);
  }
  if (rng.Chance(0.12)) {
    c.arrays.prefix = numbers([&](int64_t, int64_t k) { return part(k); });
    c.causal = c.causal || rng.Chance(0.7);
    c.window_left = -1;
    c.attention_chunk = 0;
  }
  c.has_seqused_q = !c.arrays.seqused_q.empty();
  c.has_seqused_k = !c.arrays.seqused_k.empty();
  c.has_q_position = !c.arrays.q_position.empty();
  c.has_prefix = !c.arrays.prefix.empty();
}

// After all else: whoever leaves the bias out has the same case as before.
void PickBias(Rng& rng, Case& c) {
  if (!rng.Chance(0.3)) return;
  c.has_bias = true;
  c.bias = DrawBias(rng);
  c.has_dbias = rng.Chance(0.7);
  BiasCase& b = c.bias;
  b.layout = PickLayout(rng, false);
  b.gradient = PickLayout(rng, true);
  for (Layout* const layout : {&b.layout, &b.gradient}) {
    if (layout->defaulted) {
      std::swap(layout->order[1], layout->order[2]);  // [batch, heads, queries, keys]
    } else if (rng.Chance(0.3)) {
      static constexpr int64_t kSteps[] = {2, 3, -1, -2};
      layout->dim_step = rng.Pick(kSteps);
      if (layout == &b.layout && rng.Chance(0.2)) layout->dim_step = 0;
    }
  }
  // All strides 0 ask for a contiguous bias.
  Layout& l = b.layout;
  if (l.dim_step == 0 && l.broadcast[0] && l.broadcast[1] && l.broadcast[2]) l.dim_step = 1;
  if (l.dim_step == 0 && l.odd_stride == 0) l.odd_stride = 5;
  if (c.special == Special::kInfinity) b.size = 0.3;  // see PickScores
}

// A window that need not hold a query's own position.
void PickSignedWindow(Rng& rng, Case& c) {
  if (c.attention_chunk != 0 || !rng.Chance(0.12)) return;
  const int64_t longest = std::max(c.longest_q(), c.longest_k());
  const auto far = [&] {
    return rng.Chance(0.5) ? rng.Integer(1, 9) : rng.Integer(0, longest + 10);
  };
  c.window_signed = true;
  const int64_t near = -far();  // its nearer end
  const int64_t other = rng.Chance(0.4) ? STROBE_NO_LIMIT : far() - near;
  const bool behind = c.has_prefix || c.causal || rng.Chance(0.7);
  c.window_left = behind ? other : near;
  c.window_right = behind ? near : other;
  if (c.has_prefix) c.window_left = STROBE_NO_LIMIT;
  if (rng.Chance(0.1)) c.window_right = STROBE_NO_LIMIT;
  if (c.causal && c.window_left < 0) c.window_left = 0;
}

std::string Describe(const Layout& l) {
  if (l.defaulted) return l.shift ? "contiguous+" + std::to_string(l.shift) : "contiguous";
  std::string text;
  for (const int dim : l.order) {
    text += l.negative[dim] ? "-" : "";
    text += "bsh"[dim];
    if (l.broadcast[dim]) text += "*0";
    if (l.pad[dim]) text += "(pad " + std::to_string(l.pad[dim]) + ")";
  }
  if (l.dim_step != 1) text += " step " + std::to_string(l.dim_step);
  return text + "+" + std::to_string(l.shift);
}

template <typename T>
std::string Join(const std::vector<T>& values) {
  std::string text;
  for (const T& x : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(x);
  }
  return text;
}

}  // namespace

int64_t Case::longest_q() const { return *std::max_element(seqlens_q.begin(), seqlens_q.end()); }
int64_t Case::longest_k() const { return *std::max_element(seqlens_k.begin(), seqlens_k.end()); }
int64_t Case::rows_q() const { return std::accumulate(seqlens_q.begin(), seqlens_q.end(), past_q); }
int64_t Case::rows_k() const { return std::accumulate(seqlens_k.begin(), seqlens_k.end(), past_k); }

int64_t Case::Work() const {
  int64_t scores = 0;
  for (size_t b = 0; b < seqlens_q.size(); ++b) scores += seqlens_q[b] * seqlens_k[b];
  return scores * heads * (head_dim + head_dim_v) / 2;
}

Case Case::WithPlainGradients() const {
  Case c = *this;
  c.has_dlse |= c.delta_has_dlse;
  c.out_float32 = c.grad_float32 = c.accumulate = c.has_delta = c.delta_has_dlse = false;
  return c;
}

BiasCase DrawBias(Rng& rng) {
  BiasCase b;
  b.one_batch = rng.Chance(0.5);
  b.one_head = rng.Chance(0.35);
  b.one_query = rng.Chance(0.2);
  b.extents_defaulted = rng.Chance(0.5);
  static constexpr oracle::DType kTypes[] = {oracle::DType::kFloat32, oracle::DType::kBFloat16,
                                             oracle::DType::kFloat16};
  b.dtype = rng.Pick(kTypes);
  b.same_dtype = rng.Chance(0.3);
  b.grad_float32 = rng.Chance(0.3);
  static constexpr double kSizes[] = {1, 1, 1, 0.1, 3};
  b.size = rng.Pick(kSizes);
  b.hides = rng.Chance(0.4) ? rng.Uniform(0.02, 0.7) : 0;
  b.spoils = rng.Chance(0.4);
  return b;
}

Case Case::WithoutBias() const {
  Case c = *this;
  c.has_bias = c.has_dbias = false;
  return c;
}

namespace {

// profile: null: one is drawn.
Case Generate(uint64_t seed, Rng& rng, const Profile* chosen) {
  Case c;
  c.seed = seed;
  static constexpr oracle::DType kTypes[] = {oracle::DType::kFloat32, oracle::DType::kBFloat16,
                                             oracle::DType::kFloat16};
  c.dtype = rng.Pick(kTypes);
  const Profile& profile = chosen ? *chosen : PickProfile(rng);
  PickLengths(rng, profile, c);
  static constexpr int64_t kGroups[] = {1, 1, 1, 2, 3, 4, 8};
  c.heads_kv = rng.Integer(1, 3);
  c.heads = c.heads_kv * rng.Pick(kGroups);
  c.head_dim = PickHeadDim(rng);
  c.head_dim_v = rng.Chance(0.65) ? c.head_dim : PickHeadDim(rng);
  Shrink(profile.work, c);
  PickMask(rng, c);
  PickScores(rng, c);
  PickLayouts(rng, c);
  c.has_dlse = rng.Chance(0.3);
  c.deterministic = rng.Chance(0.3);
  static constexpr int32_t kThreads[] = {0, 1, 1, 2, 3, 4};
  c.threads = rng.Pick(kThreads);
  c.own_workspace = rng.Chance(0.3);
  c.without_lse = rng.Chance(0.1);
  c.fields_defaulted = rng.Chance(0.5);
  PickSequences(rng, c);
  c.batch_invariant = rng.Chance(0.15);
  const bool same_rows = c.packing == Packing::kQkv;
  if (c.varlen && rng.Chance(0.2)) c.past_q = rng.Integer(1, 70);
  if (c.varlen && rng.Chance(0.2)) c.past_k = rng.Integer(1, 70);
  if (same_rows) c.past_k = c.past_q;
  PickSignedWindow(rng, c);
  c.grad_float32 = c.dtype != oracle::DType::kFloat32 && rng.Chance(0.2);
  c.accumulate = rng.Chance(0.2);
  c.has_delta = rng.Chance(0.15);
  if (c.has_delta) c.delta_has_dlse = std::exchange(c.has_dlse, false);
  c.out_float32 = c.dtype != oracle::DType::kFloat32 && rng.Chance(0.2);
  c.has_sinks = rng.Chance(0.25);
  if (c.has_sinks) {
    c.sinks_outside_lse = rng.Chance(0.3);
    c.has_dsinks = rng.Chance(0.7);
    if (c.sinks_outside_lse) c.delta_has_dlse = false;
  }
  PickBias(rng, c);
  return c;
}

}  // namespace

Case GenerateCase(uint64_t seed) {
  Rng rng(seed);
  return Generate(seed, rng, nullptr);
}

Case GenerateFloat8Case(uint64_t seed) {
  Case c = GenerateCase(seed);
  Rng rng(seed ^ 0xF10A78u);
  c.float8 = true;
  Float8Case& f = c.float8_case;
  f.e5m2 = rng.Chance(0.35);
  c.has_q_scale = rng.Chance(0.75);
  f.scaled = rng.Chance(0.8);
  for (Layout* const layout : {&f.q_scale, &f.k_scale, &f.v_scale}) {
    *layout = PickLayout(rng, false);
    layout->order[0] = 0, layout->order[1] = 1, layout->order[2] = 2;
    if (!layout->defaulted && rng.Chance(0.3)) layout->broadcast[0] = true;
  }
  // 448 is the largest code, and one below 2^-9 is none.
  c.size_qk = std::min(std::max(c.size_qk, 0.3), 4.0);
  c.size_v = std::max(c.size_v, 0.3);
  c.constant_keys = false;
  return c;
}

Case GenerateOwnRowsCase(uint64_t seed) {
  Case c = GenerateCase(seed).WithoutBias();
  c.dtype = oracle::DType::kBFloat16;
  c.batch_invariant = true;
  c.softcap = 0;
  c.alibi = STROBE_ALIBI_NONE;
  c.DropDropout();
  return c;
}

Case GenerateBlocksCase(uint64_t seed, strobe::RandomBlocks blocks) {
  const Profile profile{100, 1000, 0.8, 122 * blocks.queries * blocks.keys};
  Rng rng(seed);
  Case c = Generate(seed, rng, &profile);
  c.random_blocks = blocks;
  c.random_blocks.seed = rng.Next() | 4;  // not 0
  return c;
}

Case GenerateFewQueriesCase(uint64_t seed) {
  Rng rng(seed);
  return Generate(seed, rng, &kFewQueries);
}

Case GenerateMaskedCase(uint64_t seed) {
  static constexpr Profile kShort{0, 80, 1, 1'500'000}, kBlocks{60, 700, 0.7, 3'000'000};
  Rng rng(seed);
  const double u = rng.Uniform();
  Case c = Generate(seed, rng, u < 0.25 ? &kShort : u < 0.8 ? &kBlocks : &kFewQueries);
  c.mask = PickMaskChoice(rng, c.varlen);
  return c;
}

std::string ToString(const Case& c) {
  std::ostringstream text;
  text << "seed " << c.seed << ": " << oracle::Name(c.dtype) << ", seqlens_q {" << Join(c.seqlens_q)
       << "}, seqlens_k {" << Join(c.seqlens_k) << "}" << (c.varlen ? " varlen" : "")
       << (c.past_q || c.past_k
               ? ", past the end " + std::to_string(c.past_q) + "/" + std::to_string(c.past_k)
               : "")
       << ", heads " << c.heads << "/" << c.heads_kv << ", head_dim " << c.head_dim << "/"
       << c.head_dim_v;
  strobe::for_each_option(c, [&](const strobe::Option& option, auto value) {
    if (static_cast<double>(value) != option.otherwise && !(value != value))
      text << ", " << option.field << " " << +value;
  });
  strobe::for_each_array(c, c.arrays, [&](const auto& row, bool has, const auto& values) {
    if (has) text << ", " << row.name << " {" << Join(values) << "}";
  });
  if (c.random_blocks.seed) {
    text << ", random blocks of " << c.random_blocks.queries << " x " << c.random_blocks.keys
         << ", seed " << c.random_blocks.seed << (c.random_blocks.by_head ? ", of each head" : "");
  }
  if (c.float8) {
    text << ", float8, k and v " << oracle::Name(c.kv_dtype())
         << (c.float8_case.scaled ? ", scaled" : ", not scaled");
  }
  if (c.out_float32) text << ", out fp32";
  text << ToString(c.mask);
  if (c.grad_float32) text << ", gradients fp32";
  if (c.delta_has_dlse) text << ", dlse in delta";
  text << ", " << (c.own_workspace ? "library's" : "caller's") << " workspace, sizes qk "
       << c.size_qk << " v " << c.size_v << " dout " << c.size_dout
       << (c.constant_keys ? ", constant keys" : "");
  if (c.special != Special::kNone) text << (c.special == Special::kNan ? ", NaN" : ", infinity");
  static constexpr const char* kPackings[] = {"none", "qkv", "kv"};
  text << ", packing " << kPackings[static_cast<int>(c.packing)] << ", layouts";
  const std::pair<const char*, const Layout*> layouts[] = {
      {"q", &c.q},       {"k", &c.k},   {"v", &c.v},   {"out", &c.out},
      {"dout", &c.dout}, {"dq", &c.dq}, {"dk", &c.dk}, {"dv", &c.dv}};
  for (const auto& [name, layout] : layouts) text << " " << name << " " << Describe(*layout);
  if (c.has_bias) {
    const BiasCase& b = c.bias;
    text << ", bias " << oracle::Name(c.bias_dtype()) << (b.one_batch ? " of all sequences" : "")
         << (b.one_head ? " of all heads" : "") << (b.one_query ? " of all queries" : "")
         << ", size " << b.size << ", hides " << b.hides << (b.spoils ? ", NaN where masked" : "")
         << ", layout " << Describe(b.layout);
    if (c.has_dbias) {
      text << ", dbias " << oracle::Name(c.dbias_dtype()) << " " << Describe(b.gradient);
    }
  }
  return text.str();
}

}  // namespace strobe_test
