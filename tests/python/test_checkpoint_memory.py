"""Memory of full_state_dict() in addition to the model's, by the process's peak."""

import ctypes
import gc
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import run_ranks

UNITS = 8
UNIT_MIB = 8  # unsharded, in float32
MIB = 1 << 20
WHOLE_MIB = UNITS * UNIT_MIB
SLACK_MIB = 3  # for a call's own allocations

_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3

pytestmark = pytest.mark.skipif(
    not _CLEAR_REFS.exists(), reason="this system does not count a process's peak anew"
)


def _mib_of(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status).group(1)) / 1024


def _peak_mib(call):
    """Returns the peak memory of the process during `call`, less that before it."""
    gc.collect()
    _CLEAR_REFS.write_text("5")
    before = _mib_of("VmRSS")
    call()
    return _mib_of("VmHWM") - before


class _Quarters(nn.Module):
    def __init__(self):
        super().__init__()
        numel = UNIT_MIB * MIB // 4
        self.weights = nn.ParameterList([torch.ones(numel // 4 // 512, 512) for _ in range(4)])

    def forward(self, x):
        return x * sum(weight[0, 0] for weight in self.weights)


def _model():
    # Returns freed memory to the system, so that it does not hide later allocations.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    model = nn.Sequential()
    for _ in range(UNITS):
        model.append(brigade.fully_shard(_Quarters()))
    return brigade.fully_shard(model)


def _keeps_on_rank_0(rank):
    model = _model()
    model.full_state_dict(rank0_only=True)
    dist.barrier()
    return _peak_mib(lambda: model.full_state_dict(rank0_only=True))


def test_only_rank_0_holds_more_than_a_few_unsharded_units():
    first, second = run_ranks(_keeps_on_rank_0)
    print(f"{first:.1f}, {second:.1f} MiB")
    assert first >= WHOLE_MIB - SLACK_MIB
    assert second <= 3 * UNIT_MIB + SLACK_MIB
