/* A C program as a user would write one: attention over equal values gives that value back. */
#include <stdio.h>
#include <strobe/strobe.h>

int main(void) {
  float q[4 * 8], k[4 * 8], v[4 * 8], out[4 * 8];
  strobe_problem problem;
  strobe_plan plan;
  strobe_forward_args args = {0};
  int i;
  for (i = 0; i < 4 * 8; ++i) {
    q[i] = (float)i;
    k[i] = (float)-i;
    v[i] = 3.0f;
    out[i] = 0.0f;
  }

  strobe_problem_init(&problem, sizeof problem);
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = 4;
  problem.heads = 1;
  problem.head_dim = 8;
  plan.struct_size = sizeof plan;
  args.struct_size = sizeof args;
  args.q = q;
  args.k = k;
  args.v = v;
  args.out = out;
  if (strobe_plan_make(&problem, &plan) != STROBE_OK || strobe_forward(&plan, &args) != STROBE_OK) {
    printf("%s\n", strobe_last_error());
    return 1;
  }
  for (i = 0; i < 4 * 8; ++i) {
    if (!(out[i] > 2.999f && out[i] < 3.001f)) {
      printf("out[%d] = %g, expected 3\n", i, out[i]);
      return 1;
    }
  }
  printf("strobe %s, %s\n", strobe_version(), plan.kernel);
  return 0;
}
