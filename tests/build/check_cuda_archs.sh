#!/usr/bin/env bash
# Which architectures STROBE_CUDA_ARCHS stands for, by an nvidia-smi that answers what real ones do, and what a build by pip says of
# itself before it compiles. Usage: check_cuda_archs.sh SOURCE_DIR
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
cat >"$work/ask.cmake" <<END
cmake_minimum_required(VERSION 3.25)
include("$source/cmake/cuda_archs.cmake")
strobe_cuda_archs("\${WANTED}" list why)
message("\${list}: \${why}")
END

smi() { printf '#!/bin/sh\n%s\n' "$1" >"$work/bin/nvidia-smi"; chmod +x "$work/bin/nvidia-smi"; }
ask() { PATH=$work/bin:$PATH cmake "-DWANTED=$1" -P "$work/ask.cmake" 2>&1 || true; }
expect() {  # WANTED ANSWER
  local got
  got=$(ask "$1")
  [ "$got" = "$2" ] || { echo "STROBE_CUDA_ARCHS=$1: got '$got', expected '$2'"; exit 1; }
}

smi 'echo "9.0, NVIDIA H100 80GB HBM3"; echo "9.0, NVIDIA H100 80GB HBM3"'
expect NATIVE "90: this machine's NVIDIA H100 80GB HBM3 (9.0)"
expect ALL "75;80;86;89;90: all architectures"
expect "80;90" "80;90: 80, 90, as was asked"
smi 'echo "8.9, NVIDIA GeForce RTX 4090"; echo "7.5, Tesla T4"; echo "8.6, NVIDIA A10"'
expect NATIVE "75;86;89: this machine's NVIDIA GeForce RTX 4090 (8.9), Tesla T4 (7.5), NVIDIA A10 (8.6)"
smi 'echo "12.0, NVIDIA GeForce RTX 5090"; echo "8.7, Orin"'
expect NATIVE "80: this machine's NVIDIA GeForce RTX 5090 (12.0), Orin (8.7)"
smi 'echo "7.0, Tesla V100"'
expect NATIVE ": this machine's Tesla V100 (7.0)"
smi 'echo "Field \"compute_cap\" is not a valid field to query."; exit 2'
expect NATIVE "75;80;86;89;90: all architectures, since nvidia-smi did not say which GPUs there are (2)"
smi 'echo "No devices were found"'
expect NATIVE "75;80;86;89;90: all architectures, since nvidia-smi did not say which GPUs there are (0)"
# A driver that hangs is waited for ten seconds. `exec`, so that what is ended is what hangs.
smi 'exec sleep 60'
start=$SECONDS
expect NATIVE "75;80;86;89;90: all architectures, since nvidia-smi did not say which GPUs there are (Process terminated due to timeout)"
[ $((SECONDS - start)) -lt 40 ] || { echo "it waited for nvidia-smi for $((SECONDS - start)) s"; exit 1; }

# What pip shows with -v, and on the terminal without: configured as scikit-build-core does it, under a terminal of its own, with the
# output elsewhere.
announce() {  # LOG_OF_THE_TERMINAL OPTION...
  local log=$1
  shift
  rm -rf "$work/build"
  script -qec "cmake -S '$source' -B '$work/build' -DSKBUILD=2 -DSTROBE_CUDA=OFF -DSTROBE_BUILD_CLI=OFF -DSTROBE_BUILD_EXAMPLES=OFF \
    -DSTROBE_BUILD_PYTHON=ON $* >'$work/output' 2>&1" "$log" </dev/null >/dev/null || { cat "$work/output"; exit 1; }
}
if script -qec true /dev/null </dev/null >/dev/null 2>&1; then  # not in a chroot without /dev/pts
  said='strobe: building for the CPU alone, since STROBE_CUDA=OFF was given. '
  announce "$work/terminal"
  for where in output terminal; do
    grep -qF "$said" "$work/$where" || { echo "not said ($where): $said"; cat "$work/$where"; exit 1; }
    grep -qE "was given\. This takes .*minutes? .*on [0-9]+ cores\." "$work/$where" || { echo "no time in $where"; exit 1; }
    grep -qF -- '--config-settings=cmake.define.STROBE_CUDA=ON .' "$work/$where" || { echo "no switch in $where"; exit 1; }
  done
  announce "$work/terminal" -DSTROBE_ANNOUNCE=OFF
  grep -qF "$said" "$work/output" || { echo "not in the output: $said"; exit 1; }
  ! grep -qF "$said" "$work/terminal" || { echo "STROBE_ANNOUNCE=OFF was not heeded"; exit 1; }
else
  echo "no pseudo-terminal: what pip shows on one is not looked at"
fi
# With nvcc, what is built depends on the GPUs that there are.
if command -v nvcc >/dev/null; then
  with_gpu() {  # ANSWER OPTION...
    smi "echo '$1'"
    rm -rf "$work/build"
    PATH=$work/bin:$PATH cmake -G Ninja -S "$source" -B "$work/build" -DSKBUILD=2 -DSTROBE_BUILD_CLI=OFF -DSTROBE_BUILD_EXAMPLES=OFF \
      -DSTROBE_BUILD_PYTHON=ON -DSTROBE_CUDA_ARCHS=NATIVE "${@:2}" >"$work/output" 2>&1
  }
  said() { tr -s ' \n' ' ' <"$work/output" | grep -qF -- "$1" || { echo "not said: $1"; cat "$work/output"; exit 1; }; }
  with_gpu '9.0, NVIDIA H100' || { cat "$work/output"; exit 1; }
  said "building for the CPU, and CUDA kernels for this machine's NVIDIA H100 (9.0). This takes "
  said "For all architectures: pip install --config-settings=cmake.define.STROBE_CUDA_ARCHS=ALL ."
  codes=$(grep -o 'generate-code=arch=[^ "]*' "$work/build/build.ninja" | sort -u)
  [[ $codes == *code=sm_90a* && $codes != *sm_80* ]] || { echo "for a GPU of 9.0, got machine code by $codes"; exit 1; }
  with_gpu '7.0, Tesla V100' || { cat "$work/output"; exit 1; }
  said "building for the CPU alone, since the CUDA kernels need compute capability 7.5, and there is this machine's Tesla V100 (7.0). This"
  ! with_gpu '7.0, Tesla V100' -DSTROBE_CUDA=ON || { echo "STROBE_CUDA=ON went through without a GPU for it"; exit 1; }
  said "the CUDA kernels run on none of this machine's Tesla V100 (7.0): they need compute capability 7.5 or newer"
fi

# Without a terminal it does as well.
rm -rf "$work/build"
setsid cmake -S "$source" -B "$work/build" -DSKBUILD=2 -DSTROBE_CUDA=OFF -DSTROBE_BUILD_CLI=OFF -DSTROBE_BUILD_EXAMPLES=OFF \
  -DSTROBE_BUILD_PYTHON=ON >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
