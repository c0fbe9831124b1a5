#!/usr/bin/env bash
# Runs brigade's tests in stages:
#   release   Python package, README, docs/, example programs, installation, source tree
#   asan      C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
# and with --all:
#   tsan      comm/ and reducer/ under ThreadSanitizer
#   cpp       C++ tests of the release build, long ones included
#   torches   sharding with the other supported torches: fsdp_test, and torch's samples of operators
#   suites    torch's own tests with brigade's classes
#   slow      slow tests of the Python package
# --stage NAME: runs only this stage; may be repeated.
# --torch VERSION: uses this torch (2.12 or 2.12.1), with its own virtual environment and build
# folders (.venv-2.12, build/2.12-release).
# A stage that passes on an unmodified commit writes build/stamps/NAME. It is not run again on the
# same tree.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

usage() {
  echo "usage: scripts/test.sh [--all] [--stage NAME] ... [--torch VERSION]" >&2
  exit 2
}
default=(release asan) extra=(tsan cpp torches suites slow) stages=()
while (($# > 0)); do
  case "$1" in
    --all) stages=("${default[@]}" "${extra[@]}") ;;
    --stage)
      [[ " ${default[*]} ${extra[*]} " == *" ${2:-none} "* ]] || usage
      stages+=("$2")
      shift
      ;;
    --torch)
      (($# > 1)) || usage
      export BRIGADE_TORCH=$2
      shift
      ;;
    *) usage ;;
  esac
  shift
done
((${#stages[@]} > 0)) || stages=("${default[@]}")
source scripts/torch_choice.sh

export GTEST_BRIEF=1 # print failures only
tree=changed
[[ -n $(git status --porcelain) ]] || tree=$(git rev-parse 'HEAD^{tree}')
stamps=build/stamps/$build_prefix
mkdir -p "$stamps"

# build <preset> [target ...]
build() { scripts/build.sh "$@" && built=$SECONDS; }
# run_tests <preset> <ctest argument> ...: writes the numbers of passed, failed and
# skipped tests to $stamps/numbers.
run_tests() {
  local folder="$PWD/build/$build_prefix$1" rc=0
  shift
  rm -f "$folder/results.xml"
  "${launcher[@]}" ctest --test-dir "$folder" --output-on-failure --no-tests=error -j "$(nproc)" \
    --output-junit "$folder/results.xml" "$@" || rc=$?
  python3 - "$folder/results.xml" >"$stamps/numbers" <<'PY' && return "$rc"
import sys
import xml.etree.ElementTree as tree

suite = tree.parse(sys.argv[1]).getroot()
total, failed, skipped, disabled = (
    int(suite.get(name, 0)) for name in ("tests", "failures", "skipped", "disabled"))
print(total - failed - skipped - disabled, failed, skipped + disabled)
PY
}

# Targets of stage release.
programs=(brigade_bucket_sweep brigade_python digits docs_blocks gpt minimal)
run_stage() {
  launcher=()
  case "$1" in
    release) build release "${programs[@]}" && run_tests release -LE '^(cpp|gpu|all)$' ;;
    asan) build asan && run_tests asan -L '^cpp$' ;;
    tsan)
      # GCC 12's ThreadSanitizer does not start with more than 28 bits of address randomization.
      (($(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28) <= 28)) || launcher=(setarch -R)
      # Excluded: distributed autograd passes objects between threads inside LibTorch, which
      # ThreadSanitizer does not see.
      build tsan comm_test reducer_test &&
        GTEST_FILTER='-*ContextGradients*' run_tests tsan -R '^(comm|reducer)_test$'
      ;;
    cpp) BRIGADE_ALL_TESTS=ON build release && run_tests release -L '^(cpp|gpu)$' ;;
    torches)
      if [[ -z $build_prefix ]]; then
        for minor in ${supported/ ${pinned%.*}/}; do
          scripts/test.sh --torch "$minor" --stage torches || return
        done
        awk '{p += $1; f += $2; s += $3} END {print p, f, s}' build/stamps/*-/numbers >"$stamps/numbers"
      else
        build release fsdp_test sharded_operators brigade_python &&
          run_tests release -R '^(fsdp_test|ShardedOperators\..*)$'
      fi
      ;;
    suites) build release "${programs[@]}" && run_tests release -L '^suites$' ;;
    slow)
      build release "${programs[@]}" sharded_operators &&
        run_tests release -L '^all$' -LE '^(cpp|suites)$'
      ;;
  esac
}

scripts/setup.sh
passed=0 failed=0 skipped=0 table=""
for stage in "${stages[@]}"; do
  stamp=$stamps/$stage note=""
  if [[ $tree != changed && -f $stamp && $(cut -d' ' -f1 "$stamp") == "$tree" ]]; then
    read -r _ p f s seconds built <"$stamp"
    note=", from an earlier run on this tree"
  else
    printf '\ntest: stage %s with %s\n' "$stage" "$torch_requirement"
    rm -f "$stamp" "$stamps/numbers"
    begin=$SECONDS built=$SECONDS
    run_stage "$stage" || note=", FAILED"
    seconds=$((SECONDS - begin)) built=$((built - begin))
    read -r p f s <<<"$(cat "$stamps/numbers" 2>/dev/null || echo 0 0 0)"
    # A failed build counts as one failed test.
    [[ -z $note ]] || ((f > 0)) || f=1
    [[ -n $note ]] || echo "$tree $p $f $s $seconds $built" >"$stamp"
  fi
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  table+=$(printf '%-9s %5d s (build %d s): %d passed, %d failed, %d skipped%s' \
    "$stage" "$seconds" "$built" "$p" "$f" "$s" "$note")$'\n'
done

printf '\n%s' "$table"
echo "test: $((SECONDS / 60)) min $((SECONDS % 60)) s"
summary="$passed passed, $failed failed"
((skipped == 0)) || summary+=", $skipped skipped"
echo "$summary"
((failed == 0))
