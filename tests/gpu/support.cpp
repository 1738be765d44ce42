// Which kernel a plan takes on a device that need not be there: scripts/support_table.py asks.
//
//     cuda_support < questions     a question a line: 90 dtype=1 head_dim=37
//
// The first number is the compute capability; fields that are not named are those of a small
// forward in bf16. Answers with the kernel's name, or "-", a line each.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "plan_for.h"

namespace {

using strobe::AttentionProblem;

const std::map<std::string, std::function<void(AttentionProblem&, double)>> kFields = {
    {"direction", [](AttentionProblem& p, double x) { p.direction = static_cast<int32_t>(x); }},
    {"dtype", [](AttentionProblem& p, double x) { p.dtype = static_cast<int32_t>(x); }},
    {"head_dim", [](AttentionProblem& p, double x) { p.head_dim = static_cast<int64_t>(x); }},
    {"head_dim_v", [](AttentionProblem& p, double x) { p.head_dim_v = static_cast<int64_t>(x); }},
    {"causal", [](AttentionProblem& p, double x) { p.causal = static_cast<int32_t>(x); }},
    {"window_left", [](AttentionProblem& p, double x) { p.window_left = static_cast<int64_t>(x); }},
    {"varlen", [](AttentionProblem& p, double x) { p.varlen = static_cast<int32_t>(x); }},
    {"total_q", [](AttentionProblem& p, double x) { p.total_q = static_cast<int64_t>(x); }},
    {"total_k", [](AttentionProblem& p, double x) { p.total_k = static_cast<int64_t>(x); }},
    {"heads_kv", [](AttentionProblem& p, double x) { p.heads_kv = static_cast<int64_t>(x); }},
    {"alibi", [](AttentionProblem& p, double x) { p.alibi = static_cast<int32_t>(x); }},
    {"softcap", [](AttentionProblem& p, double x) { p.softcap = static_cast<float>(x); }},
    {"dropout_p", [](AttentionProblem& p, double x) { p.dropout_p = static_cast<float>(x); }},
};

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    strobe::cuda::DeviceProperties device;
    words >> device.compute_capability;
    device.multiprocessors = 100;
    device.shared_bytes = device.compute_capability == 90   ? 227 << 10
                          : device.compute_capability == 80 ? 163 << 10
                                                            : strobe::cuda::kTuringSharedBytes;
    AttentionProblem p;
    strobe_problem_init(&p, sizeof p);
    p.device = STROBE_CUDA;
    p.dtype = STROBE_BFLOAT16;
    p.batch = 2, p.heads = 4, p.head_dim = 64;
    p.seqlen_q = p.seqlen_k = 128;
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      const auto field = kFields.find(word.substr(0, equals));
      if (equals == std::string::npos || field == kFields.end()) {
        std::fprintf(stderr, "cuda_support: got %s, expected FIELD=NUMBER\n", word.c_str());
        return 2;
      }
      field->second(p, std::atof(word.c_str() + equals + 1));
    }
    strobe::Plan plan{};
    const bool taken = strobe::cuda::plan_for(p, device, plan).ok();
    std::puts(taken ? plan.kernel : "-");
  }
}
