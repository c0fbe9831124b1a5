"""Times training steps on one CUDA device under brigade's classes and torch's, in one run.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/cuda_steps.py
    torchrun --standalone --nproc-per-node 2 benchmarks/cuda_steps.py --models narrow [--trace FILE]

One rank over NCCL: the cost of wrapping, not of communication. Several ranks that share the
device: NCCL refuses them unless each says that it is on another host, so each rank sets
NCCL_HOSTID, and they talk over sockets of the loopback device. Speed is not a network's then;
order and overlap are real.

All contenders take turns in one order per round, drawn at random. Printed are medians with
quartiles of rank 0: of a step, from an idle device to an idle device; of the host, until backward
has returned; the peak of the device's memory beside what it held before; and the last loss, which
must be torch's. Ratios are medians of paired ones. --trace writes a profile of a sharded step, in
which all-gathers lie under computation.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_against_torch import Gpt
from turns import CLASSES, DDP_MODES, SHARDS, paired, quartiles, shard, start, take_turns

WARM_UP_STEPS = 5
LOW = torch.bfloat16

Makers = dict[str, Callable[[], nn.Module]]


# Name: width, blocks, vocabulary, batch, length: a GPT of 124 million parameters, and one of which
# the host's work is the limit.
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
    """A model and its optimizer, whose step is not timed."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, casts: bool) -> None:
        self.model, self.tokens, self.casts = model, tokens, casts
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.loss = torch.zeros(())

    def step(self) -> tuple[float, float]:
        """Seconds of the host, and of all."""
        self.model.zero_grad()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", LOW, enabled=self.casts):
            loss = self.model(self.tokens).float().logsumexp(-1).mean()
        loss.backward()
        of_host = time.perf_counter() - begin
        torch.cuda.synchronize()
        of_all = time.perf_counter() - begin
        self.optimizer.step()
        self.loss = loss.detach()
        return of_host, of_all


def peak_mib(maker: Callable[[], nn.Module], tokens: torch.Tensor, casts: bool) -> float:
    """Of a model that is alone, from before it is made to its third step."""
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
    contenders = {key: Contender(maker(), tokens, casts) for key, maker in makers.items()}
    taken = take_turns({key: c.step for key, c in contenders.items()}, rounds, WARM_UP_STEPS)
    if dist.get_rank() != 0:
        return contenders
    print(f"\n{title}: ms, {rounds} rounds; MiB at the peak")
    print(f"{'':22}{'step':24}{'host':24}{'peak':>8}{'loss':>11}   ours / torch's: step, host")
    columns = {key: [list(part) for part in zip(*rows, strict=True)] for key, rows in taken.items()}
    for key, (of_host, of_all) in columns.items():
        all_ms, host_ms = (quartiles(seconds, 1e-3, 2) for seconds in (of_all, of_host))
        loss = contenders[key].loss.item()
        line = f"{key:22}{all_ms:24}{host_ms:24}{peaks[key]:8.0f}{loss:11.6f}"
        if key.startswith("brigade"):
            their_host, their_all = columns[key.replace("brigade", "torch")]
            ratio = statistics.median(paired(of_all, their_all))
            of_hosts = statistics.median(paired(of_host, their_host))
            line += f"   {ratio:.3f}, {of_hosts:.3f}"
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
        raise SystemExit("cuda_steps: needs a CUDA device, and torch sees none")
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
