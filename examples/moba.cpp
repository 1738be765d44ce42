// MoBA: each query attends to its own block of keys, causally, and to the few earlier blocks whose
// mean key suits it best (E. Lu et al., arXiv:2502.13189). Two ways of computing it without a
// kernel of its own, forward and backward; moba.py is the same in PyTorch.
//
// 1. Every query chooses for itself. What a block of keys and the queries that chose it have to
//    compute is a sequence of its own: all blocks go as packed sequences of one launch, and
//    strobe::merge joins what a query got from each of its blocks. The backward gives every part
//    the merged lse, so that its weights are those of the whole softmax.
// 2. A block of queries shares its choice. That is a list of blocks, a mask as data: one launch.
//
//     c++ -std=c++20 -O2 examples/moba.cpp $(pkg-config --cflags --libs strobe) -o moba
//     ./moba [tokens [block [top]]]                                            1024 128 3
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <strobe/strobe.hpp>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kHeads = 4, kHeadsKv = 2, kGroup = kHeads / kHeadsKv, kDim = 64;
constexpr int64_t kLongestChecked = 2048;  // tokens: the check takes the pairs one by one
constexpr double kScale = 0.125;           // 1 / sqrt(kDim)

using Values = std::vector<float>;

size_t at(int64_t index) { return static_cast<size_t>(index); }

Values random_values(int64_t count) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  Values x(at(count));
  for (float& value : x) value = normal(generator);
  return x;
}

struct Size {
  int64_t tokens = 1024, block = 128, top = 3;
  [[nodiscard]] int64_t blocks() const { return (tokens + block - 1) / block; }
  [[nodiscard]] int64_t rows(int64_t b) const { return std::min(block, tokens - b * block); }
};

// q and dout are [tokens, kHeads, kDim], k and v [tokens, kHeadsKv, kDim].
struct Inputs {
  Values q, k, v, dout;
};

struct Results {
  Values out, dq, dk, dv;
};

// ------------------------------------------------------------------------------------ the choice

// The mean of each block's rows: [blocks, heads, kDim].
Values means_of_blocks(const Values& x, int64_t heads, const Size& size) {
  const int64_t row = heads * kDim;
  Values means(at(size.blocks() * row));
  for (int64_t i = 0; i < size.tokens; ++i) {
    const int64_t b = i / size.block;
    for (int64_t n = 0; n < row; ++n) {
      means[at(b * row + n)] += x[at(i * row + n)] / static_cast<float>(size.rows(b));
    }
  }
  return means;
}

// The blocks before `own`, at most top - 1 of them, whose means suit the query best.
std::vector<int32_t> best_blocks(const float* query, const Values& means, int64_t head, int64_t own,
                                 int64_t top) {
  std::vector<std::pair<float, int32_t>> gates;
  for (int64_t b = 0; b < own; ++b) {
    const float* const mean = means.data() + (b * kHeadsKv + head / kGroup) * kDim;
    gates.emplace_back(-std::inner_product(query, query + kDim, mean, 0.0F),
                       static_cast<int32_t>(b));
  }
  const auto best = gates.begin() + std::min<int64_t>(top - 1, own);
  std::partial_sort(gates.begin(), best, gates.end());
  std::vector<int32_t> blocks;
  std::transform(gates.begin(), best, std::back_inserter(blocks), [](auto g) { return g.second; });
  return blocks;
}

// What each row of [rows, kHeads] chose, which may be queries or blocks of them.
using Choice = std::vector<std::vector<int32_t>>;

Choice choose(const Values& queries, const Values& k, const Size& size, int64_t rows_of_block) {
  const Values means = means_of_blocks(k, kHeadsKv, size);
  Choice choice(queries.size() / kDim);
  for (size_t row = 0; row < choice.size(); ++row) {
    const int64_t i = static_cast<int64_t>(row) / kHeads, head = static_cast<int64_t>(row) % kHeads;
    choice[row] =
        best_blocks(queries.data() + row * kDim, means, head, i / rows_of_block, size.top);
  }
  return choice;
}

// ------------------------------------------------------------- 1. every query chooses for itself

// A head's rows of [tokens, heads, kDim], and back.
Values of_head(const Values& x, int64_t heads, int64_t head) {
  Values rows;
  for (size_t i = at(head * kDim); i < x.size(); i += at(heads * kDim)) {
    rows.insert(rows.end(), x.begin() + static_cast<std::ptrdiff_t>(i),
                x.begin() + static_cast<std::ptrdiff_t>(i) + kDim);
  }
  return rows;
}

