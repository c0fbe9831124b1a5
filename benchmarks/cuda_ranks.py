"""Steps of several ranks that share one CUDA device over NCCL, under brigade's classes and torch's.

    torchrun --standalone --nproc-per-node 2 benchmarks/cuda_ranks.py [--trace FILE]

NCCL refuses two ranks on one device unless each says that it is on another host, so each rank
sets NCCL_HOSTID, and the ranks talk over sockets of the loopback device. Speed is not a network's;
order, overlap and errors are real. Classes take turns in one order per round, drawn at random,
the same on all ranks. Printed are medians with quartiles of a step on rank 0 and the peak of its
memory; losses must be equal to torch's. --trace writes a profile of one sharded step, in which
all-gathers lie under computation.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

RANK = int(os.environ["RANK"])
os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard as torch_fully_shard  # noqa: E402

import brigade  # noqa: E402

WARM_UP_STEPS = 3


def make_block(width: int) -> nn.Sequential:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)


def make_net(width: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(make_block(width) for _ in range(num_blocks))).cuda()


def sharded(shard: Callable, net: nn.Sequential) -> nn.Module:
    for block in net:
        shard(block)
    return shard(net)


class Contender:
    """A model under one class, its optimizer, and what its steps took."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak = 0

    def step(self, inputs: torch.Tensor) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trace")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    nets = {
        "brigade DDP": lambda net: brigade.DistributedDataParallel(net),
        "torch DDP": lambda net: nn.parallel.DistributedDataParallel(net),
        "brigade fully_shard": lambda net: sharded(brigade.fully_shard, net),
        "torch fully_shard": lambda net: sharded(torch_fully_shard, net),
    }
    contenders = []
    for name, wrap in nets.items():
        contenders.append(Contender(name, wrap(make_net(options.width, options.blocks))))
    order = random.Random(1)
    for number in range(WARM_UP_STEPS + options.rounds):
        torch.manual_seed(100 * number + RANK)
        inputs = torch.randn(512, options.width, device="cuda")
        for contender in order.sample(contenders, len(contenders)):
            contender.step(inputs)
    if RANK == 0:
        for contender in contenders:
            seconds = contender.seconds[WARM_UP_STEPS:]
            low, middle, high = statistics.quantiles(seconds, n=4)
            print(
                f"{contender.name:20} {1e3 * middle:7.1f} [{1e3 * low:.1f}, {1e3 * high:.1f}] ms, "
                f"peak {contender.peak / 2**20:.0f} MiB, last loss {contender.losses[-1]:.6f}"
            )
    if options.trace:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            contenders[2].step(inputs)
        if RANK == 0:
            profile.export_chrome_trace(options.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
