"""Fails early where there is no package; CMake's target brigade_python makes it."""

import importlib.util

import pytest

if importlib.util.find_spec("brigade") is None:
    pytest.exit("no package brigade: build brigade_python and set PYTHONPATH=<build>/python", 2)
