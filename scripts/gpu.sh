#!/usr/bin/env bash
# On a machine with an NVIDIA GPU and nvcc: builds with CUDA, then tests or times. Python is the caller's: it needs
# PyTorch, the tests' float64 reference and the bench's peer. Without a GPU both say so and end well.
# Usage: scripts/gpu.sh test|bench [arguments of the script]
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?test or bench}; shift
scripts/build.sh cuda -DSTROBE_BUILD_TESTS=OFF -DSTROBE_BUILD_EXAMPLES=OFF -- strobe
export STROBE_LIBRARY=$PWD/build/cuda/libstrobe.so PYTHONPATH=python
case $what in
  test) exec "${PYTHON:-python3}" tests/gpu/run_gpu_tests.py "$@" ;;
  bench) exec "${PYTHON:-python3}" bench/gpu_bench.py "$@" ;;
  *) echo "gpu.sh: got '$what', expected test or bench" >&2; exit 2 ;;
esac
