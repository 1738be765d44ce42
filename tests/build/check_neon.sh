#!/usr/bin/env bash
# The NEON kernels compile for 64-bit Arm and share no function with other files.
# Usage: check_neon.sh COMPILER HIGHWAY_INCLUDE_DIR SOURCE_DIR
set -euo pipefail
compiler=$1 highway=$2 source=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Highway alone out of its folder: that one, /usr/include, has this machine's C library too.
mkdir "$work/include"
ln -s "$highway/hwy" "$work/include/hwy"
"$compiler" -std=c++20 -O2 -fPIC -Wall -Wextra -Wshadow -Werror -fno-math-errno -march=armv8-a+crypto \
  -I"$source/include" -I"$source/src" -isystem "$work/include" \
  -c "$source/src/cpu/kernels_neon.cpp" -o "$work/kernels_neon.cpp.o"
"$(dirname "$0")/check_isa_objects.sh" "$work/kernels_neon.cpp.o"
