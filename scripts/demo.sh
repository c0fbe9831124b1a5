#!/usr/bin/env bash
# Trains the digits example on two ranks, then sweeps bucket sizes for a moment.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/torch_choice.sh
build=build/${build_prefix}release

scripts/setup.sh
echo "demo: building examples/digits and benchmarks/bucket_size"
scripts/build.sh release digits bucket_size

echo "demo: a convolutional network learns handwritten digits on two ranks"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
on_two_ranks=("$venv/bin/torchrun" --standalone --nproc-per-node 2 --no-python)
"${on_two_ranks[@]}" "$build/examples/digits/digits"
echo
echo "demo: the same step with different bucket sizes"
"${on_two_ranks[@]}" "$build/benchmarks/bucket_size" --quick
