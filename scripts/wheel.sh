#!/usr/bin/env bash
# wheel.sh [VERSION ...]: for each version of torch (2.15 or 2.15.0; default: all
# supported), builds a wheel in dist/torch-VERSION and trains with it on two ranks,
# in a virtual environment that has only that torch. A wheel requires the minor
# version of torch that it was built against.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

say() { echo "wheel: $*"; }

# Trains with a wheel in a new virtual environment, which sees the torch of
# `with_torch` through a .pth file.
try_in_clean_venv() {
  local wheel=$1 with_torch=$2 clean
  clean=$(mktemp -d)
  "$with_torch/bin/python" -m venv --without-pip "$clean"
  "$with_torch/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$clean/torch.pth"
  mv "$clean/torch.pth" "$("$clean/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # Fails for a wheel of another torch; --no-index: must not download one.
  "$with_torch/bin/python" -m pip --python "$clean/bin/python" install --quiet --no-index "$wheel"
  (cd "$clean" && env -u PYTHONPATH GLOO_SOCKET_IFNAME=lo \
    "$clean/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$OLDPWD/scripts/try_wheel.py" "$clean")
  rm -r "$clean"
}

build() {
  export BRIGADE_TORCH=$1
  local folder=dist/torch-$1
  scripts/setup.sh
  source scripts/torch_choice.sh
  say "building against $torch_requirement"
  rm -rf "$folder"
  "$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings "build-dir=build/${build_prefix}wheel" --wheel-dir "$folder" .
  try_in_clean_venv "$PWD/$(echo "$folder"/*.whl)" "$PWD/$venv"
  say "done: $(echo "$folder"/*.whl)"
}

(($# > 0)) || set -- $(sed -n 's/.*"supported": \[\(.*\)\].*/\1/p' cmake/torch_versions.json |
  tr -d '",')
for version in "$@"; do
  (build "$version") # in a subshell, so that exports do not reach the next version
done
