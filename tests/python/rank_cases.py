"""Runs several cases of one function on the same ranks: starting these costs more than a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ranks import run_ranks


def run_cases(
    function: Callable[..., None], cases: Iterable[tuple[Any, ...]], world_size: int = 2
) -> None:
    """Calls ``function(rank, *case)`` on each rank of a Gloo group, one case behind the other.

    Raises:
        AssertionError: One has failed; names it. Those behind it have not run.
    """
    run_ranks(_call_each, function, list(cases), world_size=world_size)


def _call_each(rank: int, function: Callable[..., None], cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        try:
            function(rank, *case)
        except BaseException as error:
            raise AssertionError(f"{function.__name__}{case}") from error
