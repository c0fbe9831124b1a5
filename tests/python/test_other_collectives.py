"""Other collectives in backward on the same group, whose order is equal on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from exact_training import SumOverRanks
from ranks import on_ranks
from training import CLASSES

ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6}
TIMEOUT_S = 20  # ranks that wait for different collectives fail early


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return x * self.a


class Second(nn.Module):
    """y = 5 h, or 5 h + 7 x; backward reaches the parameter 7 first, then 5, then h."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.tensor([5.0]))
        self.c = nn.Parameter(torch.tensor([7.0]))

    def forward(self, h, x, with_c):
        y = h * self.b
        return y + x * self.c if with_c else y


class Both(nn.Module):
    """Has a collective or another wrapper's bucket between the gradients of b and a."""

    def __init__(self, wrapper=None, options=None) -> None:
        super().__init__()
        self.is_apart = wrapper is not None
        self.first = wrapper(First()) if self.is_apart else First()
        self.second = wrapper(Second(), **options) if self.is_apart else Second()

    def forward(self, x, with_c):
        h = self.first(x)
        return self.second(h if self.is_apart else SumOverRanks.apply(h), x, with_c)


def _xs(step):
    return [12.0 * (step + 1) * (rank * rank + 1) for rank in range(dist.get_world_size())]


def _average(terms):
    return torch.tensor([sum(terms) / len(terms)])


# By step, the ranks whose loss does not use c. (0, 1, 2): all ranks, also of three.
WITHOUT_C = [(), (), (), (1,), (), (0,), (0, 1, 2), (), (1,)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(timeout_s=TIMEOUT_S)
def test_a_parameter_that_becomes_unused_moves_no_other_collective(
    rank, kind, is_apart, world_size
):
    options = {**ONE_BUCKET_EACH, "find_unused_parameters": True}
    wrapper = CLASSES[kind]
    model = Both(wrapper, options) if is_apart else wrapper(Both(), **options)
    for step, without_c in enumerate(WITHOUT_C):
        model.zero_grad()
        xs = _xs(step)
        model(torch.tensor([xs[rank]]), rank not in without_c).sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        of_h = 5.0 if is_apart else 5.0 * world_size
        expected = [_average([of_h * x for x in xs]), _average([2.0 * x for x in xs])]
        if len(without_c) < world_size:
            used = [0.0 if r in without_c else x for r, x in enumerate(xs)]
            expected.append(_average(used))
        else:
            assert found.pop() is None
        assert all(map(torch.equal, found, expected)), (step, found, expected)


class EitherFirst(nn.Module):
    """Backward reaches c before or after the collective, and always a after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))
        self.c = nn.Parameter(torch.tensor([7.0]))

    def forward(self, x, c_first):
        h = x * self.a
        if c_first:
            s = SumOverRanks.apply(h)
            return x * self.c + s
        y = x * self.c
        return SumOverRanks.apply(h) + y


@pytest.mark.parametrize("mode", ["plain", "find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(3, timeout_s=TIMEOUT_S)
def test_a_peers_first_gradient_may_come_after_a_collective(rank, kind, mode):
    wrapped = CLASSES[kind](EitherFirst(), **({} if mode == "plain" else {mode: True}))
    for step in range(6):
        wrapped.zero_grad()
        xs = _xs(step)
        # Ranks take turns. The only bucket is launched after the collective on all ranks.
        wrapped(torch.tensor([xs[rank]]), rank == step % 3).sum().backward()
        a, c = (parameter.grad for parameter in wrapped.parameters())
        assert torch.equal(a, _average([3 * x for x in xs])), (step, a)
        assert torch.equal(c, _average(xs)), (step, c)
