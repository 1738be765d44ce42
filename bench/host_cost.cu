// What a call costs on the host, beside the launch of an empty kernel: microseconds, medians. A
// dense problem, and decoding with a paged cache, a new key and rotary embedding: one launch at
// head_dim 128, two at 256.
//
//     build/cuda/bin/host_cost
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "strobe/strobe.h"

namespace {

__global__ void empty() {}

// As many bytes of parameters as the Hopper forward has: four tensor maps and about 400 bytes of
// its own.
struct Parameters {
  char bytes[912];
};
__global__ void empty_with_parameters(const __grid_constant__ Parameters) {}

// A function of the driver's, which nothing here links against.
template <typename Function>
Function driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<Function>(found);
}

// A tensor map of 64 x 64 values, as a launch on Hopper makes four; true where the device takes it.
CUtensorMap map;
bool encode(void* data) {
  static const auto function = driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t lengths[2] = {64, 64}, strides[1] = {128};
  const cuuint32_t box[2] = {64, 64}, steps[2] = {1, 1};
  return function && function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, lengths, strides,
                              box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same map for other data.
bool replace(void* data) {
  static const auto function =
      driver<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  return function && function(&map, data) == CUDA_SUCCESS;
}

// Median microseconds of a call, over batches short enough not to fill the launch queue.
template <typename Call>
double cost(const Call& call) {
  constexpr int kBatch = 100, kBatches = 50;
  std::vector<double> times;
  for (int i = 0; i < kBatches; ++i) {
    cudaDeviceSynchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int j = 0; j < kBatch; ++j) call();
    const auto end = std::chrono::steady_clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(end - begin).count() / kBatch);
  }
  std::nth_element(times.begin(), times.begin() + kBatches / 2, times.end());
  return times[kBatches / 2];
}

constexpr int kLayers = 8;

// Decoding a token: the new key is appended to a page of 16 and turned, as the queries are.
class DecodeStep {
 public:
  explicit DecodeStep(int64_t head_dim) {
    constexpr int64_t kHeads = 8, kHeadsKv = 2, kPages = 64, kPageSize = 16;
    strobe_problem_init(&problem_, sizeof problem_);
    problem_.dtype = STROBE_BFLOAT16;
    problem_.device = STROBE_CUDA;
    problem_.batch = 1, problem_.heads = kHeads, problem_.heads_kv = kHeadsKv;
    problem_.head_dim = head_dim, problem_.causal = 1;
    problem_.seqlen_q = 1, problem_.seqlen_k = kPages * kPageSize;
    problem_.cache = STROBE_CACHE_PAGED;
    problem_.pages = kPages, problem_.page_size = kPageSize, problem_.pages_per_sequence = kPages;
    problem_.has_seqused_k = 1;
    problem_.append = STROBE_APPEND_DENSE, problem_.seqlen_new = 1;
    problem_.rotary_dim = head_dim, problem_.rotary_rows = kPages * kPageSize;
    plan_.struct_size = sizeof plan_;
    failures_ += strobe_plan_make(&problem_, &plan_) != STROBE_OK;
    args_.struct_size = sizeof args_;
    const int64_t row = head_dim * 2;
    pool_bytes_ = static_cast<size_t>(kPages * kPageSize * kHeadsKv * row);
    k_ = static_cast<char*>(zeros(kLayers * pool_bytes_));
    v_ = static_cast<char*>(zeros(kLayers * pool_bytes_));
    args_.q = zeros(kHeads * row), args_.out = zeros(kHeads * row);
    args_.k_new = zeros(kHeadsKv * row), args_.v_new = zeros(kHeadsKv * row);
    args_.rotary_cos = zeros(kPages * kPageSize * row / 2);
    args_.rotary_sin = zeros(kPages * kPageSize * row / 2);
    // No key yet, and page 0 in each column.
    args_.seqused_k = static_cast<int32_t*>(zeros(sizeof(int32_t)));
    args_.block_table = static_cast<int32_t*>(zeros(kPages * sizeof(int32_t)));
    args_.workspace_bytes = static_cast<size_t>(plan_.workspace_bytes);
    args_.workspace = zeros(args_.workspace_bytes);
  }

  void make() { failures_ += strobe_plan_make(&problem_, &plan_) != STROBE_OK; }
  // Like the layers of a model: each launch has another cache than the one before.
  void launch() {
    layer_ = (layer_ + 1) % kLayers;
    args_.k = k_ + layer_ * pool_bytes_, args_.v = v_ + layer_ * pool_bytes_;
    failures_ += strobe_forward(&plan_, &args_) != STROBE_OK;
  }
  const char* kernel() const { return plan_.kernel; }
  int failures() const { return failures_; }

 private:
  // Freed with the process.
  static void* zeros(size_t bytes) {
    void* data = nullptr;
    if (cudaMalloc(&data, bytes + 1) == cudaSuccess) cudaMemset(data, 0, bytes);
    return data;
  }

