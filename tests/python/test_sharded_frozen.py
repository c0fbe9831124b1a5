"""Frozen parameters: all-gathered, but not reduced."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    layers,
    loss_of,
    step_by_sign,
)

SIZE = 8  # 2 and 4 ranks need no padding


def _freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))


def _pair(frozen):
    plain, model = layers(*[SIZE] * 4), layers(*[SIZE] * 4)
    for net in (plain, model):
        _freeze(net, frozen)
    for layer in model[:2]:
        brigade.fully_shard(layer)
    return plain, brigade.fully_shard(model)


def _expect_step(rank, plain, model, step):
    backward_of_all(
        plain, dist.get_world_size(), lambda net, r: loss_of(net, batch_of(SIZE, r, step))
    )
    loss_of(model, batch_of(SIZE, rank, step)).backward()
    expect_gradients(model, plain)


def _expect_sent(rank, plain, model, step):
    """Runs a step, and checks the bytes sent by all ranks for all-gathers and reductions."""
    names = ("sent_by_gathers", "sent_by_sums")
    before = model.sharding_statistics()
    _expect_step(rank, plain, model, step)
    # Its collective comes after all all-gathers, even one that no unit waited for.
    model.clip_grad_norm_(math.inf)
    after = model.sharding_statistics()
    sent = torch.tensor([after[name] - before[name] for name in names])
    dist.all_reduce(sent)
    num_others = dist.get_world_size() - 1
    by_layer = [list(layer.parameters()) for layer in plain]
    numels = [sum(p.numel() for p in layer) for layer in by_layer]
    # Forward gathers all units; backward gathers those from the first trained one on.
    trained = (i for i, layer in enumerate(by_layer) if any(p.requires_grad for p in layer))
    reached = numels[next(trained) : 2]
    trained = [p.numel() for p in plain.parameters() if p.requires_grad]
    expected = [sum(numels) + sum(reached), sum(trained)]
    assert sent.tolist() == [8 * num_others * numel for numel in expected]
    step_by_sign(model, plain)


FROZEN = [(), ("weight",), ("bias",), ("0.",), ("0.", "1.bias"), ("0.weight", "1.bias", "2.weight")]


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_only_trained_parameters_are_reduced(rank, world_size):
    for frozen in FROZEN:
        _expect_sent(rank, *_pair(frozen), 0)


class _Encoded(nn.Module):
    """An encoder called without gradients, and a trained head."""

    def __init__(self):
        super().__init__()
        self.front, self.top = layers(*[SIZE] * 4), layers(SIZE, SIZE)[0]

    def forward(self, x):
        with torch.no_grad():
            x = self.front(x)
        return self.top(x)


@on_ranks()
def test_backward_does_not_gather_an_encoder_called_without_gradients(rank):
    model = _Encoded()
    for layer in (*model.front, model.top):
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    for _ in range(3):
        loss_of(model, batch_of(SIZE, rank, 0)).backward()
        gathers = model.sharding_timeline().gathers
        assert [gather.unit for gather in gathers if not gather.is_in_forward] == ["top"]
        assert all(gather.needed_ns > 0 for gather in gathers)


class Tapped:
    """A model that keeps its inputs, which require gradients, and its first layer's output."""

    def __init__(self, net, x):
        self.x = x.clone().requires_grad_()
        inside = []
        hook = net[0].register_forward_hook(lambda module, args, output: inside.append(output))
        self.output = net(self.x)
        hook.remove()
        self.inside = inside[0]


@pytest.mark.parametrize("frozen", [("0.",), ("1.", "2.weight")])
@on_ranks()
def test_autograd_grad_of_inputs(rank, frozen):
    """torch.autograd.grad with respect to inputs leaves parameters without gradients."""
    plain, model = _pair(frozen)
    for step in range(3):
        x = batch_of(SIZE, rank, step)
        found = []
        for net in (plain, model):
            tap = Tapped(net, x)
            found.append(torch.autograd.grad(tap.output.square().sum(), tap.x)[0])
        assert torch.equal(*found)
        assert all(p.grad is None for p in model.parameters())
        _expect_step(rank, plain, model, step)
        step_by_sign(model, plain)


@pytest.mark.parametrize("names", [["0.weight"], ["1.bias", "2.weight"]])
@on_ranks()
def test_a_backward_to_some_shards(rank, names):
    """backward(inputs=...) leaves the other parameters without gradients."""
    plain, model = _pair(())
    for step in range(3):

        def backward(net, r, step=step):
            loss_of(net, batch_of(SIZE, r, step)).backward(
                inputs=[net.get_parameter(name) for name in names]
            )

        for r in range(dist.get_world_size()):
            backward(plain, r)
        backward(model, rank)
        for name, parameter in plain.named_parameters():
            found = model.get_parameter(name).grad
            assert (found is not None) == (name in names), name
            if found is not None:
                assert torch.equal(found.full_tensor(), parameter.grad / dist.get_world_size())
        model.zero_grad()
        plain.zero_grad()
        _expect_step(rank, plain, model, step)
        step_by_sign(model, plain)
