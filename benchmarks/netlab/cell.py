"""One rank of a cell of netlab.py: measures steps over an emulated link; rank 0 writes a JSON file.

    cell.py '{"shape": "resnet", "megabytes": 24, "seconds": 160}' FILE

Ranks share the clock. A step begins at a time that rank 0 announces and ends on the slowest rank.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
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
AUTO, AUTO_ITERATIONS = "brigade, auto", 11
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


def timed(run: Callable[[], Any], steps: int = 1) -> list[float]:
    """Returns this rank's seconds from a begin that all ranks share. Collective."""
    seconds = []
    for _ in range(steps):
        begin_s = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
        dist.broadcast(begin_s, 0)
        time.sleep(max(0.0, begin_s.item() - time.monotonic()))
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


def all_reduce(tensors: list[torch.Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def all_reduce_costs(total_bytes: int) -> Points:
    """Times all-reduces of several sizes as brigade's calibration does (backward_model.cc)."""
    sizes = [1024 * 4**i for i in range(20) if 1024 * 4**i < total_bytes] + [total_bytes]
    costs = []
    for size in sizes:
        tensors = [torch.zeros(size // 4)] * min(8, max(1, total_bytes // size))
        seconds = slowest(timed(partial(all_reduce, [t.clone() for t in tensors]), 3))
        costs.append(statistics.median(seconds) / len(tensors))
    # Noise only adds: no size costs more than a larger one.
    return list(zip(sizes, numpy.minimum.accumulate(costs[::-1])[::-1].tolist(), strict=True))


def earliest_end(sizes: list[int], ready_s: list[float], costs: Points) -> float:
    """Returns a bound from below on the end of a step with any plan.

    A gradient and all later ones are sent after it is ready, in any number of collectives: a
    straight line below the costs bounds their time.
    """
    latencies = numpy.linspace(0, costs[0][1], 50)
    slopes = numpy.min([(seconds - latencies) / size for size, seconds in costs], axis=0)
    end_s, left = ready_s[-1], 0
    for size, at_s in zip(reversed(sizes), reversed(ready_s), strict=True):
        left += size
        end_s = max(end_s, at_s + float(numpy.max(latencies + slopes * left)))
    return end_s


def take_rounds(
    steps: dict[str, Callable[[], Any]], budget_s: float, round_s: float
) -> dict[str, list[list[float]]]:
    """Returns seconds on the slowest rank by arm, round and step, in about `budget_s`."""
    count = min(MOST_STEPS, max(1, int(budget_s / (MOST_ROUNDS * round_s))))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget_s / (count * round_s) / 2) * 2))
    taken = take_turns({n: partial(timed, run, count) for n, run in steps.items()}, rounds, 0)
    return {name: [slowest(seconds) for seconds in of] for name, of in taken.items()}


def replicated(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures DDP: torch's caps, brigade's default and automatic plan, and no communication."""
    numels, shares = shape_of(cell["shape"], cell["megabytes"])
    storage = [torch.zeros(numel) for numel in numels]
    # The first pass warms up: TCP's slow start doubles the times of small all-reduces.
    costs = [all_reduce_costs(4 * sum(numels)) for _ in range(2)][-1]
    backward_s = costs[-1][1]
    options: dict[str, dict[str, Any]] = {"torch, default": {}, "brigade, default": {}}
    options |= {f"torch, {cap} MiB": {"bucket_cap_mb": cap} for cap in CAPS_MIB}
    options[AUTO] = {"bucket_plan": "auto"}
    ends_s = backward_s * numpy.cumsum(shares[::-1])[::-1]
    alone = bucket_size.Stack([tensor] for tensor in storage)
    alone.set_ends(ends_s)
    arms: dict[str, Any] = {"alone": alone}
    for name, of in options.items():
        net = bucket_size.Stack([tensor] for tensor in storage)
        arms[name] = CLASSES[name.split(",")[0]](net, init_sync=False, **of)
        if name == AUTO:
            net.set_ends(ends_s)
        timed(partial(step, arms[name]), AUTO_ITERATIONS if name == AUTO else 3)
        net.set_ends(ends_s)
    plans: dict[str, list[int]] = {}
    for name in options:
        sizes_text = arms[name]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        plans[name] = [int(size) for size in sizes_text.split(",")]
    ready: list[list[float]] = []  # of steps without communication

    def step_alone() -> None:
        step(alone)
        ready.append([unit.ready_s for unit in reversed(alone.blocks)])

    steps = {name: partial(step, model) for name, model in arms.items()} | {"alone": step_alone}
    buffers = [torch.zeros(size // 4) for size in plans[AUTO]]
    steps["all-reduces of auto"] = lambda: [dist.all_reduce(tensor) for tensor in buffers]
    sizes = [4 * numel for numel in reversed(numels)]
    seconds = take_rounds(steps, cell["seconds"], 1.5 * backward_s * len(steps))
    ready_s = slowest(numpy.median(ready, axis=0).tolist())
    beside_s = statistics.median(chain(*seconds["alone"])) - ready_s[-1]
    return {
        "costs": costs,
        "sizes": sizes,
        "ready_s": ready_s,
        "plans": plans,
        "bound_s": beside_s + earliest_end(sizes, ready_s, costs),
        "seconds": seconds,
    }


def sharded_costs(size: int) -> dict[str, dict[str, list[float]]]:
    """Times collectives of one unit of `size` bytes, by library."""
    model = shard(bucket_size.Stack([[torch.zeros(size // 4)]]), brigade.fully_shard)
    found: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    for _ in range(6):
        timed(partial(step, model))
        timeline = model.sharding_timeline()
        both = {"all_gather": timeline.gathers[0], "reduce_scatter": timeline.reductions[-1]}
        for name, of in both.items():
            last_launch_s, end_s = slowest([1e-9 * of.launch_ns, 1e-9 * of.complete_ns])
            found[name].append(end_s - last_launch_s)
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // dist.get_world_size())
    calls = {"all_gather": timed(partial(dist.all_gather_into_tensor, whole, part), 6)}
    calls["reduce_scatter"] = timed(partial(dist.reduce_scatter_tensor, part, whole), 6)
    return {"brigade": found, "torch": calls}


def sharded(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures fully_shard(): prefetch depths and resharding, brigade's and torch's."""
    unit_bytes = cell["megabytes"] * 2**20 // UNITS
    costs: dict[str, dict[str, Points]] = {}
    for size in (unit_bytes // 64, unit_bytes // 8, unit_bytes, 4 * unit_bytes):
        for kind, of in sharded_costs(size // 32 * 32).items():
            for name, seconds in of.items():
                points = costs.setdefault(kind, {}).setdefault(name, [])
                points.append((size // 32 * 32, statistics.median(slowest(seconds[1:]))))
    gather_s, reduce_s = (costs["brigade"][n][2][1] for n in ("all_gather", "reduce_scatter"))
    numels = [unit_bytes // 4 // TENSORS_PER_UNIT] * TENSORS_PER_UNIT

    def make() -> bucket_size.Stack:
        return bucket_size.Stack(map(torch.zeros, numels) for _ in range(UNITS))

    arms: dict[str, Any] = {"alone": make()}
    for reshards in (True, False):
        for depth in (1, 2):
            options = {"reshard_after_forward": reshards, "prefetch_depth": depth}
            name = f"brigade, depth {depth}, reshard {reshards}"
            arms[name] = shard(make(), SHARDS["brigade"], **options)
        del options["prefetch_depth"]
        arms[f"torch, reshard {reshards}"] = shard(make(), SHARDS["torch"], **options)
    for model in arms.values():
        for index, unit in enumerate(model.blocks):
            share = 0.5 if index % 2 else 1.5
            unit.forward_s, unit.backward_s = share * gather_s, share * (gather_s + reduce_s)
        timed(partial(step, model), 3)
    steps = {name: partial(step, model) for name, model in arms.items()}
    return {
        "tensors": numels,
        "units_s": [(unit.forward_s, unit.backward_s) for unit in arms["alone"].blocks],
        "costs": costs,
        "seconds": take_rounds(steps, cell["seconds"], 9 * UNITS * (2 * gather_s + reduce_s)),
    }


def main() -> None:
    cell = json.loads(sys.argv[1])
    is_first = start()
    found = (sharded if cell["shape"] == "sharded" else replicated)(cell)
    if is_first:
        pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
