// What a call costs on the host, beside the launch of an empty kernel: microseconds, medians.
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
    layer = (layer + 1) % 8;
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
  if (failures > 0) std::printf("FAILED: %d calls, %s\n", failures, strobe_last_error());
  return failures > 0;
}
