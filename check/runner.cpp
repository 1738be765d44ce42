#include "runner.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "comparator.h"
#include "compare.h"

namespace strobe_test {
namespace {

// How often the comparator's errors are drawn at most. The largest of few values is a matter of
// luck, and when scores are large, most weights are 0 or 1 and only a few rows have an error at
// all. So: often where that is cheap.
size_t MostDraws(const Case& c) {
  constexpr int64_t kWork = 2'500'000;
  return static_cast<size_t>(std::clamp<int64_t>(kWork / std::max<int64_t>(c.Work(), 1),
                                                 c.Work() < 4 * kWork ? 2 : 1, 24));
}

// Holds the results of a fixture against the oracle. The comparator is most of a test's time.
class Judge {
 public:
  explicit Judge(const Fixture& f, bool backward = true, double spare = 0)
      : f_(f),
        problem_(f.OracleProblem()),
        q_(f.Values(f.q)),
        k_(f.Values(f.k)),
        v_(f.Values(f.v)),
        dout_(f.dout.Read()),
        dlse_(f.ReadDlse()),
        backward_(backward),
        yardstick_(
            [this](uint64_t noise_seed) {
              oracle::Plain plain = oracle::PlainAttention(
                  problem_, f_.c().dtype, q_, k_, v_, backward_ ? &dout_ : nullptr,
                  backward_ ? dlse() : nullptr, noise_seed);
              if (backward_ && f_.c().accumulate) {
                const oracle::DType dtype = f_.c().grad_dtype();
                Add(f_.Before().dq, dtype, plain.dq);
                Add(f_.Before().dk, dtype, plain.dk);
                Add(f_.Before().dv, dtype, plain.dv);
                Add(f_.Before().dsinks, oracle::DType::kFloat32, plain.dsinks);
              }
              for (double& x : plain.dbias.data) {
                x = oracle::Round(f_.c().dbias_dtype(), static_cast<float>(x));
              }
              return plain;
            },
            MostDraws(f.c()), spare) {}

  void Forward(oracle::Verdict& verdict) {
    const oracle::ForwardResult wanted = oracle::Forward(problem_, q_, k_, v_);
    verdict.Add(yardstick_.CheckOut(f_.out.Read(), wanted, f_.c().out_dtype()));
    verdict.Add(oracle::CompareLse(f_.ReadLse(), wanted.lse, wanted.size));
  }

  void Backward(oracle::Verdict& verdict) {
    oracle::BackwardResult wanted = oracle::Backward(problem_, q_, k_, v_, dout_, dlse());
    if (f_.c().accumulate) {
      const auto add = [](const oracle::Tensor& before, oracle::Tensor& to) {
        for (size_t i = 0; i < to.data.size(); ++i) to.data[i] += before.data[i];
      };
      add(f_.Before().dq, wanted.dq);
      add(f_.Before().dk, wanted.dk);
      add(f_.Before().dv, wanted.dv);
      add(f_.Before().dsinks, wanted.dsinks);
    }
    const oracle::DType dtype = f_.c().grad_dtype();
    const double factor = f_.c().alibi ? oracle::kAlibiGradientFactor : oracle::kGradientFactor;
    Check("dq", f_.dq.Read(), wanted.dq, &oracle::Plain::dq, dtype, factor, verdict);
    Check("dk", f_.dk.Read(), wanted.dk, &oracle::Plain::dk, dtype, factor, verdict);
    Check("dv", f_.dv.Read(), wanted.dv, &oracle::Plain::dv, dtype, factor, verdict);
    if (f_.c().has_dsinks) {
      Check("dsinks", f_.ReadDsinks(), wanted.dsinks, &oracle::Plain::dsinks,
            oracle::DType::kFloat32, oracle::kSinkGradientFactor, verdict);
    }
    if (f_.c().has_dbias) {
      Check("dbias", f_.dbias.Read(), wanted.dbias, &oracle::Plain::dbias, f_.c().dbias_dtype(),
            factor, verdict);
    }
  }

 private:
  const oracle::Tensor* dlse() const { return f_.HasDlse() ? &dlse_ : nullptr; }

  // A framework adds a stored gradient to what was there, and rounds the sum.
  static void Add(const oracle::Tensor& before, oracle::DType dtype, oracle::Tensor& plain) {
    for (size_t i = 0; i < plain.data.size(); ++i) {
      const double sum = plain.data[i] + before.data[i];
      plain.data[i] = oracle::Round(dtype, static_cast<float>(sum));
    }
  }

  void Check(const char* name, const oracle::Tensor& got, const oracle::Tensor& wanted,
             oracle::Tensor oracle::Plain::*which, oracle::DType dtype, double factor,
             oracle::Verdict& verdict) {
    verdict.Add(yardstick_.Check(name, got, wanted, which, dtype, factor));
  }

  const Fixture& f_;
  const oracle::Problem problem_;
  const oracle::Tensor q_, k_, v_, dout_, dlse_;
  const bool backward_;
  oracle::Yardstick yardstick_;
};

}  // namespace

oracle::Verdict JudgeForward(const Fixture& f, double spare) {
  oracle::Verdict verdict;
  Judge(f, false, spare).Forward(verdict);
  return verdict;
}
oracle::Verdict JudgeBoth(const Fixture& f, double spare) {
  oracle::Verdict verdict;
  Judge judge(f, true, spare);
  judge.Forward(verdict);
  judge.Backward(verdict);
  return verdict;
}
std::string CompareForward(const Fixture& f) { return JudgeForward(f).errors; }
std::string CompareBackward(const Fixture& f) {
  oracle::Verdict verdict;
  Judge(f).Backward(verdict);
  return verdict.errors;
}

std::string RunCase(const Case& c, const std::function<void(Fixture&)>& edit) {
  Fixture f(c);
  if (edit) edit(f);
  std::string error = f.Forward(), errors;
  if (!error.empty()) return "  " + error + "\n";
  if (c.without_lse) {
    const std::string with = Fixture::Bits(f.out), lse = f.LseBits();
    f.Poison(STROBE_FORWARD);
    error = f.Forward(false);
    if (!error.empty()) errors += "  without lse: " + error + "\n";
    if (Fixture::Bits(f.out) != with) errors += "  out differs when lse is not wanted\n";
    f.RestoreLse(lse);
  }
  if (c.float8) return errors + CompareForward(f);
  error = f.Backward();
  if (!error.empty()) return errors + CompareForward(f) + "  " + error + "\n";
  return errors + JudgeBoth(f).errors;
}

bool ForcedIsaAvailable(std::string* problem) {
  const char* const forced = std::getenv("STROBE_CPU_ISA");
  if (!forced || !*forced) return true;
  strobe_machine machine;
  machine.struct_size = sizeof machine;
  if (strobe_machine_info(&machine) != STROBE_OK) {
    *problem = strobe_last_error();
    return true;
  }
  std::istringstream names(machine.cpu_isas);
  for (std::string name; names >> name;) {
    if (name != forced) continue;
    if (name != machine.cpu_isa) {
      *problem =
          "STROBE_CPU_ISA = " + name + " is available here, but " + machine.cpu_isa + " is in use";
    }
    return true;
  }
  return false;
}

}  // namespace strobe_test
