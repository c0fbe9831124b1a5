"""Comm hooks that finish their work in callbacks they queue for the end of backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from exact_training import MODES
from ranks import on_ranks, run_ranks
from training import CLASSES

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early
SIZES = (2, 3, 5)


class Model(nn.Module):
    """Its gradients are the weights it is called with; those of later parameters come earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.p0, self.p1, self.p2 = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def forward(self, weights):
        pairs = zip(self.parameters(), weights, strict=True)
        return sum((p * w).sum() for p, w in pairs)


def _weights(rank, step):
    return [
        12.0 * (torch.arange(size) + 7 * i + 30 * step + 100 * rank + 1)
        for i, size in enumerate(SIZES)
    ]


def _averages(step):
    ranks = dist.get_world_size()
    of_ranks = [_weights(rank, step) for rank in range(ranks)]
    return [sum(weights) / ranks for weights in zip(*of_ranks, strict=True)]


def at_the_end_of_backward(callback):
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


# --------------------------------------------------------------------------- hooks


def finish_bucket(state, bucket):
    """One callback per bucket; what is delivered is that memory, finished or not."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)

    def finish():
        work.wait()
        buffer.div_(dist.get_world_size())

    at_the_end_of_backward(finish)
    return _done(buffer)


def finish_all(state, bucket):
    """One callback per backward, as torch's hook for mixed precision has."""
    buffer = bucket.buffer()
    state.append((dist.all_reduce(buffer, async_op=True), buffer))

    def finish():
        for work, reduced in state:
            work.wait()
            reduced.div_(dist.get_world_size())
        state.clear()

    if len(state) == 1:
        at_the_end_of_backward(finish)
    return _done(buffer)


def complete_future(state, bucket):
    """The future is completed by the callback, with memory of the hook's own."""
    buffer = bucket.buffer().clone()
    work = dist.all_reduce(buffer, async_op=True)
    future = torch.futures.Future()

    def finish():
        work.wait()
        future.set_result(buffer / dist.get_world_size())

    at_the_end_of_backward(finish)
    return future


def finish_in_a_second_callback(state, bucket):
    """What is finished by a callback that the first one queues."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)

    def finish():
        buffer.div_(dist.get_world_size())

    def wait():
        work.wait()
        at_the_end_of_backward(finish)

    at_the_end_of_backward(wait)
    return _done(buffer)


HOOKS = {hook.__name__: hook for hook in (finish_bucket, finish_all, complete_future)}


def _train(rank, kind, hook, mode):
    wrapped = CLASSES[kind](Model(), bucket_cap_mb=1e-6, **MODES[mode])
    wrapped.register_comm_hook([], hook)
    for step in range(4):
        wrapped.zero_grad()
        wrapped(_weights(rank, step)).backward()
        for parameter, average in zip(wrapped.parameters(), _averages(step), strict=True):
            assert torch.equal(parameter.grad, average), (step, parameter.grad, average)


# torch's class delivers at once at the end of a static graph's first backward.
@pytest.mark.parametrize(
    "kind, mode",
    [
        (kind, mode)
        for kind in CLASSES
        for mode in MODES
        if (kind, mode) != ("torch", "static_graph")
    ],
)
@pytest.mark.parametrize("name", HOOKS)
def test_gradients_are_delivered_behind_what_hooks_have_queued(kind, name, mode):
    run_ranks(_train, kind, HOOKS[name], mode, timeout_s=TIMEOUT_S, deadline_s=40)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_delivered_behind_what_callbacks_have_queued(mode):
    hook = finish_in_a_second_callback
    run_ranks(_train, "brigade", hook, mode, timeout_s=TIMEOUT_S, deadline_s=40)


# ----------------------------------------------------------- callbacks that fail


class UserError(Exception):
    """What a user's own code raises."""


@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=TIMEOUT_S, deadline_s=40)
def test_a_queued_callback_that_raises_on_one_rank_is_told_to_the_others(rank, mode):
    """The rank's own error; the others' names it; then all train on exactly."""
    armed = False

    def hook(state, bucket):
        def maybe_raise():
            if armed and bucket_index == 0:
                raise UserError("no disk")

        bucket_index = bucket.index()
        at_the_end_of_backward(maybe_raise)
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    wrapped = brigade.DistributedDataParallel(Model(), bucket_cap_mb=1e-6, **MODES[mode])
    wrapped.register_comm_hook(None, hook)
    for step in range(6):
        wrapped.zero_grad()
        loss = wrapped(_weights(rank, step))
        if step % 3 == 2:
            armed = rank == 1
            if rank == 1:
                with pytest.raises(UserError, match="no disk"):
                    loss.backward()
            else:
                with pytest.raises(dist.DistBackendError, match="rank 1 failed in iteration"):
                    loss.backward()
            armed = False
            continue
        loss.backward()
        for parameter, average in zip(wrapped.parameters(), _averages(step), strict=True):
            assert torch.equal(parameter.grad, average), (step, parameter.grad, average)
