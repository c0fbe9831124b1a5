"""Backward has other collectives on the same group: they keep their places among the buckets'."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks, run_ranks
from training import CLASSES

ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6}
TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early


def _sum_over_ranks(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor


class SumOverRanks(torch.autograd.Function):
    """A collective in forward and one in backward, as batch norm over ranks has."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _sum_over_ranks(gradient, ctx.group), None


class First(nn.Module):
    """y = 2 x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return x * self.a


class Second(nn.Module):
    """y = 5 h, or 5 h + 7 x; backward comes to the parameter 7 first, then to 5, then to h."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.tensor([5.0]))
        self.c = nn.Parameter(torch.tensor([7.0]))

    def forward(self, h, x, with_c):
        y = h * self.b
        return y + x * self.c if with_c else y


class Both(nn.Module):
    """A collective of the backward lies between the gradients of b and a."""

    def __init__(self, other) -> None:
        super().__init__()
        self.first, self.second = First(), Second()
        self.other = other

    def forward(self, x, with_c):
        h = self.first(x)
        if self.other == "function":
            h = SumOverRanks.apply(h, None)
        else:
            h.register_hook(_sum_over_ranks)
        return self.second(h, x, with_c)


class Apart(nn.Module):
    """As Both, but the collective between is the bucket of another wrapper."""

    def __init__(self, wrapper, options) -> None:
        super().__init__()
        self.first = wrapper(First())
        self.second = wrapper(Second(), **options)

    def forward(self, x, with_c):
        return self.second(self.first(x), x, with_c)


# --------------------------------------------- a rank leaves out what it always used

# Ranks whose loss leaves c out, in each step.
LEAVE_C_OUT = [(), (), (), (1,), (), (0,), (0, 1), (), (1,)]


def _x_of_ranks(step):
    return [12.0 * (step + 1) * (rank * rank + 1) for rank in range(dist.get_world_size())]


def _average(terms):
    return torch.tensor([sum(terms) / len(terms)])


def _expected(other, xs, without_c):
    """Averages over ranks: a's gradient, b's, c's."""
    ranks = len(xs)
    of_h = {"function": 5.0 * ranks, "tensor_hook": 5.0 * ranks, "second_wrapper": 5.0}[other]
    return [
        _average([of_h * x for x in xs]),
        torch.tensor([2.0 * sum(xs)]) if other == "function" else _average([2.0 * x for x in xs]),
        None
        if len(without_c) == ranks
        else _average([0.0 if rank in without_c else x for rank, x in enumerate(xs)]),
    ]


@pytest.mark.parametrize(
    "views, world_size", [(False, 2), (False, 3), (True, 2)], ids=["2_ranks", "3_ranks", "views"]
)
@pytest.mark.parametrize("other", ["function", "tensor_hook", "second_wrapper"])
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(timeout_s=TIMEOUT_S)
def test_a_parameter_left_out_after_some_steps_moves_no_other_collective(
    rank, kind, other, views, world_size
):
    options = {
        **ONE_BUCKET_EACH,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": views,
    }
    wrapper = CLASSES[kind]
    if other == "second_wrapper":
        model = Apart(wrapper, options)
    else:
        model = wrapper(Both(other), **options)
    for step, without_c in enumerate(LEAVE_C_OUT):
        without_c = [r for r in without_c if r < dist.get_world_size()]
        if len(without_c) == 2 and dist.get_world_size() == 3:
            without_c.append(2)  # nobody uses it
        model.zero_grad()
        xs = _x_of_ranks(step)
        model(torch.tensor([xs[rank]]), rank not in without_c).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        expected = _expected(other, xs, without_c)
        for name, ours, right in zip("abc", gradients, expected, strict=True):
            same = ours is right if right is None or ours is None else torch.equal(ours, right)
            assert same, (step, name, gradients, expected)


# ------------------------------- a peer's first gradient lies behind its collective


class EitherFirst(nn.Module):
    """Backward comes to c before or behind the collective; to a behind it in any case."""

    def __init__(self, group) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))
        self.c = nn.Parameter(torch.tensor([7.0]))
        self.group = group

    def forward(self, x, c_first):
        h = x * self.a
        if c_first:
            s = SumOverRanks.apply(h, self.group)
            return x * self.c + s
        y = x * self.c
        return SumOverRanks.apply(h, self.group) + y


def _first_gradient_behind(rank, kind, own_group, options):
    group = dist.new_group() if own_group else None
    wrapped = CLASSES[kind](EitherFirst(group), **options)
    ranks = dist.get_world_size()
    for step in range(6):
        wrapped.zero_grad()
        xs = _x_of_ranks(step)
        first = step % ranks  # each rank has its turn
        wrapped(torch.tensor([xs[rank]]), rank == first).sum().backward()
        a, c = (parameter.grad for parameter in wrapped.parameters())
        assert torch.equal(a, _average([ranks * x for x in xs])), (step, a)
        assert torch.equal(c, _average(xs)), (step, c)


MODES = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


@pytest.mark.parametrize("mode, world_size", [(m, 2) for m in MODES] + [("plain", 3)])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_peers_first_gradient_may_lie_behind_a_collective(kind, mode, world_size):
    # One bucket: it is launched behind the collective on all ranks.
    run_ranks(
        _first_gradient_behind,
        kind,
        False,
        MODES[mode],
        world_size=world_size,
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_peers_first_gradient_may_lie_behind_a_collective_of_another_group(kind, mode):
    options = {**ONE_BUCKET_EACH, **MODES[mode]}
    run_ranks(_first_gradient_behind, kind, True, options, timeout_s=TIMEOUT_S)
