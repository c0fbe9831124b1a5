"""Times collectives by size: `brigade bench collectives`, under torchrun."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C, bench

_SIZES = [1 << power for power in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB
_PIECES = [4, 16, 64]  # of the largest size

# Launches one collective of a number of float32 elements.
Launch = Callable[[], list[Any]]


def _operations(numel: int, device: torch.device, sums: Any) -> dict[str, Launch]:
    """Returns collectives of `numel` elements in all, a multiple of the world size."""
    world = dist.get_world_size()
    whole = torch.zeros(numel, device=device)
    part = torch.zeros(numel // world, device=device)
    parts = list(whole.chunk(world))
    # The last rank has one element more than the others.
    uneven = [torch.zeros(numel // world + (i == world - 1), device=device) for i in range(world)]
    return {
        "all-reduce": lambda: [dist.all_reduce(whole, async_op=True)],
        "all-gather into one tensor": lambda: [
            dist.all_gather_into_tensor(whole, part, async_op=True)
        ],
        "all-gather into a list": lambda: [dist.all_gather(parts, part, async_op=True)],
        "all-gather, uneven": lambda: [
            dist.broadcast(tensor, src, async_op=True) for src, tensor in enumerate(uneven)
        ],
        "reduce-scatter": lambda: [dist.reduce_scatter_tensor(part, whole, async_op=True)],
        "sums in rank order": lambda: [sums.run(whole)],
    }


def _seconds(launches: list[Launch], device: torch.device) -> float:
    """Returns the time of launches at once, from a common begin to the end on this rank."""
    dist.barrier()
    begin = time.perf_counter()
    works = [work for launch in launches for work in launch()]
    for work in works:
        work.wait()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def measure(
    device: torch.device, rounds: int, show: Callable[[int, int], None] = lambda done, total: None
) -> list[dict[str, Any]]:
    """Times each operation and size in turns; collective. Returns the slowest rank's times.

    An operation that the backend lacks is left out.
    """
    world = dist.get_world_size()
    if rounds < 2:
        raise ValueError(f"collectives: expected at least 2 rounds, found {rounds}")
    sums = _C.OrderedAllReduce(dist.group.WORLD)
    times: dict[tuple[str, int, int], list[float]] = {}
    cases = [(size, 1) for size in _SIZES] + [(_SIZES[-1], pieces) for pieces in _PIECES]
    lacking: set[str] = set()
    for done in range(rounds + 1):  # the first one warms up
        for size, pieces in cases:
            numel = max(1, size // pieces // 4 // world) * world
            several = [_operations(numel, device, sums) for _ in range(pieces)]
            for operation in list(several[0])[:: 1 if done % 2 else -1]:
                if operation in lacking:
                    continue
                try:
                    found = _seconds([launches[operation] for launches in several], device)
                except (RuntimeError, NotImplementedError):
                    if done > 0 or (size, pieces) != cases[0]:
                        raise
                    lacking.add(operation)
                    continue
                if done > 0:
                    times.setdefault((operation, 4 * numel * pieces, pieces), []).append(found)
        show(done, rounds)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [
        {"operation": operation, "bytes": size, "pieces": pieces, "seconds": bench.quartiles(row)}
        for (operation, size, pieces), row in zip(times, slowest.tolist(), strict=True)
    ]


def table(collectives: list[dict[str, Any]]) -> str:
    """Returns rows of the median ms by operation, a column per size."""
    columns = sorted({(found["pieces"], found["bytes"]) for found in collectives})
    rows: dict[str, dict[tuple[int, int], float]] = {}
    for found in collectives:
        row = rows.setdefault(found["operation"], {})
        row[found["pieces"], found["bytes"]] = 1e3 * found["seconds"]["median"]
    titles = [
        f"in {n}" if n > 1 else f"{b / 2**20:g} MiB" if b >= 2**20 else f"{b / 2**10:.3g} KiB"
        for n, b in columns
    ]
    lines = ["ms by bytes of the whole; 'in 4': the largest, in 4 pieces at once"]
    lines.append(f"{'':27}" + "".join(f"{title:>9}" for title in titles))
    for operation, row in rows.items():
        cells = "".join(f"{row[column]:9.3g}" if column in row else 9 * " " for column in columns)
        lines.append(f"{operation:27}" + cells)
    return "\n".join(lines) + "\n"


def run(given: argparse.Namespace) -> None:
    """Runs `brigade bench collectives` on this rank."""
    device = bench.start(given.backend)
    conditions = bench.set_up(device)
    with bench.progress("rounds") as show:
        collectives = measure(device, given.rounds, show)
    if dist.get_rank() == 0:
        print(table(collectives), end="", flush=True)
    bench.write(
        given.json, {"kind": "collectives", "set_up": conditions, "collectives": collectives}
    )
    dist.destroy_process_group()
