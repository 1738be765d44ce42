// The C ABI's boundary: nothing is thrown past it, every failure leaves a status and a text.
#include <cinttypes>
#include <cstddef>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <string_view>
#include <type_traits>
#include <vector>

#include "api/log.h"
#include "api/nvtx_range.h"
#include "api/plan.h"
#include "api/record.h"
#include "api/tuning.h"
#include "core/checks.h"
#include "core/machine.h"
#include "core/merge.h"
#include "core/options.h"
#include "core/packed_mask.h"
#include "core/philox.h"
#include "core/quantise.h"
#include "core/team.h"
#include "core/validate_mask.h"
#include "cpu/dispatch.h"
#include "cpu/mask_pack.h"
#include "cpu/quantise.h"
#if STROBE_HAVE_CUDA
#include "cuda/host/dispatch.h"
#endif

namespace strobe {

namespace {

// Fixed room, so that reporting a failure cannot fail; 400 bytes are what anybody reads.
thread_local char last_error[401] = "";

// As much of the text as there is room for. Returns how long all of it is.
size_t copy_text(std::string_view text, char* out, size_t capacity) noexcept {
  if (out && capacity > 0) out[text.copy(out, capacity - 1)] = '\0';
  return text.size();
}
template <size_t N>
void copy_name(char (&out)[N], std::string_view text) {
  copy_text(text, out, N);
}

strobe_status fail(strobe_status code, std::string_view text) noexcept {
  if (copy_text(text, last_error, sizeof last_error) >= sizeof last_error) {
    std::memcpy(std::end(last_error) - 4, "...", 4);
  }
  return code;
}

// Runs `body`, which returns a Status, and turns whatever it does into a status code.
template <typename Body>
strobe_status guarded(const Body& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? STROBE_OK : fail(status.code(), status.text());
  } catch (const std::bad_alloc&) {
    return fail(STROBE_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return fail(STROBE_INTERNAL_ERROR, e.what());
  } catch (...) {
    return fail(STROBE_INTERNAL_ERROR, "unknown exception");
  }
}

Status null_argument(const char* name) {
  return invalid(format("%s = NULL, expected a pointer", name));
}

// What a function that returns text says of a bad argument. strobe_last_error has it too.
std::string refused(const Status& status) {
  fail(status.code(), status.text());
  return (status.code() == STROBE_INVALID_ARGUMENT ? "invalid: " : "") + status.text();
}

// Structs may only grow at their end: a caller built against an older header has a shorter one
// (`launch` knows which of its arguments' may be). All others have to match.
Status check_size(const char* name, size_t got, size_t wanted) {
  if (got == wanted) return {};
  return invalid(
      format("%s = %zu, expected %zu (was the struct initialised, and by this version's header?)",
             name, got, wanted));
}

// A caller's struct, by the name of the argument.
template <typename T>
Status checked(const char* name, const T* given) {
  if (!given) return null_argument(name);
  if (given->struct_size == sizeof *given) return {};  // without a string: every launch comes by
  return check_size((std::string(name) + ".struct_size").c_str(), given->struct_size,
                    sizeof *given);
}

// Runs `body`, which returns text.
template <typename Body>
size_t guarded_text(const Body& body, char* out, size_t capacity) noexcept {
  try {
    return copy_text(body(), out, capacity);
  } catch (...) {
    fail(STROBE_OUT_OF_MEMORY, "out of memory");
    return copy_text("", out, capacity);
  }
}

// Null where no kernel has this index.
const Kernel* kernel_at(int32_t index) {
  const std::span<const Kernel> table = kernel_table();
  return static_cast<size_t>(index) < table.size() ? &table[static_cast<size_t>(index)] : nullptr;
}

// The kernel that made the plan. A plan is the caller's memory: do not trust its index.
Status find_kernel(const Plan* plan, const Kernel** kernel) {
  STROBE_RETURN_IF_ERROR(checked("plan", plan));
  *kernel = kernel_at(plan->kernel_index);
  if (*kernel && plan->kernel == (*kernel)->name) return {};
  return invalid("plan: not made by strobe_plan_make");
}

template <typename Args>
Status launch(const Plan* plan, const Args* args, strobe_direction direction,
              Status (*Kernel::*run)(const Plan&, const Args&)) {
  const Kernel* kernel = nullptr;
  STROBE_RETURN_IF_ERROR(find_kernel(plan, &kernel));
  if (!args) return null_argument("args");
  // As older headers had it: what came since is then not there.
  Args grown;
  constexpr bool forward = std::is_same_v<Args, ForwardArgs>;
  constexpr size_t later =
      forward ? offsetof(ForwardArgs, block_table) : offsetof(BackwardArgs, delta);
  constexpr size_t latest = forward ? offsetof(ForwardArgs, k_scale) : sizeof(BackwardArgs);
  constexpr size_t last = forward ? offsetof(ForwardArgs, q_scale) : sizeof(BackwardArgs);
  for (const size_t shorter : {offsetof(Args, interrupt), offsetof(Args, seqused_q), later,
                               offsetof(Args, sinks), offsetof(Args, bias), latest, last}) {
    if (args->struct_size != shorter) continue;
    grown = {};
    std::memcpy(&grown, args, shorter);
    grown.struct_size = sizeof grown;
    args = &grown;
    break;
  }
  STROBE_RETURN_IF_ERROR(check_size("args.struct_size", args->struct_size, sizeof *args));
  if (plan->problem.direction != direction) {
    return invalid(format("plan.problem.direction = %d, expected %d (%s)", plan->problem.direction,
                          direction, direction == STROBE_FORWARD ? "forward" : "backward"));
  }
  STROBE_RETURN_IF_ERROR(check_args(plan->problem, plan->workspace_bytes, *args));
  log_launch(*plan);
  record_launch(*plan);
  const NvtxRange range(forward ? "forward" : "backward", kernel->name);
  return (kernel->*run)(*plan, *args);
}

#if !STROBE_HAVE_CUDA
// What a merge, an addition or quantising on a GPU gets here.
Status no_cuda() {
  return {STROBE_UNSUPPORTED, "device = 1 (CUDA), expected 0 (CPU): this build has no CUDA"};
}
#endif

// A problem with a mask as data, checked and with its defaults filled in.
Status resolve_masked(const strobe_problem* problem, AttentionProblem& resolved) {
  STROBE_RETURN_IF_ERROR(checked("problem", problem));
  STROBE_RETURN_IF_ERROR(check_problem(*problem));
  if (problem->mask.kind == STROBE_MASK_NONE) {
    return invalid("mask.kind = 0 (none), expected 1 (packed)");
  }
  resolved = *problem;
  resolve_defaults(resolved);
  return {};
}

// No machine has as many bytes, and any product of extents up to it fits 64 bits.
constexpr int64_t kMaxMaskBytes = int64_t{1} << 58;

// bytes: of the whole mask.
Status check_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
                          float dropout_p, int64_t* bytes) {
  *bytes = 1;
  for (const int64_t extent : {batch, heads, seqlen_q, seqlen_k}) {
    if (extent <= 1) continue;  // below its least value, the checks of a problem refuse it
    if (*bytes > kMaxMaskBytes / extent) {
      return invalid(format("batch * heads * seqlen_q * seqlen_k = %" PRId64 " * %" PRId64
                            " * %" PRId64 " * %" PRId64 ", expected a mask of at most 2^58 bytes",
                            batch, heads, seqlen_q, seqlen_k));
    }
    *bytes *= extent;
  }
  AttentionProblem p;
  strobe_problem_init(&p, sizeof p);
  p.batch = batch;
  p.heads = heads;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = 1;
  p.dropout_p = dropout_p;
  STROBE_RETURN_IF_ERROR(check_problem(p));
  *bytes = batch * heads * seqlen_q * seqlen_k;
  return {};
}

Status write_mask(const Dropout& dropout, int64_t seqlen_q, int64_t seqlen_k, int64_t first,
                  int64_t count, uint8_t* mask) {
  if (count == 0) return {};
  if (!mask) return null_argument("mask");
  int64_t row = first / seqlen_k, j = first % seqlen_k;
  for (const uint8_t* end = mask + count; mask != end; ++row, j = 0) {
    const auto bh = static_cast<uint32_t>(row / seqlen_q),
               i = static_cast<uint32_t>(row % seqlen_q);
    for (; j < seqlen_k && mask != end; ++j)
      *mask++ = dropout.keep(bh, i, static_cast<uint32_t>(j));
  }
  return {};
}

Status quantise_or_back(const strobe_quantize_args* args, bool quantises) {
  STROBE_RETURN_IF_ERROR(checked("args", args));
  QuantiseArgs checked_args = *args;
  STROBE_RETURN_IF_ERROR(check_quantise(checked_args, quantises));
  const bool on_cuda = checked_args.device == STROBE_CUDA;
  const NvtxRange range(quantises ? "quantize" : "dequantize", on_cuda ? "cuda" : "cpu");
  if (on_cuda) {
#if STROBE_HAVE_CUDA
    return quantises ? cuda::quantise(checked_args) : cuda::dequantise(checked_args);
#else
    return no_cuda();
#endif
  }
  return quantises ? cpu::quantise(checked_args) : cpu::dequantise(checked_args);
}

}  // namespace

}  // namespace strobe

