// The character GPT that char_gpt.py trains, but for its attention: its weights, read from the
// safetensors file that `char_gpt.py --export` writes, and its layers. For generate.cpp.
#ifndef STROBE_EXAMPLES_CHAR_GPT_H_
#define STROBE_EXAMPLES_CHAR_GPT_H_

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/flags.h"
#include "cli/safetensors_file.h"
#include "cli/text.h"
#include "matrix.h"

namespace strobe::generate {

struct LinearLayer {
  Matrix weight;  // [in, out]
  std::vector<float> bias;
};

struct NormLayer {
  std::vector<float> weight, bias;
  float epsilon = 0;
};

struct Block {
  NormLayer attention_norm;
  LinearLayer qkv;  // to [3, heads, head_dim]
  LinearLayer projection;
  NormLayer feed_forward_norm;
  LinearLayer up, down;
};

struct Weights {
  std::vector<std::string> alphabet;  // the character of each number, in UTF-8
  int64_t dim = 0, heads = 0, head_dim = 0;
  int64_t context = 0;  // characters that attention sees, the query's own included
  double rotary_base = 0;
  int64_t parameters = 0;
  // What it was trained on and for how long, as far as the file says: "" and 0 where it does not.
  std::string text;
  int64_t steps = 0, processor_seconds = 0;

