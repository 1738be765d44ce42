#!/usr/bin/env bash
# The shared library exports strobe_* and nothing else, and needs nothing beyond the C, C++ and OpenMP run times.
# Usage: check_exports.sh libstrobe.so
set -euo pipefail
library=$1
status=0

exported=$(nm -D --defined-only "$library" | awk '{print $NF}')
if strangers=$(grep -v '^strobe_' <<<"$exported"); then
  printf 'exported, but not strobe_*:\n%s\n' "$strangers"
  status=1
fi
# Every function of the header is there.
header=$(dirname "$0")/../../include/strobe/strobe.h
for function in $(sed -n 's/^STROBE_API .*\b\(strobe_[a-z_]*\)(.*/\1/p' "$header"); do
  grep -qx "$function" <<<"$exported" || { echo "declared in strobe.h, but not exported: $function"; status=1; }
done

allowed='^(libc|libm|libstdc\+\+|libgcc_s|libgomp|ld-linux.*)\.so\.[0-9]+$'
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
if strangers=$(grep -vE "$allowed" <<<"$needed"); then
  printf 'needed at run time, but not promised:\n%s\n' "$strangers"
  status=1
fi
exit $status
