"""A rank fails or dies: every rank raises an error that names it, then training continues."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import brigade

from cases import pairwise
from exact_training import MODES, SIZES, SumOverRanks, Training, UserError
from ranks import on_ranks

HOUR_S = 3600  # the group's timeout, which no rank may wait for


@pairwise(
    world_size=[2, 3],
    mode=MODES,
    name=["p2", "p1", "p0"],
    failing=[[1], [0, 1]],
)
@on_ranks(timeout_s=20, deadline_s=90)
def test_an_exception_in_one_ranks_backward_raises_on_all(rank, name, mode, world_size, failing):
    training = Training(rank, MODES[mode])

    def raise_once(gradient):
        handle.remove()
        raise UserError("the user's own")

    for _ in range(2):  # in the first and in a later iteration
        if rank in failing:
            handle = getattr(training.model, name).register_hook(raise_once)
        training.expect_failure(failing, UserError, "^the user's own$", "raised an exception")
        assert training.wrapped.reducer.can_continue()
        training.expect_steps(2)


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_peers_quote_a_comm_hooks_exception(rank, mode):
    armed = False

    def hook(state, bucket):
        nonlocal armed
        if armed and bucket.is_last():
            armed = False
            raise UserError("no disk")
        return default_hooks.allreduce_hook(None, bucket)

    training = Training(rank, MODES[mode])
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        armed = rank == 1
        training.expect_failure([1], UserError, "^no disk$", "UserError: no disk")
        training.expect_steps(2)


@on_ranks(timeout_s=HOUR_S, deadline_s=60)
def test_all_raise_while_a_peers_backward_waits_in_its_own_collective(rank):
    training = Training(rank, {})
    training.expect_steps(2)

    def fail(gradient):
        raise UserError("no room")

    ones = [torch.ones(size) for size in SIZES[1:]]
    loss = training.wrapped([SumOverRanks.apply(training.model.p0), *ones])
    if rank == 0:
        training.model.p2.register_hook(fail)
    with pytest.raises(UserError if rank == 0 else RuntimeError):
        loss.backward()
    assert not training.wrapped.reducer.can_continue()
    dist.destroy_process_group()


# ------------------------------------------------------------------ a rank dies


def _go_on_without_the_last(rank, training):
    """Recovers as a user's loop does: creates a group of the survivors over the old store."""
    steps = 0
    while training.wrapped.reducer.can_continue():
        assert steps < 3
        try:
            training.backward()
        except dist.DistBackendError:
            assert not training.wrapped.reducer.can_continue()
        steps += 1
    store = dist.distributed_c10d._get_default_store()
    survivors = dist.get_world_size() - 1
    del training.wrapped
    dist.destroy_process_group()
    second = dist.PrefixStore("second", store)
    dist.init_process_group("gloo", store=second, rank=rank, world_size=survivors)
    anew = Training(rank, {})
    anew.expect_steps(3)
    assert anew.wrapped.reducer.can_continue()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["dies_in_backward", "dies", "leaves"])
@on_ranks(3, timeout_s=20, deadline_s=90, may_die=[2])
def test_survivors_of_a_dead_rank_continue_in_a_new_group(rank, way, mode):
    training = Training(rank, MODES[mode])
    training.expect_steps(2)
    if rank < 2:
        _go_on_without_the_last(rank, training)
        return
    if way == "dies_in_backward":
        training.model.p1.register_hook(lambda gradient: os._exit(3))
        training.backward()
    elif way == "dies":
        os._exit(3)
    del training.wrapped
    dist.destroy_process_group()


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise UserError("a bad batch")


@on_ranks()
def test_a_failed_backward_leaves_no_gradient_where_there_was_none(rank):
    """zero_grad(set_to_none=False) would make zeros of it, which AdamW decays on one rank only."""
    used, unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    net = torch.nn.ModuleList([used, unused])
    net.forward = lambda x, uses_both: unused(used(x)) if uses_both else used(x)
    bad = used.register_forward_hook(lambda _, args, y: _Raise.apply(y) if rank == 1 else y)
    model = brigade.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1)
    before = unused.weight.detach().clone()
    with pytest.raises((UserError, RuntimeError)):
        model(torch.ones(2, 3), rank == 0).sum().backward()
    bad.remove()
    assert all(parameter.grad is None for parameter in net.parameters())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 3), False).sum().backward()
        optimizer.step()
    assert torch.equal(unused.weight, before)
    both = [torch.empty(3, 3) for _ in range(2)]
    dist.all_gather(both, used.weight.detach())
    assert torch.equal(*both)
