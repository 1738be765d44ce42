#!/usr/bin/env bash
# Installs a build, moves the install tree elsewhere, and builds and runs C and C++ programs against it, by
# find_package and by pkg-config, shared and static. Usage: run.sh BUILD_DIR
set -euo pipefail
build=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

quietly() { "$@" >log 2>&1 || { echo "failed: $*"; cat log; exit 1; }; }

quietly cmake --install "$build" --prefix "$work/installed"
mv installed moved
prefix=$work/moved
[ -n "$(find "$prefix" -name LICENSE)" ] || { echo "cmake --install left the licence out"; exit 1; }

quietly cmake -G Ninja -S "$here" -B cmake -DCMAKE_PREFIX_PATH="$prefix"
quietly cmake --build cmake
for program in c_shared cpp_shared cpp_static; do
  echo "find_package, $program: $(./cmake/$program)"
done

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name strobe.pc)")
export PKG_CONFIG_PATH
libdir=$(dirname "$PKG_CONFIG_PATH")
read -ra shared <<<"$(pkg-config --cflags --libs strobe)"
read -ra static <<<"$(pkg-config --cflags --libs --static strobe)"
static=("${static[@]/#-lstrobe/-l:libstrobe.a}")
quietly gcc -std=c99 -pedantic-errors -Wall -Wextra -Werror "$here/consumer.c" -o c_shared "${shared[@]}"
quietly gcc -std=c99 -pedantic-errors -Wall -Wextra -Werror "$here/consumer.c" -o c_static "${static[@]}"
quietly g++ -std=c++20 -Wall -Wextra -Werror "$here/consumer.cpp" -o cpp_shared "${shared[@]}"
quietly g++ -std=c++20 -Wall -Wextra -Werror "$here/consumer.cpp" -o cpp_static "${static[@]}"
for program in c_shared c_static cpp_shared cpp_static; do
  echo "pkg-config, $program: $(LD_LIBRARY_PATH=$libdir ./$program)"
done

# The installed tool runs from where it lies, without the build tree.
if [ -x "$prefix/bin/strobe" ]; then
  quietly "$prefix/bin/strobe" --help
fi
