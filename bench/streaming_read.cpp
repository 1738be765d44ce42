// The plain read of cli/streaming_read.h by as many threads as asked for, for bench/cpu_bench.py
// --decode.
#include "cli/streaming_read.h"

#include <omp.h>

extern "C" __attribute__((visibility("default"))) void streaming_read(const void* begin,
                                                                      size_t bytes, int threads) {
#pragma omp parallel num_threads(threads)
  strobe::cli::StreamingReadShare(static_cast<const std::byte*>(begin), bytes, omp_get_thread_num(),
                                  omp_get_num_threads());
}
