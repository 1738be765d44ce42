// Data for benchmarks.
#ifndef STROBE_CLI_BENCH_FILL_H_
#define STROBE_CLI_BENCH_FILL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cli/dtype.h"
#include "cli/random.h"

namespace strobe::cli {

// Normal values from a table: the speed does not depend on more randomness than that.
inline void FillNormal(DType dtype, std::span<std::byte> bytes, uint64_t seed) {
  constexpr size_t kTable = 4096;
  Random random(seed);
  std::vector<float> table(kTable);
  for (float& x : table) x = static_cast<float>(random.Normal());
  const size_t count = bytes.size() / Bytes(dtype);
  for (size_t i = 0; i < count; ++i) Store(dtype, bytes.data(), i, table[random.Bits() % kTable]);
}

}  // namespace strobe::cli

#endif  // STROBE_CLI_BENCH_FILL_H_
