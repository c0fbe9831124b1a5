"""Calls on sharded parameters outside of forward and backward, and peak memory of a step.

    PYTHONPATH=build/release/python .venv/bin/torchrun --standalone --nproc-per-node 2 \
        benchmarks/sharded_calls.py

Each of 26 linear layers is an FSDP unit: 51 parameters. Calls are timed on rank 0 after a barrier.
`plain` are tensors of the shards' sizes. Memory is the growth of the resident memory over four
steps of an MLP, in new processes. Contenders take turns. Prints medians and paired ratios as CSV.
--json FILE stores them.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from turns import SHARDS, paired, quartiles, shard, start, take_turns


def trained(width: int) -> dict[str, list[nn.Parameter]]:
    """Returns parameters with gradients, by contender."""
    parameters = {}
    for name, fully_shard in SHARDS.items():
        model = nn.Sequential(*(nn.Linear(width, width, bias=i > 0) for i in range(26)))
        shard(model, fully_shard)(torch.ones(2, width)).sum().backward()
        parameters[name] = list(model.parameters())
    parameters["plain"] = [nn.Parameter(p.to_local().clone()) for p in parameters["brigade"]]
    for plain, sharded in zip(parameters["plain"], parameters["brigade"], strict=True):
        plain.grad = sharded.grad.to_local().clone()
    return parameters


def clip(parameters: list[nn.Parameter]) -> None:
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    getattr(norm, "full_tensor", lambda: norm)().item()  # torch's is a DTensor


def microseconds(call: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def grown(name: str, reshards: bool) -> float:
    """Joins a group of its own. Returns the MiB that four steps add to this process."""
    torch.set_num_threads(1)
    rank, size, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port)
    store = dist.PrefixStore(f"call {store.add(f'calls of {rank}', 1)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    layers = [[nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)] for _ in range(6)]
    model = nn.Sequential(*(nn.Sequential(*each) for each in layers))
    shard(model, SHARDS[name], reshard_after_forward=reshards)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    peaks = []
    for _ in range(5):
        status = pathlib.Path("/proc/self/status").read_text()
        peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)
        optimizer.zero_grad()
        model(torch.ones(4, 512)).square().sum().backward()
        optimizer.step()
    dist.barrier()
    return peaks[-1] - peaks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    rounds, rows = given.rounds, []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as forks:
        for setting, reshards in {"reshard": True, "keep": False}.items():
            turns = {name: partial(forks.apply, grown, (name, reshards)) for name in SHARDS}
            taken = take_turns(turns, min(rounds, 5), warm_up=0)
            rows.append((f"MiB, step, {setting}", taken, "torch"))
    is_first = start()
    for width in (64, 256, 512):
        calls = {"AdamW.step()": (lambda ps: torch.optim.AdamW(ps).step, ("plain", "torch"))}
        if width == 64:
            calls["full_tensor()"] = (lambda ps: lambda: [p.full_tensor() for p in ps], ("torch",))
            calls["clip_grad_norm_().item()"] = (lambda ps: partial(clip, ps), ("torch",))
        models = trained(width)
        for label, (call, others) in calls.items():
            turns = {n: partial(microseconds, call(models[n])) for n in ("brigade", *others)}
            taken = take_turns(turns, rounds)
            rows += [(f"us, {label}, width {width}", taken, theirs) for theirs in others]
    table = [["call", "compared with", "brigade", "compared", "ratio"]]
    for label, taken, theirs in rows:
        medians = [f"{statistics.median(taken[name]):.0f}" for name in ("brigade", theirs)]
        ratio = quartiles(paired(taken["brigade"], taken[theirs]), digits=2).strip()
        table.append([label, theirs, *medians, ratio])
    if is_first:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        if given.json:
            pathlib.Path(given.json).write_text(json.dumps({"table": table}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
