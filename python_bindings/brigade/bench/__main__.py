"""The command ``python -m brigade.bench module:function``, one process per rank.

Started by torchrun, or by anything that sets its variables. Rank 0 speaks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from brigade.bench import DEFAULT_SIZES, find_factory, make_workload, sweep

_START = "torchrun --standalone --nproc-per-node 2 -m brigade.bench"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_START,
        description="Times a model's training steps under several bucket sizes.",
        epilog="The function takes nothing and returns a pair: the module, and a function of it "
        "that runs forward on this rank's data and returns the loss; or a brigade.bench.Workload.",
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
    return parser.parse_args(arguments)


def _join_group(backend: str | None) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            f"brigade.bench: expected a launcher's environment, {', '.join(missing)} is not set.\n"
            f"Start it with: {_START} {' '.join(sys.argv[1:])}"
        )
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(backend)


def describe_set_up(device: torch.device) -> dict[str, str]:
    """The conditions that figures depend on, besides the code."""
    backend = dist.group.WORLD._get_backend(device).name()
    return {
        "ranks": f"{dist.get_world_size()}, {backend}, {device.type}",
        "CPU": f"{_cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "command": " ".join(["brigade.bench", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def _run(options: argparse.Namespace) -> None:
    factory = find_factory(options.factory)
    _join_group(options.backend)
    speaks = dist.get_rank() == 0
    workload = make_workload(factory)
    set_up = describe_set_up(workload.parameters()[0].device)
    if speaks:
        print("".join(f"{name:<9} {value}\n" for name, value in set_up.items()), flush=True)

    def show(label: str) -> None:
        if speaks and sys.stderr.isatty():
            print(f"\r\033[K{label}", end="", file=sys.stderr, flush=True)

    found = sweep(workload, options.caps.split(","), options.rounds, options.steps, None, show)
    if speaks:
        show("")
        print(found.table, end="", flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"set_up": set_up, "models": [found.data]}, file, indent=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parse(arguments)
    try:
        _run(options)
    except (TypeError, ValueError) as error:
        if not str(error).startswith(("brigade.bench: ", "arm_of: ", "measure: ")):
            raise
        print(error, file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
