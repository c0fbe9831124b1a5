#!/usr/bin/env bash
# Runs brigade's tests: the release build with every test (the consumer of the
# installed tree among them), then under AddressSanitizer and
# UndefinedBehaviorSanitizer, then engine/, reducer/ and comm/ under ThreadSanitizer, and
# the library's syntax against the headers of the oldest torch that is supported.
# --quick: the release build only.
# --torch VERSION: on that torch (2.12, or 2.12.1), with a virtual environment and
# build folders of its own: .venv-2.12, build/2.12-release.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

usage() {
  echo "usage: scripts/test.sh [--quick] [--torch VERSION]" >&2
  exit 2
}
quick=no
while (($# > 0)); do
  case "$1" in
    --quick) quick=yes ;;
    --torch)
      (($# > 1)) || usage
      export BRIGADE_TORCH=$2
      shift
      ;;
    *) usage ;;
  esac
  shift
done
source scripts/torch_choice.sh

# Of a test with hundreds of cases, what failed is to be seen.
export GTEST_BRIEF=1

passed=0 failed=0 skipped=0
launcher=() # what ctest is started through
broken=() # stages that did not get as far as running tests, or had failures

# stage <preset> <target ...> -- <ctest argument ...>
stage() {
  local preset=$1 targets=() folder results
  shift
  while [[ $1 != -- ]]; do
    targets+=("$1")
    shift
  done
  shift
  folder="$PWD/build/$build_prefix$preset"
  results="$folder/results.xml"
  echo
  echo "test: building $preset with $torch_requirement, ${SECONDS} s from the start"
  if ! scripts/build.sh "$preset" "${targets[@]}"; then
    broken+=("$preset does not build")
    return
  fi
  echo "test: running $preset, ${SECONDS} s from the start"
  rm -f "$results"
  if ! "${launcher[@]}" ctest --test-dir "$folder" --output-on-failure --output-junit "$results" \
    --no-tests=error -j "$(nproc)" "$@"; then
    broken+=("$preset")
  fi
  count "$results"
}

# Adds what ctest's report says to the totals.
count() {
  local numbers
  if [[ ! -s $1 ]]; then
    broken+=("no results in $1")
    return
  fi
  numbers=$(python3 - "$1" <<'PY'
import sys
import xml.etree.ElementTree as tree

suite = tree.parse(sys.argv[1]).getroot()
total, failed, skipped, disabled = (
    int(suite.get(name, 0)) for name in ("tests", "failures", "skipped", "disabled"))
print(total - failed - skipped - disabled, failed, skipped + disabled)
PY
  )
  read -r p f s <<<"$numbers"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

scripts/setup.sh
stage release --
if [[ $quick == no ]]; then
  stage asan -- -LE gpu
  # ThreadSanitizer of GCC 12 cannot start where addresses are randomised more
  # than this.
  if (($(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28) > 28)); then
    launcher=(setarch -R)
  fi
  # Distributed autograd hands objects from thread to thread inside LibTorch,
  # where ThreadSanitizer does not see it.
  export GTEST_FILTER='-*ContextGradients*'
  stage tsan comm_test engine_test reducer_test -- -R '^(comm_test|engine_test|reducer_test)$'
fi
if [[ $quick == no && -z $build_prefix ]]; then
  echo
  if "$venv/bin/python" scripts/check_headers.py; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1)) broken+=("the oldest torch's headers")
  fi
fi

echo
echo "test: $((SECONDS / 60)) min $((SECONDS % 60)) s"
((${#broken[@]} == 0)) || printf 'test: FAILED: %s\n' "${broken[@]}"
summary="$passed passed, $failed failed"
((skipped == 0)) || summary+=", $skipped skipped"
echo "$summary"
((${#broken[@]} == 0 && failed == 0))
