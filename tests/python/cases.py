"""Cases of parametrized tests, and the slow ones among them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Returns all values, those outside `chosen` marked as slow tests."""
    return [value if value in chosen else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes by a few cases that cover each pair of values of each two parameters."""
    choices = [list(each) for each in values.values()]
    rows = list(itertools.product(*(range(len(each)) for each in choices)))
    missing = {pair for row in rows for pair in _pairs(row)}
    cases = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        cases.append(tuple(each[i] for each, i in zip(choices, best, strict=True)))
    return pytest.mark.parametrize(tuple(values), cases)


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
