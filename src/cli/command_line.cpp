// Reads the command line; the work is in commands.h.
#include "cli/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/completion.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/flags.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace strobe::cli {
namespace {

constexpr int kUserErrorExit = 2;
constexpr int kFaultExit = 3;  // nothing that a user does may lead to it

const Choices<DType> kDTypeNames = {{"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16},
                                    {"float16", DType::kFloat16}, {"fp32", DType::kFloat32},
                                    {"bf16", DType::kBFloat16},   {"fp16", DType::kFloat16}};
const Choices<Device> kDeviceNames = {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}};
const Choices<int64_t> kMaskBlocks = {{"64", 64}, {"128", 128}, {"256", 256}};
const Choices<KvScale> kScaleNames = {
    {"row", KvScale::kRow}, {"head", KvScale::kHead}, {"tensor", KvScale::kTensor}};
const Choices<Layout> kLayoutNames = {{"bshd", Layout::kSeqlenHeads},
                                      {"bhsd", Layout::kHeadsSeqlen}};
const Choices<Which> kDirectionNames = {
    {"forward", Which::kForward}, {"backward", Which::kBackward}, {"both", Which::kBoth}};
constexpr size_t kShortNames = 3;  // of dtypes, in help
constexpr int64_t kMaxInt32 = 0x7fffffff;

// A flag's value is shown as it is typed: "--causal[=no|yes]" beside "--threads N".
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = option->get_type_name();
    return (type.empty() || type.starts_with("[=") ? "" : " ") + type;
  }
};

std::vector<const CLI::App*> Commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

void AddThreads(CLI::App& app, int64_t* threads) {
  constexpr int64_t kMaxThreads = 65536;  // the library's
  AddInteger(app, "--threads", threads, 1,
             "CPU threads at most; default: OMP_NUM_THREADS, or one a core", kMaxThreads);
}

void AddDevice(CLI::App& app, Device* device, int64_t* index) {
  AddChoice(app, "--device", kDeviceNames, device, "Default cpu");
  AddInteger(app, "--device-index", index, 0, "Which GPU; default 0", kMaxInt32);
  app.callback([=] {
    if (*device != Device::kCpu || *index == 0) return;
    throw UserError(fmt::format("--device-index = {}, expected 0 with --device cpu", *index));
  });
}

void AddSeconds(CLI::App& app, const char* name, const char* help, double* seconds) {
  AddText(app, name, "SECONDS", help, [=](const std::string& flag, const std::string& text) {
    constexpr double kDay = 86400;
    *seconds =
        ParseNumber(flag, text, {.wanted = "a number from 0 to 86400", .min = 0, .max = kDay});
  });
}

void AddInfo(CLI::App& app, InfoOptions* o) {
  AddFlag(app, "--json", &o->json, "As JSON");
  app.footer("Example:\n  strobe info");
}

void SetDirection(RunOptions* o, Which which) {
  if (o->direction.value_or(which) != which)
    throw UserError("--forward and --backward, expected one of them at most");
  o->direction = which;
}

