#!/usr/bin/env bash
# Runs a wheel's libstrobe on the C and C++ run times of build/sysroot instead of this machine's: the oldest that are at hand.
# tests/consumer/consumer.c computes an attention with it. Usage: scripts/run_on_sysroot.sh WHEEL
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
scripts/sysroot.sh
root=$PWD/build/sysroot
libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m zipfile -e "$wheel" "$work"
gcc -std=c99 --sysroot="$root" -L"$root/usr/lib/x86_64-linux-gnu" -Wl,-rpath-link="$libraries" -Iinclude tests/consumer/consumer.c \
  -o "$work/consumer" "$work/strobe/libstrobe.so"
# As libstrobe.so.0, by which programs ask for it.
ln -s libstrobe.so "$work/strobe/libstrobe.so.0"
on_sysroot=("$root/lib64/ld-linux-x86-64.so.2" --library-path "$work/strobe:$libraries")
if "${on_sysroot[@]}" --list "$work/consumer" | grep -F ' => ' | grep -vE " => ($root|$work)/"; then
  echo "run_on_sysroot: these libraries are this machine's" >&2
  exit 1
fi
glibc=$("${on_sysroot[@]}" "$root/lib/x86_64-linux-gnu/libc.so.6" | sed -n '1s/.*version \([0-9.]*[0-9]\).*/\1/p')
echo "run_on_sysroot: glibc $glibc: $("${on_sysroot[@]}" "$work/consumer")"
