"""Several modules that are sharded as one unit."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import Block, is_unsharded
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    expect_parameters,
    linear,
    loss_of,
    step_by_sign,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(2)])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens, to_the_end=True):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if to_the_end:
            x = self.head(self.norm(x))
        return x * self.scale.sum()


def _model():
    torch.manual_seed(0)
    return Tied()


def _sharded(model, **arguments):
    for block in model.blocks:
        brigade.fully_shard(block, **arguments)
    joint = [model.embed, model.norm, model.head]
    assert brigade.fully_shard(joint, **arguments) is joint
    return brigade.fully_shard(model, **arguments)


def _tokens(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (2, 3), generator=generator)


@on_ranks()
def test_a_joint_unit_is_unsharded_from_the_first_to_the_last_forward(rank):
    model = _sharded(_model())
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(is_unsharded(model.head.weight)))
    model(_tokens(rank, 0))
    assert seen == [True]
    assert not is_unsharded(model.head.weight)
    before = model.sharding_statistics()["buffer_bytes"]
    with torch.no_grad():
        model(_tokens(rank, 0), to_the_end=False)
        assert not is_unsharded(model.embed.weight)
        model(_tokens(rank, 0), to_the_end=False)
    assert model.sharding_statistics()["buffer_bytes"] == before
    assert re.search(r" embed, norm, head +3 ", model.explain())


@on_ranks()
def test_a_joint_root_unit(rank):
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.ModuleList(modules))
    brigade.fully_shard(modules)
    x = torch.ones(2, 4)
    for _ in range(2):
        for first, second in (modules, plain):
            first.zero_grad()
            second.zero_grad()
            second(first(x)).square().sum().backward()
    state = modules[1].full_state_dict()
    assert torch.equal(state["weight"], plain[1].weight)
    shards = [p for module in modules for p in module.parameters()]
    for shard, whole in zip(shards, plain.parameters(), strict=True):
        held = torch.zeros(2)
        held[rank] = shard.grad.to_local().sum()
        dist.all_reduce(held)
        assert held.sum() == whole.grad.sum()
    assert re.search(r" \[0\], \[1\] +4 ", modules[0].explain())


@on_ranks(1)
def test_invalid_lists_are_errors(rank):
    model = _model()
    with pytest.raises(ValueError, match="an empty list"):
        brigade.fully_shard([])
    with pytest.raises(ValueError, match="in the list twice, or contains another"):
        brigade.fully_shard([model, model.head])
    with pytest.raises(ValueError, match="in the list twice, or contains another"):
        brigade.fully_shard([model.head, model.head])
    brigade.fully_shard([model.norm, model.blocks[0]])
    with pytest.raises(ValueError, match="sharded already"):
        brigade.fully_shard([model.embed, model.norm])
    other = nn.Linear(7, 7, bias=False)
    brigade.fully_shard([model.embed, model.head])
    other.weight = model.embed.weight
    with pytest.raises(ValueError, match="is already 'weight' of a sharded Embedding with Linear"):
        brigade.fully_shard(other)


# ---- Members called alone, outside the model's forward.


class Heads(nn.Module):
    """Forward runs one of two heads, which form one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear(3, 4, 1)
        self.heads = nn.ModuleList([linear(4, 3, 2), linear(4, 5, 3)])

    def forward(self, x, which=0):
        return self.heads[which](self.body(x))


def _pair(reshards):
    plain = Heads()
    model = copy.deepcopy(plain)
    brigade.fully_shard(list(model.heads), reshard_after_forward=reshards)
    return plain, brigade.fully_shard(model, reshard_after_forward=reshards)


def _whole_then_alone(net, rank, step):
    loss = loss_of(net, batch_of(3, rank, step))
    return loss + loss_of(net.heads[1], batch_of(4, rank, step))


def _alone_then_whole(net, rank, step):
    loss = loss_of(net.heads[1], batch_of(4, rank, step))
    return loss + loss_of(net, batch_of(3, rank, step))


def _both_alone(net, rank, step):
    return sum(loss_of(head, batch_of(4, rank, step)) for head in net.heads)


def _one_alone_behind_the_other(net, rank, step):
    """Runs the second head on the output of the model, whose forward ran the first."""
    y = net(batch_of(3, rank, step))
    return loss_of(net.heads[0], torch.cat([y, y[:, :1]], 1))


LOSSES = [_whole_then_alone, _alone_then_whole, _both_alone, _one_alone_behind_the_other]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@on_ranks()
def test_a_member_called_alone_trains_as_in_one_process(rank, reshards, loss):
    plain, model = _pair(reshards)
    with torch.no_grad():  # creates the root
        assert torch.equal(model(batch_of(3, rank, 9)), plain(batch_of(3, rank, 9)))
    for step in range(4):
        backward_of_all(plain, 2, lambda net, r, step=step: loss(net, r, step))
        loss(model, rank, step).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
        expect_parameters(model, plain)
