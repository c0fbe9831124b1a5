"""Prints the version of the CUDA toolkit that an environment's torch was built with.

    <environment>/bin/python scripts/cuda_of_torch.py

It is the one that torch's wheel requires parts of, 13.2.2 for instance, so that a
compiler of the same version can be put beside them. Prints nothing where the wheel
requires none: torch was built without CUDA then, or brings CUDA's libraries itself.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

_TOOLKIT = re.compile(r"cuda-toolkit\s*(?:\[[^]]*\])?\s*==\s*(\d+(?:\.\d+)*)")


def toolkit_version(requirements: Iterable[str]) -> str:
    """The version among a wheel's `Requires-Dist` lines, or ''."""
    for requirement in requirements:
        if match := _TOOLKIT.match(requirement):
            return match[1]
    return ""


if __name__ == "__main__":
    print(toolkit_version(importlib.metadata.requires("torch") or ()))
