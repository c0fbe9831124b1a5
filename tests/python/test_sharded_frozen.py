"""Frozen parameters of sharded units are gathered, and no part of what is reduced."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import run_ranks

SIZE = 6  # 36 elements of a weight and 6 of a bias: of no unit a rank gets padding


def _batch_of(rank):
    return torch.arange(2.0 * SIZE).view(2, SIZE) - 3 + 2 * rank


def _layers():
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 - 1 + i % 2)
    return model


def _freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))


def _shard(model):
    for layer in model[:2]:
        brigade.fully_shard(layer)
    return brigade.fully_shard(model)


def _expect_gradients(model, plain):
    """And that the same ones have none."""
    with torch.no_grad():
        for (name, part), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (part.grad is None) == (whole.grad is None) == (not whole.requires_grad), name
            if whole.grad is not None:
                part.copy_(part.grad)
    state = model.full_state_dict()
    for name, whole in plain.named_parameters():
        assert torch.equal(state[name], whole if whole.grad is None else whole.grad), name


def _step(rank, model, plain):
    """Bytes that all ranks together have sent, for gathers and for sums."""
    names = ("sent_by_gathers", "sent_by_sums")
    before = model.sharding_statistics()
    world_size = dist.get_world_size()
    for r in range(world_size):
        plain(_batch_of(r)).sum().div(world_size).backward()
    model(_batch_of(rank)).sum().backward()
    # Its sum is behind all gathers, one among them that nothing needed and so waited for.
    model.clip_grad_norm_(math.inf)
    after = model.sharding_statistics()
    sent = torch.tensor([after[name] - before[name] for name in names])
    dist.all_reduce(sent)
    return sent.tolist()


def _expect_sent(rank, model, plain):
    gathers, sums = _step(rank, model, plain)
    num_others = dist.get_world_size() - 1
    layers = [list(layer.parameters()) for layer in plain]
    numels = [sum(p.numel() for p in layer) for layer in layers]
    # Once for forward, and units for backward, but for those in front of all that is trained.
    trained = (i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer))
    reached = numels[next(trained) : 2]
    assert gathers == 4 * num_others * (sum(numels) + sum(reached))
    trained = [p.numel() for p in plain.parameters() if p.requires_grad]
    assert sums == 4 * num_others * sum(trained)
    _expect_gradients(model, plain)


def _frozen_before(rank, frozen):
    model = _layers()
    _freeze(model, frozen)
    plain = copy.deepcopy(model)
    _expect_sent(rank, _shard(model), plain)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "frozen",
    [(), ("weight",), ("bias",), ("0.",), ("0.", "1.bias"), ("0.weight", "1.bias", "2.weight")],
)
def test_only_what_is_trained_is_reduced(frozen, world_size):
    run_ranks(_frozen_before, frozen, world_size=world_size)


def _frozen_behind(rank):
    """Whole units, and what was frozen by itself before."""
    model = _layers()
    _freeze(model, ("1.bias",))
    plain = copy.deepcopy(model)
    _shard(model)
    for frozen in ((), ("0.",), ("1.",), ("0.", "2."), ("1.bias",), ()):
        values = _layers()
        model.load_full_state_dict(values.state_dict())
        plain.load_state_dict(values.state_dict())
        for net in (model, plain):
            net.zero_grad()
            _freeze(net, frozen)
        _expect_sent(rank, model, plain)


def test_units_may_be_frozen_and_thawed_between_steps():
    run_ranks(_frozen_behind)


class _Encoded(nn.Module):
    """A front that is called without gradients, and what is trained behind it."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(*_layers())
        self.top = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        with torch.no_grad():
            x = self.front(x)
        return self.top(x)


def _front_without_gradients(rank):
    model = _Encoded()
    for layer in (*model.front, model.top):
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    for _ in range(3):
        model(_batch_of(rank)).sum().backward()
        gathers = model.sharding_timeline().gathers
        assert [gather.unit for gather in gathers if not gather.is_in_forward] == ["top"]
        assert all(gather.needed_ns > 0 for gather in gathers)


def test_a_front_that_is_called_without_gradients_is_not_gathered_for_backward():
    run_ranks(_front_without_gradients)
