#!/usr/bin/env bash
# Builds the libFuzzer targets and runs them beside each other for FUZZ_SECONDS (60) from their corpora in fuzz/corpus.
# STROBE_CPU_ISAS: of the kernels (portable: their source is that of the others). FUZZ_SEED: of the random numbers (another each time). New inputs go to build/fuzz/new; a crash is kept there too, and the command to repeat it is libFuzzer's last line.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh ci
scripts/build.sh fuzz -DSTROBE_CPU_ISAS="${STROBE_CPU_ISAS:-portable}"
seconds=${FUZZ_SECONDS:-60}
names=() runs=()
for program in build/fuzz/fuzz/fuzz_*; do
  [ -x "$program" ] && [ -f "$program" ] || continue
  name=${program##*/fuzz_}
  mkdir -p "build/fuzz/new/$name"
  "$program" -max_total_time="$seconds" -seed="${FUZZ_SEED:-0}" -timeout=120 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/new/$name/" "build/fuzz/new/$name" "fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1 &
  names+=("$name") runs+=($!)
done
[ ${#names[@]} -gt 0 ] || { echo "fuzz: no target was built" >&2; exit 1; }
status=0
for i in "${!names[@]}"; do
  log=build/fuzz/${names[i]}.log
  if wait "${runs[i]}"; then
    echo "fuzz: ${names[i]}, $seconds s"
    sed -n 's/^stat::\(number_of_executed_units\|peak_rss_mb\): */  \1: /p' "$log"
  else
    echo "fuzz: ${names[i]} FAILED"
    grep -v 'NEW_FUNC' "$log" | tail -n 60
    status=1
  fi
done
exit $status
