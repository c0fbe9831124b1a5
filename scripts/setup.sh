#!/usr/bin/env bash
# Installs everything that brigade's build needs on Debian 12 with git, python3
# and apt: Debian packages, .venv with the pinned requirements, and an nvcc in
# .venv if the machine has none. Installs nothing twice.
# Environment:
#   BRIGADE_CUDA=OFF    does not install nvcc
#   PYTHON              the Python to use
#   BRIGADE_TORCH=2.12  uses this torch in place of the pinned one, in its own
#                       virtual environment .venv-2.12
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/torch_choice.sh

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

readonly packages=(
  cmake ninja-build g++ ccache
  libabsl-dev libgloo-dev zlib1g-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev
)

# Prints the first Python for which torch has wheels, or nothing.
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
      fail "Debian packages are missing. Run this as root, then start setup again:
    apt-get update && $line"
    fi
    as_root=(sudo -n)
  fi
  say "installing Debian packages: $*"
  "${as_root[@]}" apt-get update -qq ||
    say "apt-get update failed; using the present package lists"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $line ||
    fail "apt-get could not install them. Resolve its error above, then start setup again."
}

# Debian packages. python3-venv and python3-dev only if this Python needs them.
python=$(find_python)
[[ -n $python ]] ||
  fail "found no Python from 3.10 to 3.14, for which torch has wheels. Set PYTHON to one."
missing=()
if command -v dpkg-query >/dev/null; then
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qx "$package installed" <<<"$installed" || missing+=("$package")
  done
  if [[ ! -x $venv/bin/python ]] && ! can_make_venv "$python"; then
    missing+=(python3-venv)
  fi
  has_headers "$python" || missing+=(python3-dev)
else
  say "this is not Debian; install the equivalents of: ${packages[*]}"
fi
((${#missing[@]} == 0)) || install_packages "${missing[@]}"

# The virtual environment.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  [[ ! -e $venv ]] || say "$venv has no working Python and pip; creating it again"
  can_make_venv "$python" || fail "$python cannot create virtual environments (no ensurepip).
    Install python3-venv, or set PYTHON to another Python."
  say "creating $venv with $python"
  "$python" -m venv --clear "$venv"
fi

# install <name> <description> <argument of pip install> ...: runs pip unless the
# last run of this name had the same arguments and requirement files.
install() {
  local name=$1 description=$2 stamp="$venv/$1.installed" wanted file
  shift 2
  wanted="$*"
  for file in "$@"; do
    [[ ! -f $file ]] || wanted+=$'\n'$(<"$file")
  done
  if [[ ! -f $stamp || $wanted != "$(<"$stamp")" ]]; then
    say "installing $description in $venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@" ||
      fail "pip could not install $name. Resolve its error above, then start setup again."
    printf '%s\n' "$wanted" >"$stamp"
  fi
}
install torch "$torch_requirement and numpy (torch with CUDA's libraries is about 3 GB)" \
  "$torch_requirement" -r requirements.txt
install tools "build and test tools of the Python package" -r requirements-python.txt

# CUDA compiler: the machine's, if it has torch's major version; otherwise one of
# torch's exact version, in .venv.
has_nvcc() {
  local candidate
  for candidate in ${CUDACXX:-} ${CUDA_HOME:+$CUDA_HOME/bin/nvcc} nvcc /usr/local/cuda/bin/nvcc; do
    if "$candidate" --version 2>/dev/null | grep -q "release $1\."; then
      return 0
    fi
  done
  return 1
}
# Version of the CUDA toolkit that torch's wheel requires, for example 13.2.2.
cuda=$("$venv/bin/python" -c 'import importlib.metadata, re
required = " ".join(importlib.metadata.requires("torch") or ())
print(*re.findall(r"cuda-toolkit\s*(?:\[[^]]*\])?\s*==\s*(\d+(?:\.\d+)*)", required)[:1])')
if [[ ${BRIGADE_CUDA:-} == OFF ]]; then
  say "BRIGADE_CUDA is OFF: not installing a CUDA compiler"
elif [[ -z $cuda ]]; then
  say "this torch was built without CUDA: not installing a CUDA compiler"
elif ! has_nvcc "${cuda%%.*}"; then
  # All four packages must have the same version.
  install nvcc "nvcc $cuda, since this machine has no CUDA toolkit ${cuda%%.*}," \
    "cuda-toolkit[nvcc,cccl,nvvm,crt]==$cuda"
fi

say "done"