using namespace strobe;

extern "C" {

strobe_status strobe_problem_init(strobe_problem* problem, size_t struct_size) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    if (!problem) return null_argument("problem");
    STROBE_RETURN_IF_ERROR(check_size("struct_size", struct_size, sizeof *problem));
    *problem = {};
    problem->struct_size = struct_size;
    problem->kv_dtype = problem->out_dtype = problem->grad_dtype = STROBE_SAME_DTYPE;
    problem->bias_dtype = problem->dbias_dtype = STROBE_SAME_DTYPE;
    problem->v_dtype = STROBE_SAME_DTYPE;
    for_each_option(*problem, [](const Option& option, auto& field) {
      field = static_cast<std::remove_reference_t<decltype(field)>>(option.otherwise);
    });
    return {};
  });
}

strobe_status strobe_plan_make(const strobe_problem* problem, strobe_plan* plan) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("problem", problem));
    STROBE_RETURN_IF_ERROR(checked("plan", plan));
    read_log_setting();
    read_record_setting();
    NvtxRange::find_tool();
    Status made = make_plan(*problem, *plan);
    if (made.code() == STROBE_UNSUPPORTED) log_declined(made.text());
    return made;
  });
}

strobe_status strobe_plan_choice(const strobe_problem* problem, int32_t index,
                                 strobe_choice* choice) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("problem", problem));
    STROBE_RETURN_IF_ERROR(checked("choice", choice));
    std::vector<Choice> choices;
    STROBE_RETURN_IF_ERROR(find_choices(*problem, choices));
    STROBE_RETURN_IF_ERROR(
        check_integer("index", index, 0, static_cast<int64_t>(choices.size()) - 1));
    const Choice& found = choices[static_cast<size_t>(index)];
    choice->kernel = found.kernel.data();
    choice->instance = found.instance.empty() ? nullptr : found.instance.data();
    choice->block = found.block;
    return {};
  });
}

