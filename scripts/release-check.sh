#!/usr/bin/env bash
# What must hold before a release, on a machine without a GPU (docs/releasing.md says what a GPU must show). Some four hours on two
# cores; goes on after a failure, and the exit status and the last lines say what failed. Needs Debian 12, root (chroots) and nvcc.
# Usage: scripts/release-check.sh [--papers | --rehearsal]
#   --papers     only what takes seconds: clean tree, versions, CHANGELOG, tag
#   --rehearsal  all of it, but no complaint that the release has no date yet
set -uo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
papers='' rehearsal=''
case ${1:-} in
  '') ;;
  --papers) papers=yes ;;
  --rehearsal) rehearsal=yes ;;
  *) echo "release-check: got '$1', expected --papers, --rehearsal or nothing" >&2; exit 2 ;;
esac

failed=()
stage() {  # NAME COMMAND...
  local name=$1 start=$SECONDS result=passed
  shift
  printf '\n=== release-check: %s\n' "$name"
  "$@" || { result=FAILED; failed+=("$name"); }
  printf '=== release-check: %s: %s, %d s\n' "$name" "$result" $((SECONDS - start))
}

version=$(sed -n 's/^#define STROBE_VERSION_[A-Z]* \([0-9]*\)$/\1/p' include/strobe/strobe.h | paste -sd.)
complain() { echo "release-check: $*"; status=1; }
papers() {
  local status=0 heading tagged
  [ -z "$(git status --porcelain)" ] || complain "the work tree is not what is committed: git status"
  heading=$(grep -m 1 '^## ' CHANGELOG.md)
  case $heading in
    "## $version - "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]) ;;
    "## $version - not released yet")
      [ -n "$rehearsal" ] || complain "CHANGELOG.md has no date for $version: write the day of the release in its first heading" ;;
    *) complain "CHANGELOG.md begins with '$heading', expected '## $version - ' (strobe.h) and a date" ;;
  esac
  tagged=$(git rev-parse -q --verify "v$version^{commit}")
  [ -z "$tagged" ] || [ "$tagged" = "$(git rev-parse HEAD)" ] ||
    complain "the tag v$version is on another commit already: is the version in strobe.h the new one?"
  return $status
}

# The Python tests with what pip installs, and not with this source tree.
installed() {
  local venv=build/release-venv
  rm -rf "$venv"
  python3 -m venv "$venv" &&
    "$venv/bin/pip" install -qq -r python/requirements-test.txt dist/strobe_attention-*.whl &&
    (unset STROBE_LIBRARY STROBE_CLI PYTHONPATH; "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python)
}

stage "version, CHANGELOG, tag" papers
if [ -z "$papers" ]; then
  stage "everything that needs no GPU" scripts/nightly.sh
  stage "the distributions" scripts/wheel.sh
  stage "the distributions on minimal systems" scripts/wheel-test.sh --sdist dist
  stage "Python's tests with the wheel" installed
  printf '\nrelease-check: still to be run on a machine with a GPU: make gpu-test, make gpu-sanitize (docs/releasing.md)\n'
fi
printf '\n=== release-check of %s: %d s, %d failed\n' "$version" "$SECONDS" "${#failed[@]}"
[ ${#failed[@]} = 0 ] || printf 'FAILED: %s\n' "${failed[@]}"
exit $((${#failed[@]} > 0))
