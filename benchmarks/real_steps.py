"""Step times of realistic models under brigade's and torch's DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 benchmarks/real_steps.py

Each class trains with four bucket caps; "alone" trains without DDP. The contenders take turns in
random order. A step is forward and backward, timed on rank 0 after a barrier. Prints medians with
quartiles in ms, and paired ratios:

    25 MiB cap    brigade with one cap of 25 MiB over torch with its fastest cap
    fastest cap   brigade with its fastest cap over torch with its fastest cap
    reproducible  brigade with reproducible=True over its default

Tiny models follow, whose steps are nearly all latency, in each DDP mode. --json FILE stores all
comparisons.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import brigade

from turns import CLASSES, DDP_MODES, compare, quartiles, report, start, time_steps

CAPS_MIB = (1, 4, 25, 100)
DEFAULT_CAP_MIB = 25


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def make_mlp(
    depth: int, width: int, batch: int, after_linear: Callable[[], nn.Module] = nn.ReLU
) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), after_linear())]
    return nn.Sequential(*layers), torch.randn(batch, width)


def make_resnet18() -> tuple[nn.Module, torch.Tensor]:
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels_in = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and channels > 64 else 1
            blocks.append(BasicBlock(channels_in, channels, stride))
            channels_in = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*blocks, *head), torch.randn(4, 3, 96, 96)


def make_transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(512, 1000))
    return model, torch.randn(2, 48, 512)


MODELS = {
    "MLP": partial(make_mlp, 7, 925, 128),
    "ResNet-18": make_resnet18,
    "transformer": make_transformer,
}
# Models of one small bucket.
TINY_MODELS = {
    "MLP": partial(make_mlp, 4, 64, 32),
    "MLP with batch norm": partial(make_mlp, 4, 64, 32, partial(nn.BatchNorm1d, 64)),
}
Rows = list[dict[str, Any]]


def measure_tiny(name: str, rounds: int) -> Rows:
    """Compares brigade's and torch's steps of about a millisecond."""
    contenders = {
        (kind, mode): wrapper(TINY_MODELS[name]()[0], **options)
        for mode, options in DDP_MODES.items()
        for kind, wrapper in CLASSES.items()
    }
    seconds = time_steps(contenders, TINY_MODELS[name]()[1], rounds)
    rows = []
    for mode in DDP_MODES:
        ours, theirs = (mode, seconds["brigade", mode]), (f"torch, {mode}", seconds["torch", mode])
        rows.append(compare(f"tiny {name}", ours, theirs))
    return rows


def measure(name: str, rounds: int) -> Rows:
    """Prints one model's step times; returns the comparisons."""
    torch.manual_seed(dist.get_rank())
    module, x = MODELS[name]()
    contenders: dict[tuple[str, int], nn.Module] = {("alone", 0): module}
    for cap in CAPS_MIB:
        for kind, wrapper in CLASSES.items():
            contenders[kind, cap] = wrapper(MODELS[name]()[0], bucket_cap_mb=cap)
    contenders["reproducible", DEFAULT_CAP_MIB] = brigade.DistributedDataParallel(
        MODELS[name]()[0], bucket_cap_mb=DEFAULT_CAP_MIB, reproducible=True
    )
    seconds = time_steps(contenders, x, rounds)
    best = {
        kind: min(
            (times for key, times in seconds.items() if key[0] == kind), key=statistics.median
        )
        for kind in CLASSES
    }
    default = ("25 MiB cap", seconds["brigade", DEFAULT_CAP_MIB])
    theirs = ("torch, fastest cap", best["torch"])
    rows = [
        compare(name, default, theirs),
        compare(name, ("fastest cap", best["brigade"]), theirs),
        compare(name, ("reproducible", seconds["reproducible", DEFAULT_CAP_MIB]), default),
    ]
    if dist.get_rank() == 0:
        size = sum(p.nbytes for p in module.parameters()) / 1e6
        count = sum(1 for _ in module.parameters())
        print(f"\n{name}: {count} parameters, {size:.0f} MB; ms per step, {rounds} rounds")
        for (kind, cap), times in seconds.items():
            print(f"{kind:14}{cap:4} MiB {quartiles(times, 1e-3)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tiny-rounds", type=int, default=300)
    parser.add_argument("--tiny", nargs="*", default=list(TINY_MODELS), choices=TINY_MODELS)
    parser.add_argument("--json", metavar="FILE", help="file for all comparisons")
    arguments = parser.parse_args()
    start()
    rows = [row for name in arguments.models for row in measure(name, arguments.rounds)]
    rows += [row for name in arguments.tiny for row in measure_tiny(name, arguments.tiny_rounds)]
    report(rows, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
