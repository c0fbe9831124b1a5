"""Build backend of brigade's wheel: scikit-build-core with the path of the installed torch.

pip builds in an isolated environment, without the installed torch. A build requirement on torch
would download 3 GB, and perhaps another version than the installed one. So this backend searches
torch by path in the environment that pip installs into. `python -m build` needs --no-isolation.
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
    """Adds LibTorch's path to the CMake settings unless the user set it."""
    settings = dict(settings or {})
    if _LIBTORCH not in settings:
        settings[_LIBTORCH] = str(_require_supported(torch_wheel.of_environment()))
    torch_wheel.chosen = pathlib.Path(settings[_LIBTORCH])
    return settings


def _require_supported(torch: pathlib.Path | None) -> pathlib.Path:
    """Returns `torch`. Raises RuntimeError if it is None or of an unsupported version."""
    versions = torch_wheel.supported()
    wanted = f"brigade: expected an installed torch {versions[0]} to {versions[-1]}"
    if torch is None:
        raise RuntimeError(
            f"{wanted}, found none in {sysconfig.get_path('platlib')}.\n"
            f"Install it first: pip install torch=={torch_wheel.pinned()}."
        )
    if (found := torch_wheel.minor_version(torch)) not in versions:
        raise RuntimeError(
            f"{wanted}, found version {found or 'unknown'} in {torch}.\n"
            f"Install another version first: pip install torch=={torch_wheel.pinned()}."
        )
    return torch
