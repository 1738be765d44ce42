#include "api/plan.h"

#include <cinttypes>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "api/tuning.h"
#include "core/checks.h"

namespace strobe {

namespace {

// Every build has kernels for the CPU.
std::string no_kernels() { return std::string(kNoCuda) + "\n"; }

// Null when the kernel takes the problem, and has made the plan; otherwise its reason, in `text`
// where it depends on the problem.
const char* refusal(const Kernel& kernel, const AttentionProblem& resolved, Plan& plan,
                    std::string& text, const Choice* choice = nullptr) {
  if (const char* reason = kernel.unavailable()) return reason;
  plan = Plan{};
  plan.struct_size = sizeof plan;
  plan.problem = resolved;
  text = kernel.plan(plan, choice);
  return text.empty() ? nullptr : text.c_str();
}

// Why kernels decline the problem, of those before index `end`: an entry each, in which kernels
// with the same reason stand together.
std::vector<std::string> refusals(const AttentionProblem& resolved, int32_t end) {
  std::vector<std::pair<std::string, std::string>> found;  // names and their reason
  std::string text;
  for (int32_t i = 0; const Kernel& kernel : kernel_table()) {
    if (i++ == end) break;
    if (kernel.device != resolved.device) continue;
    Plan plan;
    const char* reason = refusal(kernel, resolved, plan, text);
    if (!reason) continue;
    if (!found.empty() && found.back().second == reason) {
      found.back().first += std::string(", ") + kernel.name;
    } else {
      found.emplace_back(kernel.name, reason);
    }
  }
  std::vector<std::string> entries;
  for (const auto& [names, reason] : found) entries.push_back(names + " declines: " + reason);
  return entries;
}

// Why no kernel takes the problem.
std::string refusals(const AttentionProblem& resolved) {
  std::string lines;
  for (const std::string& entry : refusals(resolved, -1)) lines += entry + "\n";
  return lines.empty() ? no_kernels() : lines;
}

// By the first kernel that takes it, if one does, and that kernel's rules.
bool plan_by_rules(const AttentionProblem& resolved, Plan& plan) {
  std::string text;
  for (int32_t i = 0; const Kernel& kernel : kernel_table()) {
    Plan made;
    if (kernel.device == resolved.device && !refusal(kernel, resolved, made, text)) {
      made.kernel = kernel.name;
      made.kernel_index = i;
      plan = made;
      return true;
    }
    ++i;
  }
  return false;
}

// What the rules chose for a plan of theirs.
Choice choice_of(const Plan& plan) {
  if (plan.instance_name) return {plan.kernel, plan.instance_name};
  return {plan.kernel, {}, plan.problem.direction == STROBE_FORWARD ? plan.block_q : plan.block_k};
}

// By this choice alone. On failure the plan stays as it was.
Status plan_chosen(const AttentionProblem& resolved, const Choice& choice, Plan& plan) {
  for (int32_t i = 0; const Kernel& kernel : kernel_table()) {
    if (choice.kernel == kernel.name && kernel.device == resolved.device) {
      Plan made;
      std::string text;
      if (const char* const reason = refusal(kernel, resolved, made, text, &choice)) {
        return {STROBE_UNSUPPORTED, std::string(kernel.name) + " declines: " + reason};
      }
      made.kernel = kernel.name;
      made.kernel_index = i;
      plan = made;
      return {};
    }
    ++i;
  }
  return invalid(format("choice.kernel = %.64s, expected a kernel of the problem's device",
                        std::string(choice.kernel).c_str()));
}

// Takes a table's choice in place of the rules'. One that is none, as where STROBE_CPU_ISA or
// STROBE_CUDA_ROW say otherwise, leaves the plan as it is.
void take_tuned(const Choice& choice, Plan& plan) {
  Plan tuned;
  if (!plan_chosen(plan.problem, choice, tuned).ok()) return;
  tuned.chosen_by = STROBE_CHOSEN_BY_TUNING;
  plan = tuned;
}

// Where it was not the rules.
const char* who_chose(const Plan& plan) {
  switch (plan.chosen_by) {
    case STROBE_CHOSEN_BY_TUNING:
      return "chosen by tuning";
    case STROBE_CHOSEN_BY_CALLER:
      return "chosen by the caller";
    default:
      return nullptr;
  }
}

// One line a kernel. plan: of the problem, where some kernel takes it.
std::string lines_of_kernels(const AttentionProblem& resolved, const Plan* plan) {
  std::string lines, text;
  for (int32_t i = 0; const Kernel& kernel : kernel_table()) {
    const int32_t index = i++;
    if (kernel.device != resolved.device) continue;
    Plan made;
    const bool takes = plan && index == plan->kernel_index;
    const char* const chosen = plan ? who_chose(*plan) : nullptr;
    const char* const reason = refusal(kernel, resolved, made, text);
    lines += format("%-15s ", kernel.name);
    if (reason && !(takes && chosen)) {
      lines += format("declines: %s", reason);
    } else {
      lines += takes ? "takes it" : "would take it";
      std::string how = takes && chosen ? chosen : "";
      const std::string remark =
          kernel.remark ? kernel.remark(takes ? *plan : made) : std::string();
      if (!how.empty() && !remark.empty()) how += "; ";
      how += remark;
      if (!how.empty()) lines += ": " + how;
    }
    lines += "\n";
  }
  return lines.empty() ? no_kernels() : lines;
}

}  // namespace

Status make_plan(const AttentionProblem& problem, Plan& plan) {
  // Engines plan before each launch, mostly what they planned before. A GPU's plan depends on the
  // problem alone (the CPU's also on OpenMP's number of threads): each thread keeps its last one.
  thread_local struct {
    bool there;
    AttentionProblem problem;
    const TuningFile* tuning;
    Plan plan;
  } last{};
  const TuningFile* const tuning = tuning_table();
  if (last.there && last.tuning == tuning &&
      std::memcmp(&last.problem, &problem, sizeof problem) == 0) {
    plan = last.plan;
    return {};
  }
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  AttentionProblem resolved = problem;
  resolve_defaults(resolved);
  if (!plan_by_rules(resolved, plan)) {
    return {STROBE_UNSUPPORTED,
            "no kernel takes " + to_string(problem) + "\n" + refusals(resolved)};
  }
  if (tuning) {
    if (const std::optional<Choice> choice = tuned_choice(*tuning, resolved)) {
      if (!resolved.batch_invariant || choice->kernel == plan.kernel) take_tuned(*choice, plan);
    }
  }
  if (resolved.device == STROBE_CUDA) {
    last.there = true;
    std::memcpy(&last.problem, &problem, sizeof problem);  // padding too
    last.tuning = tuning;
    last.plan = plan;
  }
  return {};
}

Status make_plan_chosen(const AttentionProblem& problem, const Choice& choice, Plan& plan) {
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  AttentionProblem resolved = problem;
  resolve_defaults(resolved);
  STROBE_RETURN_IF_ERROR(plan_chosen(resolved, choice, plan));
  plan.chosen_by = STROBE_CHOSEN_BY_CALLER;
  return {};
}

Status find_choices(const AttentionProblem& problem, std::vector<Choice>& choices) {
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  AttentionProblem resolved = problem;
  resolve_defaults(resolved);
  Plan ruled;
  if (!plan_by_rules(resolved, ruled)) {
    return {STROBE_UNSUPPORTED,
            "no kernel takes " + to_string(problem) + "\n" + refusals(resolved)};
  }
  choices = {choice_of(ruled)};
  const auto is_ruled = [&](const Choice& c) {
    return c.kernel == choices[0].kernel && c.instance == choices[0].instance &&
           c.block == choices[0].block;
  };
  // Those of its kernel first.
  for (const bool of_rules : {true, false}) {
    for (const Kernel& kernel : kernel_table()) {
      const bool is_next = (choices[0].kernel == kernel.name) == of_rules;
      if (kernel.device != resolved.device || !is_next || kernel.unavailable()) continue;
      for (const Choice& choice : kernel.choices(resolved))
        if (!is_ruled(choice)) choices.push_back(choice);
    }
  }
  return {};
}

// A gradient that is made for entries which bias repeats by a stride of 0: what it costs, and
// what to pass instead. Nothing where there is no such.
std::string full_dbias(const AttentionProblem& p) {
  if (!p.has_dbias) return {};
  struct Axis {
    const char* name;
    int64_t size, stride;
  };
  const Axis axes[] = {{"batch", p.bias_batch, p.bias.batch},
                       {"heads", p.bias_heads, p.bias.head},
                       {"seqlen_q", p.bias_seqlen_q, p.bias.seqlen}};
  std::string repeated;
  int64_t bytes = p.seqlen_k * (p.dbias_dtype == STROBE_FLOAT32 ? 4 : 2), summed = bytes;
  for (const Axis& axis : axes) {
    bytes *= axis.size;
    if (axis.size > 1 && axis.stride == 0) {
      repeated += (repeated.empty() ? "" : ", ") + std::string(axis.name);
    } else {
      summed *= axis.size;
    }
  }
  if (repeated.empty()) return {};
  return format("dbias takes %" PRId64
                " bytes, as bias repeats its entries along %s: with one "
                "entry there, %" PRId64 " bytes, and the sum is made on the way\n",
                bytes, repeated.c_str(), summed);
}

std::string why(const AttentionProblem& problem) {
  if (Status s = check_problem(problem); !s.ok()) {
    return (s.code() == STROBE_INVALID_ARGUMENT ? "invalid: " : "") + s.text() + "\n";
  }
  AttentionProblem resolved = problem;
  resolve_defaults(resolved);
  Plan plan;
  const bool is_taken = make_plan(problem, plan).ok();
  return lines_of_kernels(resolved, is_taken ? &plan : nullptr) + full_dbias(resolved);
}

std::string describe(const Plan& plan) {
  const AttentionProblem& p = plan.problem;
  std::string s = "problem    " + to_string(p) + "\n";
  const char* const chosen = who_chose(plan);
  s += format("kernel     %s%s%s\n", plan.kernel, chosen ? ", " : "", chosen ? chosen : "");
  if (plan.instance_name) s += format("instance   %s\n", plan.instance_name);
  s += format("tile       %" PRId64 " queries x %" PRId64 " keys\n", plan.tile_q, plan.tile_k);
  const bool forward = p.direction == STROBE_FORWARD;
  const int64_t block = forward ? plan.block_q : plan.block_k;
  s += format("work       %" PRId64 " items", plan.work_items);
  if (block) s += format(", each %" PRId64 " %s of a head", block, forward ? "queries" : "keys");
  if (forward && plan.block_k) {
    s += format("%s few queries: each up to %" PRId64 " keys, for all heads that share them",
                block ? "; of sequences with" : ", of", plan.block_k);
  }
  s += "\n";
  if (p.device == STROBE_CPU) {
    s += format("threads    %d\n", plan.threads);
  } else {
    s +=
        format("grid       %d x %d x %d blocks of %d threads, %" PRId64 " bytes of shared memory\n",
               plan.grid[0], plan.grid[1], plan.grid[2], plan.block_threads, plan.shared_bytes);
  }
  s += format("workspace  %zu bytes\n", plan.workspace_bytes);
  s += "why\n";
  const std::string lines = lines_of_kernels(p, &plan) + full_dbias(p);
  for (size_t at = 0; at < lines.size();) {
    const size_t end = lines.find('\n', at);
    s += "  " + lines.substr(at, end - at) + "\n";
    at = end + 1;
  }
  return s;
}

std::string who_computes(const Plan& plan) {
  std::string s = std::string(plan.kernel) + " computes " + to_string(plan.problem);
  for (const std::string& entry : refusals(plan.problem, plan.kernel_index)) s += "; " + entry;
  if (const char* const chosen = who_chose(plan)) s += std::string("; ") + chosen;
  return s;
}

}  // namespace strobe
