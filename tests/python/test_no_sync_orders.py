"""Forwards under no_sync lie anywhere between synchronised ones and their backwards."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from exact_training import MODES
from ranks import on_ranks, run_ranks
from training import CLASSES

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early
BOTH = ("p", "q")


class Heads(nn.Module):
    """x p + 3 x q, or one of these terms."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.q = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x, heads=BOTH):
        terms = {"p": lambda: (x * self.p).sum(), "q": lambda: (3 * x * self.q).sum()}
        return sum(terms[name]() for name in heads)


def _x(rank, number):
    return torch.tensor([4.0 * number + 2 * rank, 8.0 * number + 6 * rank])


def _own(rank, numbers, heads=BOTH):
    """What forwards with these inputs add to the gradients of p and q on one rank."""
    x = sum((_x(rank, number) for number in numbers), torch.zeros(2))
    return [x if "p" in heads else 0 * x, 3 * x.sum()[None] * ("q" in heads)]


def _averaged(numbers, heads=BOTH):
    ranks = dist.get_world_size()
    of_ranks = [_own(rank, numbers, heads) for rank in range(ranks)]
    return [sum(terms) / ranks for terms in zip(*of_ranks, strict=True)]


def _expect(wrapped, expected, step):
    gradients = [p.grad for p in wrapped.parameters()]
    for name, ours, right in zip("pq", gradients, expected, strict=True):
        assert torch.equal(ours, right), (step, name, ours, right)


def _forward(wrapped, order, rank, number):
    """A synchronised forward (s), one under no_sync (l), one without gradients (n)."""
    inside = {"s": contextlib.nullcontext, "l": wrapped.no_sync, "n": torch.no_grad}[order]
    with inside():
        return wrapped(_x(rank, number))


# -------------------------------------------------------- one backward for all of them


@pairwise(
    mode=MODES,
    orders=[["sl"], ["ls"], ["lsl"], ["sll", "sl"], ["snl"], ["s", "sl"]],
    kind=CLASSES,
)
@on_ranks(timeout_s=TIMEOUT_S)
def test_one_backward_of_synchronised_and_other_forwards_is_reduced(rank, kind, orders, mode):
    wrapped = CLASSES[kind](Heads(), **MODES[mode])
    number = 0
    for step in range(5):
        order = orders[step % len(orders)]
        wrapped.zero_grad()
        losses, numbers = [], []
        for way in order:
            number += 1
            loss = _forward(wrapped, way, rank, number)
            if way != "n":
                losses.append(loss)
                numbers.append(number)
        sum(losses).backward()
        _expect(wrapped, _averaged(numbers), step)


# ------------------------------------------------------------- a backward for each


@pytest.mark.parametrize("mode", ["plain", "views", "find_unused"])
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(timeout_s=TIMEOUT_S)
def test_a_local_backward_behind_the_synchronised_one_stays_local(rank, kind, mode):
    wrapped = CLASSES[kind](Heads(), **MODES[mode])
    for step in range(4):
        wrapped.zero_grad()
        loss = _forward(wrapped, "s", rank, 2 * step)
        auxiliary = _forward(wrapped, "l", rank, 2 * step + 1)
        loss.backward()
        _expect(wrapped, _averaged([2 * step]), step)
        auxiliary.backward()
        own = _own(rank, [2 * step + 1])
        reduced = _averaged([2 * step])
        _expect(wrapped, [a + b for a, b in zip(reduced, own, strict=True)], step)


def _outcome(run, wrapped):
    """The gradients at the end, or the error: the group may be closed behind that."""
    try:
        run()
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return _lists([p.grad for p in wrapped.parameters()])


def _lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def _right_or_raised_by_all(outcomes, expected, named):
    """No rank is left with another result, nor in the belief that all is well."""
    texts = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if texts:
        assert len(texts) == len(outcomes), outcomes
        for text in texts:
            assert named in text and "static_graph" not in text, text
        return
    assert outcomes == [expected] * len(outcomes)


def _local_first(rank, mode):
    wrapped = brigade.DistributedDataParallel(Heads(), **MODES[mode])

    def run():
        for step in range(3):
            wrapped.zero_grad()
            loss = _forward(wrapped, "s", rank, 2 * step)
            auxiliary = _forward(wrapped, "l", rank, 2 * step + 1)
            with wrapped.no_sync():
                auxiliary.backward()
            loss.backward()

    return _outcome(run, wrapped), _lists(_averaged([4, 5]))


@pytest.mark.parametrize("mode", MODES)
def test_a_local_backward_before_the_synchronised_one_is_averaged_or_an_error(mode):
    answers = run_ranks(_local_first, mode, timeout_s=TIMEOUT_S)
    _right_or_raised_by_all([outcome for outcome, _ in answers], answers[0][1], "no_sync")


# ------------------------------- two heads in turn: the first iteration is unfinished


def _in_turn(rank, heads, mode):
    """The third step raises, since the first was never finished, or all is averaged."""
    wrapped = brigade.DistributedDataParallel(Heads(), **MODES[mode])

    def run():
        wrapped(_x(rank, 1), "p").backward()
        for number, head in enumerate(heads, start=2):
            with wrapped.no_sync():
                loss = wrapped(_x(rank, number), head)
            loss.backward()
        wrapped(_x(rank, 9)).backward()

    terms = [_averaged([1], "p"), _averaged([9])]
    terms += [_averaged([number], head) for number, head in enumerate(heads, start=2)]
    return _outcome(run, wrapped), _lists(sum(of_one) for of_one in zip(*terms, strict=True))


@pytest.mark.parametrize("mode", ["plain", "views"])
@pytest.mark.parametrize("heads", ["q", "p", "qq", "pq"])
def test_local_gradients_do_not_complete_an_unfinished_iteration(heads, mode):
    answers = run_ranks(_in_turn, heads, mode, timeout_s=TIMEOUT_S)
    _right_or_raised_by_all([outcome for outcome, _ in answers], answers[0][1], "'q'")
