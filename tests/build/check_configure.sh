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
if configure "${nothing[@]}" "-DSTROBE_CPU_ISAS=avx2;avx3"; then echo "STROBE_CPU_ISAS with avx3 went through"; exit 1; fi
expect "STROBE_CPU_ISAS has avx3, expected ALL, NATIVE, or some of portable"

# In somebody's project, by the lines of docs/building.md: no program is built but theirs, and none is asked for.
mkdir "$work/mine"
ln -s "$(realpath "$source")" "$work/mine/strobe"
echo 'int main() {}' >"$work/mine/mine.cpp"
{
  echo "cmake_minimum_required(VERSION 3.25)
project(mine LANGUAGES CXX)
add_executable(mine mine.cpp)"
  awk '/^```cmake$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$source/docs/building.md"
} >"$work/mine/CMakeLists.txt"
grep -q "^add_subdirectory(strobe" "$work/mine/CMakeLists.txt" || { echo "docs/building.md has no add_subdirectory"; exit 1; }
rm -rf "$work/build"
cmake -S "$work/mine" -B "$work/build" -DCMAKE_CXX_COMPILER="$compiler" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
targets=$(cmake --build "$work/build" --target help)
for target in mine strobe strobe_static; do
  grep -qw "$target" <<<"$targets" || { echo "no target $target"; exit 1; }
done
if grep -qE "strobe_cli|strobe_python" <<<"$targets"; then echo "the tool or the Python package is a target of it"; exit 1; fi

# Of what a project asks of its own files, some would break these: files joined to one, and sums in any order without NaN.
rm -rf "$work/build"
cmake -S "$work/mine" -B "$work/build" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_UNITY_BUILD=ON -DCMAKE_CXX_FLAGS=-ffast-math \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
commands=$(grep '"command"' "$work/build/compile_commands.json" | grep strobe_objects)
[ -n "$commands" ] || { echo "no commands of the library"; exit 1; }
if grep Unity <<<"$commands"; then echo "the library's files are joined"; exit 1; fi
if grep -v -- "-ffast-math .*-fno-fast-math" <<<"$commands"; then echo "the library is compiled with -ffast-math"; exit 1; fi
