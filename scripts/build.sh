#!/usr/bin/env bash
# build.sh <preset> [target ...]: configures a preset and builds all of it or
# the named targets, with as many jobs as cores and memory allow.  Quiet unless
# something fails or takes long.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

preset=$1
shift
targets=()
(($# == 0)) || targets=(--target "$@")

# A translation unit with LibTorch's headers takes up to 2 GiB.
cores=$(nproc)
memory_gib=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
jobs=$((memory_gib / 2 < cores ? memory_gib / 2 : cores))
jobs=$((jobs < 1 ? 1 : jobs))

mkdir -p build
log="build/configure-$preset.log"
if ! cmake --preset "$preset" ${BRIGADE_CUDA:+-DBRIGADE_CUDA=$BRIGADE_CUDA} >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
grep -E '^-- brigade:|^CMake Warning' "$log" | sed 's/^-- //' || true
cmake --build --preset "$preset" -j "$jobs" "${targets[@]}"
