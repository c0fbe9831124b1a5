"""Comm hooks: their input, work after the first collective, failures."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import brigade

from cases import pairwise
from exact_training import MODES, Training, UserError
from ranks import on_ranks, run_ranks
from training import Perceptron, completed_future, inputs, loss_of, train

LIMITS = {"timeout_s": 20, "deadline_s": 60}  # ranks that wait for different collectives fail early


def _sum(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def _average_of(future):
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


@on_ranks()
def test_backward_raises_the_hooks_exception_and_training_continues(rank):
    for kind in (ValueError, RuntimeError, KeyError, Exception):
        fail = [type("Mine", (kind,), {})(f"from rank {rank}")]

        def hook(state, bucket, fail=fail):
            if fail:
                raise fail[0]
            return default_hooks.allreduce_hook(None, bucket)

        wrapped = brigade.DistributedDataParallel(Perceptron())
        wrapped.register_comm_hook(None, hook)
        batches = inputs(rank, 3)
        with pytest.raises(kind) as error:
            loss_of(wrapped(batches[0])).backward()
        assert error.value is fail.pop()
        assert not any(t.isnan().any() for t in train(wrapped, batches[1:]))


# ------------------------------------------- work that completes at the end of backward


def at_the_end_of_backward(callback):
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def finish_bucket(state, bucket):
    """Queues a callback per bucket, which completes the bucket's buffer."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    at_the_end_of_backward(lambda: (work.wait(), buffer.div_(dist.get_world_size())))
    return completed_future(buffer)


def complete_future(state, bucket):
    """Queues a callback that completes the future with the hook's own tensor."""
    buffer, future = bucket.buffer().clone(), torch.futures.Future()
    work = dist.all_reduce(buffer, async_op=True)
    at_the_end_of_backward(lambda: (work.wait(), future.set_result(buffer / dist.get_world_size())))
    return future


def finish_in_a_second_callback(state, bucket):
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)

    def wait():
        work.wait()
        at_the_end_of_backward(lambda: buffer.div_(dist.get_world_size()))

    at_the_end_of_backward(wait)
    return completed_future(buffer)


def the_collectives_own(state, bucket):
    """Returns the collective's future, whose value is a list with the bucket's buffer."""
    return _sum(bucket.buffer().div_(dist.get_world_size()))


