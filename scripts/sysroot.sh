#!/usr/bin/env bash
# What wheels are linked against: the C, C++ and OpenMP run times of Debian 11, unpacked into build/sysroot. Programs that are
# linked against them run on every newer system; how much older a system may be, scripts/check_wheel.py reads from the result.
# Needs apt-get and dpkg-deb, but not root: nothing is installed. apt checks the packages' signatures.
# Usage: scripts/sysroot.sh
#   STROBE_DEBIAN_MIRROR  where Debian's packages come from (http://deb.debian.org/debian)
set -euo pipefail
cd "$(dirname "$0")/.."
suite=bullseye
packages=(libc6 libc6-dev linux-libc-dev libcrypt-dev libgcc-s1 libgomp1 libstdc++6 gcc-10-base)
root=build/sysroot
made_by="$suite: ${packages[*]} $(sha256sum <"scripts/${0##*/}")"
[ "$(cat "$root/.made" 2>/dev/null)" != "$made_by" ] || exit 0

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "sysroot: $tool was not found: wheels are built on Debian or Ubuntu" >&2; exit 2; }
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keys" ] || { echo "sysroot: $keys was not found: apt-get install debian-archive-keyring" >&2; exit 2; }
echo "sysroot: unpacking ${#packages[@]} packages of Debian 11 into $root (7 MB to fetch; nothing is installed)"

work=$PWD/build/sysroot-work
log=$PWD/build/sysroot.log
rm -rf "$root" "$work"
mkdir -p "$root" "$work"/{state/lists/partial,cache/archives/partial,packages}
echo "deb [signed-by=$keys] ${STROBE_DEBIAN_MIRROR:-http://deb.debian.org/debian} $suite main" >"$work/sources.list"
: >"$work/status"
apt=(apt-get -q -o Dir::State="$work/state" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache"
  -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o APT::Architecture=amd64
  -o APT::Architectures::=amd64 -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false)
fetch() { "${apt[@]}" update --error-on=any && (cd "$work/packages" && "${apt[@]}" download "${packages[@]}"); }
if ! fetch >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "sysroot: Debian 11's packages could not be fetched; the whole of apt's output is in $log." \
    "STROBE_DEBIAN_MIRROR names another mirror (when Debian 11 is archived: http://archive.debian.org/debian)" >&2
  exit 1
fi
for package in "$work"/packages/*.deb; do dpkg-deb -x "$package" "$root"; done
# Links to absolute paths would lead out of the sysroot, to this machine's own libraries.
find "$root" -type l -lname '/*' | while read -r link; do ln -sfnr "$root$(readlink "$link")" "$link"; done
libraries=$root/usr/lib/x86_64-linux-gnu
# The names that the linker looks for, in the one folder that it is told of.
for name in libgomp.so.1 libstdc++.so.6; do ln -sfn "$name" "$libraries/${name%.*}"; done
ln -sfnr "$root/lib/x86_64-linux-gnu/libgcc_s.so.1" "$libraries/"
# Headers that belong to this machine: GCC with a sysroot does not look into /usr/include. Those of Debian's Python are in two
# folders, of which CMake names one.
for headers in /usr/include/hwy /usr/include/x86_64-linux-gnu/python3*; do
  [ ! -d "$headers" ] || ln -sfn "$headers" "$root$headers"
done
echo "$made_by" >"$root/.made"
rm -rf "$work"
