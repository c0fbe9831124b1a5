"""CPU overhead of an FSDP unit under brigade's and torch's fully_shard.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/unit_cost.py

50 units of 8 small parameters in one process, over torch's "fake" process group of two ranks,
whose collectives return at once. The sharded models and the unwrapped model take turns in random
order. Prints medians with quartiles of the CPU time above the unwrapped model's, in us per unit
and step: for forward and backward, and for an SGD step with zero_grad().
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from turns import SHARDS, over, quartiles, shard, start, take_turns


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


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[float]:
    """Returns CPU seconds of forward and backward, and of the optimizer."""
    begin = time.process_time()
    model(x).sum().backward()
    middle = time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    return [middle - begin, time.process_time() - middle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    start("fake", store=FakeStore(), rank=0, world_size=2)
    models = {"alone": SmallUnits(arguments.units)}
    for name, fully_shard in SHARDS.items():
        models[name] = shard(SmallUnits(arguments.units), fully_shard)
    x = torch.rand(4, 16)
    steps = {
        name: partial(step, model, torch.optim.SGD(model.parameters(), lr=0.0), x)
        for name, model in models.items()
    }
    seconds = take_turns(steps, arguments.rounds, warm_up=10)
    unit = arguments.units * 1e-6
    print(f"{arguments.units} units of 8 parameters, {arguments.rounds} rounds; us per unit")
    for index, label in enumerate(("forward and backward", "optimizer")):
        print(f"\n{label}")
        taken = {name: [times[index] for times in rounds] for name, rounds in seconds.items()}
        print(f"{'alone':10}{quartiles(taken['alone'], unit)}")
        for name in SHARDS:
            print(f"{name:10}{quartiles(over(taken[name], taken['alone']), unit)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
