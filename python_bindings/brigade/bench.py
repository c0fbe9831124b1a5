"""Measures a model's step time with several bucket caps and recommends one.

    torchrun --standalone --nproc-per-node 2 -m brigade bench my_training.py:workload

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
import contextlib
import importlib
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
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
    after_round: Callable[[dict[str, Any]], None] = lambda figures: None,
    resumed: dict[str, Any] | None = None,
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
        rounds: Number of times that each size is measured; sizes alternate. Three times as many
            if the fastest saves more than 1 % of a step and chance may be the reason.
        steps: Number of timed steps per measurement.
        name: Title of the table; default: the module's class.
        group: Default: the default group.
        after_round: Receives the figures so far, equal on all ranks. An exception ends the sweep.
        resumed: Figures of an interrupted sweep, which this one continues; the same on all ranks.
        options: find_unused_parameters, static_graph or gradient_as_bucket_view, as of
            DistributedDataParallel.

    Returns:
        The table with a recommendation, and the figures as a dict (docs/guides/bucket_sizes.md
        lists its keys). The first row is the default.

    Raises:
        ValueError: A size is invalid, `rounds` or `steps` is below 1, the group has 1 rank, no
            parameter requires a gradient, the loss has several elements, or `resumed` has other
            parameters, sizes, rounds or steps.

    For example:

        table, figures = sweep(net, lambda net: F.cross_entropy(net(inputs), targets))
        print(table)
    """
    if unknown := options.keys() - set(_OPTIONS):
        known = ", ".join(_OPTIONS)
        raise TypeError(f"bucket sweep: option {min(unknown)!r} is unknown.\nUse {known} or name.")
    named = {key: value for key, value in module.named_parameters() if value.requires_grad}
    name = name or type(module).__name__
    data = _C.sweep(
        name,
        list(named.values()),
        list(named),
        lambda: loss(module),
        list(sizes),
        dist.group.WORLD if group is None else group,
        rounds=rounds,
        steps=steps,
        after_round=lambda data: after_round(json.loads(data)),
        resumed="" if resumed is None else json.dumps(resumed),
        **options,
    )
    return _C.sweep_table(name, data), json.loads(data)


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


def set_up(device: torch.device) -> dict[str, str]:
    """Returns the conditions of a measurement that starts now; rank 0 prints them."""
    backend = dist.group.WORLD._get_backend(device).name()
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    note = ": times are unreliable" if load > cores else ""
    found = {
        "ranks": f"{dist.get_world_size()}, {backend}, {device.type}",
        "CPU": f"{platform.machine()}, {cores} cores, load {load:.1f}{note}",
        "torch": torch.__version__,
        "command": " ".join(["brigade", *sys.argv[1:]]),
    }
    if variables := [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")]:
        found["NCCL"] = " ".join(variables)
    if dist.get_rank() == 0:
        print("".join(f"{name:<9} {value}\n" for name, value in found.items()), flush=True)
    return found


def start(backend: str | None) -> torch.device:
    """Joins the default group of torchrun's ranks. Returns the accelerator, or the CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def write(file: str | None, figures: dict[str, Any]) -> None:
    """Replaces the file, on rank 0. A reader never sees a part of it."""
    if file is None or dist.get_rank() > 0:
        return
    part = pathlib.Path(f"{file}.part")
    part.write_text(json.dumps(figures, indent=2) + "\n")
    part.replace(file)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": p25, "median": median, "p75": p75}


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of the done and all steps, which draws a bar on rank 0's terminal."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda done, total: None
        return
    from rich.console import Console

    # A bar in a file would be noise.
    console = Console(stderr=True)
    hidden = dist.get_rank() > 0 or not console.is_terminal
    with Progress(console=console, disable=hidden, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _resumed(file: str) -> dict[str, Any]:
    """Returns rank 0's file on all ranks."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [json.loads(pathlib.Path(file).read_text())["models"][0]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise ValueError(f"--resume: expected figures in {file}, found: {found[0]}") from found[0]
    return found[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        help="module:function or file.py:function of the workload, or 'collectives': the times of "
        "all-reduces, all-gathers and reduce-scatters by size",
    )
    parser.add_argument(
        "--caps",
        default=",".join(DEFAULT_SIZES),
        help="bucket caps in MiB, 'one' (one bucket) or 'each' (one per parameter) (default: "
        "%(default)s); DistributedDataParallel's default is always measured",
    )
    parser.add_argument(
        "--units",
        metavar="CLASS",
        help="shard the workload's module instead: each module of this class is a unit; compares "
        "resharding, prefetch, larger units and torch's fully_shard",
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="measurements of each cap (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement (%(default)s)")
    parser.add_argument("--backend", help="backend of the process group (default: torch's)")
    parser.add_argument("--json", metavar="FILE", help="file for all figures, after each round")
    parser.add_argument(
        "--resume", action="store_true", help="continue the interrupted sweep of --json FILE"
    )


def check_arguments(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exits if the arguments can't be used together, or a file can't be written."""
    if "RANK" not in os.environ:
        parser.error("the environment variable RANK is not set: start with torchrun, as above")
    if given.resume and (given.json is None or given.units or given.factory == "collectives"):
        parser.error("--resume: expected the sweep of a model with --json FILE")
    if given.json and os.environ["RANK"] == "0":
        folder = pathlib.Path(given.json).resolve().parent
        if not os.access(folder, os.W_OK):
            parser.error(f"--json: expected a folder that can be written, found {folder}")


def run(given: argparse.Namespace) -> None:
    """Runs `brigade bench` on this rank."""
    factory = find_factory(given.factory)
    start(given.backend)
    returned = factory()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        kind = type(returned).__name__
        raise TypeError(
            f"{given.factory}: expected (module, loss) or (module, loss, options), found {kind}"
        )
    module, loss, options = (*returned, {})[:3]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    conditions = set_up(device)
    is_first = dist.get_rank() == 0
    resumed = _resumed(given.json) if given.resume else None
    finished: dict[str, Any] = {}
    with progress("rounds") as show:

        def after_round(figures: dict[str, Any]) -> None:
            finished.update(figures)
            write(given.json, {"kind": "sweep", "set_up": conditions, "models": [figures]})
            show(figures["rounds_taken"], figures["rounds_to_take"])

        try:
            table, _ = sweep(
                module,
                loss,
                given.caps.split(","),
                rounds=given.rounds,
                steps=given.steps,
                after_round=after_round,
                resumed=resumed,
                **options,
            )
        except BaseException:  # ^C here, or on a peer
            if finished and is_first:
                table = _C.sweep_table(finished["name"], json.dumps(finished))
                table += "interrupted" + (": --resume continues\n" if given.json else "\n")
                print(table, end="", flush=True)
            raise
    if is_first:
        print(table, end="", flush=True)
    dist.destroy_process_group()
