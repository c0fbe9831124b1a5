"""Times a model's training steps with several bucket sizes, and recommends one.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench my_training.py:workload

``workload`` is a function that returns a module and one step of its training::

    def workload():
        torch.manual_seed(0)
        model = Net()
        inputs, targets = batch_of(dist.get_rank())
        return model, lambda model: F.cross_entropy(model(inputs), targets)

It may return options of sweep() as a third value: ``{"static_graph": True}``. C++ measures
(bucket_sweep/).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C

DEFAULT_SIZES = ("each", "0.25", "1", "4", "10", "25", "100", "one")


def sweep(
    module: torch.nn.Module,
    loss: Callable[[torch.nn.Module], torch.Tensor],
    sizes: Sequence[str] = DEFAULT_SIZES,
    *,
    rounds: int = 8,
    steps: int = 3,
    name: str = "",
    group: dist.ProcessGroup | None = None,
    **options: bool,
) -> tuple[str, dict[str, Any]]:
    """Times steps with the default's buckets and with those of each size. Collective.

    Parameters keep their values and end without gradients; buffers may change, as in training.

    Args:
        module: On the device where it is trained, not wrapped; the same on every rank.
        loss: Takes the module, runs its forward on this rank's data and returns the loss, a
            tensor of one element. Called once per step; all of it is timed.
        sizes: MiB; or "each", a bucket for each parameter, or "one" for all. Those that give the
            same buckets are measured once.
        rounds: Visits to each size.
        steps: Timed in each visit.
        name: Shown above the table; default: the module's class.
        group: Default: the default group.
        options: DistributedDataParallel's find_unused_parameters, static_graph or
            gradient_as_bucket_view.

    Returns:
        The table with a recommendation below, and the same figures as a dict. The first row has
        the default's buckets.

    Raises:
        ValueError: A size is none of these, `rounds` or `steps` is below 1, or no parameter
            requires a gradient.
    """
    table, data = _C.sweep(
        name or type(module).__name__,
        list(module.parameters()),
        lambda: loss(module),
        list(sizes),
        dist.group.WORLD if group is None else group,
        rounds=rounds,
        steps=steps,
        **options,
    )
    return table, json.loads(data)


def find_factory(name: str) -> Callable[[], Any]:
    """The function that ``package.module:function`` or ``path/to/file.py:function`` names."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        file = pathlib.Path(place).resolve(strict=True)
        sys.path.insert(0, str(file.parent))  # as if the file were run
        place = file.stem
    return pkgutil.resolve_name(f"{place}:{function}")


def _set_up(device: torch.device) -> dict[str, str]:
    """The conditions that figures depend on, besides the code."""
    backend = dist.group.WORLD._get_backend(device).name()
    return {
        "ranks": f"{dist.get_world_size()}, {backend}, {device.type}",
        "CPU": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "command": " ".join(["brigade.bench", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchrun --standalone --nproc-per-node 2 -m brigade.bench",
        description="Times a model's training steps with several bucket sizes.",
    )
    parser.add_argument("factory", help="module:function or file.py:function")
    parser.add_argument(
        "--caps",
        default=",".join(DEFAULT_SIZES),
        help="sizes at which buckets close, in MiB; 'one' bucket for all, or one for 'each' "
        "parameter (default: %(default)s); the default's buckets are always measured",
    )
    parser.add_argument("--rounds", type=int, default=8, help="visits to each (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed per visit (%(default)s)")
    parser.add_argument("--backend", help="of the process group (default: torch's choice)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    given = parser.parse_args()
    factory = find_factory(given.factory)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(given.backend)
    module, loss, *rest = factory()
    options = rest[0] if rest else {}
    set_up = _set_up(next(module.parameters()).device)
    is_first = dist.get_rank() == 0
    if is_first:
        print("".join(f"{name:<9} {value}\n" for name, value in set_up.items()), flush=True)
    sizes = given.caps.split(",")
    table, data = sweep(module, loss, sizes, rounds=given.rounds, steps=given.steps, **options)
    if is_first:
        print(table, end="", flush=True)
        if given.json:
            text = json.dumps({"set_up": set_up, "models": [data]}, indent=2)
            pathlib.Path(given.json).write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
