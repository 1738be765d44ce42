#!/usr/bin/env bash
# Draws docs/figures and writes the tables of docs/performance.md, from bench/results. Arguments go to bench/plots.py.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh plots
build/venv/bin/python bench/plots.py "$@"
build/venv/bin/python bench/tables.py
