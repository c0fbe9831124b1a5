"""Measures a model's step time with several bucket caps and recommends one.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench my_training.py:workload

``workload`` is a function that returns a module and a function of one step's loss:

    def workload():
        torch.manual_seed(0)
        model = Net()
        inputs, targets = batch_of(dist.get_rank())
        return model, lambda model: F.cross_entropy(model(inputs), targets)

It may return options of sweep() as a third value, for example ``{"static_graph": True}``.
Implemented in bucket_sweep/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C

DEFAULT_SIZES = ("each", "0.25", "1", "4", "10", "25", "100", "one")
_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


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
    """Measures step times with the default bucket caps and with each of `sizes`. Collective.

    Parameters are unchanged and end without gradients. Buffers may change, as in training.

    Args:
        module: The unwrapped module, on its training device; the same on every rank.
        loss: Function of the module: runs forward on this rank's data and returns the loss, a
            tensor of one element. Called once per step, and timed with backward.
        sizes: Bucket caps in MiB, or "each" (one bucket per parameter) or "one" (one bucket).
            Sizes with equal buckets are measured once.
        rounds: Number of times that each size is measured; sizes alternate.
        steps: Number of timed steps per measurement.
        name: Title of the table; default: the module's class.
        group: Default: the default group.
        options: find_unused_parameters, static_graph or gradient_as_bucket_view, as of
            DistributedDataParallel.

    Returns:
        The table with a recommendation, and the same figures as a dict. The first row is the
        default.

    Raises:
        ValueError: A size is invalid, `rounds` or `steps` is below 1, the group has 1 rank, no
            parameter requires a gradient, or the loss has several elements.

    For example:

        table, figures = sweep(net, lambda net: F.cross_entropy(net(inputs), targets))
        print(table)
    """
    if unknown := options.keys() - set(_OPTIONS):
        known = ", ".join(_OPTIONS)
        raise TypeError(f"bucket sweep: option {min(unknown)!r} is unknown.\nUse {known} or name.")
    named = {key: value for key, value in module.named_parameters() if value.requires_grad}
    table, data = _C.sweep(
        name or type(module).__name__,
        list(named.values()),
        list(named),
        lambda: loss(module),
        list(sizes),
        dist.group.WORLD if group is None else group,
        rounds=rounds,
        steps=steps,
        **options,
    )
    return table, json.loads(data)


def find_factory(name: str) -> Callable[[], Any]:
    """Returns the function named ``package.module:function`` or ``path/to/file.py:function``."""
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise ValueError(f"expected file.py:function or module:function, found {name!r}")
    if module.endswith(".py"):
        file = pathlib.Path(module).resolve(strict=True)
        sys.path.insert(0, str(file.parent))  # as python does for a script
        module = file.stem
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"expected a function {function!r} in {name!r}, found none")
    return found


def _set_up(device: torch.device) -> dict[str, str]:
    """Returns the conditions of the measurement."""
    backend = dist.group.WORLD._get_backend(device).name()
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    note = ": times are unreliable" if load > cores else ""
    return {
        "ranks": f"{dist.get_world_size()}, {backend}, {device.type}",
        "CPU": f"{platform.machine()}, {cores} cores, load {load:.1f}{note}",
        "torch": torch.__version__,
        "command": " ".join(["brigade.bench", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchrun --standalone --nproc-per-node 2 -m brigade.bench",
        description="Measures a model's step time with several bucket caps.",
    )
    parser.add_argument("factory", help="module:function or file.py:function")
    parser.add_argument(
        "--caps",
        default=",".join(DEFAULT_SIZES),
        help="bucket caps in MiB, 'one' (one bucket) or 'each' (one per parameter) (default: "
        "%(default)s); DistributedDataParallel's default is always measured",
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="measurements of each cap (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement (%(default)s)")
    parser.add_argument("--backend", help="backend of the process group (default: torch's)")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("the environment variable RANK is not set: start with torchrun, as above")
    factory = find_factory(given.factory)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(given.backend)
    returned = factory()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        kind = type(returned).__name__
        raise TypeError(
            f"{given.factory}: expected (module, loss) or (module, loss, options), found {kind}"
        )
    module, loss, options = (*returned, {})[:3]
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
