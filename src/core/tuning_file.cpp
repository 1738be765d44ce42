#include "core/tuning_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <utility>

#include "core/checks.h"

namespace strobe {

namespace {

// What a string of the file may have: no escapes are needed, so that none are read.
bool is_text(char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; }

bool is_before(const TunedChoice& a, const TunedChoice& b) { return a.problems < b.problems; }

// Reads what is expected, one piece after another. Once something else is there, error() says so,
// and whatever is asked for afterwards fails.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  const std::string& error() const { return error_; }
  bool failed(const std::string& what) {
    if (error_.empty()) error_ = format("line %d: ", line_) + what;
    return false;
  }

  bool punctuation(char wanted) {
    if (next_is(wanted)) return true;
    return failed(format("expected %c", wanted));
  }
  // Whether this character comes next, which is then read.
  bool next_is(char wanted) {
    skip_space();
    if (!error_.empty() || text_.empty() || text_.front() != wanted) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool end() {
    skip_space();
    return text_.empty() || failed("expected the end of the file");
  }

  // "name": before its value
  bool key(const char* wanted) {
    std::string found;
    if (!error_.empty()) return false;
    skip_space();
    const std::string quoted = '"' + std::string(wanted) + '"';
    if (!text_.starts_with(quoted)) return failed("expected " + quoted);
    text_.remove_prefix(quoted.size());
    return punctuation(':');
  }
  bool string(std::string& value) {
    if (!punctuation('"')) return false;
    size_t size = 0;
    while (size < text_.size() && is_text(text_[size]) && size <= TuningFile::kMostText) ++size;
    if (size > TuningFile::kMostText) {
      return failed(format("expected at most %zu characters", TuningFile::kMostText));
    }
    value = text_.substr(0, size);
    text_.remove_prefix(size);
    if (text_.empty() || text_.front() != '"') {
      return failed("expected a string of letters, digits and spaces");
    }
    text_.remove_prefix(1);
    return true;
  }
  bool integer(int64_t least, int64_t most, int64_t& value) {
    skip_space();
    constexpr size_t kMostDigits = 15;
    size_t digits = 0;
    int64_t read = 0;
    while (digits < text_.size() && digits < kMostDigits && '0' <= text_[digits] &&
           text_[digits] <= '9')
      read = 10 * read + (text_[digits++] - '0');
    if (!error_.empty() || digits == 0 || read < least || read > most) {
      return failed(format("expected a number from %" PRId64 " to %" PRId64, least, most));
    }
    text_.remove_prefix(digits);
    value = read;
    return true;
  }

 private:
  void skip_space() {
    size_t n = 0;
    for (; n < text_.size() &&
           (text_[n] == ' ' || text_[n] == '\n' || text_[n] == '\t' || text_[n] == '\r');
         ++n)
      line_ += text_[n] == '\n';
    text_.remove_prefix(n);
  }

  std::string_view text_;
  std::string error_;
  int line_ = 1;
};

// [item, item, ...], at most so many. read: one of them.
template <typename Read>
bool read_list(Reader& reader, size_t most, const Read& read) {
  if (!reader.punctuation('[')) return false;
  if (reader.next_is(']')) return true;
  for (size_t n = 0; n < most; ++n) {
    if (!read()) return false;
    if (reader.next_is(']')) return true;
    if (!reader.punctuation(',')) return false;
  }
  return reader.failed(format("expected at most %zu in the list", most));
}

bool read_choice(Reader& r, TunedChoice& c) {
  constexpr int64_t kMost = 1'000'000'000;
  return r.punctuation('{') && r.key("problems") && r.string(c.problems) && r.punctuation(',') &&
         r.key("kernel") && r.string(c.kernel) && r.punctuation(',') && r.key("instance") &&
         r.string(c.instance) && r.punctuation(',') && r.key("block") &&
         r.integer(0, kMost, c.block) && r.punctuation(',') && r.key("gain_percent") &&
         r.integer(0, kMost, c.gain_percent) && r.punctuation('}');
}

bool read_device(Reader& r, TunedDevice& d) {
  if (!(r.punctuation('{') && r.key("device") && r.string(d.device))) return false;
  if (d.device != "cpu" && d.device != "cuda") return r.failed("expected \"cpu\" or \"cuda\"");
  if (!(r.punctuation(',') && r.key("name") && r.string(d.name) && r.punctuation(',') &&
        r.key("compute_capability") && r.integer(0, 9999, d.compute_capability) &&
        r.punctuation(',') && r.key("choices")))
    return false;
  const auto one = [&] {
    TunedChoice choice;
    if (!read_choice(r, choice)) return false;
    d.choices.push_back(std::move(choice));
    return true;
  };
  if (!read_list(r, TuningFile::kMostChoices, one)) return false;
  std::sort(d.choices.begin(), d.choices.end(), is_before);
  for (size_t i = 1; i < d.choices.size(); ++i) {
    if (d.choices[i].problems == d.choices[i - 1].problems) {
      return r.failed("expected one choice for " + d.choices[i].problems);
    }
  }
  return r.punctuation('}');
}

std::string quoted(const std::string& text) {
  std::string s = "\"";
  for (const char c : text.substr(0, TuningFile::kMostText)) s += is_text(c) ? c : '?';
  return s + '"';
}

}  // namespace

const TunedChoice* TunedDevice::find(std::string_view problems) const {
  const auto found = std::lower_bound(
      choices.begin(), choices.end(), problems,
      [](const TunedChoice& c, std::string_view wanted) { return c.problems < wanted; });
  return found != choices.end() && found->problems == problems ? &*found : nullptr;
}

std::string parse_tuning(std::string_view text, TuningFile& file) {
  if (text.size() > TuningFile::kMostBytes) {
    return format("more than %zu bytes", TuningFile::kMostBytes);
  }
  Reader r(text);
  TuningFile read;
  int64_t file_format = 0;
  const auto one = [&] {
    TunedDevice device;
    if (!read_device(r, device)) return false;
    read.devices.push_back(std::move(device));
    return true;
  };
  if (r.punctuation('{') && r.key("strobe_tuning") &&
      r.integer(TuningFile::kFormat, TuningFile::kFormat, file_format) && r.punctuation(',') &&
      r.key("version") && r.string(read.version) && r.punctuation(',') && r.key("devices") &&
      read_list(r, TuningFile::kMostDevices, one) && r.punctuation('}') && r.end()) {
    file = std::move(read);
  }
  return r.error();
}

std::string to_text(const TuningFile& file) {
  std::string s = format("{\n  \"strobe_tuning\": %" PRId64 ",\n", TuningFile::kFormat);
  s += "  \"version\": " + quoted(file.version) + ",\n  \"devices\": [";
  for (const TunedDevice& d : file.devices) {
    s += &d == &file.devices.front() ? "\n" : ",\n";
    s += "    {\n      \"device\": " + quoted(d.device) + ",\n      \"name\": " + quoted(d.name);
    s += format(",\n      \"compute_capability\": %" PRId64 ",\n      \"choices\": [",
                d.compute_capability);
    for (const TunedChoice& c : d.choices) {
      s += &c == &d.choices.front() ? "\n" : ",\n";
      s += "        {\"problems\": " + quoted(c.problems) + ",\n         \"kernel\": ";
      s += quoted(c.kernel) + ", \"instance\": " + quoted(c.instance);
      s += format(", \"block\": %" PRId64 ", \"gain_percent\": %" PRId64 "}", c.block,
                  c.gain_percent);
    }
    s += d.choices.empty() ? "]\n    }" : "\n      ]\n    }";
  }
  return s + (file.devices.empty() ? "]\n}\n" : "\n  ]\n}\n");
}

std::string tuning_path_of_user() {
  const auto folder = [](const char* variable) -> std::string {
    const char* const value = std::getenv(variable);
    return value && *value == '/' ? value : "";  // XDG: what is not absolute does not count
  };
  std::string cache = folder("XDG_CACHE_HOME");
  if (cache.empty()) {
    const std::string home = folder("HOME");
    if (home.empty()) return {};
    cache = home + "/.cache";
  }
  return cache + "/strobe/tuning.json";
}

}  // namespace strobe
