// One random problem of `strobe check`: its tensors, its run through the library, and the
// comparison with float64.
#ifndef STROBE_CLI_CASE_H_
#define STROBE_CLI_CASE_H_

#include <cstdint>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/mirror.h"
#include "cli/random.h"
#include "cli/reference.h"
#include "core/options.h"

namespace strobe::cli {

// How a tensor lies in memory.
enum class Placement { kContiguous, kHeadsFirst, kPacked, kPadded };

// What to compute: drawn at random, then bent by a feature.
struct CaseSpec {
  Problem problem;  // strides, totals and the longest lengths are filled in from the rest
  bool backward = true;
  std::vector<int64_t> lengths_q;  // of each sequence; all equal unless problem.varlen
  std::vector<int64_t> lengths_k;
  Placement placement = Placement::kContiguous;
  // One number a sequence; empty: none. NaN stands in the rows that are not in use.
  ArraysOf<std::vector<int32_t>> arrays;
  float dlse_chance = 0;
  bool specials = false;  // a NaN or an infinity in q, k or v; forward only
  uint64_t seed = 0;      // of the tensors and the dropout
};

// A tensor [batch, seqlen, heads, dim] in poisoned memory, with as much room around and between its
// elements as its placement asks for. With varlen batch is 1 and seqlen the total.
class CaseTensor {
 public:
  CaseTensor() = default;
  CaseTensor(DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
             Placement placement);

  void FillNormal(Random* random);
  void Set(int64_t row, int64_t head, int64_t i, float value);  // row: batch * seqlen + position
  [[nodiscard]] double Get(int64_t row, int64_t head, int64_t i) const;
  [[nodiscard]] std::vector<double> Values() const;  // [rows, heads, dim]
  // Nothing was written between and around the elements.
  [[nodiscard]] bool RoomUntouched() const;
  [[nodiscard]] std::vector<std::byte> Bytes() const { return bytes_; }

  // The first element, of the memory itself or of its mirror.
  [[nodiscard]] void* In(Mirror* mirror);
  [[nodiscard]] void* Out(Mirror* mirror);
  [[nodiscard]] int64_t rows() const { return batch_ * seqlen_; }
  [[nodiscard]] int64_t heads() const { return heads_; }
  [[nodiscard]] int64_t dim() const { return dim_; }
  [[nodiscard]] const Strides& strides() const { return strides_; }

 private:
  [[nodiscard]] size_t Index(int64_t row, int64_t head, int64_t i) const;

  DType dtype_ = DType::kFloat32;
  int64_t batch_ = 0, seqlen_ = 0, heads_ = 0, dim_ = 0;
  Strides strides_ = {};
  int64_t offset_ = 0;
  std::vector<std::byte> bytes_;
};

// The tensors of a case.
class Case {
 public:
  explicit Case(const CaseSpec& spec);

  // Runs the library with poisoned outputs and workspace. Returns what went wrong, or "". threads:
  // as in Problem.
  [[nodiscard]] std::string RunLibrary(int32_t threads);

  // Error over allowed error, the worst of all results; above 1 is a failure, and *what says where.
  [[nodiscard]] double Compare(std::string* what) const;

  // The bytes of out, dq, dk, dv after RunLibrary.
  [[nodiscard]] std::vector<std::vector<std::byte>> ResultBytes() const;

  [[nodiscard]] std::string Describe() const;

 private:
  void PoisonUnused();
  [[nodiscard]] ReferenceProblem MakeReferenceProblem() const;
  [[nodiscard]] std::vector<double> LseValues() const;  // [rows, heads]

  CaseSpec spec_;
  Problem problem_;
  std::vector<int32_t> cu_q_, cu_k_;
  std::vector<float> slopes_, lse_, dlse_;
  CaseTensor q_, k_, v_, dout_, out_, dq_, dk_, dv_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_CASE_H_
