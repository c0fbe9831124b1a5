#!/usr/bin/env bash
# Brings a bare Debian 12 (git, python3, apt, pip) to where brigade builds:
# missing Debian packages, .venv with the pinned requirements, and an nvcc in
# .venv where the machine has none.  Takes a moment when all is there.
# Environment: BRIGADE_CUDA=OFF leaves nvcc out; PYTHON names the Python to use.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

readonly packages=(
  cmake ninja-build g++ ccache
  libabsl-dev libgloo-dev zlib1g-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)
changed=no

# The first Python of a version that torch has wheels for, or nothing.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 /usr/bin/python3 python3.{14,13,12,11,10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

has_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

install_packages() {
  local as_root=() line="apt-get install -y --no-install-recommends $*"
  if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
      fail "these Debian packages are missing; run as root, then start again:
    apt-get update && $line"
    fi
    as_root=(sudo -n)
  fi
  say "installing Debian packages: $*"
  "${as_root[@]}" apt-get update -qq ||
    say "apt-get update failed; going on with the package lists that are here"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $line ||
    fail "apt could not install them; see its message above, then start again"
  changed=yes
}

# Debian packages; python3-venv and python3-dev only for a Python that needs them.
python=$(find_python)
[[ -n $python ]] ||
  fail "no Python from 3.10 to 3.14 was found; torch has wheels for these.  Set PYTHON to one."
missing=()
if command -v dpkg-query >/dev/null; then
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qx "$package installed" <<<"$installed" || missing+=("$package")
  done
  if [[ ! -x .venv/bin/python ]] && ! can_make_venv "$python"; then
    missing+=(python3-venv)
  fi
  has_headers "$python" || missing+=(python3-dev)
else
  say "no dpkg here: please see that these (Debian's names) are there: ${packages[*]}"
fi
((${#missing[@]} == 0)) || install_packages "${missing[@]}"

# The virtual environment.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  [[ ! -e .venv ]] || say ".venv has no working Python and pip; making it anew"
  can_make_venv "$python" || fail "$python cannot make virtual environments (no ensurepip).
    Install python3-venv, or set PYTHON to another Python."
  say "making .venv with $python"
  "$python" -m venv --clear .venv
  changed=yes
fi

# install <requirements file> <what to say>: with pip, unless the file as it is
# was installed already.
install() {
  local stamp=".venv/$1.installed"
  if ! cmp -s "$1" "$stamp"; then
    say "installing $2 into .venv"
    .venv/bin/python -m pip install --disable-pip-version-check -r "$1" ||
      fail "pip could not install $1; see its message above, then start again"
    cp "$1" "$stamp"
    changed=yes
  fi
}
if ! compgen -G '.venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so' >/dev/null; then
  rm -f .venv/requirements.txt.installed
fi
install requirements.txt "torch and numpy (torch with CUDA's libraries is about 3 GB)"
install requirements-python.txt "what builds and tests the Python package"

# A CUDA compiler.
has_nvcc_13() {
  local candidate
  for candidate in ${CUDACXX:-} ${CUDA_HOME:+$CUDA_HOME/bin/nvcc} nvcc /usr/local/cuda/bin/nvcc; do
    if "$candidate" --version 2>/dev/null | grep -q 'release 13\.'; then
      return 0
    fi
  done
  return 1
}
if [[ ${BRIGADE_CUDA:-} == OFF ]]; then
  say "BRIGADE_CUDA is OFF: no CUDA compiler is looked for"
elif ! has_nvcc_13; then
  if ! compgen -G '.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc' >/dev/null; then
    rm -f .venv/requirements-nvcc.txt.installed
  fi
  install requirements-nvcc.txt "nvcc 13.0, since this machine has no CUDA toolkit 13,"
fi

if [[ $changed == no ]]; then
  say "everything is there"
else
  say "done"
fi
