#!/usr/bin/env bash
# Prints a table of the tree's size and the last test results.
# --reach: also counts the source files that run for a DDP gradient (backward of
#   examples/minimal) and for an FSDP unit (steps of examples/gpt), with callgrind
#   on two ranks. Builds in build/reach.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

row() { printf '| %-52s | %s |\n' "$1" "$2"; }

# Lines of tracked files; `:!` excludes.
lines() { git ls-files -z -- "$@" | xargs -0 -r cat | wc -l; }
code=('*.h' '*.cc' '*.cu' '*.hpp' '*.cuh' '*.py' '*.pyi' '*.sh')
under_tests=("${code[@]/#/tests/}")

# Counts the fields of the library's structs named ...Options.
count_options() {
  git ls-files -z -- '*.h' ':!tests' ':!examples' | xargs -0 perl -0777 -ne '
    while (/^struct \w*Options \{(.*?)^\};/msg) {
      (my $body = $1) =~ s,//.*,,g;
      for (split /;/, $body) {
        next if /^\s*(static|using|enum|struct)\b/ || !/\S/;
        (my $declared = $_) =~ s/=.*//s;
        $sum++ unless $declared =~ /\)\s*(const)?\s*$/;
      }
    }
    END { print $sum }'
}

# Prints the last result of each stage of scripts/test.sh.
stages() {
  local stamp tree p f s seconds built
  for stamp in build/stamps/*; do
    [[ -f $stamp && $stamp != */numbers ]] || continue
    read -r tree p f s seconds built <"$stamp"
    row "stage $(basename "$stamp")" "$seconds s (build $built s), $p passed, $s skipped, tree ${tree:0:8}"
  done
}

# on_two_ranks <program> ...: runs it under callgrind with $collect, into build/reach/rank.N.
on_two_ranks() {
  GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node 2 --no-python \
    valgrind --tool=callgrind "${collect[@]/#/--toggle-collect=}" \
    --callgrind-out-file=build/reach/rank.%q{RANK} "$@" >build/reach/log 2>&1
}

# Counts brigade's files in rank 0's profile, inlined code included; a header and
# its source count once. Lists them in build/reach/<name>, without suffixes.
files_that_ran() {
  { grep -ohE '^c?f[lie]=.*' build/reach/rank.0* || true; } | grep -oE '[^ ]+/brigade/[^ ]+|[^ ]+\.(h|cc)$' |
    sed -E "s#^$PWD/##; s#.*/include/brigade/##" |
    while read -r file; do
      case "$file" in /* | build/* | examples/* | tests/*) ;; *) [[ ! -f $file ]] || echo "${file%.*}" ;; esac
    done | sort -u | tee "build/reach/$1" | wc -l
}

reach() {
  cmake --preset release -B build/reach -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS='-O1 -g' \
    -DBRIGADE_CUDA=OFF -DBRIGADE_BUILD_TESTS=OFF -DBRIGADE_PYTHON_BINDINGS=OFF >/dev/null
  cmake --build build/reach --target minimal gpt >/dev/null
  # Not execute(): a nested call of a matching name would end the collection.
  collect=('torch::autograd::Engine::evaluate_function*' 'torch::autograd::GraphTask::exec_post_processing*')
  on_two_ranks build/reach/examples/minimal/minimal
  row "files that run for a DDP gradient" "$(files_that_ran gradient_files)"
  collect=('*Training::step*')
  on_two_ranks build/reach/examples/gpt/gpt --steps 3 --blocks 2 --width 32 --sample 0
  row "files that run for an FSDP unit" "$(files_that_ran unit_files)"
}

row measure "$(git describe --always --dirty)"
row ---- ----
row "product / test lines" "$(lines "${code[@]}" ':!tests') / $(lines "${under_tests[@]}")"
row "C++ files outside tests" "$(git ls-files -- '*.h' '*.cc' '*.cu' ':!tests' | wc -l)"
row "public headers" "$(PYTHONPATH=scripts .venv/bin/python -c \
  'import site_hooks; print(len(site_hooks.public_headers()))')"
row "C++ options" "$(count_options)"
row "listening sockets" "$(git grep -nE '(^|[^_[:alnum:]])listen\(' -- '*.cc' '*.h' ':!tests' |
  grep -vcE ':\s*//' || true)"
stages
[[ ${1:-} != --reach ]] || reach
