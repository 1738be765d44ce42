#!/usr/bin/env bash
# The demo, from nothing: set-up, release build of what it needs, run. Arguments go to the demo.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo
scripts/build.sh release -- strobe_demo strobe_cli
# PyTorch beside Strobe, where there is one already. Looking for it does not import it.
python=
for candidate in build/venv/bin/python python3; do
  if "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    python=$candidate
    break
  fi
done
exec build/release/bin/strobe_demo --page build/demo.html --python "$python" "$@"
