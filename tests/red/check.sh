#!/usr/bin/env bash
# Demands that the random test sees the defect that a build carries, whichever instruction set is forced.
# Usage: tests/red/check.sh BUILD_DIR, of a build with -DSTROBE_BREAK_KERNEL=<NAME> whose target random_test is built.
# Exit 0: seen with every instruction set of this machine; 1: not seen by one of them; 2: could not be tried.
set -uo pipefail
build=${1:?usage: check.sh BUILD_DIR}
program=$(find "$build" -name random_test -type f -perm -u+x | head -n 1)
[ -n "$program" ] || { echo "check.sh: no random_test under $build" >&2; exit 2; }
defect=$(sed -n 's/^STROBE_BREAK_KERNEL:[^=]*=//p' "$build/CMakeCache.txt")
[ -n "$defect" ] || { echo "check.sh: $build has no STROBE_BREAK_KERNEL" >&2; exit 2; }

tried=0 missed=0
for isa in amx avx512 avx2 neon portable; do
  output=$(STROBE_CPU_ISA=$isa STROBE_RANDOM_CASES=${STROBE_RANDOM_CASES:-200} "$program" 2>&1)
  if grep -q SKIPPED <<<"$output"; then continue; fi
  # What counts is a comparison that failed, not a crash or a missing library.
  summary=$(grep -E '^[0-9]+ cases from seed' <<<"$output") ||
    { echo "check.sh: $defect, $isa: the test did not run to its end" >&2; echo "$output" | tail -n 5 >&2; exit 2; }
  tried=$((tried + 1))
  echo "$defect, $isa: $summary"
  grep -q ': 0 failed' <<<"$summary" && missed=$((missed + 1))
done
[ $tried -gt 0 ] || { echo "check.sh: no instruction set to try" >&2; exit 2; }
if [ $missed -gt 0 ]; then
  echo "check.sh: $defect NOT SEEN with $missed of $tried instruction sets" >&2
  exit 1
fi
