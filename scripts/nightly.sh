#!/usr/bin/env bash
# Everything that needs no GPU, also what is too slow for each change: .ci/run with long fuzzing, all machine code of the
# CUDA kernels, all tests under sanitizers, random problems that no run had before, the libraries that the flash_attn shim
# stands beside. Some three hours on two cores. Goes on after a failure; the exit status and the last lines say what failed.
#   FUZZ_SECONDS         of each fuzz target (1200)
#   STROBE_RANDOM_CASES  of each instruction set (20000)
#   STROBE_RANDOM_SEED   of the first (the date, so that a night can be repeated)
set -uo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

seconds=${FUZZ_SECONDS:-1200} cases=${STROBE_RANDOM_CASES:-20000} seed=${STROBE_RANDOM_SEED:-$(date +%Y%m%d)000000}
unset STROBE_RANDOM_CASES STROBE_RANDOM_SEED  # the rest has numbers of its own
export STROBE_CPU_ISAS=NATIVE  # also where CI fuzzes one instruction set's kernels, or looks at its threads
failed=()
stage() {  # NAME COMMAND...
  local name=$1 start=$SECONDS result=passed
  shift
  printf '\n=== nightly: %s\n' "$name"
  "$@" || { result=FAILED; failed+=("$name"); }
  printf '=== nightly: %s: %s, %d s\n' "$name" "$result" $((SECONDS - start))
}

stage "CI" env FUZZ_SECONDS="$seconds" FUZZ_SEED=0 .ci/run
if command -v nvcc >/dev/null; then
  stage "all machine code of the CUDA kernels" scripts/build.sh cuda -DSTROBE_WERROR=ON -- strobe_cuda_objects strobe_cli
  stage "the kernels' registers, spills and access widths" scripts/check_kernels.py build/cuda --require
fi
stage "the emulated Hopper kernels, the backward through mma.sync and the paper's steps under sanitizers" scripts/build.sh asan -DSTROBE_SANITIZE_ALL=ON -- \
  emulator_run_time_test emulator_hopper_forward_test emulator_hopper_backward_test \
  emulator_mma_sync_forward_test emulator_mma_sync_backward_test emulator_paper_test
stage "red test" scripts/red-test.sh
stage "all tests under sanitizers" scripts/test.sh asan
isas=$(build/cpu/bin/strobe info --json | build/venv/bin/python -c "import json, sys; print(json.load(sys.stdin)['cpu_isas'])")
for isa in ${isas:-portable}; do
  stage "$cases random problems from seed $seed, $isa" \
    env STROBE_CPU_ISA="$isa" STROBE_RANDOM_CASES="$cases" STROBE_RANDOM_SEED="$seed" \
    build/cpu/tests/random_test --gtest_brief=1
  stage "float32 accuracy and special values, $isa" env STROBE_CPU_ISA="$isa" bash -c \
    'build/cpu/tests/accuracy_test --gtest_brief=1 && build/cpu/tests/softmax_test --gtest_brief=1'
done
stage "20000 problems over caches from seed $seed" env STROBE_CACHE_CASES=20000 STROBE_CACHE_SEED="$seed" \
  build/cpu/tests/cache_test --gtest_brief=1 --gtest_filter='Cache.EveryKernel*'
stage "4000 problems of the emulated decode kernels from seed $seed" \
  env STROBE_EMULATOR_CASES=4000 STROBE_EMULATOR_SEED="$seed" build/cpu/tests/emulator/emulator_decode_test \
  --gtest_brief=1 --gtest_filter='*Random*'
stage "the Hopper backward in the emulator, all rows" cmake --build build/cpu --target emulator_hopper_backward_test_all
stage "1000 problems of the emulated Hopper backward from seed $seed" \
  env STROBE_EMULATOR_CASES=1000 STROBE_EMULATOR_SEED="$seed" build/cpu/tests/emulator/emulator_hopper_backward_test_all \
  --gtest_brief=1
stage "the Hopper forward in the emulator, all rows" cmake --build build/cpu --target emulator_hopper_forward_test_all
stage "the Hopper forward in the emulator, 500 problems" \
  env STROBE_EMULATOR_CASES=500 STROBE_EMULATOR_SEED="$seed" build/cpu/tests/emulator/emulator_hopper_forward_test_all \
  --gtest_brief=1
stage "the backward through mma.sync in the emulator, all rows" cmake --build build/cpu --target emulator_mma_sync_backward_test_all
stage "500 problems of the emulated backward through mma.sync from seed $seed" \
  env STROBE_EMULATOR_CASES=500 STROBE_EMULATOR_SEED="$seed" build/cpu/tests/emulator/emulator_mma_sync_backward_test_all \
  --gtest_brief=1 --gtest_filter='*Random*'
accuracy=build/cpu/tests/kernel_accuracy_test
if [ -x build/cpu/tests/random_test_amx ]; then  # where the AMX kernels can be emulated
  stage "$cases random problems from seed $seed, amx emulated" \
    env STROBE_CPU_ISA=amx STROBE_RANDOM_CASES="$cases" STROBE_RANDOM_SEED="$seed" \
    build/cpu/tests/random_test_amx --gtest_brief=1
  stage "bf16 accuracy of AMX, emulated" env STROBE_CPU_ISA=amx STROBE_ACCURACY_CASES=2000 \
    ${accuracy}_amx --gtest_brief=1
fi
if [[ " $isas " == *" avx512_bf16 "* ]]; then
  stage "bf16 accuracy of vdpbf16ps" env STROBE_CPU_ISA=avx512_bf16 STROBE_ACCURACY_CASES=2000 $accuracy --gtest_brief=1
fi
stage "bf16 accuracy of the widest kernel" env STROBE_ACCURACY_CASES=2000 $accuracy --gtest_brief=1
python_tests() { STROBE_LIBRARY=$PWD/build/cpu/libstrobe.so build/venv/bin/python -m pytest -q "$@"; }
export STROBE_FUZZ_SEED=${seed:0:8}
stage "Python's extension under sanitizers" env -u STROBE_FUZZ_SEED scripts/asan_python.sh
STROBE_LEAK_CALLS=1000000 stage "a million calls from Python" python_tests tests/python/test_extension.py -k nothing_is_kept
STROBE_FUZZ_CASES=50000 stage "Python fuzzer" python_tests tests/python/test_fuzz.py
STROBE_MASK_SEEDS=200 stage "masks given as tensors" python_tests tests/python/test_torch_sdpa_masks.py
STROBE_TRANSFORMERS_CASES=500 stage "models of transformers" python_tests tests/python/test_transformers_random.py
unset STROBE_FUZZ_SEED
stage "ThreadSanitizer" env STROBE_RANDOM_CASES=1000 STROBE_RANDOM_SEED="$seed" STROBE_TSAN_ALL=1 scripts/tsan.sh
[ ! -x scripts/compat.sh ] || stage "libraries beside the shim" scripts/compat.sh

stage "distributions without CUDA" scripts/wheel.sh --cpu
[ "$(id -u)" != 0 ] || stage "distributions on minimal systems" scripts/wheel-test.sh --sdist build/wheel-cpu

printf '\n=== nightly: %d s, %d failed\n' "$SECONDS" "${#failed[@]}"
[ ${#failed[@]} = 0 ] || printf 'FAILED: %s\n' "${failed[@]}"
exit $((${#failed[@]} > 0))
