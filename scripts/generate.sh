#!/usr/bin/env bash
# The example engine, from nothing: set-up, release build of what it needs, run. Arguments go to the program.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo
scripts/build.sh release -- strobe_generate
# A launch here takes microseconds. Where other programs have the cores, threads that wait by spinning would stretch it to
# milliseconds.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec build/release/bin/generate "$@"
