"""Units of several modules, of which some are called alone, outside of the model's forward."""

import copy

import pytest
import torch
from torch import nn

import brigade

from rank_cases import run_cases
from ranks import run_ranks
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    expect_parameters,
    linear,
    loss_of,
    step_by_sign,
)


class Heads(nn.Module):
    """Forward goes through one of two heads, which are a unit together."""

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
    """The second head has not run in the forward before; one backward goes through both."""
    loss = loss_of(net, batch_of(3, rank, step))
    return loss + loss_of(net.heads[1], batch_of(4, rank, step))


def _alone_then_whole(net, rank, step):
    loss = loss_of(net.heads[1], batch_of(4, rank, step))
    return loss + loss_of(net, batch_of(3, rank, step))


def _both_alone(net, rank, step):
    return sum(loss_of(head, batch_of(4, rank, step)) for head in net.heads)


def _one_alone_behind_the_other(net, rank, step):
    """The output of the model is what the member that has run goes on from."""
    y = net(batch_of(3, rank, step))
    return loss_of(net.heads[0], torch.cat([y, y[:, :1]], 1))


LOSSES = [_whole_then_alone, _alone_then_whole, _both_alone, _one_alone_behind_the_other]


def _trains(rank, reshards, loss):
    plain, model = _pair(reshards)
    with torch.no_grad():  # makes the root
        assert torch.equal(model(batch_of(3, rank, 9)), plain(batch_of(3, rank, 9)))
    for step in range(4):
        backward_of_all(plain, 2, lambda net, r, step=step: loss(net, r, step))
        loss(model, rank, step).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
        expect_parameters(model, plain)


@pytest.mark.parametrize("reshards", [True, False])
def test_a_member_called_alone_trains_as_in_one_process(reshards):
    run_cases(_trains, [(reshards, loss) for loss in LOSSES])


def _in_steps_of_their_own(rank, reshards):
    """A backward of the whole, then one of the member that has not run, into one gradient."""
    plain, model = _pair(reshards)
    for step in range(4):
        for which, size in ((0, 3), (1, 3), (None, 4)):

            def loss_on(net, r, which=which, size=size, step=step):
                x = batch_of(size, r, step)
                if which is None:
                    return net.heads[1](x).square().sum()
                return net(x, which).square().sum()

            backward_of_all(plain, 2, loss_on)
            loss_on(model, rank).backward()
            assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


def test_backwards_of_the_whole_and_of_a_member_add_up():
    run_cases(_in_steps_of_their_own, [(True,), (False,)])


def _evaluates_alone(rank):
    plain, model = _pair(True)
    loss = loss_of(model, batch_of(3, rank, 0))
    with torch.no_grad():
        for i in (1, 0, 1):
            x = batch_of(4, rank, i)
            assert torch.equal(model.heads[i](x), plain.heads[i](x))
            assert isinstance(model.heads[i].weight, brigade.ShardedParameter)
    backward_of_all(plain, 2, lambda net, r: loss_of(net, batch_of(3, r, 0)))
    loss.backward()
    expect_gradients(model, plain)


def test_a_member_is_evaluated_between_forward_and_backward():
    run_ranks(_evaluates_alone)
