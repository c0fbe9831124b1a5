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
import time

RANK = int(os.environ["RANK"])
os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from turns import CLASSES, SHARDS, quartiles, take_turns  # noqa: E402

WARM_UP_STEPS = 3


def make_block(width: int) -> nn.Sequential:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)


def make_net(width: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(make_block(width) for _ in range(num_blocks))).cuda()


def sharded(shard, net: nn.Sequential) -> nn.Module:
    for block in net:
        shard(block)
    return shard(net)


class Contender:
    """A model under one class, its optimizer, its losses and the peak of its memory."""

    def __init__(self, model: nn.Module, width: int) -> None:
        self.model = model
        self.width = width
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.losses: list[float] = []
        self.peak = 0

    def step(self) -> float:
        """Seconds. Each contender gets the same inputs in its n-th step."""
        torch.manual_seed(100 * len(self.losses) + RANK)
        inputs = torch.randn(512, self.width, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trace")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    contenders = {}
    for kind, wrapper in CLASSES.items():
        net = make_net(options.width, options.blocks)
        contenders[f"{kind} DDP"] = Contender(wrapper(net), options.width)
    for kind, shard in SHARDS.items():
        net = make_net(options.width, options.blocks)
        contenders[f"{kind} fully_shard"] = Contender(sharded(shard, net), options.width)
    steps = {name: contender.step for name, contender in contenders.items()}
    seconds = take_turns(steps, options.rounds, WARM_UP_STEPS)
    if RANK == 0:
        for name, contender in contenders.items():
            print(
                f"{name:20}{quartiles(seconds[name], 1e-3)} ms, "
                f"peak {contender.peak / 2**20:.0f} MiB, last loss {contender.losses[-1]:.6f}"
            )
    if options.trace:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            contenders["brigade fully_shard"].step()
        if RANK == 0:
            profile.export_chrome_trace(options.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
