"""Two sharded models of one process train in turns; where one fails the other goes on exactly."""

import os
import signal

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import brigade

from exact_training import UserError
from ranks import on_ranks
from sharded_training import Pair

HOUR_S = 3600  # of the group: nobody may wait for that
DEADLINE_S = 60


def _pair(group=None, prefetch_depth=1):
    """Of some ranks."""
    group = group or dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    return Pair(group.rank(), world_size=group.size(), mesh=mesh, prefetch_depth=prefetch_depth)


def _raises(*_):
    raise UserError("no such batch")


def _in_backward(module):
    return module.register_forward_hook(
        lambda module, args, output: output.register_hook(_raises) and None
    )


def _in_forward(module):
    return module.register_forward_pre_hook(_raises)


def _fails_in_turns(rank, in_place, is_of_one_group):
    """The first fails on the last rank between steps of the second."""
    groups = [None if is_of_one_group else dist.new_group() for _ in range(2)]
    first, second = (_pair(group) for group in groups)
    failing = rank == dist.get_world_size() - 1
    for step in range(4):
        first.expect_step(step)
        second.expect_step(step)
        if step % 2 == 0:
            if failing:
                handle = in_place(first.model.blocks[1])
            with pytest.raises(UserError if failing else RuntimeError, match=r"rank|no such"):
                first.loss(step).backward()
            if failing:
                handle.remove()


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_one_that_raises_leaves_the_other_alone(rank, world_size):
    for is_of_one_group in (True, False):
        for in_place in (_in_forward, _in_backward):
            _fails_in_turns(rank, in_place, is_of_one_group)


@pytest.mark.parametrize("place", ["register_forward_pre_hook", "register_forward_hook"])
@on_ranks(3, timeout_s=HOUR_S, deadline_s=DEADLINE_S, may_die=[0])
def test_a_model_whose_peer_is_gone_leaves_that_of_others_alone(rank, place):
    """Ranks 0 and 1 have a model, 1 and 2 another one; the first rank vanishes."""
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2))]
    if rank < 2:
        first = _pair(groups[0], prefetch_depth=0)
        first.expect_step(0)
    if rank == 0:
        getattr(first.model.blocks[1], place)(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=True
        )
        first.loss(1)
    second = _pair(groups[1])
    second.expect_step(0)
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"fully_shard: .*rank 0\b"):
            first.loss(1).backward()
        assert all(isinstance(p, brigade.ShardedParameter) for p in first.model.parameters())
    for step in range(1, 4):
        second.expect_step(step)
        if rank == 1:
            with pytest.raises(RuntimeError):
                first.loss(step)
    # The default group has lost a rank: nobody may wait in it.
    dist.destroy_process_group()
