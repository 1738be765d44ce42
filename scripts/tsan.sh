#!/usr/bin/env bash
# Tests under ThreadSanitizer, which reports two threads at one place in memory with no order between them. It does not
# see OpenMP's barriers, so launches of this build make plain threads (src/core/team.cpp). What orders the work (items,
# turns, interrupts, callers beside each other) is as in every build.
# STROBE_CPU_ISAS: of the kernels, NATIVE for all of this machine's (portable: their source is that of the others).
# STROBE_RANDOM_CASES: random problems (100). STROBE_TSAN_ALL=1: all of determinism_test too, some ten minutes, the
# emulator's own test with the Hopper backward, the steps of examples/paper, and the decode kernels in fp16.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
scripts/build.sh tsan -DSTROBE_CPU_ISAS="${STROBE_CPU_ISAS:-portable}" ${STROBE_TSAN_ALL:+-DSTROBE_SANITIZE_ALL=ON} -- \
  random_test determinism_test interrupt_test emulator_decode_test ${STROBE_TSAN_ALL:+emulator_run_time_test emulator_hopper_backward_test emulator_paper_test}
export TSAN_OPTIONS=halt_on_error=1 STROBE_RANDOM_CASES=${STROBE_RANDOM_CASES:-100}
export STROBE_EMULATOR_CASES=${STROBE_EMULATOR_CASES:-30}
filter='Reentrancy.OnePlan*'
[ -z "${STROBE_TSAN_ALL:-}" ] || filter='*'
# Where addresses are spread wider than the tool's shadow allows for, it stops at its start.
run=(setarch "$(uname -m)" -R)
"${run[@]}" true 2>/dev/null || run=()
for test in random_test interrupt_test "determinism_test --gtest_filter=$filter" \
  "emulator/emulator_decode_test --gtest_filter=*Random*" ${STROBE_TSAN_ALL:+emulator/emulator_run_time_test emulator/emulator_paper_test}; do
  echo "tsan: $test"
  # shellcheck disable=SC2086 # the filter is a word of its own
  "${run[@]}" build/tsan/tests/$test --gtest_brief=1
done
[ -n "${STROBE_TSAN_ALL:-}" ] || exit 0
echo "tsan: the Hopper backward in the emulator"  # five seconds a problem
STROBE_EMULATOR_CASES=10 "${run[@]}" build/tsan/tests/emulator/emulator_hopper_backward_test --gtest_brief=1 \
  --gtest_filter='*Random*:*None*'
