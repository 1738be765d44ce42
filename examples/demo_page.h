// The page that demo.cpp ends with: what it computed and measured, put into demo_page.html, which
// draws it. One file, which needs no other.
#ifndef STROBE_EXAMPLES_DEMO_PAGE_H_
#define STROBE_EXAMPLES_DEMO_PAGE_H_

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/errors.h"
#include "cli/text.h"

namespace strobe::demo {

struct Token {
  std::string piece;  // as the model read it
  std::string text;   // what of the text it stands for, with the white space before it
};

// A run of tokens with the weights among them.
struct Sentence {
  int64_t first = 0, count = 0;
  std::vector<int32_t> weights;  // [heads, count, count], 1 is kWeightUnit
};
constexpr double kWeightUnit = 10000;

struct AttentionMap {
  std::string kernel;
  int64_t heads = 0, head = 0;  // that are shown; the one to begin with
  std::vector<Sentence> sentences;
  double row_sum_error = 0;
};

struct ErrorLine {
  std::string dtype;
  std::array<double, 4> strobe = {}, standard = {};  // of O, dQ, dK, dV
};

struct Cost {
  double seconds = 0;  // 0: not measured
  double bytes = 0;
};

struct CostLine {
  int64_t tokens = 0;
  Cost standard, strobe;
  std::optional<Cost> pytorch;
  std::string busy;    // why its times may not be compared; "": they may
  std::string remedy;  // then what to do for times that may
};

struct PageContent {
  std::map<std::string, std::string> facts;
  std::vector<Token> tokens;  // none: nobody knows what they are
  int64_t token_count = 0, head_dim = 0, threads = 0;
  std::string pytorch;  // its version; "": it was not there
  AttentionMap attention;
  std::vector<ErrorLine> errors;
  std::vector<CostLine> forward, both;
};

// What the tokens of a capture are: of the file .tokens.json beside it, {"tokens": [[piece, text],
// ...]}. None where there is no such file. Throws UserError where it is something else.
[[nodiscard]] inline std::vector<Token> ReadTokens(const std::string& capture, int64_t count) {
  const std::string path =
      std::filesystem::path(capture).replace_extension(".tokens.json").string();
  std::ifstream file(path);
  if (!file) return {};
  const auto refuse = [&](const std::string& got) {
    throw cli::UserError(fmt::format(
        "{}: {}, expected {{\"tokens\": [[piece, text], ...]}} with {} pairs of strings",
        cli::PathText(path), got, count));
  };
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("tokens") || !json["tokens"].is_array())
    refuse("not such an object");
  std::vector<Token> tokens;
  for (const nlohmann::json& pair : json["tokens"]) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string())
      refuse(fmt::format("tokens[{}] is no such pair", tokens.size()));
    tokens.push_back({pair[0].get<std::string>(), pair[1].get<std::string>()});
  }
  if (static_cast<int64_t>(tokens.size()) != count) refuse(fmt::format("{} pairs", tokens.size()));
  return tokens;
}

// Cuts the tokens into sentences, each to the full stop, and computes the weights in them.
// weight(head, query, key) is a number from 0 to 1.
template <typename Weight>
[[nodiscard]] AttentionMap Attention(const std::vector<Token>& tokens, int64_t count, int64_t heads,
                                     Weight weight) {
  // Of the page, so that it stays small whatever the file holds.
  constexpr int64_t kMostHeads = 16, kMostTokens = 48, kUnnamed = 16;
  constexpr size_t kMostSentences = 32;
  AttentionMap map;
  map.heads = std::min(heads, kMostHeads);

  for (int64_t i = 0, first = 0; i < count && map.sentences.size() < kMostSentences; ++i) {
    const bool named = !tokens.empty();
    const Token* const token = named ? &tokens[static_cast<size_t>(i)] : nullptr;
    if (named && token->text.empty() && i == first) {  // [CLS] begins no sentence
      first = i + 1;
      continue;
    }
    const bool stop = named && (token->piece == "." || token->piece == "?" || token->piece == "!");
    const int64_t most = named ? kMostTokens : kUnnamed;
    if (stop || i + 1 - first == most || i + 1 == count) {
      map.sentences.push_back({.first = first, .count = i + 1 - first, .weights = {}});
      first = i + 1;
    }
  }
  if (map.sentences.empty())
    map.sentences.push_back({.first = 0, .count = std::min(count, kMostTokens), .weights = {}});
  for (Sentence& s : map.sentences) {
    for (int64_t head = 0; head < map.heads; ++head) {
      for (int64_t i = s.first; i < s.first + s.count; ++i) {
        for (int64_t j = s.first; j < s.first + s.count; ++j) {
          s.weights.push_back(static_cast<int32_t>(std::lround(kWeightUnit * weight(head, i, j))));
        }
      }
    }
  }
  for (int64_t head = 0; head < map.heads; ++head) {
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < count; ++j) sum += weight(head, i, j);
      map.row_sum_error = std::max(map.row_sum_error, std::abs(sum - 1));
    }
  }

  // The one that picks its words most clearly in the first sentence: whose largest weights, of each
  // row, are the largest on average.
  double clearest = -1;
  for (int64_t head = 0; head < map.heads; ++head) {
    const Sentence& s = map.sentences.front();
    double sum = 0;
    for (int64_t i = 0; i < s.count; ++i) {
      const auto row = s.weights.begin() + (head * s.count + i) * s.count;
      sum += *std::max_element(row, row + s.count);
    }
    if (sum > clearest) {
      clearest = sum;
      map.head = head;
    }
  }
  return map;
}

