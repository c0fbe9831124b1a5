"""Arguments of fully_shard that are wrong on one rank alone: an error on all, at once."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import brigade

from ranks import run_ranks

# So that a rank which is not told fails.
DEADLINE_S = 60

ARGUMENTS = {
    "reshard_after_forward": (7, ValueError),
    "offload_policy": (CPUOffloadPolicy(), NotImplementedError),
    "comm_hook": (print, NotImplementedError),
}


def _wrong_argument(rank, name):
    value, error = ARGUMENTS[name]
    if rank == 1:
        with pytest.raises(error, match=name.replace("_", ".")):
            brigade.fully_shard(nn.Linear(4, 4), **{name: value})
        # Its program ends here, or goes on to something else, of which the others are told.
        dist.barrier()
        return ""
    with pytest.raises((ValueError, RuntimeError)) as told:
        brigade.fully_shard(nn.Linear(4, 4))
    dist.barrier()
    return str(told.value)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_wrong_on_one_rank_alone(name):
    told = run_ranks(_wrong_argument, name, timeout_s=10, deadline_s=DEADLINE_S)[0]
    assert f"rank 1: {ARGUMENTS[name][1].__name__}: " in told, told


def _module_twice(rank):
    layer = nn.Linear(4, 4)
    with pytest.raises((ValueError, RuntimeError)) as told:
        brigade.fully_shard([layer, layer] if rank == 1 else layer)
    return str(told.value)


def test_a_list_that_is_wrong_on_one_rank_alone():
    told = run_ranks(_module_twice, timeout_s=10, deadline_s=DEADLINE_S)[0]
    assert "rank 1: ValueError: " in told, told
