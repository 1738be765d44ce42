#!/usr/bin/env bash
# Python tests over the extension (and libstrobe, unless STROBE_LIBRARY names another build) under AddressSanitizer and
# UndefinedBehaviorSanitizer, whose run time an ordinary Python loads first. Leaks are test_extension.py's, as Python keeps
# memory of its own to the end.
# Usage: scripts/asan_python.sh [argument of pytest...]
set -euo pipefail
cd "$(dirname "$0")/.."
targets=(strobe_python)
[ -n "${STROBE_LIBRARY:-}" ] || targets+=(strobe)
scripts/build.sh asan -- "${targets[@]}"
export STROBE_LIBRARY=${STROBE_LIBRARY:-$PWD/build/asan/libstrobe.so}

# The package with this extension in it, in place of the one that lies in the source tree.
package=build/asan/python
rm -rf "$package"
mkdir -p "$package"
cp -r python/strobe python/flash_attn_shim "$package"
cp build/asan/_core.abi3.so "$package/strobe/"
export PYTHONPATH=$PWD/$package
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
export LD_PRELOAD
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export STROBE_LEAK_CALLS=${STROBE_LEAK_CALLS:-2000} STROBE_FUZZ_CASES=${STROBE_FUZZ_CASES:-500}
[ $# -gt 0 ] || set -- tests/python/test_{extension,errors,options,dlpack,odd_tensors,layouts,attention,direct,fuzz}.py
exec build/venv/bin/python -m pytest -q -p no:cacheprovider "$@"
