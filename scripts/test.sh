#!/usr/bin/env bash
# Set-up, build and all tests of a preset: C++ by ctest, then Python and the tool by pytest.
# Usage: scripts/test.sh [cpu|cuda|asan] [argument of ctest...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
[ $# = 0 ] || shift
scripts/setup.sh test
scripts/build.sh "$preset"
status=0
ctest --preset "$preset" "$@" || status=$?

export STROBE_CLI=$PWD/build/$preset/bin/strobe
pytest() { build/venv/bin/python -m pytest -q "$@"; }
if [ "$preset" = asan ]; then
  # An ordinary Python cannot load a library that is built with AddressSanitizer.
  pytest tests/cli || status=$?
  exit $status
fi
export STROBE_LIBRARY=$PWD/build/$preset/libstrobe.so

# Python computes on one core most of the time, so the tests run in two processes beside each other. Those that measure
# time, or need all threads, run alone after that.
compiling=(tests/python/test_torch_{operators,sdpa,sdpa_answers,sdpa_compiled,sdpa_masks}.py)
alone=(tests/python/test_{interrupt,threads,torch_overhead}.py)
mkdir -p build
OMP_WAIT_POLICY=passive pytest -p no:cacheprovider "${compiling[@]}" >build/pytest-compiling.log 2>&1 &
beside=$!
OMP_WAIT_POLICY=passive pytest $(printf -- '--ignore=%s ' "${compiling[@]}" "${alone[@]}") || status=$?
wait $beside || status=$?
cat build/pytest-compiling.log
pytest "${alone[@]}" || status=$?
exit $status