void AddRun(CLI::App& app, RunOptions* o) {
  app.add_option("FILE", o->input, "Safetensors file with q, k, v (and dout)")
      ->required()
      ->type_name("");
  AddText(app, "-o,--output", "FILE", "Write out, lse (and dq, dk, dv) to this safetensors file",
          [o](const std::string& flag, const std::string& text) {
            if (text.empty()) throw UserError(flag + " = \"\", expected a file name");
            o->output = text;
          });
  AddOptions(app, &o->problem);
  AddInteger(app, "--seed", &o->seed, 0, "Seed of the dropout; default 0");
  AddInteger(app, "--offset", &o->offset, 0, "Offset of the dropout's random numbers; default 0");
  AddFlag(app, "--alibi", &o->alibi,
          "ALiBi with slopes 2^(-8 h / heads), unless the file has alibi_slopes");
  AddFlag(app, "--sinks-outside-lse", &o->problem.sinks_outside_lse,
          "Where the file has sinks: lse is that of the keys alone");
  app.add_flag_callback(
         "--forward", [o] { SetDirection(o, Which::kForward); },
         "Forward only, also when the file has dout")
      ->disable_flag_override();
  app.add_flag_callback(
         "--backward", [o] { SetDirection(o, Which::kBoth); },
         "Backward too; when the file has no dout, with 1 everywhere")
      ->disable_flag_override();
  AddChoice(app, "--dtype", kDTypeNames, &o->dtype,
            "Convert to this dtype first; float32, bfloat16, float16 are names too", kShortNames);
  AddFlag(app, "--out-float32", &o->out_float32, "out in float32 (a backward pass reads it too)");
  AddFlag(app, "--rotary-interleaved", &o->rotary_interleaved,
          "the rotary tables rotate neighbours, not elements of the two halves");
  AddChoice(app, "--layout", kLayoutNames, &o->layout,
            "bshd: batch, seqlen, heads, head_dim (default); or bhsd");
  AddChoice(app, "--mask-block", kMaskBlocks, &o->mask_block,
            "Queries and keys of a block of the file's mask: 64, 128 (default) or 256");
  AddThreads(app, &o->threads);
  AddDevice(app, &o->device, &o->device_index);
  AddInteger(app, "--repeat", &o->repeat, 1, "Runs to time; default: as many as take half a second",
             kMaxInt32);
  AddFlag(app, "--why", &o->why, "Print the plan: kernel, tiles, threads, workspace, and why");
  app.footer(
      "Tensors, all F32, BF16 or F16 alike:\n"
      "  q              [batch, seqlen_q, heads, head_dim]\n"
      "  k              [batch, seqlen_k, heads_kv, head_dim]\n"
      "  v              [batch, seqlen_k, heads_kv, head_dim_v]\n"
      "  qkv            [batch, seqlen, 3, heads, head_dim], in place of q, k, v\n"
      "  kv             [batch, seqlen_k, 2, heads_kv, head_dim], in place of k, v\n"
      "  dout           [batch, seqlen_q, heads, head_dim_v], for the backward pass\n"
      "Optional:\n"
      "  cu_seqlens_q   I32 [batch + 1]: sequences lie end to end, [total, ...] in place\n"
      "  cu_seqlens_k   of [batch, seqlen, ...]; cu_seqlens stands for both\n"
      "  alibi_slopes   F32 [heads] or [batch, heads]\n"
      "  sinks          F32 [heads], attention sinks; dsinks is then written too\n"
      "  bias           [batch, heads, seqlen_q, seqlen_k], each of the first three or 1, of any\n"
      "                 of the dtypes: added to the scores; its gradient is dbias\n"
      "  dlse           F32 [batch, heads, seqlen_q], a gradient of lse\n"
      "  seqused_q      I32 [batch]: so many rows of each sequence are in use, the first ones\n"
      "  seqused_k      likewise of k and v\n"
      "  q_position     I32 [batch]: key position of each sequence's first query\n"
      "  prefix         I32 [batch]: keys that all queries of the sequence see\n"
      "A mask as data: a pair is seen if all of these allow it\n"
      "  mask           BOOL [batch or 1, heads or 1, seqlen_q, seqlen_k]; packed\n"
      "                 [heads or 1, total_q, keys of the longest sequence]\n"
      "  mask_intervals I32 [..., seqlen_q, 4]: a query sees the keys of two intervals: begin,\n"
      "                 end, begin, end\n"
      "  mask_partial_counts, mask_partial_blocks, mask_partial_bits, mask_full_counts,\n"
      "  mask_full_blocks\n"
      "                 lists of blocks, as in strobe_mask_args (strobe.h)\n"
      "A KV cache, forward only: with any of these, k and v are\n"
      "               [cache_batch, seqlen_k, heads_kv, head_dim], or with block_table\n"
      "               [pages, page_size, heads_kv, head_dim]; q is dense, or packed by "
      "cu_seqlens_q\n"
      "  block_table    I32 [batch, pages_per_sequence]: the pages of each sequence\n"
      "  cache_batch_idx, leftpad, rotary_position\n"
      "                 I32 [batch]: entry of the cache, rows to skip, first position\n"
      "  k_new, v_new   [batch, seqlen_new, heads_kv, head_dim]: written behind each sequence's\n"
      "                 seqused_k rows; the changed cache is a part of the result\n"
      "  cu_seqlens_k_new\n"
      "                 I32 [batch + 1]: k_new and v_new are [total, heads_kv, head_dim]\n"
      "  k_scale, v_scale\n"
      "                 F32 or F16 [cache_batch, seqlen_k, heads_kv], [heads_kv] or [1]: k and v\n"
      "                 are I8 or F8_E4M3, times these. U8: rows of q8_0 or q4_0, without.\n"
      "                 k and v may be of two dtypes, one of them that of q\n"
      "  q_scale        q is F8_E4M3, k and v are that or F8_E5M2: these and k_scale and v_scale\n"
      "                 are F32 [batch or 1, heads_kv], and k and v no cache by them; out is BF16\n"
      "  rotary_cos, rotary_sin\n"
      "                 [positions, rotary_dim / 2]: rotate q and k_new\n"
      "\n"
      "Lengths (--window, --attention-chunk) may end with k (1024) or M (1024^2): 2k, 1M.\n"
      "\n"
      "Examples:\n"
      "  strobe run examples/data/minilm_layer3_512.safetensors -o out.safetensors\n"
      "  strobe run qkv.safetensors --dtype bfloat16 --causal --window 256 0 --why");
}

