"""One rank of a cell of netlab.py: measures steps over an emulated link; rank 0 writes a JSON file.

    cell.py '{"shape": "resnet", "megabytes": 24, "seconds": 160, "sharded": false}' FILE

Ranks share the clock. A step begins at a time that rank 0 announces and ends on the slowest rank.
"""

from __future__ import annotations

import bisect
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import brigade

import bucket_size
from turns import CLASSES, SHARDS, shard, start, take_turns

CAPS_MIB = (0.25, 1, 4, 10, 25, 100)
AUTO_ITERATIONS = 12
MOST_ROUNDS, LEAST_ROUNDS, MOST_STEPS = 24, 6, 8
UNITS, TENSORS_PER_UNIT = 6, 4
Points = list[tuple[int, float]]  # bytes, seconds


def shape_of(name: str, megabytes: int) -> tuple[list[int], list[float]]:
    """Returns elements by parameter, and each one's share of the time of backward.

    ResNet-shaped: convolutions take equal times. Others: in proportion to their sizes.
    """
    total = megabytes * 2**20 // 4
    if name == "uniform":
        return [total // 48] * 48, [1 / 48] * 48
    factory = {"resnet": bucket_size.resnet50, "gpt": bucket_size.gpt2}[name]
    shapes = [p.shape for p in factory()[0].parameters()]
    scale = total / sum(shape.numel() for shape in shapes)
    numels = [max(1, round(shape.numel() * scale)) for shape in shapes]
    weights = [float(len(s) > 1) if name == "resnet" else s.numel() for s in shapes]
    return numels, [weight / sum(weights) for weight in weights]


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward; gradients are ones."""

    @staticmethod
    def forward(ctx, x, forward, backward, *parameters):
        ctx.shapes, ctx.backward = [p.shape for p in parameters], backward
        forward()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.backward()
        return grad, None, None, *[torch.ones(shape) for shape in ctx.shapes]


class Replica(nn.Module):
    """Parameters of shared storage. Gradients become ready at given times, as on a GPU."""

    def __init__(self, storage: list[torch.Tensor], shares: list[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in storage)
        self.ready_shares = numpy.cumsum(shares[::-1])[::-1]
        self.backward_s = 0.0
        self.begin_s = 0.0
        self.ready_s = [0.0] * len(storage)

    def _wait(self, index: int) -> None:
        if index == len(self.ready_s) - 1:
            self.begin_s = time.monotonic()
        sleep_until(self.begin_s + self.ready_shares[index] * self.backward_s)
        self.ready_s[index] = time.monotonic() - self.begin_s

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for index, weight in enumerate(self.weights):
            x = _Sleep.apply(x, lambda: None, partial(self._wait, index), weight)
        return x


class Unit(nn.Module):
    """An FSDP unit that sleeps in forward and backward."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(tensors))
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleeps = (partial(time.sleep, seconds) for seconds in (self.forward_s, self.backward_s))
        return _Sleep.apply(x, *sleeps, *self.weights)


class Stack(nn.Module):
    def __init__(self, count: int, numel: int, tensors: int = TENSORS_PER_UNIT) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit(numel, tensors) for _ in range(count))

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for block in self.blocks:
            x = block(x)
        return x


def sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))


def timed(run: Callable[[], Any], steps: int = 1) -> list[float]:
    """Returns this rank's seconds from a begin that all ranks share. Collective."""
    seconds = []
    for _ in range(steps):
        begin_s = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
        dist.broadcast(begin_s, 0)
        sleep_until(begin_s.item())
        run()
        seconds.append(time.monotonic() - begin_s.item())
    return seconds


def slowest(seconds: list[float]) -> list[float]:
    """Returns the maximum of each number over ranks. Collective."""
    numbers = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def step(model: nn.Module) -> None:
    model.zero_grad()
    model().backward()


def all_reduce(tensors: list[torch.Tensor], at_once: bool) -> None:
    works = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        if not at_once:
            works[-1].wait()
    for work in works:
        work.wait()


