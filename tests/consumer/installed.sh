#!/usr/bin/env bash
# installed.sh <build folder> <work folder> [<configure argument> ...]: installs
# the build, then builds and runs a program that uses the installed tree.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
build=$1 work=$2
shift 2
cmake=${CMAKE_COMMAND:-cmake}

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log"
"$cmake" -S "$here/project" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
"$cmake" --build "$work/build"
"$work/build/consumer"
