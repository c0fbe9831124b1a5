"""What a sharded unit costs from Python beside its computation and the network.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/unit_cost.py

50 units of 8 small parameters in one process, over torch's "fake" group of two ranks, which
answers at once: brigade's fully_shard and torch's. They take turns with the model alone, in
an order drawn at random in each round.
Printed are medians with quartiles of what each takes more than the model alone in the same
round, in us of processor time per unit and step: of forward and backward, and of an
optimizer's step (SGD) with zero_grad().
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import brigade

from fsdp_against_torch import shard
from turns import over, quartiles, take_turns

WORLD_SIZE = 2
PASSES = ("forward and backward", "optimizer")


class SmallUnit(nn.Module):
    """8 parameters of 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16)) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class SmallUnits(nn.Module):
    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SmallUnit() for _ in range(num_units)])
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain


class Contender:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(self, x: torch.Tensor) -> list[float]:
        """Seconds of processor time, by pass."""
        begin = time.process_time()
        self.model(x).sum().backward()
        middle = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [middle - begin, time.process_time() - middle]


def make_contenders(num_units: int) -> dict[str, Contender]:
    models = {
        "alone": SmallUnits(num_units),
        "brigade": shard(SmallUnits(num_units), brigade.fully_shard),
        "torch": shard(SmallUnits(num_units), torch_fully_shard),
    }
    return {name: Contender(model) for name, model in models.items()}


def measure(num_units: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds by contender, round and pass."""
    x = torch.rand(4, 16)
    contenders = make_contenders(num_units)
    return take_turns({name: partial(c.step, x) for name, c in contenders.items()}, rounds, 10)


def show(seconds: dict[str, list[list[float]]], num_units: int) -> None:
    alone = seconds.pop("alone")
    for index, of_pass in enumerate(PASSES):
        plain = [taken[index] for taken in alone]
        print(f"\n{of_pass}\n{'alone':10}{quartiles(plain, num_units * 1e-6)}")
        for name, rounds in seconds.items():
            extra = over([taken[index] for taken in rounds], plain)
            print(f"{name:10}{quartiles(extra, num_units * 1e-6)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    print(
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
        f"{arguments.units} units of 8 parameters, {arguments.rounds} rounds; us per unit"
    )
    show(measure(arguments.units, arguments.rounds), arguments.units)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
