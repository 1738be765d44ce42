#!/usr/bin/env bash
# Installs what a part of this project needs, where it is missing. Usage: scripts/setup.sh [demo|test|ci|bench|plots|docs|wheel] [packages]
#   demo  compiler, CMake and the header libraries: builds the library, the tool and the examples
#   test  and GoogleTest, the Arm cross compiler, and Python packages in build/venv (PyTorch where pip has its CPU build)
#   ci    and Clang (formatter, fuzzer) and ccache
#   bench what demo has, and PyTorch as the peer in build/venv
#   plots matplotlib in build/venv
#   docs  what demo has, Doxygen, and in build/venv Sphinx and what the Python package imports, whose reference is read from it
#   wheel what the distributions are built and checked with, in build/wheel-venv
# With the word `packages` it installs the Debian packages alone.
# Works on Debian 12 as root or with sudo. When all is there, it does nothing, says nothing and takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-test}

packages=(g++ cmake ninja-build pkg-config libhwy-dev libcli11-dev libfmt-dev nlohmann-json3-dev)
case $part in
  demo) why="to build the library and the examples" ;;
  test) why="to build and run the tests" ;;
  ci) why="for formatting, fuzzing and tests" ;;
  bench) why="to build and run the benchmarks" ;;
  plots) why="to draw the figures" packages=() ;;
  docs) why="to build the documentation" packages+=(doxygen) ;;
  wheel) why="to build the distributions" packages=(g++ cmake ninja-build libhwy-dev debian-archive-keyring) ;;
  *) echo "setup: got part '$part', expected demo, test, ci, bench, plots, docs or wheel" >&2; exit 2 ;;
esac
case $part in
  test | ci) packages+=(libgtest-dev g++-aarch64-linux-gnu) ;;&
  ci) packages+=(git ccache clang clang-format libclang-rt-14-dev libomp-14-dev llvm-14) ;;&
  test | ci | bench | docs | wheel) packages+=(python3-dev) ;;&  # of the Python package's extension, and torch.compile's C++
  test | ci | bench | plots | docs | wheel) packages+=(python3 python3-venv) ;;
esac

if ! command -v apt-get >/dev/null; then
  echo "setup: this is not Debian (no apt-get), so nothing was installed." \
    "Strobe needs what Debian calls: ${packages[*]}" >&2
  exit 2
fi

installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p')
missing=()
for package in "${packages[@]}"; do
  grep -qxF "$package" <<<"$installed" || missing+=("$package")
done

mkdir -p build
if [ ${#missing[@]} -gt 0 ]; then
  sudo=()
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup: neither root nor sudo. Have root run: apt-get install ${missing[*]}" >&2
      exit 2
    fi
    sudo=(sudo)
  fi
  echo "setup: installing ${#missing[@]} Debian packages $why (a minute or two): ${missing[*]}"
  log=build/setup.log
  apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Dpkg::Use-Pty=0 "$@"; }
  if ! { apt update && apt install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    echo "setup: apt-get failed; the whole of its output is in $log" >&2
    exit 1
  fi
  echo "setup: Debian packages installed in $SECONDS s"
fi

[ "${2:-}" != packages ] || exit 0

# "numpy jax pytest": what requirements files name, those that they read included, without versions.
names_in() {
  local file
  for file in "$@"; do
    # shellcheck disable=SC2046 # names of files without spaces
    names_in $(sed -n "s|^-r |$(dirname "$file")/|p" "$file")
    sed -n 's/^\([A-Za-z0-9][A-Za-z0-9_.-]*\).*/\1/p' "$file"
  done | tr '\n' ' '
}

# A requirements file with the lines of those that it reads in their places: what the copies inside a venv say that it has.
lines_of() {
  local line
  while read -r line; do
    case $line in
      "-r "*) lines_of "$(dirname "$1")/${line#-r }" ;;
      *) echo "$line" ;;
    esac
  done <"$1"
}

if [ "$part" != demo ]; then
  requirements=python/requirements-test.txt
  case $part in bench | plots | docs | wheel) requirements=python/requirements-$part.txt ;; esac
  venv=build/venv
  [ "$part" != wheel ] || venv=build/wheel-venv
  have=$venv/$(basename "$requirements")
  if ! lines_of "$requirements" | cmp -s - "$have"; then
    case $part in # as they lie on the disk; about a third of that is fetched
      test | ci) size="1 GB" time="one to three minutes" ;;
      docs) size="600 MB" time="a minute or two" ;;
      bench) size="2 GB, and several more where pip finds no CPU build of PyTorch" time="two minutes and more" ;;
      plots) size="160 MB" time="half a minute" ;;
      wheel) size="70 MB" time="half a minute" ;;
    esac
    echo "setup: installing Python packages into $venv $why ($size, $time, in silence): $(names_in "$requirements")"
    begin=$SECONDS
    python3 -m venv "$venv"
    "$venv/bin/pip" install -qq --no-compile -r "$requirements"  # most of its files are never imported
    lines_of "$requirements" >"$have"
    echo "setup: Python packages installed in $((SECONDS - begin)) s"
  fi
fi

# PyTorch, for the tests of its layer and for the reference of it: its CPU build (200 MB), where pip is set up to find it or at PyTorch's own
# index. What PyPI itself has brings several GB of CUDA, so that takes a word: STROBE_TEST_TORCH says what to install instead.
if [ "$part" = test ] || [ "$part" = ci ] || [ "$part" = docs ]; then
  requirements=python/requirements-test-torch.txt
  alone=python/requirements-test-nodeps.txt
  have=build/venv/$(basename "$requirements")
  if [ "$part" = docs ]; then # which needs no package of the tests alone
    alone=
    have=build/venv/requirements-docs-torch.txt
  fi
  files=("$requirements" ${alone:+"$alone"})
  if ! cat "${files[@]}" | cmp -s - "$have"; then
    torch=$(sed -n '/^torch==/p' "$requirements")
    install() { build/venv/bin/pip install -qq --no-compile "$@"; }
    install_torch() {
      if [ -n "${STROBE_TEST_TORCH:-}" ]; then
        # shellcheck disable=SC2086 # options may be among the words, such as --index-url
        install --retries 1 $STROBE_TEST_TORCH
      else
        install --retries 1 "$torch+cpu" || install --retries 1 --timeout 20 --index-url https://download.pytorch.org/whl/cpu "$torch+cpu"
      fi
    }
    begin=$SECONDS
    echo "setup: installing PyTorch and what is used beside it into build/venv $why (800 MB, of which 200 MB are fetched for" \
      "PyTorch's CPU build; a minute or two, in silence): $(names_in "${files[@]}")"
    if build/venv/bin/python -c "import torch" 2>/dev/null || install_torch >build/setup.log 2>&1; then
      install -r "$requirements"
      [ -z "$alone" ] || install --no-deps -r "$alone"
      cat "${files[@]}" >"$have"
      echo "setup: PyTorch and the others installed in $((SECONDS - begin)) s"
    else
      echo "setup: pip finds no ${STROBE_TEST_TORCH:-$torch+cpu}, so the tests and the reference of the PyTorch layer are left out;" \
        "STROBE_TEST_TORCH=$torch would install PyPI's (several GB)"
    fi
  fi
fi
