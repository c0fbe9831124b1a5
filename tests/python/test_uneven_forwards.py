"""Ranks call forward unequally often between equally many reduced backwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import exact_training
from cases import pairwise
from ranks import on_ranks
from training import CLASSES

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early
MODES = {**exact_training.MODES, "buckets": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}}
STEPS = 5  # buckets are rebuilt in between


class NoBuffers(nn.Module):
    """a x + 3 b x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0, 2.0]))
        self.b = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.fail = False

    def forward(self, x):
        y = x * self.a
        if self.fail:
            raise MemoryError("no room for the rest")
        return (y + 3 * x * self.b).sum()


def _x(rank, step, chunk=0):
    return torch.tensor([4.0, 8.0]) * (step + 1) + 16.0 * rank + 64.0 * chunk


def _expect(wrapped, inputs_of_ranks, step):
    """Gradients are the averages over ranks of the sums of inputs, times 1 and 3."""
    average = sum(sum(inputs) for inputs in inputs_of_ranks) / len(inputs_of_ranks)
    for parameter, factor in zip(wrapped.parameters(), (1, 3), strict=True):
        right = factor * average
        assert torch.equal(parameter.grad, right), (step, parameter.grad, right)


def _all_ranks(make):
    return [make(rank) for rank in range(dist.get_world_size())]


def _logs(rank, wrapped, step):
    """Rank 0 looks at another loss before and behind each step, gradients on."""
    for _ in range(2 if rank == 0 else 0):
        wrapped(_x(rank, step + 100)).item()
    wrapped(_x(rank, step)).backward()
    if rank == 0:
        wrapped(_x(rank, step + 100)).item()
    return _all_ranks(lambda r: [_x(r, step)])


def _logs_between(rank, wrapped, step):
    """Rank 1 looks at another loss between forward and backward, in every other step."""
    loss = wrapped(_x(rank, step))
    if rank == 1 and step % 2:
        wrapped(_x(rank, step + 100)).item()
    loss.backward()
    return _all_ranks(lambda r: [_x(r, step)])


def _chunks(rank, wrapped, step):
    """Sequences of unlike lengths in chunks, with one backward for all of them."""

    def inputs(rank):
        return [_x(rank, step, chunk) for chunk in range(1 + (step + rank) % 3)]

    sum(wrapped(x) for x in inputs(rank)).backward()
    return _all_ranks(inputs)


def _retries(rank, wrapped, step):
    """Forward raises on one rank, which tries once more, twice in the third step."""
    times = {1: 1, 2: 2}.get(step, 0) if rank == 1 else 0
    for _ in range(times):
        wrapped.module.fail = True
        with pytest.raises(MemoryError):
            wrapped(_x(rank, step + 100))
    wrapped.module.fail = False
    wrapped(_x(rank, step)).backward()
    return _all_ranks(lambda r: [_x(r, step)])


def _drops_a_loss(rank, wrapped, step):
    """A rank throws away the loss of a whole batch, and takes the next."""
    if step in (1, 3) and rank == 1:
        wrapped(_x(rank, step + 100))
    wrapped(_x(rank, step)).backward()
    return _all_ranks(lambda r: [_x(r, step)])


PROGRAMS = {
    program.__name__.strip("_"): program
    for program in (_logs, _logs_between, _chunks, _retries, _drops_a_loss)
}


@pairwise(
    mode=MODES,
    name=PROGRAMS,
    kind=CLASSES,
)
@on_ranks(timeout_s=TIMEOUT_S)
def test_ranks_may_differ_in_how_often_they_call_forward(rank, kind, name, mode):
    wrapped = CLASSES[kind](NoBuffers(), **MODES[mode])
    for step in range(STEPS):
        wrapped.zero_grad()
        _expect(wrapped, PROGRAMS[name](rank, wrapped, step), step)


@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(3, timeout_s=TIMEOUT_S)
def test_three_ranks_may_differ_in_how_often_they_call_forward(rank, kind):
    wrapped = CLASSES[kind](NoBuffers())
    for step in range(STEPS):
        wrapped.zero_grad()
        for _ in range((rank + step) % 3):
            wrapped(_x(rank, step + 100)).item()
        wrapped(12 * _x(rank, step)).backward()
        _expect(wrapped, _all_ranks(lambda r, step=step: [12 * _x(r, step)]), step)
