#!/usr/bin/env bash
# On a machine with an NVIDIA GPU and nvcc: builds with CUDA, then tests or times. Python is the caller's: it needs
# PyTorch, the tests' float64 reference and the bench's peer. Without a GPU both say so and end well.
# STROBE_LIBRARY: a libstrobe.so built elsewhere, for a machine without nvcc; nothing is built then.
# Usage: scripts/gpu.sh test|sanitize|bench [arguments of the script]
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?test, sanitize or bench}; shift
if [ -z "${STROBE_LIBRARY:-}" ]; then
  scripts/build.sh cuda -DSTROBE_BUILD_TESTS=OFF -DSTROBE_BUILD_EXAMPLES=OFF -DSTROBE_BUILD_BENCH=ON -- strobe strobe_cli strobe_host_cost
  export STROBE_LIBRARY=$PWD/build/cuda/libstrobe.so
fi
export PYTHONPATH=python
case $what in
  test) exec "${PYTHON:-python3}" tests/gpu/run_gpu_tests.py "$@" ;;
  sanitize) exec "${PYTHON:-python3}" tests/gpu/sanitize.py "$@" ;;
  bench) exec "${PYTHON:-python3}" bench/gpu_bench.py "$@" ;;
  *) echo "gpu.sh: got '$what', expected test, sanitize or bench" >&2; exit 2 ;;
esac
