#!/usr/bin/env bash
# What to ask an hour with a GPU, most telling first, in steps of under ten minutes each.
# Usage: scripts/gpu-hour.sh 1|2|...|7     one step; its output ends with a summary of a few lines
# Takes libstrobe.so and the tool from build/cuda (STROBE_LIBRARY, STROBE_CLI to name others); PYTHON has PyTorch.
# Results of the bench land in ${OUT:-bench/results}.
set -uo pipefail
cd "$(dirname "$0")/.."
export STROBE_LIBRARY=${STROBE_LIBRARY:-$PWD/build/cuda/libstrobe.so} PYTHONPATH=python
cli=${STROBE_CLI:-build/cuda/bin/strobe}
python=${PYTHON:-python3}
out=${OUT:-bench/results}
tests() { "$python" tests/gpu/run_gpu_tests.py "$@"; }
bench() { "$python" bench/gpu_bench.py "$@"; }
status=0
run() { echo "--- $*"; "$@" || status=1; }

case ${1:?step, 1 to 7} in
  1) # Does it work at all: both kernels, dropout, NaNs, bad input, graphs. About 5 minutes.
    [ ! -x "$cli" ] || run "$cli" check --device cuda --cases 6
    run tests --only errors,special,graph,threads,cpu,random --random 300 --seconds 240
    STROBE_CUDA_ARCH=80 run tests --only errors,special,graph,threads,cpu,random --random 300 --seconds 240
    ;;
  2) # Every row of kernels.def, forced.
    run tests --only rows --seconds 540
    ;;
  3) # Was the backward's bound the additions? Predictions: docs/perf-log.md. And the whole grid.
    run bench --sections grid --rounds 11 --peers ../shared/peers/h200_bf16.csv --seconds 540 --output "$out/gpu_grid.json"
    ;;
  4) # Which row for short sequences; host cost; deterministic; memory.
    run bench --sections rows,host,deterministic,memory --rounds 9 --seconds 540 --output "$out/gpu_rows.json"
    ;;
  5) # Features against FlashAttention-2.
    run bench --sections fp16,gqa,varlen,window,odd --rounds 9 --seconds 540 --output "$out/gpu_features.json"
    ;;
  6) # 1M tokens, 2^31 elements, 1,000 repeats, then random problems while time lasts.
    run tests --only long,shapes,repeats,random --random 20000 --first 1000 --seconds 540
    ;;
  7) # compute-sanitizer, as many rows as fit; goes on with `make gpu-sanitize ARGS="--first N"`.
    run "$python" tests/gpu/sanitize.py --tools racecheck,memcheck,synccheck,initcheck --seconds 540
    ;;
  *) echo "gpu-hour: got '$1', expected 1 to 7" >&2; exit 2 ;;
esac
exit $status
