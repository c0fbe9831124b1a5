"""Builds brigade's wheel: scikit-build-core, told where torch is.

pip builds in an environment of its own, which has what pyproject.toml requires and
hides the packages of the environment that is installed into. To require torch
there would download 3 GB for headers that are there already, and might build
against another version than brigade will run with. So torch is looked for by
path, in the environment that this Python belongs to. Where it has none, that is
said at once. `python -m build` needs --no-isolation.
"""

from __future__ import annotations

import pathlib
import sysconfig
from typing import Any

import torch_wheel
from scikit_build_core import build as backend
from scikit_build_core.build import (  # noqa: F401  (hooks of a build backend)
    build_sdist,
    get_requires_for_build_sdist,
)

_LIBTORCH = "cmake.define.BRIGADE_LIBTORCH"

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return backend.get_requires_for_build_wheel(_with_torch(config_settings))


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return backend.get_requires_for_build_editable(_with_torch(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return backend.build_wheel(wheel_directory, _with_torch(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return backend.build_editable(wheel_directory, _with_torch(config_settings), metadata_directory)


def _with_torch(settings: Settings) -> dict[str, Any]:
    """Tells CMake which LibTorch to build against, unless the user did."""
    settings = dict(settings or {})
    if _LIBTORCH not in settings:
        settings[_LIBTORCH] = str(_require_supported(torch_wheel.of_environment()))
    torch_wheel.chosen = pathlib.Path(settings[_LIBTORCH])
    return settings


def _require_supported(torch: pathlib.Path | None) -> pathlib.Path:
    """Raises RuntimeError where there is no torch to build against."""
    versions = torch_wheel.supported()
    wanted = f"brigade is built against an installed torch, {versions[0]} to {versions[-1]}"
    if torch is None:
        raise RuntimeError(
            f"{wanted}, and {sysconfig.get_path('platlib')} has none.\n"
            f"Install one there first: pip install torch=={torch_wheel.pinned()}."
        )
    if (found := torch_wheel.minor_version(torch)) not in versions:
        raise RuntimeError(
            f"{wanted}, and {torch} is of version {found or 'unknown'}.\n"
            f"Install another one there first: pip install torch=={torch_wheel.pinned()}."
        )
    return torch
