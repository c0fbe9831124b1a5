"""Step times of brigade's fully_shard, torch's fully_shard, and torch's DDP.

    PYTHONPATH=build/release/python .venv/bin/torchrun --standalone --nproc-per-node 2 \
        benchmarks/fsdp_against_torch.py

The model is a transformer of four blocks, each an FSDP unit. The contenders take turns in random
order. A step is forward and backward, timed on rank 0 after a barrier. Prints medians with
quartiles in ms, and paired ratios over torch's DDP and over torch's fully_shard with the same
setting. --json FILE stores the ratios.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from turns import SHARDS, compare, quartiles, report, shard, start, time_steps

SETTINGS = {"reshard": True, "keep": False}


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


def measure_steps(rounds: int) -> list[dict[str, Any]]:
    """Prints the step times; returns the comparisons."""
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
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="file for all comparisons")
    arguments = parser.parse_args()
    start()
    report(measure_steps(arguments.rounds), arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
