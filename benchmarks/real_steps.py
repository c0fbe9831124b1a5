"""Step times of realistic models under brigade's and torch's DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 benchmarks/real_steps.py

Each class trains with four bucket caps; "alone" trains without DDP. The contenders take turns in
random order. A step is forward and backward, timed on rank 0 after a barrier. Prints medians with
quartiles in ms, and medians of paired ratios:

    default       brigade with its default cap over torch with its fastest cap
    fastest       brigade with its fastest cap over torch with its fastest cap
    reproducible  brigade with reproducible=True over its default

Tiny models follow, whose steps are nearly all latency, in each DDP mode.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import brigade

from turns import CLASSES, DDP_MODES, over, paired, quartiles, start, time_steps

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


def make_mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(7) for layer in (nn.Linear(925, 925), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(128, 925)


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


MODELS = {"MLP": make_mlp, "ResNet-18": make_resnet18, "transformer": make_transformer}


def make_tiny(after_linear: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), after_linear())]
    return nn.Sequential(*layers), torch.randn(32, 64)


# Models of one small bucket.
TINY_MODELS = {
    "MLP": partial(make_tiny, nn.ReLU),
    "with batch norm": partial(make_tiny, partial(nn.BatchNorm1d, 64)),
}


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(paired(ours, theirs))


def measure_tiny(name: str, rounds: int) -> None:
    """Prints brigade's and torch's times of steps of about a millisecond."""
    contenders = {
        (kind, mode): wrapper(TINY_MODELS[name]()[0], **options)
        for mode, options in DDP_MODES.items()
        for kind, wrapper in CLASSES.items()
    }
    seconds = time_steps(contenders, TINY_MODELS[name]()[1], rounds)
    if dist.get_rank() != 0:
        return
    print(f"\ntiny, {name}: us per step, {rounds} rounds; paired differences, brigade - torch")
    for mode in DDP_MODES:
        ours, theirs = seconds["brigade", mode], seconds["torch", mode]
        print(
            f"{mode:14}torch {1e6 * statistics.median(theirs):7.0f}   brigade "
            f"{1e6 * statistics.median(ours):7.0f}   difference "
            f"{quartiles(over(ours, theirs), 1e-6, 0)}   ratio {median_ratio(ours, theirs):.3f}"
        )


def measure(name: str, rounds: int) -> dict[str, float]:
    """Prints one model's step times and ratios; returns the ratios."""
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
    default = seconds["brigade", DEFAULT_CAP_MIB]
    ratios = {
        "default": median_ratio(default, best["torch"]),
        "fastest": median_ratio(best["brigade"], best["torch"]),
        "reproducible": median_ratio(seconds["reproducible", DEFAULT_CAP_MIB], default),
    }
    if dist.get_rank() == 0:
        size = sum(p.nbytes for p in module.parameters()) / 1e6
        count = sum(1 for _ in module.parameters())
        print(f"\n{name}: {count} parameters, {size:.0f} MB; ms per step, {rounds} rounds")
        for (kind, cap), times in seconds.items():
            print(f"{kind:14}{cap:4} MiB {quartiles(times, 1e-3)}")
        print(f"ratios: {shown(ratios)}")
    return ratios


def shown(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tiny-rounds", type=int, default=300)
    parser.add_argument("--tiny", nargs="*", default=list(TINY_MODELS), choices=TINY_MODELS)
    arguments = parser.parse_args()
    is_first = start()
    found = [measure(name, arguments.rounds) for name in arguments.models]
    for name in arguments.tiny:
        measure_tiny(name, arguments.tiny_rounds)
    if is_first and found:
        means = {key: statistics.geometric_mean(r[key] for r in found) for key in found[0]}
        print(f"geometric means: {shown(means)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
