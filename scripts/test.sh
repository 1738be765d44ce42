#!/usr/bin/env bash
# Set-up, build and all tests of a preset: C++ by ctest, then Python and the tool by pytest.
# Usage: scripts/test.sh [cpu|cuda|asan] [argument of ctest...]
# STROBE_CPU_ISAS: of the kernels under AddressSanitizer, NATIVE for all of this machine's (avx2 or neon, and portable).
# STROBE_SANITIZE_CLI: the tests of the tool under AddressSanitizer (all of tests/cli).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
[ $# = 0 ] || shift
isas=
[ "$preset" != asan ] || isas=${STROBE_CPU_ISAS:-avx2;neon}
scripts/setup.sh test
scripts/build.sh "$preset" ${isas:+"-DSTROBE_CPU_ISAS=$isas"}
# Hundreds of processes import PyTorch: what Python compiled of it stays in build/venv, also where the environment
# (container images often) says otherwise, which doubles the time of all that follows.
unset PYTHONDONTWRITEBYTECODE
status=0
ctest --preset "$preset" "$@" || status=$?

export STROBE_CLI=$PWD/build/$preset/bin/strobe
pytest() { build/venv/bin/python -m pytest -q "$@"; }
if [ "$preset" = asan ]; then
  # An ordinary Python cannot load a library that is built with AddressSanitizer.
  # shellcheck disable=SC2086  # paths
  pytest ${STROBE_SANITIZE_CLI:-tests/cli} --ignore=tests/cli/test_quickstarts.py || status=$?  # half a minute of bench
  exit $status
fi
export STROBE_LIBRARY=$PWD/build/$preset/libstrobe.so

# AMX's way of batch_invariant, over tiles in memory where the machine has no AMX: the tests that are marked so.
emulated=build/$preset/tests/libstrobe_emulated.so
if [ -f "$emulated" ]; then
  STROBE_CPU_ISA=amx STROBE_LIBRARY=$PWD/$emulated pytest -m amx tests/python/test_{row_origins,batch_invariance}.py || status=$?
fi
# Python computes on one core most of the time, so two processes share the files. Tests that measure time, or need all
# threads, run alone after that.
alone=(tests/python/test_{interrupt,threads,torch_overhead}.py)
OMP_WAIT_POLICY=passive pytest -n 2 --dist loadfile $(printf -- '--ignore=%s ' "${alone[@]}") || status=$?
pytest "${alone[@]}" || status=$?
exit $status
