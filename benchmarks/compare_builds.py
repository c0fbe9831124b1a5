"""Step times of two builds of brigade, in turns.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/compare_builds.py OTHER/python

OTHER/python is the package of another build. Each build has two processes, which train over Gloo
in turns with the other's. Prints quartiles in ms, and of the paired ratios of this to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from turns import CLASSES, SHARDS, paired, quartiles, shard, take_turns

ROUND_S = 0.2  # of one model and build


class Products(nn.Module):
    """y = y * p for each parameter p, so that a step is nearly all overhead."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def linear(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def transformer() -> nn.Sequential:
    make = partial(nn.TransformerEncoderLayer, 256, 4, 1024, 0.0, batch_first=True)
    return nn.Sequential(*(make() for _ in range(4)))


def seconds(model: nn.Module, x: torch.Tensor, steps: int) -> float:
    """Returns the seconds of a forward and a backward."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
    return (time.perf_counter() - begin) / steps


def train() -> None:
    """Runs the model that each line of the input names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp, sharded = CLASSES["brigade"], partial(shard, fully_shard=SHARDS["brigade"])
    models = {
        "DDP, 4 layers of 64": (ddp(linear(4, 64)), torch.ones(32, 64)),
        "DDP, 1,000 parameters of 4": (ddp(Products(1000)), torch.ones(4)),
        "DDP, 6 layers of 512": (ddp(linear(6, 512)), torch.ones(64, 512)),
        "DDP, transformer of 256": (ddp(transformer()), torch.ones(4, 64, 256)),
        "sharded, 16 units of 8": (sharded(linear(16, 8)), torch.ones(4, 8)),
        "sharded, 6 units of 512": (sharded(linear(6, 512)), torch.ones(64, 512)),
        "sharded, transformer of 256": (sharded(transformer()), torch.ones(4, 64, 256)),
    }
    counts = {}
    for name, (model, x) in models.items():
        seconds(model, x, 5)
        counts[name] = torch.tensor(max(1, int(ROUND_S / seconds(model, x, 3))))
        dist.broadcast(counts[name], 0)
    print(json.dumps(list(models)), flush=True)
    for line in sys.stdin:
        name = line.strip()
        print(seconds(*models[name], counts[name].item()), flush=True)
    dist.destroy_process_group()


class Build:
    def __init__(self, package: str, port: int) -> None:
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        env = os.environ | ranks | quiet | {"PYTHONPATH": package}
        start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [sys.executable, __file__, "--train", package]
        self.processes = [start(command, env=env | {"RANK": str(rank)}) for rank in range(2)]
        self.names = self.answer()

    def answer(self) -> Any:
        """Returns rank 0's next line of output."""
        lines = [json.loads(process.stdout.readline()) for process in self.processes]
        return lines[0]

    def run(self, name: str) -> float:
        """Returns the seconds of a step on rank 0."""
        for process in self.processes:
            print(name, file=process.stdin, flush=True)
        return self.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="folder of the other build's package")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        return train()
    builds = {"other": Build(given.package, 29711), "this": Build(os.environ["PYTHONPATH"], 29712)}
    for name in builds["this"].names:
        steps = {key: partial(build.run, name) for key, build in builds.items()}
        taken = take_turns(steps, given.rounds, warm_up=1)
        times = "  ".join(f"{key} {quartiles(taken[key], 1e-3, 2)}" for key in taken)
        print(f"{name:28} {times}  ratio {quartiles(paired(taken['this'], taken['other']), 1, 3)}")
    for process in (process for build in builds.values() for process in build.processes):
        process.stdin.close()


if __name__ == "__main__":
    main()
