"""Comm hooks whose first collective is followed by more: a second one, work of their own."""

import pytest
import torch
import torch.distributed as dist

import brigade

from cases import pairwise
from exact_training import MODES, Training, UserError
from ranks import on_ranks, run_ranks

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early


def _future_of(work):
    return work.get_future()


def _sum(tensor):
    return _future_of(dist.all_reduce(tensor, async_op=True))


def _average_of(future):
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


# ---------------------------------------- second collectives in the order of completion


class OutOfOrder:
    """Launches the second collective when the first is done, as its continuation.

    On rank 1 the first bucket's continuation comes behind the second bucket's, as if its
    first collective were done later there; no thread waits for that.
    """

    def __init__(self, rank) -> None:
        self.late = rank == 1
        self.waiting: list = []
        self.__name__ = self.__qualname__ = "sum_behind_flag"

    def __call__(self, state, bucket):
        index, buffer = bucket.index(), bucket.buffer()
        result = torch.futures.Future()
        same_length = torch.zeros(16)  # for all: Gloo ends a process where lengths differ
        same_length[: buffer.numel()] = buffer

        def launch():
            def finish(done):
                result.set_result(done.value()[0][: buffer.numel()] / dist.get_world_size())

            _sum(same_length).add_done_callback(finish)

        def launch_in_turn(done):
            if self.late and index == 0 and not bucket.is_last():
                self.waiting.append(launch)
                return
            launch()
            while self.waiting:
                self.waiting.pop()()

        _sum(torch.ones(16)).add_done_callback(launch_in_turn)
        return result


def _out_of_order(rank, options):
    """Gradients that are right, or the error's text."""
    training = Training(rank, options)
    training.wrapped.register_comm_hook(None, OutOfOrder(rank))
    try:
        training.expect_steps(4)
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return None


@pytest.mark.parametrize("mode", ["plain", "views"])
def test_second_collectives_in_any_order_are_right_or_the_hook_is_named(mode):
    answers = run_ranks(_out_of_order, MODES[mode], timeout_s=TIMEOUT_S, deadline_s=60)
    if any(answers):
        assert all(text and "sum_behind_flag" in text for text in answers), answers


# ------------------------------------------------------- ordered second collectives


class Ordered:
    """Second collectives by then_collective(); ranks differ in which firsts are done when."""

    def __init__(self, rank) -> None:
        self.backwards = rank == 1
        self.firsts: list[torch.futures.Future] = []
        self.launched: list[int] = []
        self.fail_at: int | None = None
        self.return_nothing_at: int | None = None
        self.__name__ = self.__qualname__ = "ordered"  # torch's class wants them

    def __call__(self, state, bucket):
        index, buffer = bucket.index(), bucket.buffer()
        first = torch.futures.Future()
        self.firsts.append((first, buffer.clone()))

        def launch(value):
            self.launched.append(index)
            if self.fail_at == index:
                raise UserError("no disk")
            if self.return_nothing_at == index:
                return None
            return _average_of(_sum(value))

        result = brigade.then_collective(first, launch)
        if bucket.is_last():
            for future, value in self.firsts[:: -1 if self.backwards else 1]:
                future.set_result(value)
            self.firsts.clear()
        return result


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=TIMEOUT_S, deadline_s=60)
def test_then_collective_launches_in_plan_order(rank, mode, world_size):
    options = MODES[mode]
    training = Training(rank, options)
    hook = Ordered(rank)
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(4):
        hook.launched.clear()
        training.expect_steps(1)
        buckets = len(hook.launched)
        assert hook.launched == list(range(buckets)), hook.launched
    assert buckets == 3


def _scatter_then_gather(state, bucket):
    """Both halves are collectives: each rank averages its part, then all collect the parts."""
    ranks, buffer = dist.get_world_size(), bucket.buffer()
    padded = torch.zeros(-(-buffer.numel() // ranks) * ranks)
    padded[: buffer.numel()] = buffer
    parts = torch.empty_like(padded)
    first = _future_of(dist.all_to_all_single(parts, padded, async_op=True))

    def gather(value):
        own = parts.view(ranks, -1).sum(0) / ranks
        whole = torch.empty_like(padded)
        second = _future_of(dist.all_gather_into_tensor(whole, own, async_op=True))
        return second.then(lambda done: whole[: buffer.numel()])

    return brigade.then_collective(first, gather)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=TIMEOUT_S, deadline_s=60)
def test_a_chain_of_two_collectives_averages(rank, mode, world_size):
    options = MODES[mode]
    training = Training(rank, options)
    training.wrapped.register_comm_hook(None, _scatter_then_gather)
    training.expect_steps(6)


def _second_launch_fails(rank, options, fault, bucket):
    """On rank 1 only; it raises what launch() raised.

    Nothing can stand in for what its peers have launched: the group is of no more use.
    """
    training = Training(rank, options)
    hook = Ordered(rank)
    training.wrapped.register_comm_hook(None, hook)
    training.expect_steps(2)
    assert training.wrapped.reducer.can_continue()
    if rank == 1:
        setattr(hook, fault, bucket)
    if fault == "fail_at":
        training.expect_failure([1], UserError, "^no disk$", "UserError: no disk")
    else:
        training.expect_failure([1], TypeError, "(?i)future", "(?i)future")
    assert not training.wrapped.reducer.can_continue()
    dist.destroy_process_group()


@pairwise(
    mode=MODES,
    bucket=[0, 2],
    fault=["fail_at", "return_nothing_at"],
)
def test_a_second_launch_that_fails_on_one_rank_is_told_to_the_others(fault, bucket, mode):
    options = MODES[mode]
    run_ranks(_second_launch_fails, options, fault, bucket, timeout_s=TIMEOUT_S, deadline_s=60)


# ------------------------------------------------- a continuation that raises


def _raises_then(future, error):
    def finish(done):
        if error is not None:
            raise error
        return done.value()[0] / dist.get_world_size()

    return future.then(finish)


def _set_exception(future, error):
    result = torch.futures.Future()

    def finish(done):
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(done.value()[0] / dist.get_world_size())

    future.add_done_callback(finish)
    return result


WAYS = {"then": _raises_then, "set_exception": _set_exception}


def _continuation_raises(rank, options, way, at_bucket):
    """That rank raises its own error (torch's then() makes a RuntimeError of it)."""
    armed = False

    def hook(state, bucket):
        error = UserError("no disk") if armed and bucket.index() == at_bucket else None
        return WAYS[way](_sum(bucket.buffer()), error)

    training = Training(rank, options)
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        training.expect_steps(2)
        armed = rank == 1
        own = (UserError, RuntimeError)
        training.expect_failure([1], own, "no disk", "no disk")
        armed = False
    training.expect_steps(2)


@pairwise(
    world_size=[2, 3],
    bucket=[0, 2],
    way=WAYS,
)
def test_a_continuation_that_raises_on_one_rank_is_quoted_on_the_others(way, bucket, world_size):
    run_ranks(
        _continuation_raises,
        {},
        way,
        bucket,
        world_size=world_size,
        timeout_s=TIMEOUT_S,
        deadline_s=90,
    )


@pytest.mark.parametrize("mode", ["views", "find_unused", "static_graph"])
def test_a_continuation_that_raises_is_quoted_in_each_mode(mode):
    run_ranks(_continuation_raises, MODES[mode], "then", 0, timeout_s=TIMEOUT_S, deadline_s=90)
