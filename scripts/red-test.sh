#!/usr/bin/env bash
# Shows that the random tests see a broken kernel: for each defect that the sources know (STROBE_BREAK_KERNEL_<NAME>), builds
# the library with it and demands that a test fails; the first that does is enough. Usage: scripts/red-test.sh [NAME...]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
mapfile -t defects < <(grep -rhoE 'STROBE_BREAK_KERNEL_[A-Z0-9_]+' src | sed 's/STROBE_BREAK_KERNEL_//' | sort -u)
[ $# = 0 ] || defects=("$@")
[ ${#defects[@]} -gt 0 ] || { echo "red-test: src/ has no STROBE_BREAK_KERNEL_<NAME> to build" >&2; exit 1; }
status=0
for defect in "${defects[@]}"; do
  # A build failure is no proof: it ends the script here.
  scripts/build.sh red -DSTROBE_BREAK_KERNEL="$defect" -- random_test >build/red.log || { cat build/red.log; exit 1; }
  if STROBE_RANDOM_CASES=200 ctest --preset red -L property >build/red.log 2>&1; then
    echo "red-test: $defect: NOT SEEN: every test passed with this defect built in"
    status=1
  else
    echo "red-test: $defect: seen by" $(sed -n 's/^\t *[0-9]* - \(.*\) (.*)$/\1/p' build/red.log)
  fi
done
exit $status
