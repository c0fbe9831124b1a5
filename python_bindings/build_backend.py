"""Builds brigade's wheel: scikit-build-core, told where torch is.

pip builds in an environment of its own, which has what pyproject.toml requires and
hides the packages of the environment that is installed into. To require torch
there would download 3 GB for headers that are there already, and might build
against another version than brigade will run with. So torch is looked for by
path, in the environment that this Python belongs to. Where it has none, that is
said at once; a front end that makes a whole environment to build in
(`python -m build`) is told to fetch torch there by the setting fetch-torch=yes.
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
_FETCH = "fetch-torch"

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    required = backend.get_requires_for_build_wheel(_without_ours(config_settings))
    return required + _torch_to_fetch(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    required = backend.get_requires_for_build_editable(_without_ours(config_settings))
    return required + _torch_to_fetch(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return backend.build_wheel(wheel_directory, _with_torch(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return backend.build_editable(wheel_directory, _with_torch(config_settings), metadata_directory)


def _without_ours(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if name != _FETCH}


def _torch_to_fetch(settings: Settings) -> list[str]:
    """Requirements of the build, beside those of scikit-build-core."""
    settings = settings or {}
    if settings.get(_FETCH) == "yes":
        return [f"torch=={torch_wheel.pinned()}"]
    if _LIBTORCH not in settings:
        _require_supported(torch_wheel.of_environment())
    return []


def _with_torch(settings: Settings) -> dict[str, Any]:
    """Tells CMake which LibTorch to build against, unless the user did."""
    fetched = (settings or {}).get(_FETCH) == "yes"
    settings = _without_ours(settings)
    if _LIBTORCH not in settings:
        torch = torch_wheel.of_build_environment() if fetched else torch_wheel.of_environment()
        settings[_LIBTORCH] = str(_require_supported(torch))
    torch_wheel.chosen = pathlib.Path(settings[_LIBTORCH])
    return settings


def _require_supported(torch: pathlib.Path | None) -> pathlib.Path:
    """Raises RuntimeError where there is no torch to build against."""
    versions = torch_wheel.supported()
    wanted = f"brigade is built against an installed torch, {versions[0]} to {versions[-1]}"
    if torch is None:
        raise RuntimeError(
            f"{wanted}, and {sysconfig.get_path('platlib')} has none.\n"
            f"Install one there first: pip install torch=={torch_wheel.pinned()}.  "
            f"(To fetch one for the build only: --config-settings={_FETCH}=yes.)"
        )
    if (found := torch_wheel.minor_version(torch)) not in versions:
        raise RuntimeError(
            f"{wanted}, and {torch} is of version {found or 'unknown'}.\n"
            f"Install another one there first: pip install torch=={torch_wheel.pinned()}."
        )
    return torch
