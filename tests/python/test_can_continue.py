"""can_continue() tells a peer's exception from a peer that is gone."""

import os

import pytest
import torch.distributed as dist

from exact_training import MODES, Training, UserError
from ranks import on_ranks

TIMEOUT_S = 20


def _raise_in_next_backward(training):
    def fail(gradient):
        handle.remove()
        raise UserError("the user's own")

    handle = training.model.p1.register_hook(fail)


@pytest.mark.parametrize("failing", [[1], [1, 2]], ids=["one_rank", "two_ranks"])
@pytest.mark.parametrize("mode", ["plain", "views", "static_graph"])
@on_ranks(3, timeout_s=TIMEOUT_S, deadline_s=90)
def test_all_go_on_when_a_rank_raised(rank, mode, failing):
    options = MODES[mode]
    training = Training(rank, options)
    can_continue = training.wrapped.reducer.can_continue
    for _ in range(2):
        training.expect_steps(1)
        assert can_continue()
        if rank in failing:
            _raise_in_next_backward(training)
        training.expect_failure(failing, UserError, "^the user's own$", "an exception ended")
        assert can_continue()
    training.expect_steps(2)


def _go_on_without_the_last(rank, training):
    """As a user's loop does: asks, and makes a new group of the survivors over the old store."""
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
@on_ranks(3, timeout_s=TIMEOUT_S, deadline_s=90, may_die=[2])
def test_survivors_of_a_rank_that_is_gone_train_on_in_a_new_group(rank, way, mode):
    options = MODES[mode]
    training = Training(rank, options)
    training.expect_steps(2)
    if rank < dist.get_world_size() - 1:
        return _go_on_without_the_last(rank, training)
    if way == "dies_in_backward":
        training.model.p1.register_hook(lambda gradient: os._exit(3))
        training.backward()
    elif way == "dies":
        os._exit(3)
    del training.wrapped  # leaves
    dist.destroy_process_group()
    return None