void AddCheck(CLI::App& app, CheckOptions* o) {
  CLI::Option* const files =
      app.add_option("FILE", o->files, "With --kv: safetensors files with q, k, v")
          ->expected(0, -1)
          ->take_all()
          ->type_name("");
  CLI::Option* const cases = AddInteger(app, "--cases", &o->cases, 1,
                                        "Random problems for each feature; default 12", 1'000'000);
  AddInteger(app, "--seed", &o->seed, 0, "Another seed, other problems; default 1");
  CLI::Option* const choices =
      AddFlag(app, "--choices", &o->choices,
              "Not by the rules: each problem by one of the ways that there are, in turns");
  AddThreads(app, &o->threads);
  AddDevice(app, &o->device, &o->device_index);
  AddFlag(app, "--json", &o->json, "JSON on standard output in place of the table");
  CLI::Option* const kv =
      AddChoiceList(app, "--kv", kCodeNames, &o->kv,
                    "In place of random problems: what a cache of such codes costs in accuracy");
  kv->excludes(cases)->excludes(choices);
  files->needs(kv);
  const auto others = app.get_options();
  AddChoice(app, "--kv-scale", kScaleNames, &o->kv_scale,
            "With --kv: whose scales int8 and float8 have; default row");
  AddChoice(app, "--dtype", kDTypeNames, &o->dtype,
            "With --kv: of q, k and v before they are codes; default the file's", kShortNames);
  AddChoice(app, "--layout", kLayoutNames, &o->layout,
            "With --kv: bshd: batch, seqlen, heads, head_dim (default); or bhsd");
  AddOptions(app, &o->problem);
  for (CLI::Option* const option : app.get_options()) {
    if (std::find(others.begin(), others.end(), option) == others.end()) option->needs(kv);
  }
  app.footer(
      "Compares seeded random problems with float64, one line a feature.\n"
      "Exit code 1 when one fails.\n"
      "\n"
      "With --kv: quantises k and v of each FILE (tensors as `strobe run` reads them, without\n"
      "bias and masks as data; no FILE: random ones) to each of the forms, and compares attention\n"
      "over such a cache, and over caches of floats, with float64 over what is in the file.\n"
      "bytes: of a key and its value in one head. attention: error of out over the root mean\n"
      "square of the float64 result; rms of all elements, worst of one, worst head. K and V\n"
      "alone: the same of float64 attention over what the cache stands for.\n"
      "Where float64 would take long, queries at equal distances are compared.\n"
      "\n"
      "JSON: one object with machine (as `strobe info --json`), device, seed, threads,\n"
      "cases, features, kernels (launches of each), problems, failed_features, seconds\n"
      "and ok. features is a list of name, cases, ok, error_over_allowed (the largest;\n"
      "null for none and for infinity) and failure (\"\" where ok).\n"
      "With --kv: machine, device, seed, kv_scale and inputs, a list of file, shapes,\n"
      "queries_compared and caches, a list of kv, dtype, bytes, worst_head, attention and\n"
      "k_and_v_alone, each of these with rms, worst and heads (rms of each).\n"
      "\n"
      "Examples:\n"
      "  strobe check\n"
      "  strobe check --kv int8,q4_0 --dtype bf16 examples/data/minilm_layer3_512.safetensors\n"
      "  STROBE_CPU_ISA=avx2 strobe check --cases 100 --seed 7");
}

