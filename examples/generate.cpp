// A small inference engine: a GPT writes on from a batch of prompts, over a paged KV cache.
//
//     make generate
//     build/release/bin/generate --help
//     build/release/bin/generate "The ball " "Elizabeth " --length 400 --temperature 0
//
// From the top: Engine::Step is the engine, Draw chooses a character, Generate is the loop around
// both. The model's other layers are in char_gpt.h, and who has which page is in page_pool.h.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "char_gpt.h"
#include "cli/flags.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "matrix.h"
#include "page_pool.h"

namespace strobe::generate {
namespace {

using namespace strobe::cli;

constexpr const char* kWeightsFile = STROBE_EXAMPLES "/data/char_gpt.safetensors";

// A text: its tokens are the numbers of its characters, the prompt's first.
struct Sequence {
  std::vector<int32_t> tokens;
  CachedSequence cached;      // the cache has keys and values of the first cached.length tokens
  size_t prompt = 0;          // tokens that were given
  size_t end = 0;             // tokens that it is to get
  std::mt19937_64 generator;  // of its own, so that the batch does not matter
  std::vector<float> logits;  // [drawn, characters] what its characters were drawn from
};

// The model and its cache. Each layer has a pool of pages, [pages, page_size, heads, head_dim] of K
// and of V; a page's number is the same in all layers.
class Engine {
 public:
  // No sequence may grow longer than most_rows. kv: what the cache holds, floats (kSame) or codes;
  // its keys and its values may be of different ones.
  Engine(const Weights& weights, int64_t pages, int64_t page_size, int64_t most_rows,
         const KvDTypes& kv)
      : weights_(weights), pool_(pages, page_size) {
    // What all steps have in common; Step adds how many tokens there are.
    problem_.heads = weights.heads;
    problem_.head_dim = weights.head_dim;
    problem_.causal = true;
    problem_.window_left = weights.context - 1;
    problem_.batch_invariant = true;    // a text does not depend on the texts beside it
    problem_.varlen = true;             // the queries of all sequences lie end to end ...
    problem_.append = Append::kPacked;  // ... and so do their new keys and values
    problem_.cache = Cache::kPaged;
    problem_.pages = pages;
    problem_.page_size = page_size;
    problem_.pages_per_sequence = (most_rows + page_size - 1) / page_size;
    problem_.seqlen_k = problem_.pages_per_sequence * page_size;
    problem_.has_seqused_k = true;
    // A launch quantises the rows that it appends, and makes their scales.
    problem_.kv_dtype = kv.keys(problem_.dtype);
    problem_.v_dtype = kv.values(problem_.dtype);
    const auto scaled = [](DType dtype) {
      return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
    };
    if (scaled(problem_.kv_dtype) || scaled(problem_.v_dtype)) problem_.kv_scale = KvScale::kRow;
    problem_.rotary_dim = weights.head_dim;
    problem_.rotary_rows = most_rows;
    // The projection gives rows [3, heads, head_dim]. Strobe reads q, k and v where they are.
    problem_.q = {.batch = 0, .seqlen = 3 * weights.dim, .head = weights.head_dim, .dim = 1};
    problem_.k_new = problem_.v_new = problem_.q;
    // What Strobe does not take is refused before there is memory for it.
    problem_.seqlen_q = problem_.seqlen_new = problem_.total_q = problem_.total_new = 1;
    (void)Plan(problem_);

    const auto rows = static_cast<size_t>(pages * page_size * weights.heads);
    for (size_t n = 0; n < weights.blocks.size(); ++n) {
      // NaN, as floats and as scales: were a row read that no sequence has written, all texts would
      // show it.
      const auto unwritten = [&](DType dtype) {
        return std::vector<std::byte>(rows * RowBytes(dtype, weights.head_dim), std::byte{0xFF});
      };
      const auto scales = [&](DType dtype) {
        return std::vector<float>(scaled(dtype) ? rows : 0,
                                  std::numeric_limits<float>::quiet_NaN());
      };
      const LayerCache& made =
          caches_.emplace_back(LayerCache{unwritten(problem_.kv_dtype), unwritten(problem_.v_dtype),
                                          scales(problem_.kv_dtype), scales(problem_.v_dtype)});
      cache_bytes_ += made.k.size() + made.v.size() +
                      (made.k_scale.size() + made.v_scale.size()) * sizeof(float);
    }

    // The angle of a position and a pair of dimensions.
    const int64_t half = weights.head_dim / 2;
    for (int64_t position = 0; position < most_rows; ++position) {
      for (int64_t n = 0; n < half; ++n) {
        const double exponent = -static_cast<double>(n) / static_cast<double>(half);
        const double angle =
            static_cast<double>(position) * std::pow(weights.rotary_base, exponent);
        cosines_.push_back(static_cast<float>(std::cos(angle)));
        sines_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  // Runs the model on tokens of each sequence that the cache does not have yet, at most `chunk`: a
  // piece of a prompt, or the one that was drawn last, in one batch. So a long prompt holds nobody
  // up. Returns the logits after the last of these tokens: [sequences, characters].
  [[nodiscard]] Matrix Step(std::span<Sequence* const> batch, int64_t chunk) {
    std::vector<int32_t> tokens, starts = {0};
    std::vector<CachedSequence*> cached;
    int64_t longest = 0;
    for (Sequence* sequence : batch) {
      const auto all = static_cast<int64_t>(sequence->tokens.size());
      const int64_t fresh = std::min(all - sequence->cached.length, chunk);
      pool_.Reserve(sequence->cached, fresh);
      const auto first = sequence->tokens.begin() + sequence->cached.length;
      tokens.insert(tokens.end(), first, first + fresh);
      starts.push_back(static_cast<int32_t>(tokens.size()));
      longest = std::max(longest, fresh);
      cached.push_back(&sequence->cached);
    }
    const BatchTable table(cached, problem_.pages_per_sequence);

    // A plan costs about a microsecond, and serves all layers.
    problem_.batch = static_cast<int64_t>(batch.size());
    problem_.seqlen_q = problem_.seqlen_new = longest;
    problem_.total_q = problem_.total_new = starts.back();
    const Plan plan(problem_);
    kernel_ = plan.kernel();
    const std::span<std::byte> workspace = workspace_.of(plan);

    Matrix x(starts.back(), weights_.dim);
    for (int64_t i = 0; i < x.rows; ++i) {
      std::ranges::copy(weights_.token.row(tokens[static_cast<size_t>(i)]), x.row(i).begin());
    }
    Matrix out(x.rows, x.cols);
    for (size_t n = 0; n < weights_.blocks.size(); ++n) {
      const Block& block = weights_.blocks[n];
      const Matrix qkv = Apply(block.qkv, Apply(block.attention_norm, x));
      const float* q = qkv.values.data();
      // One launch turns queries and new keys by their positions, writes the new keys and values to
      // the cache, and attends to all that it has then.
      plan.forward({.q = q,
                    .k = caches_[n].k.data(),
                    .v = caches_[n].v.data(),
                    .out = out.values.data(),
                    .cu_seqlens_q = starts.data(),
                    .workspace = workspace,
                    .seqused_k = table.lengths.data(),
                    .block_table = table.block_table.data(),
                    .k_new = q + weights_.dim,
                    .v_new = q + 2 * weights_.dim,
                    .cu_seqlens_k_new = starts.data(),
                    .rotary_cos = cosines_.data(),
                    .rotary_sin = sines_.data(),
                    .k_scale = OrNull(caches_[n].k_scale),
                    .v_scale = OrNull(caches_[n].v_scale)});
      Add(x, Apply(block.projection, out));
      Add(x, Apply(block.down, Gelu(Apply(block.up, Apply(block.feed_forward_norm, x)))));
    }

    Matrix last(problem_.batch, weights_.dim);
    for (size_t b = 0; b < batch.size(); ++b) {
      batch[b]->cached.length += starts[b + 1] - starts[b];
      std::ranges::copy(x.row(starts[b + 1] - 1), last.row(static_cast<int64_t>(b)).begin());
    }
    return Apply(weights_.head, Apply(weights_.norm, last));
  }

  // Gives the sequence's pages back.
  void Release(Sequence& sequence) { pool_.Release(sequence.cached); }

  [[nodiscard]] const PagePool& pool() const { return pool_; }
  [[nodiscard]] const std::string& kernel() const { return kernel_; }
  [[nodiscard]] size_t cache_bytes() const { return cache_bytes_; }

 private:
  struct LayerCache {
    std::vector<std::byte> k, v;
    std::vector<float> k_scale, v_scale;  // of each row; empty where there are none
  };

  // Of one token in one head.
  static size_t RowBytes(DType dtype, int64_t head_dim) {
    const auto dim = static_cast<size_t>(head_dim);
    switch (dtype) {
      case DType::kFloat32:
        return dim * sizeof(float);
      case DType::kQ8_0:
        return dim / 32 * 34;
      case DType::kQ4_0:
        return dim / 32 * 18;
      default:
        return dim;
    }
  }
  static const float* OrNull(const std::vector<float>& scales) {
    return scales.empty() ? nullptr : scales.data();
  }

  const Weights& weights_;
  PagePool pool_;
  std::vector<LayerCache> caches_;
  size_t cache_bytes_ = 0;
  std::vector<float> cosines_, sines_;  // [most_rows, head_dim / 2]
  Problem problem_;
  Workspace workspace_;
  std::string kernel_;  // that ran last
};

// The number of the next character: the likeliest one at temperature 0, otherwise drawn by chance,
// each in proportion to exp(logit / temperature).
int32_t Draw(std::span<const float> logits, double temperature, std::mt19937_64& generator) {
  const auto likeliest = std::ranges::max_element(logits);
  if (temperature == 0) return static_cast<int32_t>(likeliest - logits.begin());
  std::vector<double> sums;
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp((static_cast<double>(logit) - *likeliest) / temperature);
    sums.push_back(sum);
  }
  const double chance = static_cast<double>(generator() >> 11) * 0x1p-53;  // in [0, 1)
  const auto drawn = std::ranges::upper_bound(sums, chance * sum);
  return static_cast<int32_t>(std::min(drawn, sums.end() - 1) - sums.begin());
}

struct Options {
  std::vector<std::string> prompts = {"It is a truth universally acknowledged, that ",
                                      "Mr. Darcy ",
                                      "\"My dear Emma,\" said ",
                                      "The letter was ",
                                      "CHAPTER I\n\n\n",
                                      "Captain Wentworth looked at Anne, and "};
  std::string weights;
  int64_t length = 300;
  int64_t chunk = 16;
  double temperature = 0.5;
  int64_t seed = 0;
  int64_t page_size = 16;
  KvDTypes kv;
  std::string logits;  // file to write; "": none
};

// The numbers of a prompt's characters.
std::vector<int32_t> Tokens(const std::string& prompt, const Weights& weights) {
  if (prompt.empty()) throw UserError("a prompt is empty, expected at least one character");
  std::vector<int32_t> tokens;
  for (const std::string& character : Characters(prompt)) {
    const auto found = std::ranges::find(weights.alphabet, character);
    if (found == weights.alphabet.end()) {
      throw UserError(fmt::format(
          "prompt \"{}\" has the character \"{}\", expected those of the training alone: {}",
          Printable(prompt), Printable(character),
          Printable(fmt::format("{}", fmt::join(weights.alphabet, "")), 200)));
    }
    tokens.push_back(static_cast<int32_t>(found - weights.alphabet.begin()));
  }
  return tokens;
}

// Prints the texts one below the other, as far as they are there: the first one character by
// character, and what the others have got meanwhile when it is their turn. The line above each says
// where its prompt ends; on a terminal prompts have a colour of their own, too.
class Transcript {
 public:
  Transcript(const std::vector<Sequence>& sequences, const Weights& weights)
      : sequences_(sequences), weights_(weights) {}

  void PrintNew() {
    while (turn_ < sequences_.size()) {
      const Sequence& sequence = sequences_[turn_];
      if (printed_ == 0) {
        printed_ = sequence.prompt;
        const std::string prompt = Text(sequence, 0, printed_);
        Print("{}\n{}",
              Dim(fmt::format("--- {} of {}, which goes on from \"{}\"", turn_ + 1,
                              sequences_.size(), Printable(prompt))),
              Cyan(prompt));
      }
      Print("{}", Text(sequence, printed_, sequence.tokens.size()));
      printed_ = sequence.tokens.size();
      if (printed_ < sequence.end) break;
      Print("\n");
      ++turn_;
      printed_ = 0;
    }
    Flush();
  }

 private:
  [[nodiscard]] std::string Text(const Sequence& sequence, size_t begin, size_t end) const {
    std::string text;
    for (size_t n = begin; n < end; ++n) {
      text += weights_.alphabet[static_cast<size_t>(sequence.tokens[n])];
    }
    return text;
  }

  const std::vector<Sequence>& sequences_;
  const Weights& weights_;
  size_t turn_ = 0, printed_ = 0;  // the text, and how many of its characters
};

// The logits and the texts, for who wants to compare them.
void WriteLogits(const std::string& path, const std::vector<Sequence>& sequences,
                 const Weights& weights) {
  const auto characters = static_cast<int64_t>(weights.alphabet.size());
  std::vector<TensorView> tensors;
  std::map<std::string, std::string> texts;
  for (size_t n = 0; n < sequences.size(); ++n) {
    const Sequence& sequence = sequences[n];
    const auto drawn = static_cast<int64_t>(sequence.logits.size()) / characters;
    tensors.push_back({.name = fmt::format("logits.{}", n),
                       .dtype = "F32",
                       .shape = {drawn, characters},
                       .data = std::as_bytes(std::span(sequence.logits))});
    std::string& text = texts[fmt::format("text.{}", n)];
    for (const int32_t token : sequence.tokens) {
      text += weights.alphabet[static_cast<size_t>(token)];
    }
  }
  WriteSafetensors(path, tensors, texts);
}

void Generate(const Options& options) {
  if (!options.logits.empty()) CheckWritable(options.logits);
  const Weights weights = WeightsReader(options.weights).Read();
  Print("{}\n", Description(weights));

  std::vector<Sequence> sequences(options.prompts.size());
  int64_t prompt_tokens = 0, most_rows = 0, pages = 0;
  for (size_t n = 0; n < sequences.size(); ++n) {
    Sequence& sequence = sequences[n];
    sequence.tokens = Tokens(options.prompts[n], weights);
    sequence.prompt = sequence.tokens.size();
    sequence.end = sequence.prompt + static_cast<size_t>(options.length);
    std::seed_seq seeds = {options.seed, static_cast<int64_t>(n)};
    sequence.generator.seed(seeds);
    prompt_tokens += static_cast<int64_t>(sequence.tokens.size());
    const auto rows = static_cast<int64_t>(sequence.end) - 1;  // nobody asks what follows the last
    most_rows = std::max(most_rows, rows);
    pages += (rows + options.page_size - 1) / options.page_size;
  }

  Engine engine(weights, pages, options.page_size, most_rows, options.kv);
  Transcript transcript(sequences, weights);
  std::vector<Sequence*> batch;
  for (Sequence& sequence : sequences) batch.push_back(&sequence);
  int64_t steps = 0, drawn = 0, most_pages = 0;
  const Stopwatch watch;
  for (; !batch.empty(); ++steps) {
    const Matrix logits = engine.Step(batch, options.chunk);
    most_pages = std::max(most_pages, pages - engine.pool().free_pages());
    for (size_t b = 0; b < batch.size(); ++b) {
      Sequence& sequence = *batch[b];
      const auto cached = static_cast<size_t>(sequence.cached.length);
      if (cached < sequence.tokens.size()) continue;  // there is more of its prompt
      const std::span<const float> row = logits.row(static_cast<int64_t>(b));
      sequence.tokens.push_back(Draw(row, options.temperature, sequence.generator));
      ++drawn;
      if (!options.logits.empty()) {
        sequence.logits.insert(sequence.logits.end(), row.begin(), row.end());
      }
      if (sequence.tokens.size() == sequence.end) engine.Release(sequence);
    }
    std::erase_if(batch, [](const Sequence* s) { return s->tokens.size() == s->end; });
    transcript.PrintNew();
  }
  const double seconds = watch.Seconds();

  Print(
      "\n{} characters of prompts and {} new ones, {} steps in {:.2f} s: {:.0f} new characters/s\n",
      prompt_tokens, drawn, steps, seconds, static_cast<double>(drawn) / seconds);
  Print("attention by {}, over {} of {} pages of {} rows, {}; given back, {} are free\n",
        engine.kernel(), most_pages, pages, options.page_size,
        BytesText(static_cast<double>(engine.cache_bytes())), engine.pool().free_pages());
  Flush();
  if (!options.logits.empty()) WriteLogits(options.logits, sequences, weights);
}

int Main(int argc, char** argv) {
  Options options;
  options.weights = std::filesystem::proximate(kWeightsFile).string();

  CLI::App app("A GPT writes on from a batch of prompts, over a paged KV cache.", "generate");
  constexpr int64_t kMost = 1'000'000;
  app.add_option("prompts", options.prompts, "Beginnings of texts; without any, some are given")
      ->type_name("PROMPT");
  app.add_option("--weights", options.weights, "What char_gpt.py --export wrote")
      ->type_name("FILE");
  AddLength(app, "--length", &options.length, 1, "New characters of each text (300)", kMost);
  AddText(app, "--temperature", "T", "0: always the likeliest character; 1: as trained (0.5)",
          [&options](const std::string& flag, const std::string& text) {
            options.temperature =
                ParseNumber(flag, text, {.wanted = "a number from 0 to 100", .min = 0, .max = 100});
          });
  AddInteger(app, "--seed", &options.seed, 0, "Other numbers, other texts (0)", kMost);
  AddLength(app, "--chunk", &options.chunk, 1,
            "Characters of a prompt that a step reads at most (16)", kMost);
  AddLength(app, "--page-size", &options.page_size, 1, "Rows of a page of the cache (16)", 1024);
  AddText(app, "--kv", Alternatives(kKvNames),
          "What the cache holds: floats (same), or codes of eight or four bits. K/V: q8_0/q4_0",
          [&options](const std::string& flag, const std::string& text) {
            options.kv = ChosenKv(flag, text);
          });
  app.add_option("--logits", options.logits,
                 "Also write what each character was drawn from: safetensors, logits.N of text N")
      ->type_name("FILE");
  if (const std::optional<int> exit_code = ParseAll(app, argc, argv)) return *exit_code;
  Generate(options);
  return 0;
}

}  // namespace
}  // namespace strobe::generate

int main(int argc, char** argv) {
  try {
    return strobe::generate::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "generate: out of memory\n");
  } catch (const std::exception& error) {  // what() says what was got and what was expected
    std::fprintf(stderr, "generate: %s\n", error.what());
  }
  return 2;
}
