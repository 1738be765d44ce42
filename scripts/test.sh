#!/usr/bin/env bash
# Set-up, build and all tests of a preset: C++ by ctest, then Python by pytest. Usage: scripts/test.sh [cpu|cuda|asan]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
scripts/setup.sh test
scripts/build.sh "$preset"
status=0
# Two at a time: the tests' own threads fill the cores.
ctest --preset "$preset" -j 2 || status=$?
if [ "$preset" != asan ]; then  # a Python interpreter that is not built with ASan cannot load the library
  STROBE_LIBRARY=$PWD/build/$preset/libstrobe.so PYTHONPATH=python \
    build/venv/bin/python -m pytest -q tests/python || status=$?
fi
exit $status
