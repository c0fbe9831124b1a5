"""Helpers of the benchmarks: set-up, turns of contenders, formats of times, and JSON files."""

from __future__ import annotations

import json
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
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


def start(backend: str = "gloo") -> bool:
    """Joins torchrun's group, or makes one of world size 1. Returns True on rank 0."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **group)
    is_first = dist.get_rank() == 0
    if is_first:
        print(
            f"torch {torch.__version__}, ranks {dist.get_world_size()}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}"
        )
    return is_first


def shard(model: nn.Module, fully_shard: Callable, **arguments: object) -> nn.Module:
    """Makes each of `model.blocks`, or of a Sequential, an FSDP unit, and the rest another."""
    for block in getattr(model, "blocks", model):
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments)


def take_turns(
    steps: Mapping[Key, Callable[[], Value]], rounds: int, warm_up: int = 4
) -> dict[Key, list[Value]]:
    """Returns the results of each step by round, in an order per round that is drawn at random."""
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


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Returns the seconds of a forward and a backward, after a barrier."""
    model.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - begin


def time_steps(
    models: Mapping[Key, nn.Module], x: torch.Tensor, rounds: int
) -> dict[Key, list[float]]:
    return take_turns(
        {key: partial(step_seconds, model, x) for key, model in models.items()}, rounds
    )


def spread(values: Sequence[float], unit: float = 1) -> dict[str, float]:
    """Returns the median and quartiles, in multiples of `unit`."""
    low, middle, high = (q / unit for q in statistics.quantiles(values, n=4))
    return {"p25": low, "median": middle, "p75": high}


def quartiles(values: Sequence[float], unit: float = 1, digits: int = 1) -> str:
    """Formats the median and quartiles, in multiples of `unit`."""
    return shown(spread(values, unit), digits)


def shown(taken: Mapping[str, float], digits: int = 1) -> str:
    low, middle, high = (taken[key] for key in ("p25", "median", "p75"))
    return f"{middle:8.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns the ratio of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def compare(
    model: str, ours: tuple[str, Sequence[float]], theirs: tuple[str, Sequence[float]]
) -> dict[str, Any]:
    """Returns a row of the JSON files: step times and paired ratios of two named contenders."""
    return {
        "model": model,
        "ours": ours[0],
        "theirs": theirs[0],
        "rounds": len(ours[1]),
        "ours_ms": spread(ours[1], 1e-3),
        "theirs_ms": spread(theirs[1], 1e-3),
        "ratio": spread(paired(ours[1], theirs[1])),
    }


def report(rows: Sequence[Mapping[str, Any]], file: str | None) -> None:
    """Rank 0 prints the rows of `compare()`, and writes them to `file`, if one is given."""
    if dist.get_rank() > 0:
        return
    print("\nms per step, median [quartiles]; ratios of the rounds")
    for row in rows:
        ours, theirs = shown(row["ours_ms"], 2), shown(row["theirs_ms"], 2)
        print(f"{row['model']}: {row['ours']} {ours} over {row['theirs']} {theirs}", end="")
        print(f"{shown(row['ratio'], 3)}")
    if file:
        pathlib.Path(file).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
