#!/usr/bin/env bash
# Trains the digits example on two ranks, then runs a short bucket sweep.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/torch_choice.sh
build=build/${build_prefix}release

scripts/setup.sh
echo "demo: building examples/digits and the Python package"
scripts/build.sh release digits brigade_python

echo "demo: training a convolutional network on handwritten digits, two ranks"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
on_two_ranks=("$venv/bin/torchrun" --standalone --nproc-per-node 2)
"${on_two_ranks[@]}" --no-python "$build/examples/digits/digits"
echo
echo "demo: timing training steps with several bucket sizes"
PYTHONPATH="$build/python" "${on_two_ranks[@]}" -m brigade bench examples/python/bench_mlp.py:mlp
