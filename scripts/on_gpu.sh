#!/usr/bin/env bash
# Runs the GPU tests and benchmarks, in at most 8 minutes, and prints a Markdown report:
#   scripts/on_gpu.sh [FOLDER]   # writes the profiler's trace to FOLDER
# Builds the programs if they are missing. BRIGADE_PYTHON: a python3 that has torch with CUDA;
# default: that of scripts/setup.sh.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source scripts/torch_choice.sh
python=${BRIGADE_PYTHON:-$PWD/$venv/bin/python}
build=$PWD/build/${build_prefix}release
out=${1:-$build}
export PYTHONPATH=$build/python PYTHONUNBUFFERED=1
readonly limit=480

[[ -x $build/tests/gpu/gpu_test ]] || scripts/build.sh release gpu_test brigade_python || exit 1
"$python" -c 'import torch; assert torch.cuda.is_available()' || {
  echo "on_gpu: torch found no CUDA device" >&2
  exit 1
}

# section <title> <command ...>: runs a command within the remaining time.
failed=0
section() {
  echo
  echo "## $1"
  echo
  echo '```'
  timeout "$((limit - SECONDS > 5 ? limit - SECONDS : 5))" "${@:2}" 2>&1 | tail -25
  local rc=${PIPESTATUS[0]}
  echo '```'
  ((rc == 0)) || { echo "exit status $rc"; failed=1; }
}
SECONDS=0

ranks=("$python" -m torch.distributed.run --standalone)

echo "# GPU"
echo
"$python" -c 'import torch; print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")'
section "gpu_test" "$build/tests/gpu/gpu_test" --gtest_brief=1
section "2 ranks on one device" "${ranks[@]}" --nproc-per-node 2 benchmarks/cuda_steps.py \
  --models narrow --trace "$out/sharded_step.json"
section "4 ranks on one device" "${ranks[@]}" --nproc-per-node 4 benchmarks/cuda_steps.py \
  --models narrow --rounds 10
section "test_on_cuda.py" "$python" -m pytest -q -p no:cacheprovider tests/python/test_on_cuda.py
section "steps of brigade and torch" "$python" benchmarks/cuda_steps.py
exit $failed
