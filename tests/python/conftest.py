"""Fails early where the package is not there, which CMake's target brigade_python makes."""

import importlib.util

import pytest

if importlib.util.find_spec("brigade") is None:
    pytest.exit("no package brigade: build brigade_python and set PYTHONPATH=<build>/python", 2)
