"""The versions of torch that brigade may be built against, and the one that is there.

cmake/torch_versions.json holds the versions. The build backend asks here where torch
is; scikit-build-core asks `Dependency` what pyproject.toml leaves open: which torch a
wheel requires, namely the minor version that it was built against, since another
has another binary interface.
"""

from __future__ import annotations

import json
import pathlib
import re
import sysconfig
from collections.abc import Mapping
from typing import Any

_VERSIONS = pathlib.Path(__file__).resolve().parent.parent / "cmake" / "torch_versions.json"

# LibTorch that the build backend was told to build against.
chosen: pathlib.Path | None = None


def supported() -> list[str]:
    """Minor versions, oldest first."""
    return json.loads(_VERSIONS.read_text())["supported"]


def pinned() -> str:
    """The version that brigade is developed and measured with."""
    return json.loads(_VERSIONS.read_text())["pinned"]


def range_requirement() -> str:
    """All supported versions, as pip writes it."""
    major, minor = supported()[-1].split(".")
    return f"torch>={supported()[0]},<{major}.{int(minor) + 1}"


def minor_version(torch: pathlib.Path) -> str:
    """Of a wheel's folder or an unpacked LibTorch: 2.15, for instance; '' for neither."""
    header = torch / "include" / "torch" / "headeronly" / "version.h"
    if not header.exists():
        return ""
    numbers = dict(re.findall(r"define TORCH_VERSION_(MAJOR|MINOR) (\d+)", header.read_text()))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}"


def of_environment() -> pathlib.Path | None:
    """The torch package, of whatever version, beside which brigade is installed."""
    for name in ("platlib", "purelib"):
        folder = pathlib.Path(sysconfig.get_path(name)) / "torch"
        if minor_version(folder):
            return folder
    return None


class Dependency:
    """A provider of scikit-build-core's for `dependencies`."""

    def build_state(self, state: str) -> None:
        self._state = state

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        torch = None if self._state == "sdist" else chosen
        requirement = f"torch=={minor_version(torch)}.*" if torch else range_requirement()
        return {"dependencies": [requirement]}