HOOKS = [
    finish_bucket,
    complete_future,
    finish_in_a_second_callback,
    the_collectives_own,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(**LIMITS)
def test_gradients_are_delivered_after_the_hooks_queued_callbacks(rank, hook, mode):
    training = Training(rank, MODES[mode])
    training.wrapped.register_comm_hook([], hook)
    training.expect_steps(4)


# ------------------------------------------------------- ordered second collectives


class Ordered:
    """Second collectives by then_collective(). The order of completions differs by rank."""

    def __init__(self, rank) -> None:
        self.backwards = rank == 1
        self.firsts: list[torch.futures.Future] = []
        self.launched: list[int] = []
        self.fail_at: int | None = None
        self.return_nothing_at: int | None = None

    def __call__(self, state, bucket):
        index, first = bucket.index(), torch.futures.Future()
        self.firsts.append((first, bucket.buffer().clone()))

        def launch(value):
            self.launched.append(index)
            if self.fail_at == index:
                raise UserError("no disk")
            return None if self.return_nothing_at == index else _average_of(_sum(value))

        result = brigade.then_collective(first, launch)
        if bucket.is_last():
            for future, value in self.firsts[:: -1 if self.backwards else 1]:
                future.set_result(value)
            self.firsts.clear()
        return result


@pytest.mark.parametrize("mode", MODES)
@on_ranks(3, **LIMITS)
def test_then_collective_launches_in_plan_order(rank, mode):
    training, hook = Training(rank, MODES[mode]), Ordered(rank)
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(4):
        hook.launched.clear()
        training.expect_steps(1)
        assert hook.launched == list(range(len(hook.launched)))
    assert len(hook.launched) == 3


@pairwise(bucket=[0, 2], fault=["fail_at", "return_nothing_at"])
@on_ranks(**LIMITS)
def test_peers_raise_when_a_second_launch_fails_on_one_rank(rank, fault, bucket):
    """The peers' launched collectives can't be matched, so the group is closed."""
    training, hook = Training(rank, {}), Ordered(rank)
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


# ------------------------------------- a continuation or a queued callback that raises


def _raises_at_the_end(future, error):
    def finish():
        if error is not None:
            raise error

    at_the_end_of_backward(finish)
    return _average_of(future)


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


@pairwise(mode=MODES, bucket=[0, 2], way=[_raises_at_the_end, _raises_then, _set_exception])
@on_ranks(**LIMITS)
def test_peers_raise_when_a_continuation_raises_on_one_rank(rank, way, bucket, mode):
    armed, at_bucket = False, bucket

    def hook(state, bucket):
        error = UserError("no disk") if armed and bucket.index() == at_bucket else None
        return way(_sum(bucket.buffer()), error)

    training = Training(rank, MODES[mode])
    training.wrapped.register_comm_hook(None, hook)
    peers_text = "." if way is _raises_at_the_end else "no disk"
    for _ in range(2):
        training.expect_steps(2)
        armed = rank == 1
        training.expect_failure([1], (UserError, RuntimeError), "no disk", peers_text)
        armed = False
    training.expect_steps(2)


# ---------------------------------------------- hooks that never complete, or differ


def averages(state, bucket):
    return _average_of(_sum(bucket.buffer()))


def two_collectives(state, bucket):
    _sum(bucket.buffer().clone())
    return averages(state, bucket) if not bucket.is_last() else completed_future(bucket.buffer())


def never_done(state, bucket):
    _sum(bucket.buffer().clone())
    return averages(state, bucket) if not bucket.is_last() else torch.futures.Future()


def _backward_fails(rank, hooks):
    training = Training(rank, {})
    with pytest.raises(RuntimeError) as caught:
        training.wrapped.register_comm_hook(None, hooks[rank])
        for _ in range(4):
            training.backward()
    assert training.wrapped.can_continue() == (hooks[0] is not hooks[1])
    dist.destroy_process_group()
    return str(caught.value)


_texts_of = functools.partial(run_ranks, _backward_fails, timeout_s=5, deadline_s=60)


@pytest.mark.parametrize("first", [never_done, two_collectives])
def test_a_future_that_never_completes_closes_the_group(first):
    texts = _texts_of([first, never_done])
    assert "never_done" in texts[1]
    assert "never_done" in texts[0] or "rank 1" in texts[0], texts


def test_unlike_hooks_on_two_ranks_are_named():
    for text in _texts_of([averages, two_collectives]):
        assert "averages" in text and "two_collectives" in text, text


@on_ranks(**LIMITS)
def test_unlike_lambdas_on_two_ranks_are_an_error(rank):
    hooks = [
        lambda state, bucket: averages(state, bucket),
        lambda state, bucket: _sum(bucket.buffer()),
    ]
    training = Training(rank, {})
    with pytest.raises(RuntimeError, match=r"(?s)<lambda> \(test_comm_hooks.py:\d+\).*<lambda> \("):
        training.wrapped.register_comm_hook(None, hooks[rank])
        training.backward()
    dist.destroy_process_group()


@on_ranks(**LIMITS)
def test_one_hook_that_launches_collectives_on_one_rank_is_an_error(rank):
    def hook(state, bucket):
        return averages(state, bucket) if rank else completed_future(bucket.buffer())

    training = Training(rank, {})
    training.expect_steps(2)  # learns the buckets
    training.wrapped.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=r"collectives of comm hook .*hook \(test_comm_hooks.py"):
        training.backward()
    assert not training.wrapped.can_continue()
    dist.destroy_process_group()


@on_ranks(**LIMITS)
def test_objects_and_partials_are_the_same_hook_at_other_addresses(rank):
    for make in (functools.partial(Ordered, rank), lambda: functools.partial(averages)):
        hooks = [make() for _ in range(rank + 1)]
        training = Training(rank, {})
        training.wrapped.register_comm_hook(None, hooks[-1])
        training.expect_steps(2)