// The choices of a key head's group as packed sequences, one for each block: the queries, of
// whichever head of the group, that chose it.
struct Route {
  std::vector<int32_t> starts_q = {0}, starts_k = {0};
  std::vector<int64_t> rows;   // of each packed row: which of [tokens, kHeads] it is
  std::vector<int64_t> parts;  // of each packed row: which of the row's choices it is
  int64_t longest = 0;         // sequence of queries
};

Route route(const Choice& choice, int64_t head_kv, const Size& size) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> chosen_by(at(size.blocks()));
  for (int64_t i = 0; i < size.tokens; ++i) {
    for (int64_t head = head_kv * kGroup; head < (head_kv + 1) * kGroup; ++head) {
      const int64_t row = i * kHeads + head;
      for (size_t n = 0; n < choice[at(row)].size(); ++n) {
        chosen_by[at(choice[at(row)][n])].emplace_back(row, n);
      }
    }
  }
  Route way;
  for (int64_t b = 0; b < size.blocks(); ++b) {
    for (const auto& [row, part] : chosen_by[at(b)]) {
      way.rows.push_back(row);
      way.parts.push_back(part);
    }
    way.starts_q.push_back(static_cast<int32_t>(way.rows.size()));
    way.starts_k.push_back(static_cast<int32_t>(std::min((b + 1) * size.block, size.tokens)));
    way.longest = std::max<int64_t>(way.longest, static_cast<int64_t>(chosen_by[at(b)].size()));
  }
  return way;
}

// Rows of [rows, width], one after the other.
Values gather(const Values& x, const std::vector<int64_t>& rows, int64_t width) {
  Values found(rows.size() * at(width));
  for (size_t n = 0; n < rows.size(); ++n) {
    std::copy_n(x.begin() + rows[n] * width, width, found.data() + n * at(width));
  }
  return found;
}

// Problem and rows of a launch over the packed sequences; keys and values are those of one head.
strobe::Problem packed_problem(const Route& way, const Size& size) {
  return {.batch = size.blocks(),
          .seqlen_q = way.longest,
          .seqlen_k = std::min(size.block, size.tokens),
          .heads = 1,
          .head_dim = kDim,
          .varlen = true,
          .total_q = static_cast<int64_t>(way.rows.size()),
          .total_k = size.tokens};
}

strobe::Problem causal_problem(const Size& size) {
  strobe::Problem problem = {.seqlen_q = size.tokens,
                             .seqlen_k = size.tokens,
                             .heads = kHeads,
                             .heads_kv = kHeadsKv,
                             .head_dim = kDim};
  problem.causal = true;
  return problem;
}

// The own blocks of all queries: chunks are what they are.
strobe::Problem own_blocks(const Size& size) {
  strobe::Problem problem = causal_problem(size);
  problem.attention_chunk = size.block;
  return problem;
}

// out, and lse as [kHeads, tokens].
void forward_by_query(const Inputs& in, const Choice& choice, const Size& size, Values& out,
                      Values& lse) {
  const int64_t rows = size.tokens * kHeads;
  // What each query gets from each of its blocks, [top, tokens, kHeads, kDim], with its own lse,
  // [top, kHeads, tokens], which says -inf where it chose no more blocks. (Where that does not fit,
  // a group of heads at a time does.)
  Values outs(at(size.top * rows * kDim)), lses(at(size.top * rows), -INFINITY);
  strobe::Plan(own_blocks(size))
      .forward({.q = in.q.data(),
                .k = in.k.data(),
                .v = in.v.data(),
                .out = outs.data(),
                .lse = lses.data()});
  for (int64_t head_kv = 0; head_kv < kHeadsKv; ++head_kv) {
    const Route way = route(choice, head_kv, size);
    if (way.rows.empty()) continue;
    const Values q = gather(in.q, way.rows, kDim), k = of_head(in.k, kHeadsKv, head_kv),
                 v = of_head(in.v, kHeadsKv, head_kv);
    Values found(q.size()), found_lse(way.rows.size());
    strobe::Plan(packed_problem(way, size))
        .forward({.q = q.data(),
                  .k = k.data(),
                  .v = v.data(),
                  .out = found.data(),
                  .lse = found_lse.data(),
                  .cu_seqlens_q = way.starts_q.data(),
                  .cu_seqlens_k = way.starts_k.data()});
    for (size_t n = 0; n < way.rows.size(); ++n) {
      const int64_t row = way.rows[n], part = way.parts[n] + 1;
      std::copy_n(found.data() + n * kDim, kDim, outs.begin() + (part * rows + row) * kDim);
      lses[at((part * kHeads + row % kHeads) * size.tokens + row / kHeads)] = found_lse[n];
    }
  }
  strobe::merge({.parts = size.top,
                 .seqlen_q = size.tokens,
                 .heads = kHeads,
                 .head_dim_v = kDim,
                 .outs = outs.data(),
                 .lses = lses.data(),
                 .out = out.data(),
                 .lse = lse.data()});
}

