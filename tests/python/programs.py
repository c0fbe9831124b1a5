"""Runs interpreters that may end in any way, on two ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# Of the process group: a peer that is gone is known after so long.
TIMEOUT_S = 15
_DEADLINE_S = 300

# Both ranks train; rank 1 runs a line of its own in between.
_PROGRAM = f"""
import datetime, os, sys
import torch
import torch.distributed as dist
from torch import nn
import brigade

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + os.environ["BRIGADE_TEST_STORE"], rank=rank,
    world_size=2, timeout=datetime.timedelta(seconds={TIMEOUT_S}),
)
state, x = [None], torch.ones(2, 3)

def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    if state[0]:
        state[0]()
    return work.get_future().then(lambda done: done.value()[0])

def step():
    wrapped(x).sum().backward()

model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
wrapped = brigade.DistributedDataParallel(model, bucket_cap_mb=1e-5)
wrapped.register_comm_hook(state, hook)
step()
step()
dist.barrier()
if rank == 1:
    exec(os.environ["BRIGADE_TEST_LINE"])
else:
    step()
    step()
"""


@dataclasses.dataclass
class Ended:
    """How one rank's program ended."""

    code: int
    output: str


def run_programs(line: str) -> list[Ended]:
    """Trains on two ranks, of which rank 1 ends with `line`; returns how they ended.

    Raises:
        AssertionError: A rank was still running at the deadline, or died of a signal.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(line, rank, pathlib.Path(folder)) for rank in range(2)]
        deadline = time.monotonic() + _DEADLINE_S
        try:
            for rank, process in enumerate(ranks):
                try:
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise AssertionError(
                        f"rank {rank} still ran after {_DEADLINE_S} s:\n" + _output(folder, rank)
                    ) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        ended = [Ended(p.returncode, _output(folder, rank)) for rank, p in enumerate(ranks)]
    for rank, end in enumerate(ended):
        assert end.code >= 0, f"rank {rank} died of signal {-end.code}:\n{end.output}"
    return ended


def _start(line: str, rank: int, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "BRIGADE_TEST_LINE": line,
        "BRIGADE_TEST_STORE": str(folder / "store"),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",
    }
    with open(folder / f"output_{rank}", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _output(folder: str, rank: int) -> str:
    return (pathlib.Path(folder) / f"output_{rank}").read_text(errors="replace")
