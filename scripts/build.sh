#!/usr/bin/env bash
# build.sh <preset> [target ...]: configures a preset and builds all targets or
# the named ones, with as many jobs as cores and memory allow.
# BRIGADE_TORCH=2.12 builds in build/2.12-<preset> against the torch that
# scripts/setup.sh installed for it. BRIGADE_UNITY=OFF turns unity builds off:
# less to rebuild after an edit, twice the time of a full build.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/torch_choice.sh

preset=$1
shift
targets=()
(($# == 0)) || targets=(--target "$@")

# Compiling a translation unit with LibTorch's headers takes up to 4 GiB.
cores=$(nproc)
memory_gib=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
jobs=$((memory_gib / 4 < cores ? memory_gib / 4 : cores))
jobs=$((jobs < 1 ? 1 : jobs))

mkdir -p build
folder="build/$build_prefix$preset"
log="build/configure-$build_prefix$preset.log"
settings=(
  ${BRIGADE_CUDA:+-DBRIGADE_CUDA=$BRIGADE_CUDA}
  ${BRIGADE_ALL_TESTS:+-DBRIGADE_ALL_TESTS=$BRIGADE_ALL_TESTS}
  ${BRIGADE_UNITY:+-DCMAKE_UNITY_BUILD=$BRIGADE_UNITY})
[[ -z $build_prefix ]] || settings+=("-DBRIGADE_PYTHON=$PWD/$venv/bin/python")
if ! cmake --preset "$preset" -B "$folder" "${settings[@]}" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
grep -E '^-- brigade:|^CMake Warning' "$log" | sed 's/^-- //' || true
cmake --build "$folder" -j "$jobs" "${targets[@]}"