strobe_status strobe_plan_make_chosen(const strobe_problem* problem, const strobe_choice* choice,
                                      strobe_plan* plan) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("problem", problem));
    STROBE_RETURN_IF_ERROR(checked("choice", choice));
    STROBE_RETURN_IF_ERROR(checked("plan", plan));
    if (!choice->kernel) return null_argument("choice.kernel");
    return make_plan_chosen(
        *problem, {choice->kernel, choice->instance ? choice->instance : "", choice->block}, *plan);
  });
}

strobe_status strobe_tuning_load(const char* path) STROBE_NOEXCEPT {
  return guarded([&] { return load_tuning(path); });
}

size_t strobe_tuning_text(char* text, size_t capacity) STROBE_NOEXCEPT {
  return guarded_text([] { return describe_tuning(); }, text, capacity);
}

size_t strobe_plan_text(const strobe_plan* plan, char* text, size_t capacity) STROBE_NOEXCEPT {
  return guarded_text(
      [&]() -> std::string {
        const Kernel* kernel = nullptr;
        if (Status s = find_kernel(plan, &kernel); !s.ok()) return refused(s) + "\n";
        return describe(*plan);
      },
      text, capacity);
}

strobe_status strobe_supports(const strobe_problem* problem) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("problem", problem));
    Plan plan;
    return make_plan(*problem, plan);
  });
}

size_t strobe_why(const strobe_problem* problem, char* text, size_t capacity) STROBE_NOEXCEPT {
  return guarded_text(
      [&]() -> std::string {
        if (Status s = checked("problem", problem); !s.ok()) return refused(s) + "\n";
        return why(*problem);
      },
      text, capacity);
}

strobe_status strobe_forward(const strobe_plan* plan,
                             const strobe_forward_args* args) STROBE_NOEXCEPT {
  return guarded([&] { return launch(plan, args, STROBE_FORWARD, &Kernel::forward); });
}

