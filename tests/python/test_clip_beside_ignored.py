"""Clipping by norm where some of the model's parameters are ignored by fully_shard."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from whole_numbers import backward_of_all, loss_of, own_part

WORLD_SIZE = 2


def _nets():
    """One of one process, and one whose last layer is not sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = copy.deepcopy(plain)
    brigade.fully_shard(model, ignored_params=set(model[2].parameters()))
    return plain, model


def _batch_of(rank):
    return torch.linspace(-3, 5, 8).view(2, 4) * (rank + 1)


def _backward(plain, model, rank):
    """Gradients of the ranks' mean; those of what is ignored are averaged by hand."""
    backward_of_all(plain, WORLD_SIZE, lambda net, r: loss_of(net, _batch_of(r)))
    model(_batch_of(rank)).square().sum().backward()
    for parameter in model[2].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.mul_(1 / WORLD_SIZE)


def _split(model):
    ignored = list(model[2].parameters())
    return [p for p in model.parameters() if all(p is not i for i in ignored)], ignored


@on_ranks()
def test_torchs_function_refuses_both_together(rank):
    for foreach in (None, True):
        plain, model = _nets()
        _backward(plain, model, rank)
        ignored = [p.grad.clone() for p in _split(model)[1]]
        parts = [p.grad.to_local().clone() for p in _split(model)[0]]
        with pytest.raises(
            NotImplementedError, match=r"(?s)together with others.*Clip them separately"
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        for parameter, gradient in zip(_split(model)[1], ignored, strict=True):
            assert torch.equal(parameter.grad, gradient)
        for parameter, gradient in zip(_split(model)[0], parts, strict=True):
            assert torch.equal(parameter.grad.to_local(), gradient)


def _apart(rank, norm_type):
    """As the error says: norms apart, put together, and both clipped by the total."""
    plain, model = _nets()
    _backward(plain, model, rank)
    sharded, ignored = _split(model)
    norms = [
        nn.utils.get_total_norm([p.grad for p in of_kind], norm_type)
        for of_kind in (sharded, ignored)
    ]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    torch.testing.assert_close(total, expected)
    for of_kind in (sharded, ignored):
        nn.utils.clip_grads_with_norm_(of_kind, 0.5, total)
    wholes = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = wholes[name].grad
        if isinstance(parameter, brigade.ShardedParameter):
            torch.testing.assert_close(parameter.grad.norm(), gradient.norm())
            torch.testing.assert_close(parameter.grad.to_local(), own_part(parameter, gradient))
        else:
            torch.testing.assert_close(parameter.grad, gradient)


@on_ranks()
def test_norms_are_put_together_by_hand(rank):
    for norm_type in (2.0, 1.0, float("inf")):
        _apart(rank, norm_type)


@on_ranks()
def test_the_models_own_method_is_of_its_units_alone(rank):
    """The model's own method is of its units: neither the norm nor the clip is of others."""
    plain, model = _nets()
    _backward(plain, model, rank)
    sharded, ignored = _split(model)
    before = [p.grad.clone() for p in ignored]
    expected = nn.utils.get_total_norm([p.grad for p in plain[0].parameters()])
    found = model.clip_grad_norm_(0.5)
    torch.testing.assert_close(found, expected.to(found.dtype))
    torch.testing.assert_close(
        nn.utils.get_total_norm([p.grad for p in sharded]), torch.tensor(0.5), rtol=1e-4, atol=0
    )
    for parameter, gradient in zip(ignored, before, strict=True):
        assert torch.equal(parameter.grad, gradient)
