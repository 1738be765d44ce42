#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json in build/<preset>.
# Usage: scripts/build.sh PRESET [cmake configure option...] [-- target...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?preset}; shift
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
[ $# = 0 ] || shift
log=build/configure-$preset.log
mkdir -p build
cmake --preset "$preset" "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
cmake --build "build/$preset" ${1:+--target "$@"}
