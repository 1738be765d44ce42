// One problem with all of its tensors in guarded memory, and the calls that run it through the C
// ABI.
#ifndef STROBE_CHECK_FIXTURE_H_
#define STROBE_CHECK_FIXTURE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "guarded.h"
#include "oracle.h"
#include "problem_gen.h"
#include "strobe/strobe.h"

namespace strobe_test {

int32_t StrobeDType(oracle::DType dtype);

class Fixture {
 public:
  /// Lays the tensors out and fills the inputs with the case's values. Outputs are poison.
  explicit Fixture(const Case& c);

  /// The problem as the C ABI wants it.
  strobe_problem MakeProblem(strobe_direction direction) const;
  /// The arguments but for the workspace.
  strobe_forward_args ForwardArgs() const;
  strobe_backward_args BackwardArgs() const;

  /// Plans and launches. "" or what went wrong: a failing status, memory written that should not
  /// be, an output element that was not, an input changed. `with_lse` false: forward runs with lse
  /// = NULL.
  std::string Forward(bool with_lse = true);
  /// The same where `launch` plans and launches, and "" or what went wrong is what it gives.
  using ForwardLaunch =
      std::function<std::string(const strobe_problem&, const strobe_forward_args&)>;
  std::string Forward(const ForwardLaunch& launch, bool with_lse);
  /// Takes out and lse as Forward() left them.
  std::string Backward();
  /// The same where `launch` plans and launches, and "" or what went wrong is what it gives.
  using BackwardLaunch =
      std::function<std::string(const strobe_problem&, const strobe_backward_args&)>;
  std::string Backward(const BackwardLaunch& launch);
  /// What the case's mask is packed from.
  const MaskData& mask() const { return mask_; }
  /// What the tensors lie in: a launch on another device works on copies of it.
  std::vector<std::span<std::byte>> Memory() const { return WholeOf(memory_); }
  /// Poisons the outputs of the direction again.
  void Poison(strobe_direction direction);

  /// The same problem for the oracle.
  oracle::Problem OracleProblem() const;
  /// lse and dlse as [rows, heads, 1], whatever the library's order.
  oracle::Tensor ReadLse() const { return ReadRows(lse_); }
  oracle::Tensor ReadDlse() const { return ReadRows(dlse_); }
  oracle::Tensor ReadDelta() const { return ReadRows(delta_); }
  oracle::Tensor ReadDsinks() const { return dsinks_.Read(); }
  /// Whether there is a gradient of lse, as an argument or in delta.
  bool HasDlse() const { return case_.has_dlse || case_.delta_has_dlse; }
  /// What dq, dk and dv hold before Backward() adds to them.
  struct Gradients {
    oracle::Tensor dq, dk, dv, dsinks;
  };
  const Gradients& Before() const { return before_; }
  void SetDlse(int64_t row, int64_t head, float x) { dlse_.Set(dlse_.Index(0, row, head, 0), x); }

  /// The elements of an output as they stand in memory, for comparing bits.
  static std::string Bits(const Strided& t);
  std::string LseBits() const { return Bits(lse_); }
  void RestoreLse(const std::string& bits) const;

  const Case& c() const { return case_; }

  /// Called with each plan before its launch, where there is one: to run another kernel than
  /// strobe_plan_make chose.
  std::function<void(strobe_plan&)> edit_plan;

  Strided q, k, v, out, dout, dq, dk, dv;
  Strided bias, dbias;                // where the case has them
  Strided q_scale, k_scale, v_scale;  // float8: [batch, 1, heads_kv, 1]

  /// What q, k or v of this fixture stands for: codes times their scales.
  oracle::Tensor Values(const Strided& t) const;

 private:
  Guarded* Allocate(int64_t elements, int64_t element_size, int64_t shift);
  Strided Place(const Layout& layout, int64_t rows, int64_t heads, int64_t dim,
                oracle::DType dtype);
  Strided PlaceEntries(const Layout& layout, int64_t batch, int64_t rows, int64_t heads,
                       int64_t dim, oracle::DType dtype);
  void FillBias(oracle::Rng& rng);
  void PlaceScales();
  void FillScales();
  int64_t SequenceOf(const Strided& t, int64_t row) const;
  void Pack(const std::vector<Strided*>& tensors, const Layout& layout);
  Strided PlaceRows();
  void PlaceSinks(oracle::Rng& rng);
  void Fill(const Strided& t, double size, oracle::Rng& rng) const;
  void PutSpecials(oracle::Rng& rng) const;
  void PoisonUnused() const;
  void FillDelta();
  void FillGradients();
  oracle::Tensor ReadRows(const Strided& t) const;
  void Seal();
  /// every: each element that may be written has to change.
  std::string CheckMemory(const char* call, bool every = true);

  Case case_;
  std::vector<std::unique_ptr<Guarded>> memory_;
  Strided lse_, dlse_, delta_;
  Strided sinks_, dsinks_;  // [heads]
  Gradients before_;
  std::vector<float> slopes_;
  std::vector<int32_t> cu_q_, cu_k_;
  void PackMask();
  MaskData mask_;
  strobe_mask mask_shape_{};
  Guarded* packed_mask_ = nullptr;
  std::string mask_error_;
};

/// Each sequence's start and length in use in the packed rows; dense batches likewise.
std::vector<oracle::Sequence> Sequences(const Case& c);

}  // namespace strobe_test

#endif  // STROBE_CHECK_FIXTURE_H_
