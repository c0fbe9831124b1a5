#!/usr/bin/env bash
# Brings a bare Debian 12 (git, python3, apt, pip) to where brigade builds:
# missing Debian packages, .venv with the pinned requirements, and an nvcc in
# .venv where the machine has none.  Takes a moment when all is there.
# Environment: BRIGADE_CUDA=OFF leaves nvcc out; PYTHON names the Python to use;
# BRIGADE_TORCH names another torch than the pinned one, which gets a virtual
# environment of its own (BRIGADE_TORCH=2.12: .venv-2.12).
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
  libgtest-dev libgmock-dev doxygen
)

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
  if [[ ! -x $venv/bin/python ]] && ! can_make_venv "$python"; then
    missing+=(python3-venv)
  fi
  has_headers "$python" || missing+=(python3-dev)
else
  say "no dpkg here: please see that these (Debian's names) are there: ${packages[*]}"
fi
((${#missing[@]} == 0)) || install_packages "${missing[@]}"

# The virtual environment.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  [[ ! -e $venv ]] || say "$venv has no working Python and pip; making it anew"
  can_make_venv "$python" || fail "$python cannot make virtual environments (no ensurepip).
    Install python3-venv, or set PYTHON to another Python."
  say "making $venv with $python"
  "$python" -m venv --clear "$venv"
fi

# install <name> <what to say> <argument of pip install> ...: unless the same was
# installed under that name, by the same files, already.
install() {
  local name=$1 what=$2 stamp="$venv/$1.installed" wanted file
  shift 2
  wanted="$*"
  for file in "$@"; do
    [[ ! -f $file ]] || wanted+=$'\n'$(<"$file")
  done
  if [[ ! -f $stamp || $wanted != "$(<"$stamp")" ]]; then
    say "installing $what into $venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@" ||
      fail "pip could not install $name; see its message above, then start again"
    printf '%s\n' "$wanted" >"$stamp"
  fi
}
install torch "$torch_requirement and numpy (torch with CUDA's libraries is about 3 GB)" \
  "$torch_requirement" -r requirements.txt
install tools "what builds and tests the Python package and the documentation" -r requirements-python.txt -r requirements-docs.txt

# A CUDA compiler of torch's major version: the machine's own, or one of exactly
# torch's version beside torch.
has_nvcc() {
  local candidate
  for candidate in ${CUDACXX:-} ${CUDA_HOME:+$CUDA_HOME/bin/nvcc} nvcc /usr/local/cuda/bin/nvcc; do
    if "$candidate" --version 2>/dev/null | grep -q "release $1\."; then
      return 0
    fi
  done
  return 1
}
# The toolkit that torch's wheel requires parts of, 13.2.2 for instance.
cuda=$("$venv/bin/python" -c 'import importlib.metadata, re
required = " ".join(importlib.metadata.requires("torch") or ())
print(*re.findall(r"cuda-toolkit\s*(?:\[[^]]*\])?\s*==\s*(\d+(?:\.\d+)*)", required)[:1])')
if [[ ${BRIGADE_CUDA:-} == OFF ]]; then
  say "BRIGADE_CUDA is OFF: no CUDA compiler is looked for"
elif [[ -z $cuda ]]; then
  say "this torch's wheel asks for no CUDA toolkit: no CUDA compiler is looked for"
elif ! has_nvcc "${cuda%%.*}"; then
  # Parts of different versions cannot compile: all four are named.
  install nvcc "nvcc $cuda, since this machine has no CUDA toolkit ${cuda%%.*}," \
    "cuda-toolkit[nvcc,cccl,nvvm,crt]==$cuda"
fi

say "everything is there"