// The weights are exp(score - lse) with the lse of all blocks: what a part gives is its share of
// the whole gradient, and shares are added up.
void backward_by_query(const Inputs& in, const Choice& choice, const Size& size, const Values& lse,
                       Results& results) {
  Values delta(lse.size());                             // the sum of dout * out, in lse's layout
  Values lse_rows(lse.size()), delta_rows(lse.size());  // [tokens, kHeads]
  for (int64_t row = 0; row < size.tokens * kHeads; ++row) {
    const float* const dout = in.dout.data() + row * kDim;
    const size_t place = at(row % kHeads * size.tokens + row / kHeads);
    delta[place] = std::inner_product(dout, dout + kDim, results.out.begin() + row * kDim, 0.0F);
    lse_rows[at(row)] = lse[place];
    delta_rows[at(row)] = delta[place];
  }
  strobe::Problem problem = own_blocks(size);
  problem.direction = strobe::Direction::kBackward;
  problem.has_delta = true;
  strobe::Plan(problem).backward({.q = in.q.data(),
                                  .k = in.k.data(),
                                  .v = in.v.data(),
                                  .lse = lse.data(),
                                  .dout = in.dout.data(),
                                  .dq = results.dq.data(),
                                  .dk = results.dk.data(),
                                  .dv = results.dv.data(),
                                  .delta = delta.data()});
  for (int64_t head_kv = 0; head_kv < kHeadsKv; ++head_kv) {
    const Route way = route(choice, head_kv, size);
    if (way.rows.empty()) continue;
    const Values q = gather(in.q, way.rows, kDim), dout = gather(in.dout, way.rows, kDim),
                 k = of_head(in.k, kHeadsKv, head_kv), v = of_head(in.v, kHeadsKv, head_kv),
                 row_lse = gather(lse_rows, way.rows, 1),
                 row_delta = gather(delta_rows, way.rows, 1);
    Values dq(q.size());
    problem = packed_problem(way, size);
    problem.direction = strobe::Direction::kBackward;
    problem.has_delta = true;
    // dk and dv of this head are added to where they lie, among those of the other heads.
    problem.accumulate = true;
    problem.dk = problem.dv = {0, kHeadsKv * kDim, kDim, 1};
    strobe::Plan(problem).backward({.q = q.data(),
                                    .k = k.data(),
                                    .v = v.data(),
                                    .lse = row_lse.data(),
                                    .dout = dout.data(),
                                    .dq = dq.data(),
                                    .dk = results.dk.data() + head_kv * kDim,
                                    .dv = results.dv.data() + head_kv * kDim,
                                    .cu_seqlens_q = way.starts_q.data(),
                                    .cu_seqlens_k = way.starts_k.data(),
                                    .delta = row_delta.data()});
    for (size_t n = 0; n < dq.size(); ++n) {
      results.dq[at(way.rows[n / kDim] * kDim) + n % kDim] += dq[n];
    }
  }
}

// ------------------------------------------------------------- 2. a block of queries shares its

struct alignas(64) Line {
  std::byte bytes[64];
};

