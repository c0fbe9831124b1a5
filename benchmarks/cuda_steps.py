"""Times training steps on one CUDA device under brigade's classes and torch's, in one run.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/cuda_steps.py

One rank over NCCL: what is measured is what wrapping costs, not communication. All contenders
take turns in one order per round, drawn at random. Printed are medians with quartiles: of a step,
from an idle device to an idle device; of the host, until backward has returned; and the peak of
the device's memory beside what it held before. Ratios are medians of paired ones.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_against_torch import shard
from turns import CLASSES, DDP_MODES, SHARDS, paired, quartiles, take_turns

WARM_UP_STEPS = 5
LOW = torch.bfloat16


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


# Name: width, blocks, vocabulary, batch, length. The small one's steps are the host's alone.
MODELS = {
    "GPT of 124 million": (768, 12, 50304, 8, 1024),
    "GPT of 48 narrow blocks": (128, 48, 512, 2, 64),
}


def make(name: str) -> nn.Module:
    width, num_blocks, vocabulary, _, _ = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Gpt(width, num_blocks, vocabulary)


def tokens_of(name: str) -> torch.Tensor:
    _, _, vocabulary, batch, length = MODELS[name]
    return torch.randint(vocabulary, (batch, length), device="cuda")


def data_parallel(name: str) -> dict[str, Callable[[], nn.Module]]:
    makers: dict[str, Callable[[], nn.Module]] = {"alone": lambda: make(name)}
    for mode, options in DDP_MODES.items():
        for kind, wrapper in CLASSES.items():
            makers[f"{kind}, {mode}"] = lambda w=wrapper, o=options: w(make(name), **o)
    return makers


def sharded(name: str) -> dict[str, Callable[[], nn.Module]]:
    makers: dict[str, Callable[[], nn.Module]] = {"alone": lambda: make(name).to(LOW)}
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for setting, reshards in (("reshard", True), ("keep", False)):
        for kind, function in SHARDS.items():
            makers[f"{kind}, {setting}"] = lambda f=function, r=reshards: shard(
                make(name), f, mp_policy=policy, reshard_after_forward=r
            )
    return makers


def step(model: nn.Module, tokens: torch.Tensor, casts: bool) -> tuple[float, float]:
    """Seconds of the host, and of all."""
    model.zero_grad()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.autocast("cuda", LOW, enabled=casts):
        loss = model(tokens).float().logsumexp(-1).mean()
    loss.backward()
    of_host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return of_host, time.perf_counter() - begin


def peak_mib(maker: Callable[[], nn.Module], tokens: torch.Tensor, casts: bool) -> float:
    """Of a model that is alone, from before it is made to its third step."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = maker()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step(model, tokens, casts)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    title: str,
    makers: dict[str, Callable[[], nn.Module]],
    tokens: torch.Tensor,
    rounds: int,
    casts: bool,
) -> None:
    peaks = {key: peak_mib(maker, tokens, casts) for key, maker in makers.items()}
    models = {key: maker() for key, maker in makers.items()}
    steps = {key: partial(step, model, tokens, casts) for key, model in models.items()}
    taken = take_turns(steps, rounds, WARM_UP_STEPS)
    print(f"\n{title}: ms, {rounds} rounds; MiB at the peak")
    print(f"{'':22}{'step':24}{'host':24}{'peak':>8}   ours / torch's: step, host")
    for key in models:
        of_host, of_all = (list(part) for part in zip(*taken[key], strict=True))
        all_ms, host_ms = (quartiles(seconds, 1e-3, 2) for seconds in (of_all, of_host))
        line = f"{key:22}{all_ms:24}{host_ms:24}{peaks[key]:8.0f}"
        torchs = taken.get(key.replace("brigade", "torch"), ())
        if key.startswith("brigade"):
            their_host, their_all = (list(part) for part in zip(*torchs, strict=True))
            ratio = statistics.median(paired(of_all, their_all))
            of_hosts = statistics.median(paired(of_host, their_host))
            line += f"   {ratio:.3f}, {of_hosts:.3f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_steps: needs a CUDA device, and torch sees none")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}")
    for name in arguments.models:
        tokens = tokens_of(name)
        measure(f"{name}, data parallel", data_parallel(name), tokens, arguments.rounds, True)
        gc.collect()
        measure(f"{name}, sharded", sharded(name), tokens, arguments.rounds, False)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
