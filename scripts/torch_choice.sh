# Sourced by the other scripts: which torch they use.  Decides where its virtual
# environment lies and how its build folders are named, so that several versions
# live side by side; installs and builds nothing.
# In:  BRIGADE_TORCH  a version, such as 2.12 (the newest of these) or 2.12.1;
#                     empty means the pinned one.
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
      echo "torch '$BRIGADE_TORCH' was asked for, but brigade supports ${supported// /, }." \
        "Name one of these, or one of its patches as in $pinned." >&2
      exit 2
    fi
    torch_requirement="torch==$BRIGADE_TORCH"
    [[ $BRIGADE_TORCH == *.*.* ]] || torch_requirement+=".*"
    venv=.venv-$BRIGADE_TORCH build_prefix=$BRIGADE_TORCH-
    ;;
esac