[[nodiscard]] inline nlohmann::json ToJson(const PageContent& page) {
  nlohmann::json json;
  for (const auto& [key, value] : page.facts) json[key] = value;
  json["date"] = fmt::format("{:%d %B %Y}", fmt::localtime(std::time(nullptr)));
  json["machine"] = {{"cpu", page.facts.at("cpu")}, {"threads", page.threads}};
  json["tokens"] = page.token_count;
  json["head_dim"] = page.head_dim;
  json["pytorch"] = page.pytorch;

  nlohmann::json& map = json["attention"];
  map = {{"kernel", page.attention.kernel}, {"heads", page.attention.heads},
         {"head", page.attention.head},     {"unit", kWeightUnit},
         {"unnamed", page.tokens.empty()},  {"row_sum_error", page.attention.row_sum_error}};
  for (const Sentence& s : page.attention.sentences) {
    nlohmann::json pieces, text;
    for (int64_t i = s.first; i < s.first + s.count; ++i) {
      const Token token = page.tokens.empty() ? Token{fmt::format("{}", i), fmt::format(" {}", i)}
                                              : page.tokens[static_cast<size_t>(i)];
      pieces.push_back(token.piece);
      text.push_back(token.text.empty() ? " " + token.piece : token.text);
    }
    map["sentences"].push_back({{"pieces", pieces}, {"text", text}, {"weights", s.weights}});
  }

  for (const ErrorLine& line : page.errors) {
    json["errors"].push_back(
        {{"dtype", line.dtype}, {"strobe", line.strobe}, {"standard", line.standard}});
  }
  const auto costs = [](const std::vector<CostLine>& lines) {
    const auto cost = [](const Cost& c) -> nlohmann::json {
      return {{"seconds", c.seconds}, {"bytes", c.bytes}};
    };
    nlohmann::json list = nlohmann::json::array();
    for (const CostLine& line : lines) {
      nlohmann::json entry = {{"tokens", line.tokens},
                              {"standard", cost(line.standard)},
                              {"strobe", cost(line.strobe)},
                              {"busy", line.busy},
                              {"remedy", line.remedy}};
      if (line.pytorch) entry["pytorch"] = cost(*line.pytorch);
      list.push_back(entry);
    }
    return list;
  };
  json["costs"] = {{"forward", costs(page.forward)}, {"both", costs(page.both)}};
  return json;
}

// Puts the content into the template, in the place of @DATA@. Throws UserError.
inline void WritePage(const std::string& path, const std::string& page_template,
                      const PageContent& page) {
  std::ifstream file(page_template);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::string mark = "@DATA@";
  const size_t place = text.find(mark);
  if (place == std::string::npos) {
    throw cli::UserError(fmt::format("{} is missing, or has no {} to put the data in",
                                     cli::PathText(page_template), mark));
  }
  // What a file's metadata says must not end the script that it stands in.
  std::string data = ToJson(page).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (size_t at = 0; (at = data.find('<', at)) != std::string::npos;)
    data.replace(at, 1, "\\u003c");
  text.replace(place, mark.size(), data);
  std::ofstream out(path, std::ios::trunc);
  if (!(out << text) || !out.flush()) {
    throw cli::UserError(fmt::format("cannot write {}", cli::PathText(path)));
  }
}

}  // namespace strobe::demo

#endif  // STROBE_EXAMPLES_DEMO_PAGE_H_
