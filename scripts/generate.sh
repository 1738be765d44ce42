#!/usr/bin/env bash
# The example engine, from nothing: set-up, release build of what it needs, run. Arguments go to the program.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo
scripts/build.sh release -- strobe_generate
exec build/release/bin/generate "$@"
