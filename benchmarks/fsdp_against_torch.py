"""Step times of brigade's fully_shard, torch's fully_shard, and torch's DDP.

    PYTHONPATH=build/release/python .venv/bin/torchrun --standalone --nproc-per-node 2 \
        benchmarks/fsdp_against_torch.py

The model is a transformer of four blocks, each an FSDP unit. The contenders take turns in random
order. A step is forward and backward, timed on rank 0 after a barrier. Prints medians with
quartiles in ms, and paired ratios over torch's DDP and over torch's fully_shard with the same
setting. --json FILE stores the ratios.

--units: an MLP in 1 to 16 units with prefetch depths of 0 to 2: step time, memory, and
communication that computation does not hide.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import brigade

from turns import (
    SHARDS,
    compare,
    paired,
    quartiles,
    shard,
    shown,
    start,
    step_seconds,
    take_turns,
    time_steps,
    write_json,
)

SETTINGS = {"reshard": True, "keep": False}
# (number of units, prefetch depth)
DIVISIONS = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 0), (16, 1), (16, 2))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.first_norm(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, num_blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, width // 64) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Perceptron(nn.Module):
    """16 layers of 262,656 parameters each, in `num_blocks` blocks of equal size."""

    def __init__(self, num_blocks: int = 1, num_layers: int = 16, width: int = 512) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
        size = num_layers // num_blocks
        self.blocks = nn.ModuleList(
            [nn.Sequential(*layers[i : i + size]) for i in range(0, num_layers, size)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ratio(ours: list[float], theirs: list[float]) -> str:
    return quartiles(paired(ours, theirs), digits=3).strip()


def measure_steps(rounds: int) -> list[dict[str, Any]]:
    """Prints the step times and ratios; returns the ratios."""
    torch.manual_seed(0)
    tokens = torch.randint(512, (4, 64))
    make = partial(Gpt, width=256, num_blocks=4, vocabulary=512)
    contenders: dict[str, nn.Module] = {
        "alone": make(),
        "DDP": DistributedDataParallel(make()),
    }
    for kind, fully_shard in SHARDS.items():
        for setting, reshards in SETTINGS.items():
            contenders[f"{kind} {setting}"] = shard(
                make(), fully_shard, reshard_after_forward=reshards
            )
    seconds = time_steps(contenders, tokens, rounds)
    rows = []
    for setting in SETTINGS:
        ours = (setting, seconds[f"brigade {setting}"])
        for theirs in (f"torch {setting}", "DDP"):
            name = theirs.replace("torch", "torch,").replace("DDP", "torch's DDP")
            rows.append(compare("sharded transformer", ours, (name, seconds[theirs])))
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in contenders["alone"].parameters())
        print(f"\ntransformer of 4 blocks, {count / 1e6:.1f} million parameters; {rounds} rounds")
        for name, taken in seconds.items():
            print(f"{name:16}{quartiles(taken, 1e-3)} ms")
        for row in rows:
            print(f"{row['ours']:8}over {row['theirs']:15}{shown(row['ratio'], 3)}")
    return rows


def measure_units(rounds: int) -> None:
    """Prints the step time, peak memory and waits of each division into units."""
    x = torch.rand(256, 512)
    ddp = DistributedDataParallel(Perceptron())
    models = {}
    for division in DIVISIONS:
        model = shard(Perceptron(division[0]), brigade.fully_shard, prefetch_depth=division[1])
        model.set_timeline_sample_rate(1)
        models[division] = model

    def step(model: nn.Module) -> tuple[float, int, int]:
        """Returns seconds, and ns of waits for all-gathers and for reduce-scatters."""
        seconds = step_seconds(model, x)
        timeline = model.sharding_timeline()
        reduced = sum(timeline.exposed_ns(index) for index in range(len(timeline.reductions)))
        return seconds, sum(gather.exposed_ns for gather in timeline.gathers), reduced

    steps = {division: partial(step, model) for division, model in models.items()}
    taken = take_turns({"DDP": lambda: (step_seconds(ddp, x), 0, 0), **steps}, rounds)
    if dist.get_rank() != 0:
        return
    columns = {
        key: [list(column) for column in zip(*rows, strict=True)] for key, rows in taken.items()
    }
    size = sum(p.nbytes for p in ddp.parameters()) / 2**20
    print(f"\nMLP of 16 layers, {size:.1f} MiB of parameters; {rounds} rounds")
    print(f"DDP: {quartiles(columns['DDP'][0], 1e-3)} ms")
    print(f"units depth {'over DDP':24}{'MiB':>6}  {'all-gather wait ms':26}reduce-scatter wait ms")
    for division, model in models.items():
        seconds, gathers, reduced = columns[division]
        peak = model.sharding_statistics()["peak_buffer_bytes"] / 2**20
        print(
            f"{division[0]:5} {division[1]:5} {ratio(seconds, columns['DDP'][0]):24}{peak:6.1f}  "
            f"{quartiles(gathers, 1e6):26}{quartiles(reduced, 1e6)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--units", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="file for all comparisons (not of --units)")
    arguments = parser.parse_args()
    start()
    if arguments.units:
        measure_units(arguments.rounds)
    else:
        write_json(arguments.json, measure_steps(arguments.rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
