#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json in build/<preset>.
# Usage: scripts/build.sh PRESET [cmake configure option...] [-- target...]
# Where ccache is installed, nothing is compiled twice that is the same to the compiler, in whatever folder the clone lies.
# A tree that was configured without it stays so; CCACHE_DISABLE=1 compiles everything.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?preset}; shift
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
[ $# = 0 ] || shift
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
  export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER-ccache}
  # Paths below the clone count as relative ones.
  export CCACHE_BASEDIR=${CCACHE_BASEDIR-$PWD} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-1}
fi
log=build/configure-$preset.log
mkdir -p build
cmake --preset "$preset" "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
cmake --build "build/$preset" ${1:+--target "$@"}
