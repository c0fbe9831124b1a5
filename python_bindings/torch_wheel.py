"""Supported versions of torch (cmake/torch_versions.json), the installed one, and the wheel's.

`Dependency` gives scikit-build-core the dependencies that pyproject.toml declares as dynamic: a
wheel requires the minor version of torch that it was built against, since the binary interface
changes with it.
"""

from __future__ import annotations

import json
import pathlib
import re
import sysconfig
from collections.abc import Mapping
from typing import Any

_VERSIONS = pathlib.Path(__file__).resolve().parent.parent / "cmake" / "torch_versions.json"

# The LibTorch to build against; set by the build backend.
chosen: pathlib.Path | None = None


def supported() -> list[str]:
    """Returns the supported minor versions, oldest first."""
    return json.loads(_VERSIONS.read_text())["supported"]


def pinned() -> str:
    """Returns the version that brigade is developed and measured with."""
    return json.loads(_VERSIONS.read_text())["pinned"]


def range_requirement() -> str:
    """Returns a requirement specifier of all supported versions."""
    major, minor = supported()[-1].split(".")
    return f"torch>={supported()[0]},<{major}.{int(minor) + 1}"


def minor_version(torch: pathlib.Path) -> str:
    """Returns, for example, "2.15" for a wheel's folder or an unpacked LibTorch, otherwise ""."""
    header = torch / "include" / "torch" / "headeronly" / "version.h"
    if not header.exists():
        return ""
    numbers = dict(re.findall(r"define TORCH_VERSION_(MAJOR|MINOR) (\d+)", header.read_text()))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}"


def of_environment() -> pathlib.Path | None:
    """Returns the folder of the environment's torch package, or None."""
    for name in ("platlib", "purelib"):
        folder = pathlib.Path(sysconfig.get_path(name)) / "torch"
        if minor_version(folder):
            return folder
    return None


class Dependency:
    """scikit-build-core's dynamic metadata provider of `dependencies`."""

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
