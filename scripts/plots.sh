#!/usr/bin/env bash
# Draws docs/figures from bench/results. Arguments go to bench/plots.py.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh plots
exec build/venv/bin/python bench/plots.py "$@"
