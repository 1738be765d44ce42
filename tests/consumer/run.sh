#!/usr/bin/env bash
# Installs a build, moves the install tree to where README puts it, and builds and runs programs against it: README's C++ as it is
# printed and examples/consumer, by CMake and by pkg-config, and what those do not have: C, older C++, the static library.
# Usage: run.sh BUILD_DIR
set -euo pipefail
build=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
example=$root/examples/consumer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "$*"; exit 1; }
quietly() { "$@" >log 2>&1 || { echo "failed: $*"; cat log; exit 1; }; }
block() {  # LANGUAGE WORD: the blocks of README in that language that have the word
  awk -v fence="\`\`\`$1" -v word="$2" '
    inside && /^```$/ { inside = 0; if (index(text, word)) printf "%s", text }
    inside { text = text $0 "\n" }
    $0 == fence { inside = 1; text = "" }' "$root/README.md"
}

quietly cmake --install "$build" --prefix "$work/installed"
export HOME=$work/home
mkdir "$HOME"
mv installed "$HOME/.local"
prefix=$HOME/.local
[ -n "$(find "$prefix" -name LICENSE)" ] || fail "cmake --install left the licence out"

# README's two files and commands, in a folder of their own.
mkdir readme
block cpp strobe.hpp >readme/quickstart.cpp
block cmake find_package >readme/CMakeLists.txt
block sh 'pkg-config --cflags' >readme/commands.sh
diff readme/quickstart.cpp "$example/quickstart.cpp" || fail "README's C++ is not examples/consumer/quickstart.cpp"
diff readme/CMakeLists.txt <(sed '/^$/,$d' "$example/CMakeLists.txt") || fail "nor is its CMakeLists.txt the example's first paragraph"
(cd readme && quietly bash -eu commands.sh)
grep -q '^CMAKE_BUILD_TYPE:.*=Release$' readme/build/CMakeCache.txt || fail "README's commands build without optimising"
[ "$(grep -c '^out\[0\] = 0\.1$' readme/log)" = 2 ] || { cat readme/log; fail "README's commands do not run the program twice"; }

# The example's training step, by CMake, optimized though no build type is given. The loss falls, or it says so by its exit status.
quietly cmake -S "$example" -B example -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_FLAGS="-Wall -Wextra -Wpedantic -Werror" \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
[ "$(grep -c '"command".* -O3 ' example/compile_commands.json)" = 2 ] || fail "the example is not compiled as Release by default"
quietly cmake --build example
./example/quickstart >/dev/null || fail "quickstart: exit status $?"
echo "examples/consumer: $(./example/train | tail -n 1)"
./example/train >/dev/null || fail "train: the loss did not fall"

quietly cmake -S "$here" -B c -DLANGUAGES=C -DCMAKE_PREFIX_PATH="$prefix"
quietly cmake --build c
echo "find_package without C++: $(./c/c_shared)"
quietly cmake -S "$here" -B both "-DLANGUAGES=C;CXX" -DCMAKE_PREFIX_PATH="$prefix"
quietly cmake --build both
for program in c_shared c_static cpp17_shared cpp_static ring; do
  echo "find_package, $program: $(./both/$program | tail -n 1)"
done

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name strobe.pc)")
export PKG_CONFIG_PATH
read -ra shared <<<"$(pkg-config --cflags --libs strobe)"
shared+=("-Wl,-rpath,$(pkg-config --variable=libdir strobe)")
read -ra static <<<"$(pkg-config --cflags --libs --static strobe)"
static=("${static[@]/#-lstrobe/-l:libstrobe.a}")
warnings=(-Wall -Wextra -Werror)
quietly gcc -std=c99 -pedantic-errors "${warnings[@]}" "$here/consumer.c" -o c_shared "${shared[@]}"
quietly gcc -std=c99 -pedantic-errors "${warnings[@]}" "$here/consumer.c" -o c_static "${static[@]}"
quietly g++ -std=c++17 "${warnings[@]}" "$here/consumer17.cpp" -o cpp17_shared "${shared[@]}"
quietly g++ -std=c++20 "${warnings[@]}" "$example/train.cpp" -o cpp_static "${static[@]}"
quietly g++ -std=c++20 "${warnings[@]}" "$here/ring.cpp" -o ring "${shared[@]}"
for program in c_shared c_static cpp17_shared cpp_static ring; do
  echo "pkg-config, $program: $(./$program | tail -n 1)"
done

# Each header by itself, where a compiler looks at it as at the program's own; strobe.h in the oldest C++ too.
alone() {
  printf '#include <strobe/%s>\nint main() {}\n' "$2" >"alone-$2.cpp"
  g++ "$1" -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wformat=2 -Werror -I"$prefix/include" \
    "alone-$2.cpp"
}
export -f alone
export prefix
find "$prefix/include/strobe" -name '*.hpp' -printf '%f\n' | sort >headers
xargs -a headers -P 2 -I{} bash -c 'alone -std=c++20 {}' >log 2>&1 || { cat log; fail "a header does not stand alone"; }
quietly alone -std=c++98 strobe.h

# strobe::Workspace is aligned also where the compiler aligns no more than malloc does.
quietly g++ -std=c++20 -fno-aligned-new "${warnings[@]}" "$here/workspace.cpp" -o workspace "${shared[@]}"
./workspace || fail "the workspace does not serve"

# There are no components.
mkdir component
echo 'cmake_minimum_required(VERSION 3.25)
project(component LANGUAGES NONE)
find_package(strobe 0.2 COMPONENTS cuda)
message(STATUS "found: ${strobe_FOUND}")' >component/CMakeLists.txt
quietly cmake -S component -B component/build -DCMAKE_PREFIX_PATH="$prefix"
grep -q 'found: \(0\|FALSE\)$' log || { cat log; fail "a component that is not there was found"; }

# Older C++ is told in one error what the headers need.
for header in strobe ring; do
  echo "#include <strobe/$header.hpp>" >older.cpp
  if g++ -std=c++17 -fsyntax-only older.cpp "${shared[@]}" 2>log; then fail "$header.hpp went through as C++17"; fi
  [ "$(grep -c 'error' <(grep -E ': (fatal )?error:' log))" = 1 ] && grep -q "$header.hpp needs C++20" log ||
    { cat log; fail "expected one error that names C++20"; }
done

# The installed tool runs from where it lies, without the build tree.
if [ -x "$prefix/bin/strobe" ]; then
  quietly "$prefix/bin/strobe" --help
fi
