"""Hooks that never finish, and unlike hooks on unlike ranks, are named."""

import pytest
import torch
import torch.distributed as dist

from cases import quick
from exact_training import MODES, Training
from ranks import run_ranks


def _sum(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def one_collective(state, bucket):
    buffer = bucket.buffer()
    padded = torch.zeros(16)
    padded[: buffer.numel()] = buffer
    size = buffer.numel()
    return _sum(padded).then(lambda done: done.value()[0][:size] / dist.get_world_size())


def two_collectives(state, bucket):
    _sum(torch.zeros(16))
    return one_collective(state, bucket)


def never_done(state, bucket):
    _sum(bucket.buffer().clone())
    return torch.futures.Future() if bucket.is_last() else one_collective_unpadded(state, bucket)


def one_collective_unpadded(state, bucket):
    return _sum(bucket.buffer()).then(lambda done: done.value()[0] / dist.get_world_size())


def done_of_two(state, bucket):
    _sum(bucket.buffer().clone())
    return one_collective_unpadded(state, bucket) if not bucket.is_last() else _immediately(bucket)


def _immediately(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _backward_fails(rank, options, hooks):
    training = Training(rank, options)
    with pytest.raises(RuntimeError) as caught:
        training.wrapped.register_comm_hook(None, hooks[rank])
        for _ in range(4):
            training.backward()
    can_continue = training.wrapped.reducer.can_continue()
    dist.destroy_process_group()
    return str(caught.value), can_continue


@pytest.mark.parametrize("mode", quick(MODES, ["views"]))
def test_a_future_that_never_completes_ends_at_the_timeout(mode):
    answers = run_ranks(_backward_fails, MODES[mode], [never_done] * 2, timeout_s=5, deadline_s=60)
    for text, _ in answers:
        assert "never_done" in text, answers


def test_a_future_that_never_completes_on_one_rank_ends_at_the_timeout():
    hooks = [done_of_two, never_done]
    answers = run_ranks(_backward_fails, {}, hooks, timeout_s=5, deadline_s=60)
    assert "never_done" in answers[1][0], answers
    assert "rank 1" in answers[0][0], answers


@pytest.mark.parametrize("mode", MODES)
def test_unlike_hooks_on_unlike_ranks_are_named(mode):
    hooks = [one_collective, two_collectives]
    answers = run_ranks(_backward_fails, MODES[mode], hooks, timeout_s=5, deadline_s=60)
    for text, _ in answers:
        assert "one_collective" in text and "two_collectives" in text, answers
