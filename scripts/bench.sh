#!/usr/bin/env bash
# Strobe and PyTorch on this CPU, same tensors, same process. Arguments go to bench/cpu_bench.py.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh bench
scripts/build.sh release -DSTROBE_BUILD_BENCH=ON -- strobe strobe_python strobe_cpu_peak strobe_streaming_read
STROBE_LIBRARY=$PWD/build/release/libstrobe.so PYTHONPATH=python exec build/venv/bin/python bench/cpu_bench.py "$@"
