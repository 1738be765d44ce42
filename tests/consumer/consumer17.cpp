// A program in older C++ that uses the C interface: the package leaves its language as it is.
#include <strobe/strobe.h>

#include <cstdio>
#include <vector>

static_assert(__cplusplus == 201703L, "the package changed the program's C++");

int main() {
  std::vector<float> q(4 * 8, 1.0F), out(q.size());
  strobe_problem problem;
  strobe_problem_init(&problem, sizeof problem);
  problem.batch = problem.heads = 1;
  problem.seqlen_q = problem.seqlen_k = 4;
  problem.head_dim = 8;
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  strobe_forward_args args = {};
  args.struct_size = sizeof args;
  args.q = args.k = args.v = q.data();
  args.out = out.data();
  const bool done = strobe_plan_make(&problem, &plan) == STROBE_OK &&
                    strobe_forward(&plan, &args) == STROBE_OK && out[5] == 1.0F;
  std::printf("strobe %s, %s\n", strobe_version(), done ? plan.kernel : strobe_last_error());
  return done ? 0 : 1;
}
