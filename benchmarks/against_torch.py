"""Overhead of brigade's and torch's DDP reducers, per parameter and step.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/against_torch.py [--rounds N]

One process, world size 1 over Gloo. The model is a chain of addcmul over 4-element parameters,
so that a step is nearly all overhead. The contenders take turns in random order. Overhead is
the time above local training in the same round, divided by the number of parameters. `control`
is a second copy of local training; its overhead is noise.

Columns: median and [25th, 75th] percentile in microseconds; brigade's median over torch's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import brigade

from turns import CLASSES, DDP_MODES, over, quartiles, start, take_turns, time_steps


class Chain(nn.Module):
    """y = x; y = y + p * x for each parameter p."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for parameter in self.parameters_:
            y = torch.addcmul(y, parameter, x)
        return y


def measure_steps(count: int, rounds: int) -> None:
    """Prints the overhead of each mode at `count` parameters."""
    contenders: dict[object, nn.Module] = {"local": Chain(count), "control": Chain(count)}
    for mode, options in DDP_MODES.items():
        for name, wrapper in CLASSES.items():
            contenders[mode, name] = wrapper(Chain(count), **options)
    gc.collect()
    gc.disable()
    seconds = time_steps(contenders, torch.ones(4), rounds)
    gc.enable()
    control = quartiles(over(seconds["control"], seconds["local"]), count * 1e-6, 2)
    print(f"\n{count} parameters, {rounds} rounds; control {control}")
    print(f"{'mode':14}{'brigade':>24}{'torch':>24}{'ratio':>8}")
    for mode in DDP_MODES:
        extra = [over(seconds[mode, name], seconds["local"]) for name in CLASSES]
        ours, theirs = (quartiles(times, count * 1e-6, 2) for times in extra)
        ratio = statistics.median(extra[0]) / statistics.median(extra[1])
        print(f"{mode:14}{ours:>24}{theirs:>24}{ratio:>8.3f}")


def measure_construction(count: int, rounds: int) -> None:
    """Prints the time to construct a reducer with one bucket, and a wrapper."""

    def seconds_to_make(make: Callable) -> float:
        module = Chain(count)
        gc.collect()
        begin = time.perf_counter()
        made = make(module)
        seconds = time.perf_counter() - begin
        del made
        return seconds

    def make_reducer(reducer: type, module: nn.Module) -> object:
        plan = [list(range(count))]
        return reducer(list(module.parameters()), plan, [1 << 40], dist.group.WORLD)

    steps = {}
    for name, reducer in {"brigade": brigade.Reducer, "torch": dist.Reducer}.items():
        steps["reducer", name] = partial(seconds_to_make, partial(make_reducer, reducer))
        steps["wrapper", name] = partial(seconds_to_make, CLASSES[name])
    times = take_turns(steps, rounds, warm_up=0)
    print(f"\nconstruction, {count} parameters in one bucket, us per parameter (median)")
    for label in ("reducer", "wrapper"):
        medians = [statistics.median(times[label, name]) / count * 1e6 for name in CLASSES]
        print(f"{label:14}{medians[0]:>24.2f}{medians[1]:>24.2f}{medians[0] / medians[1]:>8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    start()
    for count in (1000, 5000):
        measure_steps(count, rounds)
    measure_construction(8000, rounds=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
