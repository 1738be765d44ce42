#!/usr/bin/env bash
# Shows that the random tests see a broken kernel: for each defect that the sources know (STROBE_BREAK_KERNEL_<NAME>), builds
# the library with it and demands that a test fails; the first that does is enough. MASK_MEMBER is a mask of another kind
# rather than a defect: of it the tests that can be told so demand that every CPU kernel obeys. Usage: scripts/red-test.sh [NAME...]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
mapfile -t defects < <(grep -rhoE 'STROBE_BREAK_KERNEL_[A-Z0-9_]+' src | sed 's/STROBE_BREAK_KERNEL_//' | sort -u)
[ $# = 0 ] || defects=("$@")
[ ${#defects[@]} -gt 0 ] || { echo "red-test: src/ has no STROBE_BREAK_KERNEL_<NAME> to build" >&2; exit 1; }
status=0
# Whether a few dozen problems of all kinds agree with their oracle, whose queries do not see the first $1 keys.
hides() {
  local test
  for test in "sequences.py --count 24" "sequences_backward.py --count 12 --dims 40,64" "cache.py --count 24"; do
    # shellcheck disable=SC2086  # a name and its arguments
    if STROBE_TEST_HIDDEN_KEYS=$1 STROBE_LIBRARY=$PWD/build/red/libstrobe.so PYTHONPATH=python \
      build/venv/bin/python tests/gpu/${test%% *} --device cpu ${test#* } >build/red.log 2>&1; then
      [ "$2" = pass ] || { echo "red-test: MASK_MEMBER: ${test%% *} passes with $1 hidden keys, expected it to fail"; return 1; }
    else
      [ "$2" = fail ] || { tail -n 5 build/red.log; echo "red-test: MASK_MEMBER: ${test%% *} fails with $1 hidden keys"; return 1; }
    fi
  done
}
for defect in "${defects[@]}"; do
  # A build failure is no proof: it ends the script here.
  targets=(random_test)
  [ "$defect" != MASK_MEMBER ] || targets+=(strobe strobe_oracle_shared)
  scripts/build.sh red -DSTROBE_BREAK_KERNEL="$defect" -- "${targets[@]}" >build/red.log ||
    { cat build/red.log; exit 1; }
  if STROBE_RANDOM_CASES=200 ctest --preset red -L property >build/red.log 2>&1; then
    echo "red-test: $defect: NOT SEEN: every test passed with this defect built in"
    status=1
  else
    echo "red-test: $defect: seen by" $(sed -n 's/^\t *[0-9]* - \(.*\) (.*)$/\1/p' build/red.log)
  fi
  [ "$defect" = MASK_MEMBER ] || continue
  if ! build/venv/bin/python -c "import torch" 2>/dev/null; then
    echo "red-test: $defect: without torch nothing shows that every kernel obeys"
  elif hides 1 pass && hides 0 fail; then
    echo "red-test: $defect: obeyed forward, backward and with a cache"
  else
    status=1
  fi
done
exit $status
