"""Times training steps of real shapes under brigade's class and torch's, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/real_steps.py

Each class trains with four bucket caps, and the same model alone shows what
communication adds. All take turns in one order per round, drawn at random; a
step is forward and backward, timed on rank 0 between barriers. Printed are
medians with quartiles, and the medians of paired ratios: brigade with its default
cap, and with its fastest, over the fastest of torch's, and what `reproducible` costs
with the default cap.  Tiny models follow, whose
steps are nearly all latency, in each mode.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import brigade

from turns import CLASSES, DDP_MODES, over, paired, quartiles, take_turns

CAPS_MIB = (1, 4, 25, 100)
DEFAULT_CAP_MIB = 25


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

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


def make_tiny_mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 64)


def make_tiny_normed() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
    return nn.Sequential(*layers), torch.randn(32, 64)


# Of one small bucket, so that a step is nearly all latency.
TINY_MODELS = {"MLP": make_tiny_mlp, "with batch norm": make_tiny_normed}


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - begin


def timed(contenders: dict, x: torch.Tensor) -> dict:
    return {key: partial(step_seconds, model, x) for key, model in contenders.items()}


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(paired(ours, theirs))


def measure_tiny(name: str, rounds: int) -> None:
    """Prints what brigade takes more than torch, of steps of about a millisecond."""
    contenders = {
        (kind, mode): wrapper(TINY_MODELS[name]()[0], **options)
        for mode, options in DDP_MODES.items()
        for kind, wrapper in CLASSES.items()
    }
    x = TINY_MODELS[name]()[1]
    seconds = take_turns(timed(contenders, x), rounds)
    if dist.get_rank() != 0:
        return
    print(f"\ntiny, {name}: us per step, {rounds} rounds; brigade less torch, paired")
    for mode in DDP_MODES:
        ours, theirs = seconds["brigade", mode], seconds["torch", mode]
        print(
            f"{mode:14}torch {1e6 * statistics.median(theirs):7.0f}   brigade "
            f"{1e6 * statistics.median(ours):7.0f}   difference "
            f"{quartiles(over(ours, theirs), 1e-6, 0)}   ratio {paired_ratio(ours, theirs):.3f}"
        )


def measure(name: str, rounds: int) -> dict[str, float]:
    """The ratios of one model, by what of brigade is compared."""
    torch.manual_seed(dist.get_rank())
    contenders: dict[tuple[str, int], nn.Module] = {}
    module, x = MODELS[name]()
    contenders["alone", 0] = module
    for cap in CAPS_MIB:
        for kind, wrapper in CLASSES.items():
            contenders[kind, cap] = wrapper(MODELS[name]()[0], bucket_cap_mb=cap)
    contenders["reproducible", DEFAULT_CAP_MIB] = brigade.DistributedDataParallel(
        MODELS[name]()[0], bucket_cap_mb=DEFAULT_CAP_MIB, reproducible=True
    )
    seconds = take_turns(timed(contenders, x), rounds)
    fastest = {
        kind: min(CAPS_MIB, key=lambda cap: statistics.median(seconds[kind, cap]))
        for kind in CLASSES
    }
    ratios = {
        what: paired_ratio(seconds["brigade", cap], seconds["torch", fastest["torch"]])
        for what, cap in (("default", DEFAULT_CAP_MIB), ("fastest", fastest["brigade"]))
    }
    ratios["reproducible"] = paired_ratio(
        seconds["reproducible", DEFAULT_CAP_MIB], seconds["brigade", DEFAULT_CAP_MIB]
    )
    if dist.get_rank() == 0:
        size = sum(p.nbytes for p in module.parameters()) / 1e6
        count = sum(1 for _ in module.parameters())
        print(f"\n{name}: {count} parameters, {size:.0f} MB; ms per step, {rounds} rounds")
        print(f"{'alone':12}{quartiles(seconds['alone', 0], 1e-3)}")
        for cap in CAPS_MIB:
            cells = "   ".join(f"{kind} {quartiles(seconds[kind, cap], 1e-3)}" for kind in CLASSES)
            print(f"{f'{cap} MiB':12}{cells}")
        print(f"brigade over torch's fastest ({fastest['torch']} MiB): ", end="")
        print(f"default {ratios['default']:.3f}, ", end="")
        print(f"fastest ({fastest['brigade']} MiB) {ratios['fastest']:.3f}")
        ordered = seconds["reproducible", DEFAULT_CAP_MIB]
        print(f"{'reproducible':12}{quartiles(ordered, 1e-3)}   ratio {ratios['reproducible']:.3f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tiny-rounds", type=int, default=300)
    parser.add_argument("--tiny", nargs="*", default=list(TINY_MODELS), choices=TINY_MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        ranks, cores = dist.get_world_size(), os.cpu_count()
        print(f"torch {torch.__version__}, {ranks} ranks on {cores} cores, ", end="")
        print(f"load {os.getloadavg()[0]:.1f}")
    found = [measure(name, arguments.rounds) for name in arguments.models]
    for name in arguments.tiny:
        measure_tiny(name, arguments.tiny_rounds)
    if dist.get_rank() == 0 and found:
        for what in ("default", "fastest", "reproducible"):
            mean = math.exp(statistics.fmean(math.log(ratios[what]) for ratios in found))
            print(f"geometric mean, {what}: {mean:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
