// `strobe run` from the command line and the bytes of a file to the launch and the output file:
// words before the command and flags after it drawn from the input, the file as it stands. It ends
// with 0 or 2; a failure is one short text of printable characters; the output file is whole or was
// not made.
//
// Input: a byte with the numbers of flags (its low bits) and of words, a byte for each word, for
// each flag a byte or two, then the file.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/command_line.h"
#include "cli/safetensors_file.h"
#include "cli/text.h"

namespace {

using strobe::cli::Outcome;
using strobe::cli::SafetensorsFile;

void Require(bool good, const char* what, const std::string& text) {
  if (good) return;
  std::fprintf(stderr, "run: %s: %s\n", what, text.c_str());
  std::abort();
}

// A flag, how many values it takes, and which are worth a try.
struct Flag {
  const char* name;
  int values;
  std::span<const char* const> choices;
};
constexpr std::array kNone = {""};
constexpr std::array kNumbers = {"0",    "1",   "0.5",  "-1",    "1e-50", "1e-39", "1e38",
                                 "1e39", "nan", "-inf", "65504", "",      "0.999", "1e"};
constexpr std::array kIntegers = {
    "0", "1", "2", "3", "7", "64", "-1", "-2", "2147483647", "9223372036854775807", "8k", ""};
constexpr std::array kDTypes = {"float32", "bf16", "fp16", "float64"};
constexpr std::array kLayouts = {"bshd", "bhsd", "sbhd"};
constexpr std::array<Flag, 20> kFlags = {{{"--causal", 0, kNone},
                                          {"--signed-window", 2, kIntegers},
                                          {"--window", 2, kIntegers},
                                          {"--scale", 1, kNumbers},
                                          {"--softcap", 1, kNumbers},
                                          {"--dropout", 1, kNumbers},
                                          {"--seed", 1, kIntegers},
                                          {"--offset", 1, kIntegers},
                                          {"--alibi", 0, kNone},
                                          {"--deterministic", 0, kNone},
                                          {"--batch-invariant", 0, kNone},
                                          {"--forward", 0, kNone},
                                          {"--backward", 0, kNone},
                                          {"--dtype", 1, kDTypes},
                                          {"--layout", 1, kLayouts},
                                          {"--device-index", 1, kIntegers},
                                          {"--why", 0, kNone},
                                          {"--attention-chunk", 1, kIntegers},
                                          {"--out-float32", 0, kNone},
                                          {"--rotary-interleaved", 0, kNone}}};

// What may stand before `run`. Of the commands, those that end at once whatever follows.
constexpr std::array kWords = {"help", "--help", "--version", "info", "run",  "bench",
                               "",     "--",     "-x",        "--x",  "word", "run=bench"};

// All arguments from the command on, or from the words before it, and how many words those are.
std::vector<std::string> TakeArguments(std::span<const uint8_t>* input, int* words) {
  const auto take = [input] {
    const uint8_t byte = input->empty() ? 0 : input->front();
    *input = input->subspan(input->empty() ? 0 : 1);
    return byte;
  };
  std::vector<std::string> arguments;
  const int counts = take();
  *words = counts / 8 % 4;
  for (int n = 0; n < *words; ++n) arguments.emplace_back(kWords[take() % kWords.size()]);
  arguments.emplace_back("run");
  for (int count = counts % 8; count > 0; --count) {
    const Flag& flag = kFlags[take() % kFlags.size()];
    arguments.emplace_back(flag.name);
    for (int i = 0; i < flag.values; ++i)
      arguments.emplace_back(flag.choices[take() % flag.choices.size()]);
  }
  return arguments;
}

// In memory, so that nothing waits for a disk. Its path can be opened as often as one likes.
class MemoryFile {
 public:
  explicit MemoryFile(std::span<const uint8_t> bytes)
      : file_(memfd_create("fuzz", MFD_CLOEXEC)),
        path_("/proc/self/fd/" + std::to_string(file_.fd())) {
    Require(write(file_.fd(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
            "cannot write", path_);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  strobe::cli::File file_;
  std::string path_;
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  // What the tool prints, libFuzzer's own log being on standard error.
  if (std::freopen("/dev/null", "w", stdout) == nullptr) std::abort();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A file of 16 KB has room for 4096 numbers: a few million operations at most. Extents that claim
  // more without having the bytes are what is to be refused.
  constexpr size_t kMaxFile = 1 << 14;
  std::span<const uint8_t> input(data, size);
  std::vector<std::string> arguments = {"strobe"};
  int words = 0;
  for (std::string& argument : TakeArguments(&input, &words))
    arguments.push_back(std::move(argument));
  if (input.size() > kMaxFile) return 0;

  const MemoryFile file(input);
  static const std::string output = "/dev/shm/strobe-fuzz-" + std::to_string(getpid());
  for (const std::string& more :
       {std::string("--threads"), std::string("1"), std::string("--repeat"), std::string("1"),
        std::string("--output"), output, file.path()}) {
    arguments.push_back(more);
  }
  std::vector<const char*> argv;
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());

  const Outcome outcome = strobe::cli::RunCommandLine(static_cast<int>(argv.size()), argv.data());
  const bool made = std::filesystem::exists(output);
  if (outcome.exit_code == 0) {
    Require(outcome.error.empty(), "an error with exit code 0", outcome.error);
    if (!made) {  // --help, --version
      Require(words > 0, "no output", output);
      return 0;
    }
    SafetensorsFile result(output);  // throws unless the tensors fill the file
    Require(result.header().Find("out") != nullptr, "no out in", output);
    unlink(output.c_str());
  } else {
    Require(outcome.exit_code == 2, "a fault", outcome.error);
    Require(!outcome.error.empty(), "no error", "");
    Require(outcome.error.size() <= strobe::cli::kMaxMessage, "a long error", outcome.error);
    for (const char c : outcome.error)
      Require(c == '\n' || (c >= ' ' && c <= '~'), "an unprintable error", outcome.error);
    Require(!made, "an output in spite of an error", outcome.error);
  }
  return 0;
}
