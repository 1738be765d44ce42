#!/usr/bin/env bash
# What to ask an hour with a GPU, most telling first, in steps of under ten minutes each.
# Usage: scripts/gpu-hour.sh 1|2|...|7     one step; its output ends with a summary of a few lines
# Takes libstrobe.so and the tools from build/cuda (STROBE_LIBRARY, STROBE_CLI to name others; step 3 also the tool of
# build/racecheck, STROBE_CLI_RACECHECK); PYTHON has PyTorch. Results of the bench land in ${OUT:-bench/results}.
set -uo pipefail
cd "$(dirname "$0")/.."
export STROBE_LIBRARY=${STROBE_LIBRARY:-$PWD/build/cuda/libstrobe.so} PYTHONPATH=python
cli=${STROBE_CLI:-build/cuda/bin/strobe}
cli_racecheck=${STROBE_CLI_RACECHECK:-build/racecheck/bin/strobe}
python=${PYTHON:-python3}
out=${OUT:-bench/results}
tests() { "$python" tests/gpu/run_gpu_tests.py "$@"; }
bench() {
  "$python" bench/gpu_bench.py --peers ../shared/peers/h200_bf16.csv --decode-peers ../shared/peers/h200_decode.csv "$@"
}
training() { "$python" bench/gpt_training.py "$@"; }
status=0
run() { echo "--- $*"; "$@" || status=1; }

case ${1:?step, 1 to 7} in
  1) # Does it work: both kernels, dropout, NaNs, bad input, graphs, large shapes, random problems. Three minutes.
    [ ! -x "$cli" ] || run "$cli" check --device cuda --cases 6
    run tests --only errors,special,graph,threads,cpu,long,shapes,repeats,random --random 3000 --seconds 150
    STROBE_CUDA_ARCH=80 run tests --only errors,special,graph,threads,random --first 3000 --random 3000 --seconds 60
    run "$python" -m pytest -q tests/python -k "cuda or batch_inv"
    ;;
  2) # How fast: the whole grid, features, host cost, the paper's story, the cost of a call from Python. Three minutes, quiet.
    run bench --rounds 11 --seconds 400 --output "$out/gpu_h200_bf16.json" \
      --sections grid,host,fp16,gqa,varlen,window,odd,deterministic,memory,story,decode
    run "$python" bench/torch_overhead.py
    ;;
  3) # compute-sanitizer: three minutes on 16 cores. racecheck wants the preset racecheck.
    run "$python" tests/gpu/sanitize.py --seconds 540 --strobe "$cli" --strobe-racecheck "$cli_racecheck"
    ;;
  4) # Every row of kernels.def, forced; the choices between rows.
    run tests --only rows --seconds 400
    run bench --sections rows --rounds 9 --output "$out/gpu_rows.json"
    ;;
  5) # Random problems while time lasts.
    run tests --only random --random 20000 --first 6000 --seconds 540
    ;;
  6) run training --model 1.3B --output "$out/gpt_training_1.3b.json" ;;
  7) run training --model 2.7B --output "$out/gpt_training_2.7b.json" ;;
  *) echo "gpu-hour: got '$1', expected 1 to 7" >&2; exit 2 ;;
esac
exit $status
