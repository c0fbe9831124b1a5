# Chooses the torch of the scripts that source this, its virtual environment and
# the names of its build folders. Installs and builds nothing.
# In:  BRIGADE_TORCH  a version: 2.12 (its newest patch) or 2.12.1; default: the
#                     pinned one.
# Out: torch_requirement, venv, build_prefix
# shellcheck shell=bash disable=SC2034

torch_versions=cmake/torch_versions.json
pinned=$(sed -n 's/.*"pinned": "\([^"]*\)".*/\1/p' $torch_versions)
supported=$(sed -n 's/.*"supported": \[\(.*\)\].*/\1/p' $torch_versions | tr -d '",')

case "${BRIGADE_TORCH:-$pinned}" in
  "$pinned")
    torch_requirement="torch==$pinned" venv=.venv build_prefix=""
    ;;
  *)
    minor=$(grep -oE '^[0-9]+\.[0-9]+' <<<"$BRIGADE_TORCH" || true)
    if [[ " $supported " != *" $minor "* || ! $BRIGADE_TORCH =~ ^[0-9]+(\.[0-9]+){1,2}$ ]]; then
      echo "BRIGADE_TORCH is '$BRIGADE_TORCH', but brigade supports ${supported// /, }." \
        "Set it to one of these or to a patch version, for example $pinned." >&2
      exit 2
    fi
    torch_requirement="torch==$BRIGADE_TORCH"
    [[ $BRIGADE_TORCH == *.*.* ]] || torch_requirement+=".*"
    venv=.venv-$BRIGADE_TORCH build_prefix=$BRIGADE_TORCH-
    ;;
esac