strobe_status strobe_backward(const strobe_plan* plan,
                              const strobe_backward_args* args) STROBE_NOEXCEPT {
  return guarded([&] { return launch(plan, args, STROBE_BACKWARD, &Kernel::backward); });
}

strobe_status strobe_mask_bytes(const strobe_problem* problem, size_t* bytes) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    if (!bytes) return null_argument("bytes");
    AttentionProblem p;
    STROBE_RETURN_IF_ERROR(resolve_masked(problem, p));
    *bytes = static_cast<size_t>(MaskLayout::of(p).end) * 4;
    return {};
  });
}

strobe_status strobe_mask_pack(const strobe_problem* problem,
                               const strobe_mask_args* args) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    AttentionProblem p;
    STROBE_RETURN_IF_ERROR(resolve_masked(problem, p));
    STROBE_RETURN_IF_ERROR(checked("args", args));
    MaskArgs checked_args = *args;
    STROBE_RETURN_IF_ERROR(check_mask_args(p, problem->seqlen_k, checked_args));
    const NvtxRange range("mask_pack", p.device == STROBE_CUDA ? "cuda" : "cpu");
    if (p.device == STROBE_CUDA) {
#if STROBE_HAVE_CUDA
      return cuda::pack_mask(p, checked_args);
#else
      return {STROBE_UNSUPPORTED, "device = 1 (CUDA), expected 0 (CPU): this build has no CUDA"};
#endif
    }
    return cpu::pack_mask(p, checked_args);
  });
}

strobe_status strobe_merge(const strobe_merge_args* args) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    if (!args) return null_argument("args");
    MergeArgs checked_args{};
    if (args->struct_size == offsetof(MergeArgs, sinks)) {  // as older headers had it
      std::memcpy(&checked_args, args, args->struct_size);
      checked_args.struct_size = sizeof checked_args;
    } else {
      STROBE_RETURN_IF_ERROR(checked("args", args));
      checked_args = *args;
    }
    STROBE_RETURN_IF_ERROR(check_merge(checked_args));
    const bool on_cuda = checked_args.device == STROBE_CUDA;
    const NvtxRange range("merge", on_cuda ? "cuda" : "cpu");
    if (!on_cuda) return cpu::merge(checked_args);
#if STROBE_HAVE_CUDA
    return cuda::merge(checked_args);
#else
    return no_cuda();
#endif
  });
}

strobe_status strobe_add(const strobe_add_args* args) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("args", args));
    AddArgs checked_args = *args;
    STROBE_RETURN_IF_ERROR(check_add(checked_args));
    const bool on_cuda = checked_args.device == STROBE_CUDA;
    const NvtxRange range("add", on_cuda ? "cuda" : "cpu");
    if (!on_cuda) return cpu::add(checked_args);
#if STROBE_HAVE_CUDA
    return cuda::add(checked_args);
#else
    return no_cuda();
#endif
  });
}

strobe_status strobe_quantize(const strobe_quantize_args* args) STROBE_NOEXCEPT {
  return guarded([&] { return quantise_or_back(args, true); });
}

strobe_status strobe_dequantize(const strobe_quantize_args* args) STROBE_NOEXCEPT {
  return guarded([&] { return quantise_or_back(args, false); });
}

strobe_status strobe_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
                                  float dropout_p, uint64_t seed, uint64_t offset,
                                  uint8_t* mask) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    int64_t bytes;
    STROBE_RETURN_IF_ERROR(check_dropout_mask(batch, heads, seqlen_q, seqlen_k, dropout_p, &bytes));
    return write_mask(Dropout::make(dropout_p, seed, offset), seqlen_q, seqlen_k, 0, bytes, mask);
  });
}

strobe_status strobe_dropout_mask_part(int64_t batch, int64_t heads, int64_t seqlen_q,
                                       int64_t seqlen_k, float dropout_p, uint64_t seed,
                                       uint64_t offset, int64_t first, int64_t count,
                                       uint8_t* mask) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    int64_t bytes;
    STROBE_RETURN_IF_ERROR(check_dropout_mask(batch, heads, seqlen_q, seqlen_k, dropout_p, &bytes));
    STROBE_RETURN_IF_ERROR(check_integer("first", first, 0, bytes));
    STROBE_RETURN_IF_ERROR(check_integer("count", count, 0, bytes - first));
    const Dropout dropout = Dropout::make(dropout_p, seed, offset);
    return write_mask(dropout, seqlen_q, seqlen_k, first, count, mask);
  });
}