void AddBench(CLI::App& app, BenchOptions* o) {
  AddFlag(app, "--decode", &o->decode,
          "Few queries on a KV cache, beside a plain read (defaults in brackets)");
  AddChoiceList(app, "--dtype", kDTypeNames, &o->dtypes, "Default fp32,bf16", kShortNames);
  AddLengths(app, "--head-dim", &o->head_dims, 1, 256, "Default 64,128 [128]");
  AddLengths(app, "--seqlen", &o->seqlens, 1, kMaxInt32,
             "Tokens, of queries and keys; default 512,1024,2048,4096 [1]");
  AddLengths(app, "--seqlen-k", &o->seqlens_k, 1, kMaxInt32,
             "Keys; default: as many as queries [4096]");
  AddLengths(app, "--page-size", &o->page_sizes, 0, kMaxInt32,
             "With --decode: rows of a page; 0 (default): contiguous");
  AddText(app, "--kv", Alternatives(kKvNames) + ",...",
          "With --decode: what the cache holds; default same (as q). K/V: q8_0/q4_0",
          [o](const std::string& flag, const std::string& text) {
            o->kv.clear();
            for (const std::string& part : SplitCommas(text)) o->kv.push_back(ChosenKv(flag, part));
          });
  AddChoice(app, "--layout", kLayoutNames, &o->layout,
            "With --decode: cache with rows before heads, bshd, or bhsd");
  AddSwitch(app, "--causal", Alternatives(kNoYes) + ",...",
            "Query i sees keys up to i + seqlen_k - seqlen_q; default no,yes [no]",
            [o](const std::string& flag, const std::string& text) {
              o->causal = ChosenList(flag, text, kNoYes);
            });
  AddOptions(app, &o->problem);
  AddChoice(app, "--direction", kDirectionNames, &o->direction, "Default both");
  AddInteger(app, "--heads", &o->heads, 1, "Query heads; default 8 [32]", kMaxInt32);
  AddInteger(app, "--heads-kv", &o->heads_kv, 1,
             "Key and value heads; default: as many as heads [8]", kMaxInt32);
  AddLength(app, "--batch", &o->batch, 1, "Default: 4096 tokens in all, at least 1 [16]",
            kMaxInt32);
  AddSeconds(app, "--min-time", "Time spent on each figure at least; default 0.3", &o->min_time);
  AddInteger(app, "--ranks", &o->ranks, 1,
             "With --device cuda: split sequences over so many GPUs, beside one", kMaxInt32);
  AddInteger(app, "--documents", &o->documents, 1,
             "With --ranks: a sequence is so many packed documents", kMaxInt32);
  AddThreads(app, &o->threads);
  AddDevice(app, &o->device, &o->device_index);
  AddFlag(app, "--json", &o->json, "JSON on standard output in place of the table");
  app.footer(
      "[64] behind a default: the default with --decode.\n"
      "Median times on random data. FLOP count: forward 2 (head_dim + head_dim_v)\n"
      "for each query, key and head, halved when causal; backward 2.5 times that.\n"
      "Bytes per second: of q, k, v and out; backward their gradients too.\n"
      "busy: other programs had the processors meanwhile, or the repetitions lie far\n"
      "apart; such a time says little. JSON: busy has the reason, \"\" where there is none.\n"
      "Lengths and sizes may end with k (1024) or M (1024^2): 2k, 1M.\n"
      "--ranks: --seqlen is the whole sequence's, 16k and 64k by default; bf16, head_dim 128.\n"
      "Messages go by NCCL (libnccl.so.2). by: a ring, an all-to-all over the heads, or a\n"
      "ring of groups with an all-to-all inside. faster: one GPU's time over that of all.\n"
      "\n"
      "Examples:\n"
      "  strobe bench --dtype bf16 --head-dim 128 --seqlen 2k,8k\n"
      "  strobe bench --device cuda --ranks 2 --seqlen 128k --causal\n"
      "  strobe bench --device cuda --ranks 2 --seqlen 128k --causal --documents 32\n"
      "  strobe bench --decode --batch 64 --seqlen-k 8k --page-size 0,16 --dtype bf16\n"
      "  strobe bench --json > bench.json");
}

