"""Builds brigade's wheel: scikit-build-core, told where torch is.

pip builds in an environment of its own, which has what pyproject.toml requires and
hides the packages of the environment that is installed into. To require torch
there would download 3 GB for headers that are there already, and might build
against another version than brigade will run with. So torch is looked for by
path, in the environment that this Python belongs to; only where it has none (a
front end that makes a whole environment to build in) is it required.
"""

from __future__ import annotations

import pathlib
import re
import sysconfig
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import (  # noqa: F401  (hooks of a build backend)
    build_sdist,
    get_requires_for_build_sdist,
)

_SUPPORTED = "2.11"
_REQUIREMENT = f"torch=={_SUPPORTED}.*"
_LIBTORCH = "cmake.define.BRIGADE_LIBTORCH"

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    required = backend.get_requires_for_build_wheel(config_settings)
    return required if _located(config_settings) else [*required, _REQUIREMENT]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    required = backend.get_requires_for_build_editable(config_settings)
    return required if _located(config_settings) else [*required, _REQUIREMENT]


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
        torch = _torch_of_environment() or _torch_of_build_environment()
        if torch is None:
            raise RuntimeError(
                f"brigade is built against torch {_SUPPORTED}, and none was found in "
                f"{sysconfig.get_path('platlib')}.\nInstall torch=={_SUPPORTED}.* there first."
            )
        settings[_LIBTORCH] = str(torch)
    return settings


def _located(settings: Settings) -> bool:
    return _LIBTORCH in (settings or {}) or _torch_of_environment() is not None


def _torch_of_environment() -> pathlib.Path | None:
    """The torch package of the environment that this Python belongs to."""
    for name in ("platlib", "purelib"):
        folder = pathlib.Path(sysconfig.get_path(name)) / "torch"
        if _is_supported(folder):
            return folder
    return None


def _torch_of_build_environment() -> pathlib.Path | None:
    """The torch package that the build front end put on the path."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
    return folder if _is_supported(folder) else None


def _is_supported(torch: pathlib.Path) -> bool:
    version = torch / "version.py"
    if not (torch / "lib" / "libtorch_python.so").exists() or not version.exists():
        return False
    match = re.search(r"^__version__ = '(\d+\.\d+)\.", version.read_text(), re.MULTILINE)
    return match is not None and match[1] == _SUPPORTED
