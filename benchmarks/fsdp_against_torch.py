"""Times sharded training steps under brigade's fully_shard, torch's, and torch's DDP, in one run.

    PYTHONPATH=build/release/python .venv/bin/torchrun --standalone --nproc-per-node 2 \
        benchmarks/fsdp_against_torch.py

A transformer of four blocks, each a unit. All contenders take turns in one order per round,
drawn at random; a step is forward and backward, timed on rank 0 between barriers. Printed are
medians with quartiles in ms, and medians of paired ratios over torch's DDP and over torch's
fully_shard with the same setting.

--unit-sizes: an MLP in 1 to 16 units, time against memory. --prefetch: gathers that begin 0, 1
and 2 units ahead, and what of the communication computation has not covered.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import brigade

from turns import SHARDS, paired, quartiles, take_turns

SETTINGS = {"reshard": True, "keep": False}
UNIT_COUNTS = (1, 2, 4, 8, 16)
PREFETCH_DEPTHS = (0, 1, 2)


class TransformerBlock(nn.Module):
    """Attention and an MLP, of 0.8 million parameters at a width of 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.second_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second_norm(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 256, num_blocks: int = 4, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([TransformerBlock(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceptron(nn.Module):
    """16 layers of a quarter of a million parameters, in blocks of equally many."""

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


def shard(model: nn.Module, fully_shard: Callable, **arguments: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments)


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - begin


def seconds_of(contenders: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> dict:
    steps = {name: partial(step_seconds, model, x) for name, model in contenders.items()}
    return take_turns(steps, rounds)


def ratio(ours: list[float], theirs: list[float]) -> str:
    return quartiles(paired(ours, theirs), digits=3).strip()


def measure_steps(rounds: int) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(512, (4, 64))
    contenders: dict[str, nn.Module] = {
        "alone": Transformer(),
        "DDP": DistributedDataParallel(Transformer()),
    }
    for kind, fully_shard in SHARDS.items():
        for setting, reshards in SETTINGS.items():
            contenders[f"{kind} {setting}"] = shard(
                Transformer(), fully_shard, reshard_after_forward=reshards
            )
    seconds = seconds_of(contenders, tokens, rounds)
    if dist.get_rank() != 0:
        return
    count = sum(p.numel() for p in contenders["alone"].parameters())
    print(f"\ntransformer of 4 blocks, {count / 1e6:.1f} million parameters; ms, {rounds} rounds")
    for name, taken in seconds.items():
        over = "" if name in ("alone", "DDP") else f"   over DDP {ratio(taken, seconds['DDP'])}"
        if name.startswith("brigade"):
            theirs = seconds[name.replace("brigade", "torch")]
            over += f"   over torch's {ratio(taken, theirs)}"
        print(f"{name:16}{quartiles(taken, 1e-3)}{over}")


def measure_unit_sizes(rounds: int) -> None:
    x = torch.rand(64, 512)
    contenders: dict[str, nn.Module] = {"DDP": DistributedDataParallel(Perceptron())}
    for count in UNIT_COUNTS:
        contenders[str(count)] = shard(Perceptron(count), brigade.fully_shard)
    seconds = seconds_of(contenders, x, rounds)
    if dist.get_rank() != 0:
        return
    whole = sum(p.numel() * p.element_size() for p in contenders["DDP"].parameters())
    print(f"\nMLP of 16 layers, {whole / 2**20:.1f} MiB of parameters; {rounds} rounds")
    print(f"{'units':6}{'over DDP':24}{'MiB of whole units and gradients':>36}")
    for count in UNIT_COUNTS:
        taken = ratio(seconds[str(count)], seconds["DDP"])
        peak = contenders[str(count)].sharding_statistics()["peak_buffer_bytes"]
        print(f"{count:<6}{taken:24}{peak / 2**20:36.1f}")
    print(f"DDP: {quartiles(seconds['DDP'], 1e-3)} ms")


def measure_prefetch(rounds: int) -> None:
    x = torch.rand(256, 512)
    contenders: dict[str, nn.Module] = {"DDP": DistributedDataParallel(Perceptron())}
    for depth in PREFETCH_DEPTHS:
        sharded = shard(Perceptron(16), brigade.fully_shard, prefetch_depth=depth)
        sharded.set_timeline_sample_rate(1)
        contenders[str(depth)] = sharded
    waited: dict[str, list[float]] = {name: [] for name in contenders}
    behind: dict[str, list[float]] = {name: [] for name in contenders}

    def step(name: str) -> float:
        seconds = step_seconds(contenders[name], x)
        if name != "DDP":
            timeline = contenders[name].sharding_timeline()
            reductions = range(len(timeline.reductions))
            waited[name].append(sum(gather.exposed_ns for gather in timeline.gathers))
            behind[name].append(sum(timeline.exposed_ns(index) for index in reductions))
        return seconds

    seconds = take_turns({name: partial(step, name) for name in contenders}, rounds)
    if dist.get_rank() != 0:
        return
    print(f"\nMLP of 16 layers in 16 units, resharding; ms, {rounds} rounds")
    print(f"{'ahead':6}{'step':24}{'over 0 ahead':24}{'waits for gathers':24}sums behind backward")
    for depth in map(str, PREFETCH_DEPTHS):
        print(
            f"{depth:6}{quartiles(seconds[depth], 1e-3):24}{ratio(seconds[depth], seconds['0']):24}"
            f"{quartiles(waited[depth], 1e6):24}{quartiles(behind[depth], 1e6)}"
        )
    print(f"DDP: {quartiles(seconds['DDP'], 1e-3)} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--unit-sizes", action="store_true")
    parser.add_argument("--prefetch", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(
            f"torch {torch.__version__}, {dist.get_world_size()} ranks on {os.cpu_count()} "
            f"cores, load {os.getloadavg()[0]:.1f}"
        )
    if arguments.unit_sizes:
        measure_unit_sizes(arguments.rounds)
    elif arguments.prefetch:
        measure_prefetch(arguments.rounds)
    else:
        measure_steps(arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
