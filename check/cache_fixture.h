// One problem over a KV cache with all of its tensors in guarded memory: rows and pages that are
// not in use hold NaN, and no byte may change but new rows, out and lse.
#ifndef STROBE_CHECK_CACHE_FIXTURE_H_
#define STROBE_CHECK_CACHE_FIXTURE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_case.h"
#include "compare.h"
#include "guarded.h"
#include "oracle.h"
#include "quantised.h"

namespace strobe_test {

class CacheFixture {
 public:
  /// What a launch came to, and whether its plan unpacks a quantised cache first.
  struct Launched {
    strobe_status status;
    bool unpacks_first;
    // NOLINTNEXTLINE(google-explicit-constructor): most launches have a status alone.
    Launched(strobe_status s, bool unpacks = false) : status(s), unpacks_first(unpacks) {}
    // NOLINTNEXTLINE(google-explicit-constructor)
    operator strobe_status() const { return status; }
  };
  /// Runs a problem: the library through the C ABI, or whatever stands for it.
  using Launch = std::function<Launched(const strobe_problem&, strobe_forward_args&)>;

  explicit CacheFixture(const CacheCase& c);

  strobe_problem Problem() const;
  strobe_forward_args Args() const;

  /// Launches once. "" or what went wrong: a failing status, memory written that should not be, an
  /// element of an output that was not.
  std::string Run(const Launch& launch);
  /// After Run: "" when the appended rows, out and lse agree with the oracle over the gathered
  /// cache.
  std::string Judge() const;
  /// The same, and how near it was. spare: as Yardstick has it.
  oracle::Verdict JudgeWith(double spare) const;
  std::vector<std::span<std::byte>> Memory() const { return WholeOf(memory_); }
  /// The bits of out and lse of one sequence.
  std::string Bits(int64_t sequence) const;

  const CacheCase& c() const { return case_; }
  /// Whether the launch of Run unpacked a quantised cache first: as its plan says, and as it is
  /// judged, for what codes stand for is rounded to the queries' dtype there; of float8 queries to
  /// bf16, keys times the queries' scale.
  bool unpacks_first() const { return unpacks_first_; }
  /// What the case's mask is packed from.
  const MaskData& mask() const { return mask_; }

  Strided q, k, v, k_new, v_new, out, lse;  // k and v: bytes where the case quantises them
  Strided k_scale, v_scale, q_scale;        // without memory where there are none
  std::vector<int32_t> table, cu_q, cu_new, used_q, used_k, entries, leftpad, q_position, prefix,
      rotary_position;

 private:
  void Seal();
  Guarded* Allocate(int64_t elements, oracle::DType dtype, int64_t shift);
  Strided Place(oracle::DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim,
                const Spacing& spacing);
  void PlaceCache();
  void FillCache(oracle::Rng& rng);
  void FillScales(oracle::Rng& rng);
  oracle::QuantisedRow DrawRow(const Strided& t, std::optional<float> given,
                               oracle::Rng& rng) const;
  void FillNewCodes(const Strided& t, const Strided& of, oracle::Rng& rng) const;
  void FillQuantised(const Strided& t, int64_t entry, int64_t row, int64_t head,
                     oracle::Rng& rng) const;
  /// What the rows of k, or of v, are, and the strobe_kv_scale that they have.
  oracle::Form FormOf(const Strided& t) const { return &t == &v ? case_.value_form() : case_.form; }
  int32_t ScaleKindOf(const Strided& t) const;
  float ScaleOf(const Strided& t, int64_t entry, int64_t row, int64_t head) const;
  oracle::Tensor ReadCache(const Strided& t) const;
  void ScaleSequences(const Strided& scales, const std::vector<oracle::Sequence>& sequences,
                      bool of_q, oracle::Tensor& values) const;
  std::vector<uint8_t> BytesOf(const Strided& t, int64_t row, int64_t head) const;
  std::string CheckQuantised(const char* name, const Strided& t, int64_t row, int64_t head,
                             const double* x, int64_t dim, bool turned) const;
  void FillRotary(oracle::Rng& rng);
  void FillBias(oracle::Rng& rng);
  void SetArrays();
  oracle::Cache OracleCache() const;
  std::string CheckAppended(const oracle::Cache& cache) const;
  void PackMask();

  CacheCase case_;
  bool unpacks_first_ = false;
  std::vector<std::unique_ptr<Guarded>> memory_;
  Strided cosines_, sines_;
  std::vector<float> slopes_;
  Strided sinks_;  // [heads]
  Strided bias_;   // where the case has one
  MaskData mask_;
  strobe_mask mask_shape_{};
  Guarded* packed_mask_ = nullptr;
  std::string mask_error_;
};

/// Through strobe_plan_make and strobe_forward, with a workspace of the caller's between red zones.
/// edit: called with the plan before the launch, to take another kernel.
CacheFixture::Launch ThroughTheLibrary(std::function<void(strobe_plan&)> edit = {});

}  // namespace strobe_test

#endif  // STROBE_CHECK_CACHE_FIXTURE_H_
