#!/usr/bin/env bash
# clang-format over every C, C++ and CUDA file that git does not ignore. Usage: scripts/format.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh ci
mode=(-i)
[ "${1:-}" != --check ] || mode=(--dry-run --Werror)
git ls-files -z -co --exclude-standard -- '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs -0 -r clang-format-14 "${mode[@]}"
