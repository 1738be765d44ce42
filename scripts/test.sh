#!/usr/bin/env bash
# Set-up, build and all tests of a preset: C++ by ctest, then Python and the tool by pytest.
# Usage: scripts/test.sh [cpu|cuda|asan]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
scripts/setup.sh test
scripts/build.sh "$preset"
status=0
ctest --preset "$preset" || status=$?

export STROBE_CLI=$PWD/build/$preset/bin/strobe
suites=()
if [ "$preset" = asan ]; then
  suites=(tests/cli)  # an ordinary Python cannot load a library that is built with AddressSanitizer
else
  export STROBE_LIBRARY=$PWD/build/$preset/libstrobe.so
fi
build/venv/bin/python -m pytest -q "${suites[@]}" || status=$?
exit $status
