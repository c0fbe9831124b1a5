"""Step times of torch's DDP and brigade's over emulated links between hosts. Needs root.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/netlab/netlab.py run FILE
    ... netlab.py report FILE [--write]     prints tables; writes the picture and docs' tables
    ... netlab.py compare FILE              compares the simulator with the measured steps

`run` takes 70 minutes on 2 cores, on which nothing else should run. FILE stores each cell when it
is complete: a second run measures only the missing ones. --cells TEXT chooses those whose name has
TEXT; --seconds is for a trial. Hosts are network namespaces (netlab.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import report as documents

FOLDER = pathlib.Path(__file__).resolve().parent

LINKS = {
    "2 hosts, 1 Gbit": ["2", "1gbit"],
    "4 hosts, 200 Mbit": ["4", "200mbit"],
    "4 hosts, 1 Gbit": ["4", "1gbit"],
    "2 hosts, 1 Gbit + 1 ms": ["2", "1gbit", "1000"],
}
MODELS = {
    "24 MB ResNet": ("resnet", 24),
    "6 MB uniform": ("uniform", 6),
    "100 MB GPT": ("gpt", 100),
}
SHARDED = list(LINKS)[:2]


def cells() -> dict[str, dict[str, Any]]:
    """Returns the cells by name; the first four have one link each."""
    found = {
        f"{link}, {model}": {"link": link, "shape": shape, "megabytes": megabytes, "sharded": False}
        for model, (shape, megabytes) in MODELS.items()
        for link in LINKS
    }
    for link in SHARDED:
        cell = {"link": link, "shape": "units", "megabytes": 24, "sharded": True}
        found[f"{link}, sharded 24 MB"] = cell
    slowest = f"{SHARDED[1]}, 100 MB GPT"
    return found | {slowest: found.pop(slowest)}


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Runs one rank per host; returns the figures of the cell."""
    link = LINKS[cell["link"]]
    script, file = str(FOLDER / "netlab.sh"), pathlib.Path(f"/tmp/netlab_{os.getpid()}.json")
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "eth0"}
    quiet |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(random.randint(20000, 40000))}
    ranks: list[subprocess.Popen] = []
    subprocess.run([script, "down"], check=True)
    try:
        subprocess.run([script, "up", *link], check=True)
        for rank in range(int(link[0])):
            ranked = {"RANK": str(rank), "WORLD_SIZE": link[0], **quiet}
            command = [script, "exec", str(rank), sys.executable, str(FOLDER / "cell.py")]
            command += [json.dumps(cell), str(file)]
            ranks.append(subprocess.Popen(command, env=os.environ | ranked))
        if any([rank.wait() for rank in ranks]):
            raise RuntimeError(f"{cell}: a rank failed")
        return json.loads(file.read_text())
    finally:
        for rank in ranks:
            rank.kill()
        subprocess.run([script, "down"], check=True)
        file.unlink(missing_ok=True)


def run(file: pathlib.Path, chosen: str, seconds: float) -> None:
    data: dict[str, Any] = {"kind": "netlab", "set_up": documents.machine(), "cells": {}}
    if file.exists():
        data = json.loads(file.read_text())
    wanted = {name: cell for name, cell in cells().items() if chosen in name}
    for index, (name, cell) in enumerate(wanted.items()):
        if name in data["cells"]:
            continue
        print(f"{time.strftime('%H:%M:%S')} {index + 1} of {len(wanted)}: {name}", flush=True)
        load = os.getloadavg()[0]
        data["cells"][name] = {**cell, "load": load, **measure(cell | {"seconds": seconds})}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(data) + "\n")
        part.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "report", "compare"])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--cells", default="", metavar="TEXT")
    parser.add_argument(
        "--seconds", type=float, default=170, help="of rounds per cell (%(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write docs/ in place of tables")
    given = parser.parse_args()
    if given.action == "run":
        run(given.file, given.cells, given.seconds)


if __name__ == "__main__":
    main()