void AddTune(CLI::App& app, TuneOptions* o) {
  app.add_option("FILE", o->input, "What STROBE_RECORD=FILE wrote; none: a set by kind and size")
      ->type_name("");
  AddText(app, "-o,--output", "FILE", "Where the choices go; default: where the library looks",
          [o](const std::string& flag, const std::string& text) {
            if (text.empty()) throw UserError(flag + " = \"\", expected a file name");
            o->output = text;
          });
  AddFlag(app, "--check", &o->check, "Time what the choices (of --output, or those in force) gain");
  AddSeconds(app, "--seconds", "About so long in all; default 120", &o->seconds);
  AddThreads(app, &o->threads);
  AddDevice(app, &o->device, &o->device_index);
  app.footer(
      "Times the ways in which problems can be computed against that of the rules, and\n"
      "writes down those that win by 3 % and by more than the noise, twice. The library\n"
      "loads them by itself: STROBE_TUNING=FILE, or ~/.cache/strobe/tuning.json.\n"
      "A run that is stopped goes on where it was.\n"
      "\n"
      "Examples:\n"
      "  strobe tune --device cuda\n"
      "  STROBE_RECORD=mine.jsonl ./program && strobe tune mine.jsonl\n"
      "  strobe tune --check");
}

// `app` is the last of the program's commands.
void AddHelp(CLI::App& app, std::string* command) {
  std::string names;
  for (const CLI::App* each : Commands(*app.get_parent()))
    names += (names.empty() ? "" : "|") + each->get_name();
  app.add_option("COMMAND", *command, "Whose help; none: the program's")->type_name(names);
  app.footer("Example:\n  strobe help bench");
}

void AddCompletion(CLI::App& app, std::string* shell) {
  const Choices<std::string> shells = {{"bash", "bash"}, {"zsh", "zsh"}};
  app.add_option_function<std::string>(
         "SHELL", [=](const std::string& text) { *shell = Chosen("SHELL", text, shells); },
         "Whose script")
      ->required()
      ->type_name(Alternatives(shells));
  app.footer(
      "Prints a script with which the shell completes commands, flags and their values.\n"
      "\n"
      "Examples:\n"
      "  strobe completion bash > ~/.local/share/bash-completion/completions/strobe\n"
      "  strobe completion zsh > ~/.zfunc/_strobe   # where fpath has ~/.zfunc");
}

// "info, run, check, bench, tune, completion or help", with the last word between the last two.
std::string CommandNames(const CLI::App& app, const char* last) {
  std::string text;
  const std::vector<const CLI::App*> commands = Commands(app);
  for (size_t n = 0; n < commands.size(); ++n) {
    if (n > 0) text += n + 1 < commands.size() ? ", " : fmt::format(" {} ", last);
    text += commands[n]->get_name();
  }
  return text;
}

std::string NoCommand(const CLI::App& app, const std::string& got) {
  std::vector<std::string> names;
  for (const CLI::App* command : Commands(app)) names.push_back(command->get_name());
  const std::string near = Nearest(got, names);
  return fmt::format("{} is not a command: {} {}", got.empty() ? "\"\"" : Printable(got),
                     near.empty() ? "there are" : fmt::format("did you mean {}? There are", near),
                     CommandNames(app, "and"));
}