// The packed mask of such a choice, and the problem that takes it: a list of blocks for each block
// of queries, its own among them, which `causal` cuts.
std::vector<Line> pack_lists(const Choice& choice, const Size& size, strobe::Problem& problem) {
  const int64_t columns = std::min(size.top, size.blocks());
  std::vector<int32_t> counts, blocks;
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t b = 0; b < size.blocks(); ++b) {
      const std::vector<int32_t>& chosen = choice[at(b * kHeads + head)];
      counts.push_back(static_cast<int32_t>(chosen.size()) + 1);
      blocks.insert(blocks.end(), chosen.begin(), chosen.end());
      blocks.push_back(static_cast<int32_t>(b));
      blocks.resize(counts.size() * at(columns));
    }
  }
  problem.mask.kind = STROBE_MASK_PACKED;
  problem.mask.block_q = problem.mask.block_k = static_cast<int32_t>(size.block);
  problem.mask.batch = 1;
  problem.mask.heads = kHeads;
  // So many entries, and none in part.
  problem.mask.capacity = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  problem.mask.partial_capacity = 1;
  std::vector<Line> mask((strobe::mask_bytes(problem) + sizeof(Line) - 1) / sizeof(Line));
  strobe::MaskArgs args{};
  args.full_counts = counts.data();
  args.full_blocks = blocks.data();
  args.full_columns = columns;
  args.packed = mask.data();
  args.packed_bytes = mask.size() * sizeof(Line);
  strobe::pack_mask(problem, args);
  return mask;
}

// ------------------------------------------------------------------------- check and measurement

// Attention with these pairs, pair by pair in double. sees(head, query, key): of keys that are not
// behind the query.
template <typename Sees>
std::vector<std::vector<double>> standard(const Inputs& in, const Size& size, const Sees& sees) {
  std::vector<double> out(in.q.size()), dq(in.q.size()), dk(in.k.size()), dv(in.v.size());
  std::vector<double> weights(at(size.tokens)), gradients(at(size.tokens));
  for (int64_t row = 0; row < size.tokens * kHeads; ++row) {
    const int64_t i = row / kHeads, head = row % kHeads;
    const float *const q = in.q.data() + row * kDim, *const dout = in.dout.data() + row * kDim;
    const auto key_row = [&](int64_t j) { return (j * kHeadsKv + head / kGroup) * kDim; };
    double sum = 0, delta = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const float* const k = in.k.data() + key_row(j);
      weights[at(j)] =
          sees(head, i, j) ? std::exp(kScale * std::inner_product(q, q + kDim, k, 0.0)) : 0;
      sum += weights[at(j)];
    }
    for (int64_t j = 0; j <= i; ++j) {
      const float* const v = in.v.data() + key_row(j);
      weights[at(j)] /= sum;
      for (int64_t n = 0; n < kDim; ++n) out[at(row * kDim + n)] += weights[at(j)] * v[n];
      gradients[at(j)] = std::inner_product(dout, dout + kDim, v, 0.0);
      delta += weights[at(j)] * gradients[at(j)];
    }
    for (int64_t j = 0; j <= i; ++j) {
      const double ds = kScale * weights[at(j)] * (gradients[at(j)] - delta);
      for (int64_t n = 0; n < kDim; ++n) {
        dq[at(row * kDim + n)] += ds * in.k[at(key_row(j) + n)];
        dk[at(key_row(j) + n)] += ds * q[n];
        dv[at(key_row(j) + n)] += weights[at(j)] * dout[n];
      }
    }
  }
  return {out, dq, dk, dv};
}

// The largest difference, of the largest value.
double difference(const Values& got, const std::vector<double>& wanted) {
  double most = 0, largest = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    most = std::fmax(most, std::fabs(got[n] - wanted[n]));
    largest = std::fmax(largest, std::fabs(wanted[n]));
  }
  return most / largest;
}

