#!/usr/bin/env bash
# Runs other people's libraries beside the distribution flash-attn (python/flash_attn_shim) and without it, with tiny
# models of random weights on the CPU, and prints a table: tests/compat/run.py. Without a library's name, also runs the tests
# of strobe.transformers with the newest transformers, whose abstract classes and masks change with its releases.
# Usage: scripts/compat.sh [library...]
# Makes build/compat-current and build/compat-older (2 GB together) from PyTorch's CPU build and what
# python/requirements-compat*.txt name; where they are there, build/compat-current is brought up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test

torch=${STROBE_TEST_TORCH:-$(sed -n '/^torch==/p' python/requirements-test-torch.txt)+cpu}
log=$PWD/build/compat.log
: >"$log"
install() { # VENV requirement...
  local venv=$1; shift
  "$venv/bin/pip" install -q --upgrade "$@" >>"$log" 2>&1 ||
    { tail -n 15 "$log" >&2; echo "compat: pip failed; the whole of its output is in $log" >&2; exit 1; }
}
for age in current older; do
  venv=build/compat-$age
  requirements=python/requirements-compat.txt
  [ "$age" = current ] || requirements=python/requirements-compat-older.txt
  cmp -s "$requirements" "$venv/requirements.txt" && [ "$age" = older ] && continue
  echo "compat: installing PyTorch and the Python packages of $requirements into $venv (1 GB, one to three minutes, in silence)"
  python3 -m venv "$venv"
  # shellcheck disable=SC2086 # options may be among the words, such as --index-url
  install "$venv" $torch -r "$requirements"
  cp "$requirements" "$venv/requirements.txt"
done

# Strobe and the shim as pip installs them, but in a folder of their own: in front of a run, or not.
echo "compat: building Strobe's package and the shim (two or three minutes on two cores, in silence)"
site=build/compat-site
rm -rf "$site" build/compat-wheel
build/venv/bin/pip wheel -qq --no-deps -C cmake.define.STROBE_CUDA=OFF -w build/compat-wheel . >>"$log" 2>&1 ||
  { tail -n 15 "$log" >&2; echo "compat: pip wheel failed; the whole of its output is in $log" >&2; exit 1; }
install build/compat-current --no-deps --target "$site" build/compat-wheel/strobe_attention-*.whl ./python/flash_attn_shim

status=0
build/compat-current/bin/python tests/compat/run.py "$site" build/compat-results/current "$@" || status=1
if [ $# = 0 ]; then
  echo
  echo "compat: Strobe's tests with transformers $(build/compat-current/bin/python -c 'import transformers; print(transformers.__version__)'), the newest"
  newest=$(build/compat-current/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  PYTHONPATH=$PWD/$site:$newest build/venv/bin/python -m pytest -q -W ignore -p no:cacheprovider tests/python/test_transformers*.py || status=1
  echo
  build/compat-older/bin/python tests/compat/run.py "$site" build/compat-results/older diffusers transformers || status=1
fi
exit $status
