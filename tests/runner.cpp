#include "runner.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "comparator.h"
#include "compare.h"

namespace strobe_test {
namespace {

// How often the comparator's errors are drawn. The largest of few values is a matter of luck, and
// when scores are large, most weights are 0 or 1 and only a few rows have an error at all. So:
// often where that is cheap.
int64_t NoisyDraws(const Case& c) {
  constexpr int64_t kWork = 2'500'000;
  return std::clamp<int64_t>(kWork / std::max<int64_t>(c.Work(), 1), c.Work() < 4 * kWork ? 2 : 1,
                             24);
}

struct Truth {
  oracle::Problem problem;
  oracle::Tensor q, k, v, dout, dlse;
  std::vector<oracle::Plain> plain;
};

Truth MakeTruth(const Fixture& f, bool backward = true) {
  Truth t{f.OracleProblem(), f.q.Read(), f.k.Read(), f.v.Read(), f.dout.Read(), f.ReadDlse(), {}};
  const int64_t draws = NoisyDraws(f.c());
  for (int64_t seed = 0; seed <= draws; ++seed) {
    t.plain.push_back(oracle::PlainAttention(
        t.problem, f.c().dtype, t.q, t.k, t.v, backward ? &t.dout : nullptr,
        backward && f.c().has_dlse ? &t.dlse : nullptr, static_cast<uint64_t>(seed)));
  }
  return t;
}

std::vector<const oracle::Tensor*> All(const std::vector<oracle::Plain>& plain,
                                       oracle::Tensor oracle::Plain::*which) {
  std::vector<const oracle::Tensor*> all;
  for (const oracle::Plain& p : plain) all.push_back(&(p.*which));
  return all;
}

void Add(const Worst& worst, std::string& errors) {
  if (!worst.ok) errors += "  " + worst.text + "\n";
}

std::string CheckForward(const Fixture& f, const Truth& t) {
  const oracle::ForwardResult wanted = oracle::Forward(t.problem, t.q, t.k, t.v);
  std::string errors;
  Add(Compare("out", f.out.Read(), wanted.out, All(t.plain, &oracle::Plain::out), f.c().dtype,
              kOutFactor),
      errors);
  Add(CompareLse(f.ReadLse(), wanted.lse, wanted.size), errors);
  return errors;
}

std::string CheckBackward(const Fixture& f, const Truth& t) {
  const oracle::BackwardResult wanted =
      oracle::Backward(t.problem, t.q, t.k, t.v, t.dout, f.c().has_dlse ? &t.dlse : nullptr);
  const double factor = f.c().alibi ? kAlibiGradientFactor : kGradientFactor;
  std::string errors;
  Add(Compare("dq", f.dq.Read(), wanted.dq, All(t.plain, &oracle::Plain::dq), f.c().dtype, factor),
      errors);
  Add(Compare("dk", f.dk.Read(), wanted.dk, All(t.plain, &oracle::Plain::dk), f.c().dtype, factor),
      errors);
  Add(Compare("dv", f.dv.Read(), wanted.dv, All(t.plain, &oracle::Plain::dv), f.c().dtype, factor),
      errors);
  return errors;
}

}  // namespace

std::string CompareForward(const Fixture& f) { return CheckForward(f, MakeTruth(f, false)); }
std::string CompareBackward(const Fixture& f) { return CheckBackward(f, MakeTruth(f)); }

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
  error = f.Backward();
  const Truth truth = MakeTruth(f);
  errors += CheckForward(f, truth);
  return errors + (error.empty() ? CheckBackward(f, truth) : "  " + error + "\n");
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
