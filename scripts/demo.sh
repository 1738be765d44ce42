#!/usr/bin/env bash
# The demo, from nothing: set-up, release build of what it needs, run. Arguments go to the demo.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo
scripts/build.sh release -- strobe_demo strobe_cli
exec build/release/bin/strobe_demo "$@"