// Milliseconds of the fastest of five runs.
double time_of(const std::function<void()>& run) {
  double best = 1e9;
  for (int n = 0; n < 5; ++n) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

// Runs a problem forward and backward in one launch each.
void at_once(strobe::Problem problem, const Inputs& in, const void* mask, Results& results) {
  Values lse(in.q.size() / kDim);
  strobe::Plan(problem).forward({.q = in.q.data(),
                                 .k = in.k.data(),
                                 .v = in.v.data(),
                                 .out = results.out.data(),
                                 .lse = lse.data(),
                                 .mask = mask});
  problem.direction = strobe::Direction::kBackward;
  strobe::Plan(problem).backward({.q = in.q.data(),
                                  .k = in.k.data(),
                                  .v = in.v.data(),
                                  .out = results.out.data(),
                                  .lse = lse.data(),
                                  .dout = in.dout.data(),
                                  .dq = results.dq.data(),
                                  .dk = results.dk.data(),
                                  .dv = results.dv.data(),
                                  .mask = mask});
}

void attend(const Size& size) {
  const int64_t rows = size.tokens * kHeads * kDim, rows_kv = size.tokens * kHeadsKv * kDim;
  const Inputs in = {random_values(rows), random_values(rows_kv), random_values(rows_kv),
                     random_values(rows)};
  Results results = {Values(at(rows)), Values(at(rows)), Values(at(rows_kv)), Values(at(rows_kv))};
  std::printf("%lld tokens, %lld heads of %lld, %lld of keys; blocks of %lld, %lld a query\n",
              static_cast<long long>(size.tokens), static_cast<long long>(kHeads),
              static_cast<long long>(kDim), static_cast<long long>(kHeadsKv),
              static_cast<long long>(size.block), static_cast<long long>(size.top));

  const Choice by_query = choose(in.q, in.k, size, size.block);
  const Choice by_block = choose(means_of_blocks(in.q, kHeads, size), in.k, size, 1);
  strobe::Problem listed = causal_problem(size);
  const std::vector<Line> mask = pack_lists(by_block, size, listed);
  // rows_of_choice: queries that share a row of the choice.
  const auto seen_by = [&size](const Choice& choice, int64_t rows_of_choice) {
    return [&choice, &size, rows_of_choice](int64_t head, int64_t i, int64_t j) {
      if (i / size.block == j / size.block) return true;
      const std::vector<int32_t>& chosen = choice[at(i / rows_of_choice * kHeads + head)];
      return std::find(chosen.begin(), chosen.end(), j / size.block) != chosen.end();
    };
  };

  struct Way {
    const char* name;
    std::function<void()> run;
    const Choice* choice;  // null: all keys that are not behind the query
    int64_t rows_of_choice;
  };
  const Way ways[] = {
      {"dense, causal", [&] { at_once(causal_problem(size), in, nullptr, results); }, nullptr, 0},
      {"each query's choice",
       [&] {
         Values lse(at(size.tokens * kHeads));
         forward_by_query(in, by_query, size, results.out, lse);
         backward_by_query(in, by_query, size, lse, results);
       },
       &by_query, 1},
      {"a block's choice", [&] { at_once(listed, in, mask.data(), results); }, &by_block,
       size.block},
  };
  // Times with the gradients, as multiples of dense attention's; and these as multiples of the
  // share of the pairs, where 1 would be a pair at the cost that it has in dense attention.
  const double all_pairs = 0.5 * static_cast<double>(kHeads * size.tokens * (size.tokens + 1));
  double dense = 0;
  for (const Way& way : ways) {
    double pairs = 0;
    for (int64_t row = 0; way.choice != nullptr && row < size.tokens * kHeads; ++row) {
      const int64_t i = row / kHeads;
      const auto& chosen = (*way.choice)[at(i / way.rows_of_choice * kHeads + row % kHeads)];
      pairs += static_cast<double>(i % size.block + 1 +
                                   static_cast<int64_t>(chosen.size()) * size.block);
    }
    const double share = way.choice == nullptr ? 1 : pairs / all_pairs, took = time_of(way.run);
    if (way.choice == nullptr) dense = took;
    std::printf("%-20s %5.1f%% of the pairs, %8.2f ms, %5.2f x dense, %5.2f x the share", way.name,
                100 * share, took, took / dense, took / dense / share);
    if (way.choice != nullptr && size.tokens <= kLongestChecked) {
      const auto wanted = standard(in, size, seen_by(*way.choice, way.rows_of_choice));
      const Values* const got[] = {&results.out, &results.dq, &results.dk, &results.dv};
      double most = 0;
      for (size_t n = 0; n < 4; ++n) most = std::fmax(most, difference(*got[n], wanted[n]));
      std::printf("; differs by %.1e", most);
    }
    std::printf("\n");
  }
}

// A whole number from `least`, or an end with a message.
bool read(const char* name, const char* text, int64_t least, int64_t& value) {
  const char* const end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error == std::errc() && rest == end && value >= least && value <= 1 << 24) return true;
  std::fprintf(stderr, "moba: %s = %s, expected a whole number from %lld to %d\n", name, text,
               static_cast<long long>(least), 1 << 24);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  Size size;
  if (argc > 1 && !read("tokens", argv[1], 1, size.tokens)) return 2;
  if (argc > 2 && !read("block", argv[2], 64, size.block)) return 2;
  if (argc > 3 && !read("top", argv[3], 2, size.top)) return 2;
  try {
    attend(size);  // a block that no list can have is refused by the library, by name
  } catch (const strobe::Error& error) {
    std::fprintf(stderr, "moba: %s\n", error.what());
    return 1;
  }
}
