#!/usr/bin/env bash
# planning_alone.sh <source folder> <work folder>: builds planning/ and its tests
# without LibTorch, and runs the tests.
set -euo pipefail
source=$1 work=$2
cmake=${CMAKE_COMMAND:-cmake}

rm -rf "$work"
"$cmake" -S "$source" -B "$work" -DBRIGADE_PLANNING_ONLY=ON
"$cmake" --build "$work"
"$work/tests/planning/planning_test"
if ldd "$work/tests/planning/planning_test" | grep -E 'lib(torch|c10)'; then
  echo "planning_test is linked to LibTorch: expected no dependency on it" >&2
  exit 1
fi
