#!/usr/bin/env bash
# The documentation site: build/docs/index.html, which opens from the file. Needs the network for set-up alone.
# Usage: scripts/docs.sh [argument of sphinx-build...]
# The reference of the Python package and of the command line is read from the package and the tool at work. They are built with one
# instruction set, unless STROBE_LIBRARY and STROBE_CLI name a libstrobe.so and a tool (and the target strobe_python was built).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh docs
if [ -z "${STROBE_LIBRARY:-}" ] || [ -z "${STROBE_CLI:-}" ]; then
  echo "docs: building the package and the tool, whose reference is what they say themselves (a minute or two)"
  scripts/build.sh docs-tool -- strobe strobe_python strobe_cli
  export STROBE_LIBRARY=$PWD/build/docs-tool/libstrobe.so STROBE_CLI=$PWD/build/docs-tool/bin/strobe
fi
echo "docs: reading the headers and the package, and writing the pages (half a minute, in silence)"
rm -rf build/docs build/docs-work
mkdir -p build/docs-work/doxygen
doxygen docs/Doxyfile
build/venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d build/docs-work/doctrees "$@" docs build/docs
build/venv/bin/python scripts/check_site.py build/docs build/docs-work/doxygen/xml
