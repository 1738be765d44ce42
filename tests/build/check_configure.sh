#!/usr/bin/env bash
# `cmake -B build`, as somebody types it who has a compiler and Highway and nothing else: it must configure, and say what it
# leaves out. What was asked for by name and is missing must end in an error that says what to install.
# Usage: check_configure.sh SOURCE_DIR CXX_COMPILER
set -euo pipefail
source=$1 compiler=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nothing=()
for package in GTest CLI11 fmt nlohmann_json; do nothing+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"); done

configure() {  # OPTION...
  rm -rf "$work/build"
  cmake -S "$source" -B "$work/build" -DCMAKE_CXX_COMPILER="$compiler" -DSTROBE_CUDA=OFF "$@" >"$work/log" 2>&1
}

expect() {  # TEXT
  tr -s ' \n' ' ' <"$work/log" | grep -qF -- "$1" || { echo "not said: $1"; cat "$work/log"; exit 1; }
}

configure "${nothing[@]}" || { echo "failed without the optional libraries"; cat "$work/log"; exit 1; }
expect "building without the tool and the examples; not found: CLI11, fmt, nlohmann_json"
configure || { echo "failed with all that this machine has"; cat "$work/log"; exit 1; }

if configure "${nothing[@]}" -DSTROBE_BUILD_CLI=ON; then echo "STROBE_BUILD_CLI=ON went through"; exit 1; fi
expect "apt install libcli11-dev libfmt-dev nlohmann-json3-dev"
if configure "${nothing[@]}" -DSTROBE_BUILD_TESTS=ON; then echo "STROBE_BUILD_TESTS=ON went through"; exit 1; fi
expect "apt install libgtest-dev"
