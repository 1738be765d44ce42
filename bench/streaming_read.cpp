// The plain read of cli/streaming_read.h by as many threads as asked for, for bench/cpu_bench.py
// --decode.
#include "cli/streaming_read.h"

extern "C" __attribute__((visibility("default"))) void streaming_read(const void* begin,
                                                                      size_t bytes, int threads) {
  strobe::cli::StreamingRead({begin}, bytes, threads);
}
