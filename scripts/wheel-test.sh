#!/usr/bin/env bash
# The wheels of a folder on Debian systems with nothing on them but Python: no compiler, no CUDA, no PyTorch, no OpenMP. Each is
# a chroot of the minimal system: pip installs the wheels there, `python -m strobe` runs, and attention is compared with NumPy
# (tests/wheel/smoke.py). Usage, as root: scripts/wheel-test.sh [--sdist] [FOLDER [SUITE...]]
#   FOLDER   dist
#   SUITE    bookworm (Debian 12) trixie forky: the oldest Debian whose Python is 3.10 or newer, the newest release, the one in
#            the making
#   --sdist  also builds the sdist for the CPU, on the first of them, with a compiler
# Installs debootstrap where it is missing. The systems are kept in STROBE_CHROOTS (a folder under the temporary directory).
set -euo pipefail
cd "$(dirname "$0")/.."
sdist=
if [ "${1:-}" = --sdist ]; then sdist=yes; shift; fi
folder=$(realpath "${1:-dist}")
suites=("${@:2}")
[ ${#suites[@]} -gt 0 ] || suites=(bookworm trixie forky)
base=${STROBE_CHROOTS:-${TMPDIR:-/tmp}/strobe-wheel-test}
wheels=("$folder"/strobe_attention-*.whl)
[ -e "${wheels[0]}" ] || { echo "wheel-test: no strobe_attention-*.whl in $folder: run make wheel" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "wheel-test: chroots need root" >&2; exit 2; }
if ! command -v debootstrap >/dev/null; then
  echo "wheel-test: installing the Debian package debootstrap to make the systems with"
  apt-get update -qq && apt-get install -y -qq debootstrap >/dev/null
fi
version=$(basename "${wheels[0]}" | cut -d- -f2)
mkdir -p "$base"

run='' mounts=()
cleanup() {
  for mount in "${mounts[@]}"; do umount -l "$mount" 2>/dev/null || true; done
  mounts=()
  [ -z "$run" ] || rm -rf --one-file-system "$run"
}
trap cleanup EXIT

# pip and apt reach the network as they do out here.
environment=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive)
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_CERT PIP_INDEX_URL PIP_DEFAULT_TIMEOUT \
  SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
  [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done

system() {  # SUITE
  local there=$base/$1
  [ ! -e "$there/.ready" ] || return 0
  echo "wheel-test: $1: making the minimal system in $there"
  rm -rf --one-file-system "$there"
  local script=/usr/share/debootstrap/scripts/$1  # of a Debian that is newer than this debootstrap: as the newest
  [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$1" "$there" \
    "${STROBE_DEBIAN_MIRROR:-http://deb.debian.org/debian}" "$script" >"$base/$1.log" 2>&1 ||
    { tail -n 5 "$base/$1.log" >&2; echo "wheel-test: debootstrap failed; its output is in $base/$1.log" >&2; exit 1; }
  touch "$there/.ready"
}

inside() { env -i "${environment[@]}" chroot "$run" /bin/bash -euo pipefail -c "$1" </dev/null; }

for suite in "${suites[@]}"; do
  system "$suite"
  run=$base/run
  rm -rf --one-file-system "$run"
  cp -a "$base/$suite" "$run"
  mount -t proc proc "$run/proc"; mounts+=("$run/proc")
  mount --bind /dev "$run/dev"; mounts+=("$run/dev")
  cp /etc/resolv.conf /etc/hosts "$run/etc/"
  # Of a proxy that has certificates of its own.
  cp -L /etc/ssl/certs/ca-certificates.crt "$run/etc/ssl/certs/" 2>/dev/null || true
  mkdir "$run/wheels"
  cp "$folder"/*.whl tests/wheel/smoke.py "$run/wheels/"
  echo "wheel-test: $suite: $(inside '. /etc/os-release; echo "$PRETTY_NAME, $(python3 --version), $(ldd --version | head -n 1)"')"
  inside 'for program in gcc g++ cc nvcc cmake; do ! command -v $program || { echo "there is a $program"; exit 1; }; done
    ! ldconfig -p | grep -E "libgomp|libcuda" || { echo "there are such libraries"; exit 1; }'
  inside 'python3 -m venv /venv && /venv/bin/pip install -q --only-binary :all: /wheels/*.whl 2>/root/pip.log ||
    { cat /root/pip.log; exit 1; }'
  inside 'cd / && /venv/bin/python -m strobe'
  inside "cd /wheels && /venv/bin/python smoke.py $version"
  # The shim has the name and the version that libraries look for. It needs PyTorch only when it is imported.
  inside '! ls /wheels/flash_attn-*.whl >/dev/null 2>&1 ||
    { /venv/bin/python -c "from importlib.metadata import version; assert version(\"flash-attn\") == \"2.8.3\"" &&
      /venv/bin/pip check; }'
  if [ -n "$sdist" ]; then
    sdist=
    cp "$folder"/strobe_attention-*.tar.gz "$run/wheels/"
    echo "wheel-test: $suite: installing a compiler in the chroot to build the sdist with"
    inside 'apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ cmake ninja-build libhwy-dev python3-dev' \
      >"$base/sdist.log" 2>&1 || { tail -n 5 "$base/sdist.log" >&2; exit 1; }
    inside 'python3 -m venv /venv-sdist && /venv-sdist/bin/pip install -v --config-settings=cmake.define.STROBE_CPU_ISAS=portable \
      /wheels/strobe_attention-*.tar.gz' >"$base/sdist.log" 2>&1 || { tail -n 15 "$base/sdist.log" >&2; exit 1; }
    grep -F 'building for the CPU alone' "$base/sdist.log" ||
      { echo "wheel-test: pip did not say that it builds for the CPU alone: $base/sdist.log" >&2; exit 1; }
    inside 'cd / && /venv-sdist/bin/python -m strobe'
  fi
  cleanup
  run=''
  echo "wheel-test: $suite: passed"
done
