#!/usr/bin/env bash
# unpacked.sh <build folder> <work folder> <LibTorch> [<Python>]: the consumer
# against a LibTorch made of nothing but the include, lib and share folders of another.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
build=$1 work=$2 torch=$3 python=${4:-}

rm -rf "$work.libtorch"
mkdir -p "$work.libtorch"
for folder in include lib share; do
  # Hard links where the file system allows them: a copy is 1.2 GB.
  cp -al "$torch/$folder" "$work.libtorch/" 2>/dev/null ||
    cp -a "$torch/$folder" "$work.libtorch/"
done
# The Python tells where CUDA's libraries are, which the wheel keeps elsewhere.
bash "$here/installed.sh" "$build" "$work" -DBRIGADE_LIBTORCH="$work.libtorch" \
  ${python:+-DBRIGADE_PYTHON="$python"}
ldd "$work/build/consumer" | grep libtorch_cpu | tee /dev/stderr | grep -q "$work.libtorch"
rm -rf "$work.libtorch"