const char* strobe_last_error(void) STROBE_NOEXCEPT { return last_error; }

const char* strobe_status_name(strobe_status status) STROBE_NOEXCEPT {
  constexpr const char* kNames[] = {"STROBE_OK",           "STROBE_INVALID_ARGUMENT",
                                    "STROBE_UNSUPPORTED",  "STROBE_OUT_OF_MEMORY",
                                    "STROBE_DEVICE_ERROR", "STROBE_INTERNAL_ERROR",
                                    "STROBE_INTERRUPTED"};
  static_assert(std::size(kNames) == STROBE_INTERRUPTED + 1);
  return static_cast<size_t>(status) < std::size(kNames) ? kNames[status] : "unknown status";
}

#define STROBE_TEXT(x) #x
#define STROBE_DOTTED(a, b, c) STROBE_TEXT(a) "." STROBE_TEXT(b) "." STROBE_TEXT(c)

const char* strobe_version(void) STROBE_NOEXCEPT {
  return STROBE_DOTTED(STROBE_VERSION_MAJOR, STROBE_VERSION_MINOR, STROBE_VERSION_PATCH);
}

const char* strobe_kernel_name(int32_t index) STROBE_NOEXCEPT {
  const Kernel* const kernel = kernel_at(index);
  return kernel ? kernel->name : nullptr;
}

const char* strobe_kernel_unavailable(int32_t index) STROBE_NOEXCEPT {
  const Kernel* const kernel = kernel_at(index);
  return kernel ? kernel->unavailable() : "no kernel has this index";
}

size_t strobe_kernel_declines(int32_t index, const strobe_problem* problem, char* text,
                              size_t capacity) STROBE_NOEXCEPT {
  return guarded_text(
      [&]() -> std::string {
        if (Status s = checked("problem", problem); !s.ok()) return refused(s);
        if (Status s = check_problem(*problem); !s.ok()) return refused(s);
        const Kernel* const kernel = kernel_at(index);
        if (!kernel) return "no kernel has this index";
        if (kernel->device != problem->device) {
          return format("device = %d, expected %d", problem->device, kernel->device);
        }
        Plan plan{};
        plan.struct_size = sizeof plan;
        plan.problem = *problem;
        resolve_defaults(plan.problem);
        return kernel->plan(plan, nullptr);
      },
      text, capacity);
}

strobe_status strobe_machine_info(strobe_machine* machine) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("machine", machine));
    strobe_machine m{};
    m.struct_size = sizeof m;
    copy_name(m.cpu_name, cpu_features().name);
    copy_name(m.cpu_isa, cpu::widest_in_use());
    std::string isas;
    for (const auto* isa : cpu::instruction_sets())
      isas += (isas.empty() ? "" : " ") + std::string(isa->name);
    copy_name(m.cpu_isas, isas);
    m.cpu_threads = default_threads();
#if STROBE_HAVE_CUDA
    m.cuda_devices = static_cast<int32_t>(cuda::devices().size());
    copy_name(m.cuda_reason, cuda::no_devices_reason());
#else
    copy_name(m.cuda_reason, kNoCuda);
#endif
#if defined(__clang__)
    copy_name(m.compiler, "Clang " __clang_version__);
#else
    copy_name(m.compiler, "GCC " __VERSION__);
#endif
    *machine = m;
    return {};
  });
}

strobe_status strobe_cuda_device_info(int32_t index, strobe_cuda_device* device) STROBE_NOEXCEPT {
  return guarded([&]() -> Status {
    STROBE_RETURN_IF_ERROR(checked("device", device));
    size_t count = 0;
#if STROBE_HAVE_CUDA
    count = cuda::devices().size();
    if (static_cast<size_t>(index) < count) {
      const cuda::DeviceProperties& found = cuda::devices()[static_cast<size_t>(index)];
      strobe_cuda_device d{};
      d.struct_size = sizeof d;
      copy_name(d.name, found.name);
      d.compute_capability = found.compute_capability;
      d.multiprocessors = found.multiprocessors;
      d.memory_bytes = found.memory_bytes;
      *device = d;
      return {};
    }
#endif
    return invalid(
        format("index = %d, expected below the number of CUDA devices, %zu", index, count));
  });
}

}  // extern "C"
