// What the machine gives by number of threads. Arithmetic: no memory, no shared data. How well a
// launch spreads over threads can be judged by this alone: cores share power and clocks, and the
// CPUs of a virtual machine may be two to a core without saying so. Reading: each thread reads its
// share of a block of memory that no cache holds, once, from begin to end; the time of decoding a
// long KV cache is at least that.
//
//     build/release/bin/cpu_peak [THREADS]    1, 2, 4, ... threads, the best of several
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cli/streaming_read.h"

namespace {

constexpr int kChains = 16;  // more than latency times throughput of any core's FMA units

__attribute__((target("avx2,fma"))) double fma_256(int64_t rounds) {
  __m256 sum[kChains], factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(0.001f);
  for (__m256& x : sum) x = term;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (__m256& x : sum) x = _mm256_fmadd_ps(x, factor, term);
  }
  for (__m256& x : sum) asm volatile("" : "+x"(x));  // not to be optimised away
  return 2.0 * 8 * kChains * static_cast<double>(rounds);
}

__attribute__((target("avx512f"))) double fma_512(int64_t rounds) {
  __m512 sum[kChains], factor = _mm512_set1_ps(0.999f), term = _mm512_set1_ps(0.001f);
  for (__m512& x : sum) x = term;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (__m512& x : sum) x = _mm512_fmadd_ps(x, factor, term);
  }
  for (__m512& x : sum) asm volatile("" : "+v"(x));
  return 2.0 * 16 * kChains * static_cast<double>(rounds);
}

__attribute__((target("amx-tile,amx-bf16"))) double amx_bf16(int64_t rounds) {
  alignas(64) uint8_t config[64] = {1};  // palette 1
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;  // bytes of a row
    config[48 + t] = 16;      // rows
  }
  asm volatile("" ::"r"(config) : "memory");  // GCC 12's intrinsic does not say that it reads
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4 * 2.0 * 16 * 16 * 32 * static_cast<double>(rounds);
}

constexpr int64_t kReadBytes = int64_t{1} << 29;  // of all threads together: no cache is as large

// What so many threads do in a second, 10^12 units at a time: the best of kTries. work(thread)
// returns how many units it has done.
template <typename Work>
double speed(int threads, const Work& work) {
  constexpr int kTries = 7;
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::atomic<double> done{0};
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t) {
      all.emplace_back([&, t] {
        ++ready;
        while (!go) std::this_thread::yield();
        done += work(t);
      });
    }
    while (ready < threads) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    go = true;
    for (std::thread& t : all) t.join();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    best = std::max(best, done / time.count() * 1e-12);
  }
  return best;
}

void report(const char* name, double (*loop)(int64_t), int64_t rounds, int most) {
  double one = 0;
  for (int threads = 1; threads <= most; threads *= 2) {
    const double now = speed(threads, [&](int) { return loop(rounds); });
    if (threads == 1) one = now;
    std::printf("%-9s %3d threads %8.3f TFLOP/s %4.0f %%\n", name, threads, now,
                100 * now / one / threads);
    std::fflush(stdout);
  }
}

void report_read(int most) {
  const std::vector<std::byte> memory(kReadBytes, std::byte{1});
  for (int threads = 1; threads <= most; threads *= 2) {
    const double now = speed(threads, [&](int thread) {
      const size_t share = memory.size() / static_cast<size_t>(threads);
      strobe::cli::StreamingRead(memory.data() + static_cast<size_t>(thread) * share, share);
      return static_cast<double>(kReadBytes) / threads;
    });
    std::printf("%-9s %3d threads %8.1f GB/s\n", "read", threads, 1e3 * now);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int most =
      argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    report("fp32", fma_512, 5000000, most);
  } else if (__builtin_cpu_supports("avx2")) {
    report("fp32", fma_256, 5000000, most);
  }
  report_read(most);
  // Linux gives a process the tile registers when it asks: ARCH_REQ_XCOMP_PERM, XTILEDATA.
  constexpr int kAsk = 0x1023, kTiles = 18;
  if (syscall(SYS_arch_prctl, kAsk, kTiles) == 0) report("bf16 AMX", amx_bf16, 1000000, most);
  return 0;
}
