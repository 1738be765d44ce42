#!/usr/bin/env bash
# No function that another file could share is emitted in a file that is compiled for one instruction set: the linker
# keeps one copy of such a function, perhaps this one, and an older CPU would stop at it. All weak symbols of these
# objects must therefore stand in the instruction set's own namespaces, which no other file uses.
# Usage: check_isa_objects.sh OBJECT...
set -euo pipefail
status=0
seen=0
for object in "$@"; do
  case $object in
    */kernels_avx2.cpp.o | */kernels_avx512.cpp.o | */kernels_avx512_bf16.cpp.o | */kernels_neon.cpp.o | */amx_*.cpp.o) ;;
    *) continue ;;
  esac
  seen=$((seen + 1))
  isa=$(sed -E 's#.*/(kernels_([a-z0-9_]+)|(amx)_[a-z0-9_]+)\..*#\2\3#' <<<"$object")
  # Of a template's instance the namespace comes after the return type, and typeinfo and the like have a prefix.
  if strangers=$(nm -C --defined-only "$object" | awk '$2 ~ /^[WwVvu]$/ {$1 = ""; print}' |
      grep -vE "^ [^(]*\b(strobe::cpu::$isa|hwy::N_[A-Z0-9_]+)::"); then
    printf '%s: shared functions compiled for %s:\n%s\n' "$(basename "$object")" "$isa" "$strangers"
    status=1
  fi
done
[ $seen -gt 0 ] || { echo "no object of one instruction set among: $*"; exit 1; }
exit $status
