#!/usr/bin/env bash
# Builds the documentation site into build/site; open build/site/index.html.
# A broken link, or a page outside of the navigation, is an error.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
scripts/setup.sh
NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
echo "docs: build/site/index.html"
