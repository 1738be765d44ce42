#!/usr/bin/env bash
# On a machine with an NVIDIA GPU and nvcc: builds with CUDA, then tests or times. Python is the caller's: it needs
# PyTorch, the tests' float64 reference and the bench's peer. Without a GPU all say so and end well.
# STROBE_LIBRARY: a libstrobe.so built elsewhere, for a machine without nvcc; nothing is built then, and the extension
# python/strobe/_core.abi3.so and a build/*/libstrobe_oracle.so must have come with it.
# Usage: scripts/gpu.sh test|walks|sanitize|bench|training [arguments of the script]
# walks: random problems for kernels whose walks are lists, a library of its own in build/walks (preset walks), by the kernels that
# the GPU's plans choose and by those through mma.sync.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?test, walks, sanitize, bench or training}; shift
built=
if [ -z "${STROBE_LIBRARY:-}" ] && [ "$what" = walks ]; then
  scripts/build.sh walks -- strobe
  export STROBE_LIBRARY=$PWD/build/walks/libstrobe.so
elif [ -z "${STROBE_LIBRARY:-}" ]; then
  built=yes
  scripts/build.sh cuda -DSTROBE_BUILD_TESTS=OFF -DSTROBE_BUILD_EXAMPLES=OFF -DSTROBE_BUILD_BENCH=ON -- strobe strobe_oracle_shared strobe_python strobe_cli strobe_host_cost strobe_paper_story
  export STROBE_LIBRARY=$PWD/build/cuda/libstrobe.so
fi
export PYTHONPATH=python
python=${PYTHON:-python3}
case $what in
  test)
    status=0
    "$python" tests/gpu/run_gpu_tests.py "$@" || status=$?
    # The GPU variants of the Python tests, when all was asked for.
    if [ $# = 0 ] && "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
      if "$python" -c 'import pytest, hypothesis, ml_dtypes' 2>/dev/null; then
        "$python" -m pytest -q tests/python -k cuda || status=$?
      else
        echo "gpu tests: tests/python skipped (no pytest, hypothesis or ml_dtypes)"
      fi
    fi
    exit $status ;;
  walks)
    "$python" tests/gpu/run_gpu_tests.py --only walks "$@"
    STROBE_CUDA_ARCH=80 exec "$python" tests/gpu/run_gpu_tests.py --only walks "$@" ;;
  sanitize)
    [ -z "$built" ] || scripts/build.sh racecheck -- strobe strobe_cli
    exec "$python" tests/gpu/sanitize.py "$@" ;;
  bench) exec "$python" bench/gpu_bench.py "$@" ;;
  training) exec "$python" bench/gpt_training.py "$@" ;;
  *) echo "gpu.sh: got '$what', expected test, walks, sanitize, bench or training" >&2; exit 2 ;;
esac