  Matrix token;  // [characters, dim]
  std::vector<Block> blocks;
  NormLayer norm;
  LinearLayer head;
};

// The characters of a text in UTF-8. What is no UTF-8 becomes characters of one byte, which no
// alphabet has.
[[nodiscard]] inline std::vector<std::string> Characters(std::string_view text) {
  std::vector<std::string> characters;
  while (!text.empty()) {
    size_t bytes = 1;
    while (bytes < text.size() && (static_cast<unsigned char>(text[bytes]) & 0xc0U) == 0x80U) {
      ++bytes;
    }
    characters.emplace_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return characters;
}

// What the model is, in a line.
[[nodiscard]] inline std::string Description(const Weights& w) {
  std::string line = fmt::format(
      "A GPT that reads and writes characters: {} layers of {} heads of {}, {:.1f} million "
      "parameters",
      w.blocks.size(), w.heads, w.head_dim, static_cast<double>(w.parameters) / 1e6);
  line += fmt::format("; trained on {}", w.text.empty() ? "what its file does not say" : w.text);
  if (w.steps > 0) line += fmt::format(", {} steps", w.steps);
  if (w.processor_seconds > 0) {
    line += w.processor_seconds < 120
                ? fmt::format(", {} s of processor time", w.processor_seconds)
                : fmt::format(", {} minutes of processor time", (w.processor_seconds + 30) / 60);
  }
  return line;
}

// Reads one file. Throws UserError, which names what the file has and what it should have.
class WeightsReader {
 public:
  explicit WeightsReader(const std::string& path) : path_(path), file_(path) {}

  [[nodiscard]] Weights Read() {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    Weights w;
    w.alphabet = Characters(Metadata("alphabet"));
    w.heads = ParseInteger("heads", 1, kMost);
    w.context = ParseInteger("context", 1, kMost);
    w.rotary_base = ParseReal("rotary_base");
    epsilon_ = static_cast<float>(ParseReal("norm_epsilon"));
    constexpr int64_t kMostSeconds = 1'000'000'000'000;
    if (Says("text")) w.text = cli::Printable(Metadata("text"), 100);
    if (Says("steps")) w.steps = ParseInteger("steps", 0, kMost);
    if (Says("processor_seconds"))
      w.processor_seconds = ParseInteger("processor_seconds", 0, kMostSeconds);

    const auto characters = static_cast<int64_t>(w.alphabet.size());
    w.dim = Columns("token.weight");
    w.head_dim = w.dim / w.heads;
    // Whoever makes tables of that size believes it.
    constexpr int64_t kMostDim = 256;  // of Strobe's heads
    if (w.head_dim * w.heads != w.dim || w.head_dim % 2 != 0 || w.head_dim == 0 ||
        w.head_dim > kMostDim) {
      Refuse(
          fmt::format("heads = {} in its metadata, expected what divides the {} columns of "
                      "token.weight into heads of an even size of at most {}",
                      w.heads, w.dim, kMostDim));
    }
    // A block's matrices have dim * dim values: with one of them the file is as large as it says.
    (void)Find("blocks.0.qkv.weight");
    w.token = Table("token.weight", characters, w.dim);
    for (;;) {
      const std::string block = fmt::format("blocks.{}.", w.blocks.size());
      if (file_.header().Find(block + "qkv.weight") == nullptr) break;
      const int64_t hidden = 4 * w.dim;
      w.blocks.push_back({.attention_norm = Norm(block + "attention_norm", w.dim),
                          .qkv = Layer(block + "qkv", w.dim, 3 * w.dim),
                          .projection = Layer(block + "projection", w.dim, w.dim),
                          .feed_forward_norm = Norm(block + "feed_forward_norm", w.dim),
                          .up = Layer(block + "up", w.dim, hidden),
                          .down = Layer(block + "down", hidden, w.dim)});
    }
    w.norm = Norm("norm", w.dim);
    w.head = Layer("head", w.dim, characters);
    w.parameters = parameters_;
    return w;
  }

 private:
  [[noreturn]] void Refuse(const std::string& why) const {
    throw cli::UserError(fmt::format("{}: {}", cli::PathText(path_), why));
  }

  [[nodiscard]] bool Says(const std::string& key) const {
    return file_.header().metadata.contains(key);
  }

  [[nodiscard]] const std::string& Metadata(const std::string& key) const {
    const auto found = file_.header().metadata.find(key);
    if (found == file_.header().metadata.end()) {
      Refuse(fmt::format("no {} in its metadata, expected a file that char_gpt.py --export wrote",
                         key));
    }
    return found->second;
  }

  [[nodiscard]] int64_t ParseInteger(const std::string& key, int64_t min, int64_t max) const {
    return cli::ParseInteger(cli::PathText(path_) + ": " + key, Metadata(key), min, max);
  }

  [[nodiscard]] double ParseReal(const std::string& key) const {
    return cli::ParseNumber(cli::PathText(path_) + ": " + key, Metadata(key),
                            {.wanted = "a positive number", .min = 1e-30, .max = 1e30});
  }

  [[nodiscard]] const cli::TensorInfo& Find(const std::string& name) const {
    const cli::TensorInfo* info = file_.header().Find(name);
    if (info == nullptr) Refuse(fmt::format("no tensor {}", name));
    return *info;
  }

  [[nodiscard]] int64_t Columns(const std::string& name) const {
    const cli::TensorInfo& info = Find(name);
    constexpr int64_t kMost = 1 << 24;  // its multiples are far from overflowing
    if (info.shape.size() != 2 || info.shape[1] == 0 || info.shape[1] > kMost) {
      Refuse(fmt::format("{} is {}, expected [characters, dim] with dim from 1 to {}", name,
                         cli::ShapeText(info.shape), kMost));
    }
    return info.shape[1];
  }

  [[nodiscard]] std::vector<float> Values(const std::string& name,
                                          const std::vector<int64_t>& shape) {
    const cli::TensorInfo& info = Find(name);
    for (const DType dtype : cli::kDTypes) {
      if (info.dtype != cli::FileName(dtype) || info.shape != shape) continue;
      const std::span<const std::byte> data = file_.Read(info);
      std::vector<float> values(data.size() / cli::Bytes(dtype));
      for (size_t i = 0; i < values.size(); ++i) values[i] = cli::Load(dtype, data.data(), i);
      parameters_ += static_cast<int64_t>(values.size());
      return values;
    }
    Refuse(fmt::format("{} is {} {}, expected F32, BF16 or F16 {}", name, info.dtype,
                       cli::ShapeText(info.shape), cli::ShapeText(shape)));
  }

  [[nodiscard]] Matrix Table(const std::string& name, int64_t rows, int64_t cols) {
    Matrix table;
    table.values = Values(name, {rows, cols});  // memory is taken once the file is known to have it
    table.rows = rows;
    table.cols = cols;
    return table;
  }

  [[nodiscard]] NormLayer Norm(const std::string& name, int64_t dim) {
    return {Values(name + ".weight", {dim}), Values(name + ".bias", {dim}), epsilon_};
  }

  // PyTorch keeps weights as [out, in].
  [[nodiscard]] LinearLayer Layer(const std::string& name, int64_t in, int64_t out) {
    const Matrix stored = Table(name + ".weight", out, in);
    LinearLayer layer = {Matrix(in, out), Values(name + ".bias", {out})};
    for (int64_t i = 0; i < out; ++i) {
      for (int64_t j = 0; j < in; ++j) {
        layer.weight.row(j)[static_cast<size_t>(i)] = stored.row(i)[static_cast<size_t>(j)];
      }
    }
    return layer;
  }

  std::string path_;
  cli::SafetensorsFile file_;
  float epsilon_ = 0;
  int64_t parameters_ = 0;
};

[[nodiscard]] inline Matrix Apply(const LinearLayer& layer, const Matrix& x) {
  Matrix y = Linear(x, layer.weight);
  for (int64_t i = 0; i < y.rows; ++i) {
    const std::span<float> row = y.row(i);
    for (size_t j = 0; j < row.size(); ++j) row[j] += layer.bias[j];
  }
  return y;
}

// Each row less its mean, over its standard deviation, times the weight, plus the bias.
[[nodiscard]] inline Matrix Apply(const NormLayer& layer, const Matrix& x) {
  Matrix y(x.rows, x.cols);
  const auto count = static_cast<float>(x.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    const std::span<const float> row = x.row(i);
    float sum = 0, squares = 0;
    for (const float value : row) sum += value;
    const float mean = sum / count;
    for (const float value : row) squares += (value - mean) * (value - mean);
    const float factor = 1 / std::sqrt(squares / count + layer.epsilon);
    for (size_t j = 0; j < row.size(); ++j) {
      y.row(i)[j] = (row[j] - mean) * factor * layer.weight[j] + layer.bias[j];
    }
  }
  return y;
}

// x * (the normal distribution's integral up to x).
[[nodiscard]] inline Matrix Gelu(Matrix x) {
  constexpr float kRootHalf = 0.70710678F;
  for (float& value : x.values) value *= 0.5F * (1 + std::erf(value * kRootHalf));
  return x;
}

}  // namespace strobe::generate

#endif  // STROBE_EXAMPLES_CHAR_GPT_H_
