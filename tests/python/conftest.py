"""Exits at once if the package is missing; CMake's target brigade_python builds it."""

import importlib.util

import pytest

if importlib.util.find_spec("brigade") is None:
    pytest.exit("no package brigade: build brigade_python and set PYTHONPATH=<build>/python", 2)
