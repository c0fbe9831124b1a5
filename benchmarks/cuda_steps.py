"""Step times of brigade's and torch's DDP and FSDP on one CUDA device.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/cuda_steps.py
    torchrun --standalone --nproc-per-node 2 benchmarks/cuda_steps.py --models narrow [--trace FILE]

One rank over NCCL measures the overhead of wrapping without communication. Several ranks share
the device: NCCL allows this only between hosts, so each rank sets its own NCCL_HOSTID and they
communicate over loopback sockets. Bandwidth is then not realistic; order and overlap are.

The contenders take turns in random order. Rank 0 prints medians with quartiles: the step, from
idle device to idle device; the host, until backward returns; the peak of additional device
memory; the operations of matrix products per second, and their share of the device's peak (MFU);
and the last loss, which must equal torch's. Ratios are medians of paired ratios. --trace
writes a profile of a sharded step, which shows all-gathers during computation.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode

from fsdp_against_torch import Gpt
from turns import CLASSES, DDP_MODES, SHARDS, paired, quartiles, shard, start, take_turns

WARM_UP_STEPS = 5
LOW = torch.bfloat16
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989}  # of LOW, dense: NVIDIA's data sheets

Makers = dict[str, Callable[[], nn.Module]]


# Name: width, blocks, vocabulary size, batch size, sequence length of a GPT. Steps of the narrow
# one are limited by the host.
MODELS = {
    "124 million": (768, 12, 50304, 8, 1024),
    "narrow": (128, 48, 512, 2, 64),
}


def make(name: str) -> nn.Module:
    width, num_blocks, vocabulary, _, _ = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Gpt(width, num_blocks, vocabulary)


def tokens_of(name: str) -> torch.Tensor:
    _, _, vocabulary, batch, length = MODELS[name]
    return torch.randint(vocabulary, (batch, length), device="cuda")


def data_parallel(name: str) -> Makers:
    makers: Makers = {"alone": lambda: make(name)}
    for mode, options in DDP_MODES.items():
        for kind, wrapper in CLASSES.items():
            makers[f"{kind}, {mode}"] = lambda w=wrapper, o=options: w(make(name), **o)
    return makers


def sharded(name: str) -> Makers:
    makers: Makers = {"alone": lambda: make(name).to(LOW)}
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for setting, reshards in (("reshard", True), ("keep", False)):
        for kind, function in SHARDS.items():
            makers[f"{kind}, {setting}"] = lambda f=function, r=reshards: shard(
                make(name), f, mp_policy=policy, reshard_after_forward=r
            )
    return makers


class Contender:
    """A model and its optimizer. The optimizer's step is not timed."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, casts: bool) -> None:
        self.model, self.tokens, self.casts = model, tokens, casts
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.loss = torch.zeros(())

    def step(self) -> tuple[float, float]:
        """Returns seconds until backward returns, and until the device is idle."""
        self.model.zero_grad()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", LOW, enabled=self.casts):
            loss = self.model(self.tokens).float().logsumexp(-1).mean()
        loss.backward()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        total = time.perf_counter() - begin
        self.optimizer.step()
        self.loss = loss.detach()
        return host, total


def peak_mib(maker: Callable[[], nn.Module], tokens: torch.Tensor, casts: bool) -> float:
    """Returns the device memory of one model in its third step, in MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    contender = Contender(maker(), tokens, casts)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        contender.step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    title: str, makers: Makers, tokens: torch.Tensor, rounds: int, casts: bool
) -> dict[str, Contender]:
    peaks = {key: peak_mib(maker, tokens, casts) for key, maker in makers.items()}
    with FlopCounterMode(display=False) as counter:
        Contender(makers["alone"](), tokens, casts).step()
    tflop = 1e-12 * counter.get_total_flops()
    contenders = {key: Contender(maker(), tokens, casts) for key, maker in makers.items()}
    taken = take_turns({key: c.step for key, c in contenders.items()}, rounds, WARM_UP_STEPS)
    if dist.get_rank() != 0:
        return contenders
    device = torch.cuda.get_device_name()
    peak = next((value for key, value in PEAK_TFLOPS.items() if key in device), math.nan)
    print(f"\n{title}: {rounds} rounds")
    print(
        f"{'':22}{'step ms':24}{'host ms':24}{'peak MiB':>8}{'TFLOPS':>8}{'MFU':>6}{'loss':>11}"
        "   brigade / torch: step, host"
    )
    columns = {key: [list(part) for part in zip(*rows, strict=True)] for key, rows in taken.items()}
    for key, (host, total) in columns.items():
        total_ms, host_ms = (quartiles(seconds, 1e-3, 2) for seconds in (total, host))
        loss = contenders[key].loss.item()
        tflops = tflop / statistics.median(total)
        line = f"{key:22}{total_ms:24}{host_ms:24}{peaks[key]:8.0f}"
        line += f"{tflops:8.1f}{tflops / peak:6.2f}{loss:11.6f}"
        if key.startswith("brigade"):
            torch_host, torch_total = columns[key.replace("brigade", "torch")]
            total_ratio = statistics.median(paired(total, torch_total))
            host_ratio = statistics.median(paired(host, torch_host))
            line += f"   {total_ratio:.3f}, {host_ratio:.3f}"
        print(line, flush=True)
    return contenders


def write_trace(contender: Contender, path: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        contender.step()
    if dist.get_rank() == 0:
        profile.export_chrome_trace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--trace")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_steps: torch found no CUDA device")
    os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ.get('RANK', 0)}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    torch.cuda.set_device(0)
    start("nccl")
    torch.manual_seed(dist.get_rank())
    for name in arguments.models:
        tokens = tokens_of(name)
        measure(f"{name}, data parallel", data_parallel(name), tokens, arguments.rounds, True)
        gc.collect()
        found = measure(f"{name}, sharded", sharded(name), tokens, arguments.rounds, False)
        if arguments.trace:
            write_trace(found["brigade, reshard"], arguments.trace)
        del found
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
