#!/usr/bin/env bash
# unpacked.sh <build folder> <work folder> <LibTorch> [<Python>]: runs installed.sh
# with a copy of LibTorch that has only the folders include, lib and share.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
build=$1 work=$2 torch=$3 python=${4:-}

rm -rf "$work.libtorch"
mkdir -p "$work.libtorch"
for folder in include lib share; do
  # Prefers hard links, since a copy takes 1.2 GB.
  cp -al "$torch/$folder" "$work.libtorch/" 2>/dev/null ||
    cp -a "$torch/$folder" "$work.libtorch/"
done
# CMake asks this Python for CUDA's libraries, which the wheel does not contain.
bash "$here/installed.sh" "$build" "$work" -DBRIGADE_LIBTORCH="$work.libtorch" \
  ${python:+-DBRIGADE_PYTHON="$python"}
ldd "$work/build/consumer" | grep libtorch_cpu | tee /dev/stderr | grep -q "$work.libtorch"
rm -rf "$work.libtorch"