def all_reduce_costs(total_bytes: int) -> Points:
    """Times all-reduces of several sizes as brigade's calibration does (backward_model.cc)."""
    points: Points = []
    size = 1024
    while True:
        count = min(8, max(1, total_bytes // size))
        tensors = [torch.zeros(size // 4) for _ in range(count)]
        seconds = slowest(timed(partial(all_reduce, tensors, True), 3))
        points.append((size, max(statistics.median(seconds) / count, (points or [(0, 0)])[-1][1])))
        if size == total_bytes:
            return points
        size = min(4 * size, total_bytes)


def predict(buckets: list[int], sizes: list[int], ready_s: list[float], costs: Points) -> float:
    """Returns the end of a step, from the begin of backward.

    The link runs buckets in order, each after its last gradient. `sizes` and `ready_s` are in the
    order of readiness.
    """
    before = [int(total) for total in numpy.cumsum(sizes)]
    end_s, sent = 0.0, 0
    for size in buckets:
        sent += size
        last = min(bisect.bisect_left(before, sent), len(sizes) - 1)
        end_s = max(end_s, ready_s[last]) + float(numpy.interp(size, *zip(*costs, strict=True)))
    return max(end_s, ready_s[-1])


def earliest_end(sizes: list[int], ready_s: list[float], costs: Points) -> float:
    """Returns a bound from below on predict() of any plan.

    A gradient and all later ones are sent after it is ready. n collectives of `left` bytes cost at
    least n times the convex hull's cost of left / n.
    """
    hull: Points = []
    for x, y in [(0, costs[0][1]), *costs]:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) >= (
            y - hull[-1][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    counts = numpy.arange(1, len(sizes) + 1)
    end_s, left = ready_s[-1], 0
    for size, at_s in zip(reversed(sizes), reversed(ready_s), strict=True):
        left += size
        least_s = counts * numpy.interp(left / counts, *zip(*hull, strict=True))
        end_s = max(end_s, at_s + float(least_s.min()))
    return end_s


@contextmanager
def captured_stderr(lines: list[str]) -> Iterator[None]:
    """Appends the lines that C++ and Python write to stderr."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            file.seek(0)
            lines += file.read().splitlines()


def bucket_bytes(model: Any, numels: list[int]) -> list[int]:
    """Returns the sizes of buckets in the order of launch."""
    if isinstance(model, brigade.DistributedDataParallel):
        return [4 * sum(numels[i] for i in bucket) for bucket in model.bucket_plan()]
    text = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in text.split(",")]


def take_rounds(
    steps: dict[str, Callable[[], Any]], budget_s: float, round_s: float
) -> dict[str, list[list[float]]]:
    """Returns seconds on the slowest rank by arm, round and step, in about `budget_s`."""
    count = min(MOST_STEPS, max(1, int(budget_s / (MOST_ROUNDS * round_s))))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget_s / (count * round_s) / 2) * 2))
    if dist.get_rank() == 0:
        print(f"{rounds} rounds of {count} steps, {len(steps)} arms", flush=True)
    taken = take_turns({n: partial(timed, run, count) for n, run in steps.items()}, rounds, 0)
    return {name: [slowest(seconds) for seconds in of] for name, of in taken.items()}


def replicated(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures DDP: torch's caps, brigade's default and automatic plan, and no communication."""
    numels, shares = shape_of(cell["shape"], cell["megabytes"])
    storage = [torch.zeros(numel) for numel in numels]
    costs = all_reduce_costs(4 * sum(numels))
    backward_s = costs[-1][1]
    wrapped: dict[str, tuple[str, dict[str, Any]]] = {"torch, default": ("torch", {})}
    for cap in CAPS_MIB:
        wrapped[f"torch, {cap} MiB"] = ("torch", {"bucket_cap_mb": cap})
    wrapped["brigade, default"] = ("brigade", {})
    wrapped["brigade, auto"] = ("brigade", {"bucket_plan": "auto"})
    arms: dict[str, Any] = {"alone": Replica(storage, shares)}
    for name, (kind, options) in wrapped.items():
        arms[name] = CLASSES[kind](Replica(storage, shares), init_sync=False, **options)
    report: list[str] = []
    for name, model in arms.items():
        net = getattr(model, "module", model)
        if name == "brigade, auto":
            net.backward_s = backward_s
            with captured_stderr(report):
                timed(partial(step, model), AUTO_ITERATIONS)
        else:
            timed(partial(step, model), 4)
        net.backward_s = backward_s
    plans = {name: bucket_bytes(arms[name], numels) for name in wrapped}
    steps = {name: partial(step, model) for name, model in arms.items()}
    buffers = [torch.zeros(size // 4) for size in plans["brigade, auto"]]
    steps["all-reduces of auto"] = partial(all_reduce, buffers, False)
    sizes = [4 * numel for numel in reversed(numels)]
    expected_s = [predict(plan, sizes, [backward_s] * len(sizes), costs) for plan in plans.values()]
    seconds = take_rounds(steps, cell["seconds"], 3 * backward_s + 0.7 * sum(expected_s))
    ready_s = slowest(arms["alone"].ready_s)[::-1]
    beside_s = statistics.median(chain(*seconds["alone"])) - ready_s[-1]
    return {
        "backward_s": backward_s,
        "costs": costs,
        "costs_after": all_reduce_costs(4 * sum(numels)),
        "sizes": sizes,
        "ready_s": ready_s,
        "plans": plans,
        "predicted_s": {
            name: beside_s + predict(plan, sizes, ready_s, costs) for name, plan in plans.items()
        },
        "bound_s": beside_s + earliest_end(sizes, ready_s, costs),
        "report": report,
        "seconds": seconds,
    }


def sharded_costs(size: int) -> dict[str, dict[str, list[float]]]:
    """Times all-gathers and reduce-scatters of one unit of `size` bytes, by library."""
    world = dist.get_world_size()
    model = shard(Stack(1, size // 4, 1), brigade.fully_shard)
    model.set_timeline_sample_rate(1)
    found: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    for _ in range(6):
        timed(partial(step, model))
        timeline = model.sharding_timeline()
        for name, of in (("all_gather", timeline.gathers), ("reduce_scatter", timeline.reductions)):
            found[name].append(1e-9 * (of[0].complete_ns - of[0].launch_ns))
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // world)
    calls = {
        "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
    }
    ours = {name: slowest(of[1:]) for name, of in found.items()}
    return {"brigade": ours, "torch": {n: slowest(timed(call, 5)) for n, call in calls.items()}}


def sharded(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures fully_shard(): prefetch depths and resharding, brigade's and torch's."""
    unit_bytes = cell["megabytes"] * 2**20 // UNITS
    costs: dict[str, dict[str, Points]] = {}
    for size in (unit_bytes // 64, unit_bytes // 8, unit_bytes, 4 * unit_bytes):
        for kind, of in sharded_costs(size // 32 * 32).items():
            for name, seconds in of.items():
                points = costs.setdefault(kind, {}).setdefault(name, [])
                points.append((size // 32 * 32, statistics.median(seconds)))
    gather_s, reduce_s = (costs["brigade"][n][2][1] for n in ("all_gather", "reduce_scatter"))
    make = partial(Stack, UNITS, unit_bytes // 4 // TENSORS_PER_UNIT)
    arms: dict[str, Any] = {"alone": make()}
    for reshards in (True, False):
        for depth in (1, 2):
            options = {"reshard_after_forward": reshards, "prefetch_depth": depth}
            name = f"brigade, depth {depth}, reshard {reshards}"
            arms[name] = shard(make(), SHARDS["brigade"], **options)
        name = f"torch, reshard {reshards}"
        arms[name] = shard(make(), SHARDS["torch"], reshard_after_forward=reshards)
    for model in arms.values():
        for index, unit in enumerate(model.blocks):
            share = 0.5 if index % 2 else 1.5
            unit.forward_s, unit.backward_s = share * gather_s, share * (gather_s + reduce_s)
        timed(partial(step, model), 3)
    round_s = len(arms) * 1.4 * UNITS * (2 * gather_s + reduce_s)
    steps = {name: partial(step, model) for name, model in arms.items()}
    units = [(unit.forward_s, unit.backward_s) for unit in arms["alone"].blocks]
    return {
        "tensors": [unit_bytes // 4 // TENSORS_PER_UNIT] * TENSORS_PER_UNIT,
        "units_s": units,
        "costs": costs,
        "seconds": take_rounds(steps, cell["seconds"], round_s),
    }


def main() -> None:
    cell = json.loads(sys.argv[1])
    is_first = start()
    begin_s = time.monotonic()
    found = (sharded if cell["sharded"] else replicated)(cell)
    found["wall_s"] = time.monotonic() - begin_s
    if is_first:
        pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
