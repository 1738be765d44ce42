// One random problem of `strobe check` over a KV cache.
#ifndef STROBE_CLI_CACHED_CASE_H_
#define STROBE_CLI_CACHED_CASE_H_

#include <cstdint>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/case.h"
#include "cli/random.h"
#include "cli/reference.h"

namespace strobe::cli {

// What a case surely has; the rest is drawn.
struct CachedSpec {
  Device device = Device::kCpu;
  bool paged = false;
  bool append = false;  // and, mostly, rotary embedding
};

class CachedCase {
 public:
  CachedCase(const CachedSpec& spec, Random* random);

  // Runs the library on a cache that holds NaN in all rows that are not in use. Returns what went
  // wrong, or "". threads: as in Problem.
  [[nodiscard]] std::string RunLibrary(int32_t threads);
  // After RunLibrary: error over allowed error, as Case::Compare.
  [[nodiscard]] double Compare(std::string* what) const;
  [[nodiscard]] std::string Describe() const;

 private:
  struct Sequence {
    int64_t queries, used, pad, added;  // rows before the append, left pad included
    int64_t first_query, first_new;     // rows of q_ and of k_new_
    int64_t rotary_start;
  };

  void DrawSequences(Random* random);
  void Place(Random* random);
  // Row n of a sequence in k_ and v_.
  [[nodiscard]] int64_t CacheRow(size_t b, int64_t n) const;
  [[nodiscard]] std::vector<double> Rotated(const CaseTensor& t, int64_t row, int64_t head,
                                            int64_t position) const;
  // Rows of the cache that the launch should not have changed, and those that it should have
  // written.
  [[nodiscard]] std::string CheckCache(const CaseTensor& k_before,
                                       const CaseTensor& v_before) const;

  Problem problem_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> cu_q_, cu_new_, used_, pads_, entries_, table_, positions_;
  std::vector<float> lse_;
  CaseTensor q_, k_, v_, k_new_, v_new_, out_, cos_, sin_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_CACHED_CASE_H_
