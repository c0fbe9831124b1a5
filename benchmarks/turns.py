"""Contenders that take turns, and how their times are shown."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import fully_shard

import brigade

CLASSES = {
    "brigade": brigade.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
SHARDS = {"brigade": brigade.fully_shard, "torch": fully_shard}
DDP_MODES = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}

Key = TypeVar("Key")
Value = TypeVar("Value")


def take_turns(
    steps: Mapping[Key, Callable[[], Value]], rounds: int, warm_up: int = 4
) -> dict[Key, list[Value]]:
    """What each step returned by round, in an order per round that is drawn at random."""
    taken: dict[Key, list[Value]] = {key: [] for key in steps}
    order = list(steps)
    shuffle = random.Random(0)
    for index in range(-warm_up, rounds):
        shuffle.shuffle(order)
        for key in order:
            value = steps[key]()
            if index >= 0:
                taken[key].append(value)
    return taken


def quartiles(values: Sequence[float], unit: float = 1, digits: int = 1) -> str:
    """Median and quartiles."""
    low, middle, high = (q / unit for q in statistics.quantiles(values, n=4))
    return f"{middle:8.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def over(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Differences of each round."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]
