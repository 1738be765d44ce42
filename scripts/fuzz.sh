#!/usr/bin/env bash
# Builds the libFuzzer targets and runs each for FUZZ_SECONDS (60) from its corpus in fuzz/corpus.
# New inputs go to build/fuzz/new; a crash is kept there too, and the command to repeat it is libFuzzer's last line.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh ci
scripts/build.sh fuzz
for program in build/fuzz/fuzz/fuzz_*; do
  [ -x "$program" ] && [ -f "$program" ] || continue
  name=${program##*/fuzz_}
  mkdir -p "build/fuzz/new/$name"
  echo "fuzz: $name for ${FUZZ_SECONDS:-60} s"
  log=build/fuzz/$name.log
  if ! "$program" -max_total_time="${FUZZ_SECONDS:-60}" -timeout=20 -rss_limit_mb=2048 -verbosity=0 \
      -print_final_stats=1 -artifact_prefix="build/fuzz/new/$name/" \
      "build/fuzz/new/$name" "fuzz/corpus/$name" >"$log" 2>&1; then
    grep -v 'NEW_FUNC' "$log" | tail -n 60
    exit 1
  fi
  sed -n 's/^stat::\(number_of_executed_units\|peak_rss_mb\): */  \1: /p' "$log"
done