// What `strobe --help` prints, or with a command's name `strobe COMMAND --help`.
int Help(const CLI::App& app, const std::string& name) {
  const auto print = [&app](const CLI::App* about, const std::string& title) {
    Print("{}", app.get_formatter()->make_help(about, title, CLI::AppFormatMode::Normal));
    return 0;
  };
  if (name.empty()) return print(&app, app.get_name());
  for (const CLI::App* command : Commands(app)) {
    if (command->get_name() == name) return print(command, app.get_name() + " " + name);
  }
  throw UserError(NoCommand(app, name));
}

// What stands before a command, or in place of one.
std::string NoProgramArgument(const CLI::App& app, const std::string& got) {
  if (!got.starts_with('-')) return NoCommand(app, got);
  for (const CLI::App* command : Commands(app)) {
    const std::string name = got.substr(0, got.find('='));
    if (command->get_option_no_throw(name) != nullptr)
      return fmt::format("{} stands before a command: a command's flags follow its name",
                         Printable(got));
  }
  return NoFlag(app, "strobe", got);
}

// A word that a command has no place for; with a hint where the flag before it takes a value after
// = alone.
std::string OneTooMany(const CLI::App& command, const std::string& got,
                       const std::vector<std::string>& argv) {
  const auto at = std::find(argv.begin(), argv.end(), got);
  std::string hint;
  if (at != argv.begin() && at != argv.end() && at[-1].starts_with('-')) {
    const CLI::Option* option = command.get_option_no_throw(at[-1]);
    if (option != nullptr && option->get_type_name().starts_with("[="))
      hint = fmt::format(": the value of {} follows =, as in {}{}", at[-1], at[-1],
                         option->get_type_name());
  }
  return fmt::format("{} is one argument too many{}", Printable(got), hint);
}

// What a command needs and was not given.
std::string Missing(const CLI::App& command, const CLI::Option& option) {
  std::string wanted = option.get_type_name();
  if (wanted.empty()) {
    wanted = option.get_description();
    wanted.front() = static_cast<char>(std::tolower(static_cast<unsigned char>(wanted.front())));
    wanted.insert(0, "a ");
  }
  if (const size_t bar = wanted.rfind('|'); bar != std::string::npos)
    wanted.replace(bar, 1, " or ");
  return fmt::format("{} is missing, expected {}: see `strobe help {}`", option.get_name(), wanted,
                     command.get_name());
}

// CLI11's complaints in the form of all our errors.
std::string ParseErrorText(const CLI::App& app, const CLI::ParseError& error,
                           const std::vector<std::string>& argv) {
  const auto commands = app.get_subcommands();
  if (const std::vector<std::string> words = app.remaining(); !words.empty())
    return NoProgramArgument(app, words.front());
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr && !commands.empty()) {
    const std::string text =
        error.what();  // "--window: 2 required LEFT RIGHT missing", "causal was given ..."
    const std::string name = text.substr(0, text.find_first_of(": "));
    const std::string flag = name.rfind('-', 0) == 0 ? name : "--" + name;
    const CLI::Option* option = commands.front()->get_option_no_throw(flag);
    if (option != nullptr && option->get_type_name().empty())
      return fmt::format("{} takes no value", flag);
    if (option != nullptr)
      return fmt::format("{} lacks a value, expected {} {}", flag, flag, option->get_type_name());
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !commands.empty()) {
    for (const CLI::Option* option : commands.front()->get_options()) {
      if (option->get_required() && option->count() == 0)
        return Missing(*commands.front(), *option);
    }
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr)
    return Printable(error.what(), kMaxMessage);
  std::vector<std::string> words = app.remaining(true);
  const bool no_flags = !words.empty() && words.front() == "--";  // behind it there are none
  std::erase(words, "--");
  if (words.empty() || commands.empty()) return Printable(error.what(), kMaxMessage);
  const CLI::App& command = *commands.front();  // the only one: Parse demands that
  const std::string& got = words.front();
  return got.starts_with('-') && !no_flags ? NoFlag(command, "strobe " + command.get_name(), got)
                                           : OneTooMany(command, got, argv);
}