  strobe_problem problem_;
  strobe_plan plan_;
  strobe_forward_args args_{};
  size_t pool_bytes_ = 0, layer_ = 0;
  char *k_ = nullptr, *v_ = nullptr;
  int failures_ = 0;
};

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("host_cost: skipped (no GPU)\n");
    return 0;
  }
  strobe_problem problem;
  strobe_problem_init(&problem, sizeof problem);
  problem.dtype = STROBE_BFLOAT16;
  problem.device = STROBE_CUDA;
  problem.batch = 1, problem.heads = 1, problem.head_dim = 64;
  problem.seqlen_q = problem.seqlen_k = 64;
  void *q, *k, *v, *out, *workspace;
  for (void** p : {&q, &k, &v, &out, &workspace}) cudaMalloc(p, 1 << 20);
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  strobe_forward_args args{};
  args.struct_size = sizeof args;
  args.q = q, args.k = k, args.v = v, args.out = out;
  args.workspace = workspace, args.workspace_bytes = 1 << 20;
  int failures = 0;
  const auto make = [&] { failures += strobe_plan_make(&problem, &plan) != STROBE_OK; };
  // Like the layers of a model: each launch has other addresses than the one before.
  int layer = 0;
  const auto at_layer = [&](void* tensor) { return static_cast<char*>(tensor) + (layer << 16); };
  const auto launch = [&] {
    layer = (layer + 1) % kLayers;
    args.q = at_layer(q), args.k = at_layer(k), args.v = at_layer(v), args.out = at_layer(out);
    failures += strobe_forward(&plan, &args) != STROBE_OK;
  };
  make();
  launch();
  const Parameters parameters{};
  const auto bare = [] { empty<<<1, 32>>>(); };
  const auto alike = [&] { empty_with_parameters<<<1, 32>>>(parameters); };
  double nothing = cost(bare), with_parameters = cost(alike);
  const double planned = cost(make), launched = cost(launch);
  double both = cost([&] { make(), launch(); });
  for (int i = 0; i < 4; ++i) {  // in turns, the least of each: a host has neighbours
    nothing = std::min(nothing, cost(bare));
    with_parameters = std::min(with_parameters, cost(alike));
    both = std::min(both, cost([&] { make(), launch(); }));
  }
  cudaPointerAttributes attributes;
  const double asked = cost([&] { cudaPointerGetAttributes(&attributes, q); });
  int device;
  const double device_asked = cost([&] { cudaGetDevice(&device); });
  const double last_error = cost([] { cudaGetLastError(); });
  const double mapped = cost([&] { failures += !encode(q); });
  const double remapped = cost([&] { failures += !replace(k); });
  // The same launch with a block's shape as the Hopper forward's, and by the driver's function.
  const int shared = 200 << 10;
  cudaFuncSetAttribute(empty_with_parameters, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  const double shaped = cost([&] { empty_with_parameters<<<1, 384, shared>>>(parameters); });
  const auto launch_by_driver = driver<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  cudaKernel_t kernel{};
  failures +=
      cudaGetKernel(&kernel, reinterpret_cast<const void*>(&empty_with_parameters)) != cudaSuccess;
  void* pointers[] = {const_cast<Parameters*>(&parameters)};
  const double direct = cost([&] {
    failures += launch_by_driver(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 384, 1, 1, shared,
                                 nullptr, pointers, nullptr) != CUDA_SUCCESS;
  });
  std::printf("kernel                  %s\n", plan.kernel);
  std::printf("empty launch            %.2f us, %.2f with %zu bytes of parameters\n", nothing,
              with_parameters, sizeof parameters);
  std::printf("plan                    %.2f us\n", planned);
  std::printf("launch                  %.2f us\n", launched);
  std::printf(
      "plan and launch         %.2f us: %.2f more than an empty launch, %.2f than the other\n",
      both, both - nothing, both - with_parameters);
  std::printf(
      "of which, possibly      %.2f us a tensor map (%.2f for other data), %.2f cudaGetDevice, "
      "%.2f "
      "cudaGetLastError\n",
      mapped, remapped, device_asked, last_error);
  std::printf("empty launch, 384 threads, 200 KB of shared memory   %.2f us, %.2f by the driver\n",
              shaped, direct);
  std::printf("cudaPointerGetAttributes %.2f us\n", asked);
  for (const int64_t head_dim : {128, 256}) {
    DecodeStep step(head_dim);
    step.launch();
    const double step_planned = cost([&] { step.make(); });
    double step_launched = cost([&] { step.launch(); });
    for (int i = 0; i < 4; ++i) {
      nothing = std::min(nothing, cost(bare));
      step_launched = std::min(step_launched, cost([&] { step.launch(); }));
    }
    std::printf(
        "decoding, head_dim %lld   plan %.2f us, launch %.2f us (%s): %.2f more than an empty "
        "one\n",
        static_cast<long long>(head_dim), step_planned, step_launched, step.kernel(),
        step_launched - nothing);
    failures += step.failures();
  }
  if (failures > 0) std::printf("FAILED: %d calls, %s\n", failures, strobe_last_error());
  return failures > 0;
}
