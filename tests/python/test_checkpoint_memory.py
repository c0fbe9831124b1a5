"""How much memory saving and loading take beside the model: by the process's own peak."""

import ctypes
import functools
import gc
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks, run_ranks

UNITS = 8
UNIT_MIB = 8  # whole, in float32
MIB = 1 << 20
WHOLE_MIB = UNITS * UNIT_MIB
PART_MIB = WHOLE_MIB // 2  # of each of two ranks
SLACK_MIB = 3  # of what a call has for itself

_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3

pytestmark = pytest.mark.skipif(
    not _CLEAR_REFS.exists(), reason="this system does not count a process's peak anew"
)


def _mib_of(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status).group(1)) / 1024


def _peak_mib(call):
    """How far the process grows in it, at most, beyond what it has before."""
    gc.collect()
    _CLEAR_REFS.write_text("5")
    before = _mib_of("VmRSS")
    call()
    return _mib_of("VmHWM") - before


class _Quarters(nn.Module):
    """A unit of four parameters, of which each of two ranks has two."""

    def __init__(self):
        super().__init__()
        numel = UNIT_MIB * MIB // 4
        self.weights = nn.ParameterList([torch.ones(numel // 4 // 512, 512) for _ in range(4)])

    def forward(self, x):
        return x * sum(weight[0, 0] for weight in self.weights)


def _model():
    # What is freed goes back to the system, and does not hide what is allocated later.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    model = nn.Sequential()
    for _ in range(UNITS):
        model.append(brigade.fully_shard(_Quarters()))
    return brigade.fully_shard(model)


def _stepped(model):
    """Its optimizer holds as much as the parameters of this rank, once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@on_ranks()
def test_a_checkpoint_takes_little_beside_the_model(rank, tmp_path):
    """Those of safetensors: tests/checkpoint.

    torch's writer copies what lies in one storage with others, and keeps the copies. What is
    loaded is held beside what this rank has: a damaged file is to change nothing.
    """
    model = _model()
    optimizer = _stepped(model)
    model.full_state_dict(rank0_only=True)
    brigade.save_checkpoint(
        tmp_path / "first", model
    )  # connections, code, and what else is made once
    for num_parts, given in ((1, None), (2, optimizer)):
        path = tmp_path / str(num_parts)
        for call, most in (
            (brigade.save_checkpoint, PART_MIB + UNIT_MIB),
            (brigade.load_checkpoint, (num_parts * PART_MIB) + 2 * UNIT_MIB),
        ):
            dist.barrier()
            peak = _peak_mib(functools.partial(call, path, model, given))
            assert peak <= most + SLACK_MIB, (call, num_parts)


def _keeps_on_rank_0(rank):
    model = _model()
    model.full_state_dict(rank0_only=True)
    dist.barrier()
    return _peak_mib(lambda: model.full_state_dict(rank0_only=True))


def test_ranks_that_keep_nothing_of_a_state_have_few_units_at_once():
    first, second = run_ranks(_keeps_on_rank_0)
    print(f"{first:.1f}, {second:.1f} MiB")
    assert first >= WHOLE_MIB - SLACK_MIB
    assert second <= 3 * UNIT_MIB + SLACK_MIB