Outcome Fail(const std::string& command, const std::string& text, int exit_code = kUserErrorExit) {
  std::string message =
      Message(fmt::format("strobe{}: {}", command.empty() ? "" : " " + command, text));
  // What no kernel takes comes with a line for each kernel.
  for (size_t at = 0; (at = message.find('\n', at)) != std::string::npos; at += 3)
    message.insert(at + 1, "  ");
  return {exit_code, Message(std::move(message))};
}

Outcome Done(int exit_code) {
  Flush();
  return {exit_code, ""};
}

Outcome Parse(int argc, const char* const* argv) {
  CLI::App app("Strobe: exact attention, forward and backward, in O(seqlen) memory.", "strobe");
  app.set_version_flag("--version", "strobe " + version(), "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.formatter(std::make_shared<HelpFormatter>());
  app.get_formatter()->column_width(26);
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.get_formatter()->label("OPTIONS", "FLAGS");
  app.get_formatter()->label("REQUIRED", "");
  app.get_formatter()->label("Positionals", "File");
  app.option_defaults()->group("Flags")->take_last();
  app.get_help_ptr()->group("Flags");
  app.get_version_ptr()->group("Flags");
  app.footer("`strobe help COMMAND` has each command's flags and an example.");
  app.require_subcommand(0, 1);

  InfoOptions info;
  RunOptions run;
  CheckOptions check;
  BenchOptions bench;
  TuneOptions tune;
  std::string about, shell;
  struct Command {
    CLI::App* app;
    std::function<int()> run;
  };
  std::vector<Command> commands;
  const auto add = [&](const char* name, const char* help, auto* options, auto add_flags,
                       auto execute) {
    CLI::App* command = app.add_subcommand(name, help)->group("Commands");
    command->get_help_ptr()->group("Flags");
    add_flags(*command, options);
    commands.push_back({command, [=] { return execute(*options); }});
  };
  add("info", "What Strobe found here: CPU, instruction sets, threads, kernels", &info, AddInfo,
      Info);
  add("run", "Attention over the tensors of a safetensors file", &run, AddRun, Run);
  add("check", "Test this installation against float64", &check, AddCheck, Check);
  add("bench", "Time forward and backward over a grid of shapes", &bench, AddBench, Bench);
  add("tune", "Measure which choices are fastest here, for the library to take", &tune, AddTune,
      Tune);
  add("completion", "Print a script for completion in bash or zsh", &shell, AddCompletion,
      [&app](const std::string& name) {
        Print("{}", CompletionScript(app, name));
        return 0;
      });
  add("help", "Print what --help prints, of the program or of a command", &about, AddHelp,
      [&app](const std::string& command) { return Help(app, command); });

  const auto name = [&app] {
    return app.get_subcommands().empty() ? "" : app.get_subcommands().front()->get_name();
  };
  try {
    if (argc <= 1) {  // a question, as --help is
      Print("{}", app.help());
      return Done(0);
    }
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help, --version
      std::ostringstream text;
      const int exit_code = app.exit(request, text, text);
      Print("{}", text.str());
      return Done(exit_code);
    } catch (const CLI::ParseError& error) {
      return Fail(app.remaining().empty() ? name() : "",
                  ParseErrorText(app, error, {argv + 1, argv + argc}));
    }
    for (const Command& command : commands) {
      if (command.app->parsed()) return Done(command.run());
    }
    return Fail("", "expected a command: " + CommandNames(app, "or"));
  } catch (const std::bad_alloc&) {
    return Fail(name(), "out of memory");
  } catch (const UserError& error) {
    return Fail(name(), error.what());
  } catch (const Error& error) {
    return Fail(name(), error.what(),
                error.status() == Status::kInternalError ? kFaultExit : kUserErrorExit);
  } catch (const std::exception& error) {
    return Fail(name(), error.what(), kFaultExit);
  }
}

}  // namespace

Outcome RunCommandLine(int argc, const char* const* argv) noexcept {
  try {
    return Parse(argc, argv);
  } catch (...) {  // no memory even for what there is to say
    return {kUserErrorExit, {}};
  }
}

}  // namespace strobe::cli
