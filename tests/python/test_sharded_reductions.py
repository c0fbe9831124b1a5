"""Numbers that are computed of whole tensors, of which each rank holds a part."""

import math

import pytest
import torch
from torch import nn

import brigade

from cases import pairwise
from ranks import run_ranks

_TOTALS = ("sum", "mean", "max", "min", "amax", "amin")


def _nets(rank):
    """The same whole and sharded, with gradients; the bias is on one rank."""
    torch.manual_seed(0)
    plain, sharded = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    sharded.load_state_dict(plain.state_dict())
    brigade.fully_shard(sharded)
    x = torch.arange(6.0, dtype=torch.double).view(2, 3) - 2.5
    for net in (plain, sharded):
        net(x).pow(2).sum().backward()
    return plain, sharded


def _takes_totals(rank):
    plain, sharded = _nets(rank)
    with torch.no_grad():
        for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
            for w, p in ((whole, part), (whole.grad, part.grad)):
                for name in _TOTALS:
                    expected = getattr(w, name)()
                    for found in (getattr(p, name)(), getattr(torch, name)(p)):
                        assert found.dtype == p.dtype
                        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(
                    p.flatten().dot(p.flatten()) if p.dim() > 1 else p.dot(p),
                    w.flatten().dot(w.flatten()),
                    rtol=1e-12,
                    atol=1e-12,
                )
        # Of elements, as before.
        assert torch.equal(torch.max(part, part), part.to_local())
        assert sharded.weight.sum(dtype=torch.float).dtype == torch.float


def _takes_totals_no_grad(rank):
    _, sharded = _nets(rank)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        sharded.weight.sum()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="other arguments"):
        sharded.weight.sum(0)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="two parts of one parameter"):
        sharded.bias.dot(torch.ones(sharded.bias.numel(), dtype=torch.double))


def test_sums_and_extremes_are_of_the_whole_tensors():
    run_ranks(_takes_totals)


def test_what_is_no_number_of_the_whole_raises():
    run_ranks(_takes_totals_no_grad)


def _clip_with(rank, found, norm_type, clip):
    """Of the first element of a gradient or of the last one: each is in one rank's part."""
    for where, index in (("weight", 0), ("bias", 4)):
        plain, sharded = _nets(rank)
        whole, part = (net.get_parameter(where) for net in (plain, sharded))
        whole.grad.view(-1)[index] = found
        held = index - brigade._C.offset_of(part)
        if 0 <= held < part.numel():
            part.grad.to_local().view(-1)[held] = found
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        norm = clip(sharded, 1.0, norm_type)
        assert str(norm.item()) == str(expected.item())
        if math.isinf(expected):  # the gradients are what torch makes of them
            with torch.no_grad():
                for parameter in sharded.parameters():
                    parameter.copy_(parameter.grad)
            for name, value in sharded.full_state_dict().items():
                gradient = plain.get_parameter(name).grad
                torch.testing.assert_close(value, gradient, rtol=0, atol=0, equal_nan=True)


def _torchs_clip(sharded, max_norm, norm_type):
    return nn.utils.clip_grad_norm_(sharded.parameters(), max_norm, norm_type)


def _own_clip(sharded, max_norm, norm_type):
    return sharded.clip_grad_norm_(max_norm, norm_type)


@pairwise(
    clip=[_torchs_clip, _own_clip],
    norm_type=[1.0, 2.0, 3.0, math.inf],
    found=[math.nan, -math.inf],
)
def test_what_is_not_finite_in_one_part_is_in_the_norm_of_all(found, norm_type, clip):
    run_ranks(_clip_with, found, norm_type, clip)


def _steps(rank, name):
    _, sharded = _nets(rank)
    optimizer = getattr(torch.optim, name)(sharded.parameters())
    with pytest.raises(NotImplementedError, match=f"{name} of sharded parameters"):
        optimizer.step(lambda: torch.zeros(()))
    torch.optim.SGD(sharded.parameters(), lr=0.5).step()


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_look_at_whole_parameters_are_refused(name):
    run_ranks(_steps, name)


def _steps_unsharded(rank):
    net = brigade.replicate(nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.Adafactor(net.parameters()).step()


def test_they_are_not_where_parameters_are_whole():
    run_ranks(_steps_unsharded)


class Adafactor(torch.optim.SGD):
    """As another package's."""


def _steps_of_another_package(rank):
    _, sharded = _nets(rank)
    with pytest.raises(NotImplementedError, match="Adafactor of sharded parameters"):
        Adafactor(sharded.parameters(), lr=0.1).step()


def test_optimizers_of_other_packages_are_refused_by_name():
    run_ranks(_steps_of_another_package)


_OF_SEVERAL = {
    "std": torch.Tensor.std,
    "var": torch.var,
    "median": torch.median,
    "quantile": lambda t: torch.quantile(t, 0.5),
    "logsumexp": lambda t: t.logsumexp(0),
    "prod": torch.prod,
    "cat": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "stack": lambda t: torch.stack([t, t]),
    "matmul": lambda t: t @ t,
    "cumsum": lambda t: t.cumsum(0),
    "sort": torch.sort,
}


def _takes_of_several(rank):
    plain, sharded = _nets(rank)
    for name, function in _OF_SEVERAL.items():
        for part in (sharded.weight.grad, sharded.bias.grad):
            with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
                function(part)
            if part is sharded.bias.grad and name != "matmul":
                function(part.full_tensor())
    for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(part.full_tensor(), whole)
        assert torch.equal(part.grad.full_tensor(), whole.grad)
        assert torch.equal((part.grad * 2).full_tensor(), whole.grad * 2)


def test_functions_of_several_elements_are_refused():
    run_ranks(_takes_of_several)
