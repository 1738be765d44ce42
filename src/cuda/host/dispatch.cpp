// The GPU's rows of the kernel table: what the machine has, which row of kernels.def takes a
// problem, and the launch.
#include "cuda/host/dispatch.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/common/softcap.h"
#include "cuda/common/static_order.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/longest.h"
#include "cuda/host/rows.h"
#include "cuda/host/stream_blocks.h"

namespace strobe::cuda {

#define STROBE_forward_ROW(name, when) extern const ForwardRow name;
#define STROBE_backward_ROW(name, when) extern const BackwardRow name;
#include "cuda_rows.inc"
#undef STROBE_forward_ROW
#undef STROBE_backward_ROW

namespace {

template <typename Row>
struct Entry {
  const Row* row;
  const char* name;
  When when;
};

constexpr When any = When::kAny, plain = When::kPlain, few = When::kFew, some = When::kSome,
               brief = When::kShort;

bool suits(When when, int32_t tile_q, const AttentionProblem& p, const DeviceProperties& device) {
  const bool is_plain = p.softcap == 0 && !p.alibi && !(p.dropout_p > 0);
  // Rows differ in their bits: with batch_invariant nothing counts here that others in the batch
  // decide, which are its size and, where lengths vary, the longest.
  const auto keys_up_to = [&](int64_t most) {
    return !(p.batch_invariant && p.varlen) && longest_k(p) <= (p.causal ? 2 * most : most);
  };
  switch (when) {
    case When::kPlain:
      return is_plain;
    case When::kFew:
      return keys_up_to(256) || !is_plain;
    case When::kSome:
      return keys_up_to(4096) || !is_plain;
    case When::kShort:
      return !p.batch_invariant &&
             p.batch * p.heads * ceil_div(longest_q(p), tile_q) <= device.multiprocessors;
    default:
      return true;
  }
}

// In the order of kernels.def. The null entry at the end keeps an array from being empty.
#define STROBE_backward_ROW(name, when)
#define STROBE_forward_ROW(name, when) {&name, #name, when},
constexpr Entry<ForwardRow> kForward[] = {
#include "cuda_rows.inc"
    {nullptr, nullptr, any}};
#undef STROBE_forward_ROW
#undef STROBE_backward_ROW
#define STROBE_forward_ROW(name, when)
#define STROBE_backward_ROW(name, when) {&name, #name, when},
constexpr Entry<BackwardRow> kBackward[] = {
#include "cuda_rows.inc"
    {nullptr, nullptr, any}};
#undef STROBE_forward_ROW
#undef STROBE_backward_ROW

template <typename Row>
constexpr auto& table() {
  if constexpr (std::is_same_v<Row, ForwardRow>) {
    return kForward;
  } else {
    return kBackward;
  }
}

// As much of a text as there is room for.
template <size_t kSize>
void copy_text(char (&to)[kSize], const char* from) {
  const size_t length = std::min(std::strlen(from), kSize - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

struct Machine {
  std::vector<DeviceProperties> devices;
  char reason[128] = "";
  int forced_arch = 0;     // STROBE_CUDA_ARCH: 80 rules cuda_sm90 out
  std::string forced_row;  // STROBE_CUDA_ROW: rows with this in their name come first

  Machine() {
    if (const char* forced = std::getenv("STROBE_CUDA_ARCH")) forced_arch = std::atoi(forced);
    if (const char* forced = std::getenv("STROBE_CUDA_ROW")) forced_row = forced;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      cudaGetLastError();
      const char* const text = error == cudaErrorInsufficientDriver
                                   ? "no NVIDIA driver, or one older than CUDA 13 needs (580)"
                               : error == cudaErrorNoDevice || error == cudaSuccess
                                   ? "no NVIDIA GPU"
                                   : cudaGetErrorString(error);
      copy_text(reason, text);
      return;
    }
    for (int i = 0; i < count; ++i) {
      cudaDeviceProp properties;
      DeviceProperties d;
      if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) {
        copy_text(d.name, properties.name);
        d.compute_capability = 10 * properties.major + properties.minor;
        d.multiprocessors = properties.multiProcessorCount;
        d.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
        d.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
      }
      devices.push_back(d);
    }
  }
};

const Machine& machine() {
  static const Machine m;
  return m;
}

// --- Which row ---

// Whether tests or benches ask for this row; a problem that it cannot do goes where it always does.
bool is_forced(std::string_view row) {
  const std::string& forced = machine().forced_row;
  return !forced.empty() && row.find(forced) != std::string_view::npos;
}

// Index in the table of the row that takes the problem; -1: none, and *reason says why.
template <typename Row>
int find_row(int arch, const AttentionProblem& p, const DeviceProperties& device,
             std::string* reason) {
  const auto& rows = table<Row>();
  const int64_t dim = max64(p.head_dim, p.head_dim_v);
  int found = -1;
  int64_t widest = 0, least_shared = 0;
  for (int i = 0; rows[i].row; ++i) {
    const auto& c = rows[i].row->config;
    if (c.arch != arch || c.dtype != p.dtype) continue;
    widest = max64(widest, c.width);
    if (c.width < dim) continue;
    const int64_t shared = rows[i].row->shape.shared_bytes;
    if (shared > device.shared_bytes) {
      least_shared = least_shared ? min64(least_shared, shared) : shared;
      continue;
    }
    const bool can = rows[i].when != When::kPlain || suits(When::kPlain, c.tile_q, p, device);
    if (can && is_forced(rows[i].name)) return i;
    if (!suits(rows[i].when, c.tile_q, p, device)) continue;
    if (found < 0 || c.width < rows[found].row->config.width) found = i;
  }
  if (found >= 0 || !reason) return found;
  const char* const direction = p.direction == STROBE_FORWARD ? "forward" : "backward";
  if (widest == 0) {
    *reason = format("this build has no %s %s kernel of this kind", dtype_name(p.dtype), direction);
  } else if (least_shared > 0) {
    *reason =
        format("its tiles take %lld bytes of shared memory, the device has %lld",
               static_cast<long long>(least_shared), static_cast<long long>(device.shared_bytes));
  } else {
    *reason = format("head_dim = %lld, expected at most %lld in this build (STROBE_CUDA_HEAD_DIMS)",
                     static_cast<long long>(dim), static_cast<long long>(widest));
  }
  return -1;
}

// What the sm90 kernels leave to mma.sync. TMA moves 16-byte units: strides must be multiples of 8
// values, and it knows no stride of 0. Pointers are looked at when they are there, at launch.
std::string tma_declines(const AttentionProblem& p) {
  const bool forward = p.direction == STROBE_FORWARD;
  if (p.dropout_p > 0) return "dropout_p > 0, expected 0 (it draws no random numbers)";
  if (!forward && p.softcap > 0) return "softcap > 0, expected 0 for the backward pass";
  if (!forward && p.alibi) return "alibi, expected none for the backward pass";
  if (!forward && p.deterministic) return "deterministic, expected false for the backward pass";
  if (forward && p.head_dim_v % 8 != 0) {
    return format("head_dim_v = %lld, expected a multiple of 8 (TMA writes 16-byte units)",
                  static_cast<long long>(p.head_dim_v));
  }
  const int64_t rows_of_map_q = p.varlen ? p.total_q : p.seqlen_q;
  const int64_t rows_of_map_k = p.varlen ? p.total_k : p.seqlen_k;
  // With batch_invariant a batch of one must go where a larger one goes.
  const int64_t batch = p.varlen ? 1 : p.batch_invariant ? 2 : p.batch;
  const struct {
    const char* name;
    const Strides& strides;
    int64_t rows, heads;
  } tensors[] = {{"q", p.q, rows_of_map_q, p.heads},
                 {"k", p.k, rows_of_map_k, p.heads_kv},
                 {"v", p.v, rows_of_map_k, p.heads_kv},
                 // The backward pass reads dout by TMA, and writes nothing by it.
                 {forward ? "out" : "dout", forward ? p.out : p.dout, rows_of_map_q, p.heads}};
  for (const auto& t : tensors) {
    const struct {
      const char* name;
      int64_t stride, length;
    } dims[] = {{"batch", t.strides.batch, batch},
                {"seqlen", t.strides.seqlen, t.rows},
                {"head", t.strides.head, t.heads}};
    for (const auto& dim : dims) {
      if (dim.length > 1 && (dim.stride <= 0 || dim.stride % 8 != 0)) {
        return format(
            "%s.%s = %lld elements, expected a positive multiple of 8 (TMA reads "
            "16-byte units)",
            t.name, dim.name, static_cast<long long>(dim.stride));
      }
    }
  }
  return {};
}

std::string declines_on(int arch, const AttentionProblem& p, const DeviceProperties& device) {
  const int cc = device.compute_capability;
  if (arch == 90 ? cc / 10 != 9 : cc < 80) {
    return format("device %d has compute capability %d.%d, expected %s", p.device_index, cc / 10,
                  cc % 10, arch == 90 ? "9.x (TMA and wgmma)" : "8.0 or newer");
  }
  if (p.dtype == STROBE_FLOAT32) {
    return "dtype = fp32, expected bf16 or fp16 (what the tensor cores multiply)";
  }
  for (const auto& [name, length] :
       {std::pair{"seqlen_q", longest_q(p)}, {"seqlen_k", longest_k(p)}}) {
    if (length > kLongestSequence) {
      return format("%s = %lld, expected at most %lld", name, static_cast<long long>(length),
                    static_cast<long long>(kLongestSequence));
    }
  }
  if (arch == 90) {
    if (machine().forced_row.find("_sm80_") != std::string::npos) {
      return "STROBE_CUDA_ROW asks for another kernel";
    }
    if (std::string reason = tma_declines(p); !reason.empty()) return reason;
  }
  std::string reason;
  if (p.direction == STROBE_FORWARD) {
    find_row<ForwardRow>(arch, p, device, &reason);
  } else {
    find_row<BackwardRow>(arch, p, device, &reason);
  }
  return reason;
}

// --- Parameters ---

Tensor tensor(const void* data, const Strides& s, const AttentionProblem& p) {
  return {const_cast<void*>(data), p.varlen ? 0 : s.batch, s.seqlen, s.head};
}

template <typename Args>
void fill_common(const AttentionProblem& p, const Args& a, CommonParams& c) {
  c.q = tensor(a.q, p.q, p);
  c.k = tensor(a.k, p.k, p);
  c.v = tensor(a.v, p.v, p);
  c.cu_q = p.varlen ? a.cu_seqlens_q : nullptr;
  c.cu_k = p.varlen ? a.cu_seqlens_k : nullptr;
  c.alibi_slopes = p.alibi ? a.alibi_slopes : nullptr;
  c.alibi_batch_stride = p.alibi == STROBE_ALIBI_PER_BATCH_HEAD ? p.heads : 0;
  c.dropout = Dropout::make(p.dropout_p, a.dropout_seed, a.dropout_offset);
  c.batch = static_cast<int32_t>(p.batch);
  c.heads = static_cast<int32_t>(p.heads);
  c.heads_kv = static_cast<int32_t>(p.heads_kv);
  c.group = static_cast<int32_t>(p.heads / p.heads_kv);
  c.seqlen_q = static_cast<int32_t>(longest_q(p));
  c.seqlen_k = static_cast<int32_t>(longest_k(p));
  c.total_q = p.varlen ? p.total_q : p.seqlen_q;
  c.total_k = p.varlen ? p.total_k : p.seqlen_k;
  c.head_dim = static_cast<int32_t>(p.head_dim);
  c.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  c.causal = p.causal;
  c.window_left = p.window_left;
  c.window_right = p.window_right;
  c.lse_head_stride = p.varlen ? p.total_q : p.seqlen_q;
  c.scale = p.scale;
  c.softcap = p.softcap;
  const SoftcapConstants cap = SoftcapConstants::make(p.scale, p.softcap);
  c.cap_log2 = cap.cap_log2;
  c.cap_power = cap.cap_power;
}

void fill_params(const AttentionProblem& p, const ForwardArgs& a, ForwardParams& f) {
  fill_common(p, a, f);
  f.out = tensor(a.out, p.out, p);
  f.lse = a.lse;
  f.batch_invariant = p.batch_invariant;
}

void fill_params(const AttentionProblem& p, const BackwardArgs& a, BackwardParams& b) {
  fill_common(p, a, b);
  b.out = tensor(a.out, p.out, p);
  b.dout = tensor(a.dout, p.dout, p);
  b.dq = tensor(a.dq, p.dq, p);
  b.dk = tensor(a.dk, p.dk, p);
  b.dv = tensor(a.dv, p.dv, p);
  b.lse = a.lse;
  b.dlse = p.has_dlse ? a.dlse : nullptr;
  b.deterministic = p.deterministic;
  b.batch_invariant = p.batch_invariant;
}

// --- Plan ---

// The row of a plan: fill_row left its index there. A plan is the caller's memory: the row must
// still fit.
constexpr int kRowSlot = 0;

template <typename Row>
const Row* row_of(const Plan& plan, int arch) {
  constexpr size_t kRows = std::size(table<Row>()) - 1;
  const auto index = static_cast<size_t>(plan.reserved[kRowSlot]);
  if (index >= kRows) return nullptr;
  const Row* const row = table<Row>()[index].row;
  const AttentionProblem& p = plan.problem;
  const bool fits = row->config.arch == arch && row->config.dtype == p.dtype &&
                    row->config.width >= max64(p.head_dim, p.head_dim_v);
  return fits ? row : nullptr;
}

template <typename Row, typename Params>
void fill_row(int arch, Plan& plan, const DeviceProperties& device) {
  const AttentionProblem& p = plan.problem;
  const int index = find_row<Row>(arch, p, device, nullptr);
  const Row& row = *table<Row>()[index].row;
  plan.reserved[kRowSlot] = index;
  plan.tile_q = row.config.tile_q;
  plan.tile_k = row.config.tile_k;
  plan.block_threads = row.shape.threads;
  plan.shared_bytes = row.shape.shared_bytes;
  if (p.direction == STROBE_FORWARD) {
    plan.block_q = row.config.tile_q;
    plan.work_items = p.batch * p.heads * ceil_div(longest_q(p), plan.block_q);
  } else {
    plan.block_k = row.config.tile_k;
    plan.work_items = p.batch * p.heads_kv * ceil_div(longest_k(p), plan.block_k);
  }
  const GridSize grid = grid_for(plan.work_items);
  plan.grid[0] = static_cast<int32_t>(grid.x);
  plan.grid[1] = static_cast<int32_t>(grid.y);
  plan.grid[2] = 1;
  Params params{};
  if constexpr (std::is_same_v<Row, ForwardRow>) {
    fill_params(p, ForwardArgs{}, params);
  } else {
    fill_params(p, BackwardArgs{}, params);
  }
  Arena arena;
  row.carve(arena, p, params);
  plan.workspace_bytes = arena.used();
  if constexpr (std::is_same_v<Row, BackwardRow>) {
    // Pointers that TMA cannot read send a launch to mma.sync, with this plan's workspace.
    if (const int other = arch == 90 ? find_row<Row>(80, p, device, nullptr) : -1; other >= 0) {
      Arena count;
      table<Row>()[other].row->carve(count, p, params);
      plan.workspace_bytes = std::max(plan.workspace_bytes, count.used());
    }
  }
}

void fill_on(int arch, Plan& plan, const DeviceProperties& device) {
  if (plan.problem.direction == STROBE_FORWARD) {
    fill_row<ForwardRow, ForwardParams>(arch, plan, device);
  } else {
    fill_row<BackwardRow, BackwardParams>(arch, plan, device);
  }
}

// --- Launch ---

Status cuda_status(cudaError_t error, const char* what) {
  cudaGetLastError();  // what it was is in the status; it must not surface in a later call
  return {error == cudaErrorMemoryAllocation ? STROBE_OUT_OF_MEMORY : STROBE_DEVICE_ERROR,
          format("%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

// Makes a device current for the time of a launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

template <typename Args>
Status check_common_pointers(const AttentionProblem& p, const Args& a) {
  const int device = p.device_index;
  STROBE_RETURN_IF_ERROR(check_device_pointer("q", a.q, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("k", a.k, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("v", a.v, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("out", a.out, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("lse", a.lse, device));
  if (p.varlen) {
    STROBE_RETURN_IF_ERROR(check_device_pointer("cu_seqlens_q", a.cu_seqlens_q, device));
    STROBE_RETURN_IF_ERROR(check_device_pointer("cu_seqlens_k", a.cu_seqlens_k, device));
  }
  if (p.alibi) {
    STROBE_RETURN_IF_ERROR(check_device_pointer("alibi_slopes", a.alibi_slopes, device));
  }
  return check_device_pointer("workspace", a.workspace, device);
}

Status check_pointers(const AttentionProblem& p, const ForwardArgs& a) {
  return check_common_pointers(p, a);
}

Status check_pointers(const AttentionProblem& p, const BackwardArgs& a) {
  const int device = p.device_index;
  STROBE_RETURN_IF_ERROR(check_device_pointer("dout", a.dout, device));
  if (p.has_dlse) STROBE_RETURN_IF_ERROR(check_device_pointer("dlse", a.dlse, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("dq", a.dq, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("dk", a.dk, device));
  STROBE_RETURN_IF_ERROR(check_device_pointer("dv", a.dv, device));
  return check_common_pointers(p, a);
}

bool aligned_for_tma(const void* q, const void* k, const void* v, const void* out) {
  return ((reinterpret_cast<uintptr_t>(q) | reinterpret_cast<uintptr_t>(k) |
           reinterpret_cast<uintptr_t>(v) | reinterpret_cast<uintptr_t>(out)) &
          15) == 0;
}
bool aligned_for_tma(const ForwardArgs& a) { return aligned_for_tma(a.q, a.k, a.v, a.out); }
bool aligned_for_tma(const BackwardArgs& a) { return aligned_for_tma(a.q, a.k, a.v, a.dout); }

template <typename Row, typename Params, typename Args>
Status launch(int arch, const Plan& plan, const Args& args) {
  const AttentionProblem& p = plan.problem;
  if (rows_q(p) == 0 && (p.direction == STROBE_FORWARD || rows_k(p) == 0)) return {};
  const auto& devices = machine().devices;
  if (static_cast<size_t>(p.device_index) >= devices.size()) {
    return {STROBE_INVALID_ARGUMENT,
            format("device_index = %d, expected below %zu", p.device_index, devices.size())};
  }
  const Row* row = row_of<Row>(plan, arch);
  if (!row) return {STROBE_INVALID_ARGUMENT, "plan: not made by strobe_plan_make"};
  // Pointers are not known when a plan is made. Those that TMA cannot read go to mma.sync.
  if (arch == 90 && !aligned_for_tma(args)) {
    const int other = find_row<Row>(80, p, devices[static_cast<size_t>(p.device_index)], nullptr);
    if (other < 0) {
      return {
          STROBE_INVALID_ARGUMENT,
          format("q = %p, k = %p, v = %p, expected alignment to 16 bytes", args.q, args.k, args.v)};
    }
    row = table<Row>()[other].row;
  }
  STROBE_RETURN_IF_ERROR(check_pointers(p, args));
  const DeviceGuard guard(p.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");

  Params params{};
  fill_params(p, args, params);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  void* workspace = args.workspace;
  if constexpr (std::is_same_v<Row, ForwardRow>) {
    if (!workspace && plan.workspace_bytes > 0) {
      workspace = StreamBlocks::get(plan.workspace_bytes, p.device_index, stream);
    }
  }
  const bool own = !workspace && plan.workspace_bytes > 0;
  if (own) {
    // From the stream's memory pool: ordered like a launch, and capturable.
    const cudaError_t error = cudaMallocAsync(&workspace, plan.workspace_bytes, stream);
    if (error != cudaSuccess) return cuda_status(error, "allocating the workspace");
  }
  Arena arena(workspace);
  row->carve(arena, p, params);
  const DeviceProperties& device = devices[static_cast<size_t>(p.device_index)];
  cudaError_t error =
      row->launch(params, {stream, p.device_index, device.multiprocessors, device.shared_bytes});
  if (own) {
    const cudaError_t freed = cudaFreeAsync(workspace, stream);
    if (error == cudaSuccess) error = freed;
  }
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

// --- The rows of the kernel table ---

template <int kArch>
const char* unavailable() {
  const Machine& m = machine();
  if (m.devices.empty()) return m.reason;
  if (m.forced_arch != 0 && m.forced_arch < kArch) {
    return "STROBE_CUDA_ARCH asks for an older architecture";
  }
  return nullptr;
}

template <int kArch>
std::string declines(const AttentionProblem& p) {
  const auto& devices = machine().devices;
  if (static_cast<size_t>(p.device_index) >= devices.size()) {
    return format("device_index = %d, expected below the number of CUDA devices, %zu",
                  p.device_index, devices.size());
  }
  return declines_on(kArch, p, devices[static_cast<size_t>(p.device_index)]);
}

template <int kArch>
void fill(Plan& plan) {
  fill_on(kArch, plan, machine().devices[static_cast<size_t>(plan.problem.device_index)]);
}

template <int kArch>
Status run_forward(const Plan& plan, const ForwardArgs& args) {
  return launch<ForwardRow, ForwardParams>(kArch, plan, args);
}
template <int kArch>
Status run_backward(const Plan& plan, const BackwardArgs& args) {
  return launch<BackwardRow, BackwardParams>(kArch, plan, args);
}

template <int kArch>
constexpr Kernel kernel(const char* name) {
  return {name,        STROBE_CUDA,        unavailable<kArch>, declines<kArch>,
          fill<kArch>, run_forward<kArch>, run_backward<kArch>};
}

constexpr Kernel kKernels[] = {kernel<90>("cuda_sm90"), kernel<80>("cuda_sm80")};
constexpr int kArchs[] = {90, 80};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }
std::span<const DeviceProperties> devices() { return machine().devices; }
const char* no_devices_reason() { return machine().reason; }

Status plan_for(const AttentionProblem& problem, const DeviceProperties& device, Plan& plan) {
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  Plan made{};
  made.struct_size = sizeof made;
  made.problem = problem;
  resolve_defaults(made.problem);
  std::string reasons;
  for (size_t i = 0; i < std::size(kArchs); ++i) {
    const std::string reason = declines_on(kArchs[i], made.problem, device);
    if (reason.empty()) {
      made.kernel = kKernels[i].name;
      fill_on(kArchs[i], made, device);
      plan = made;
      return {};
    }
    reasons += format("%-14s declines: %s\n", kKernels[i].name, reason.c_str());
  }
  return {STROBE_UNSUPPORTED, "no kernel takes " + to_string(problem) + "\n" + reasons};
}

}  // namespace strobe::cuda
