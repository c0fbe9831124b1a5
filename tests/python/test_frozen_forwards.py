"""Frozen parameters with several forwards in a step, and backwards that reach no trained ones."""

import pytest
import torch

import brigade

from rank_cases import run_cases
from ranks import run_ranks
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    expect_parameters,
    layers,
    loss_of,
    step_by_sign,
)

SIZES = (3, 5, 2, 4)
FROZEN = [("weight",), ("0.",), ("1.",), ("0.", "2.bias"), ("0.bias", "1.weight", "2.bias")]


def _pair(frozen, reshards=True):
    pair = layers(*SIZES), layers(*SIZES)
    for net in pair:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    model = pair[1]
    for layer in model[:2]:
        brigade.fully_shard(layer, reshard_after_forward=reshards)
    brigade.fully_shard(model)
    return pair


def _one_backward(net, batches):
    sum(loss_of(net, x) for x in batches).backward()


def _backward_of_each(net, batches):
    losses = [loss_of(net, x) for x in batches]
    for loss in losses:
        loss.backward()


def _in_turn(net, batches):
    for x in batches:
        loss_of(net, x).backward()


def _with_evaluation(net, batches):
    """A forward without a gradient before each one, and one of an inner unit alone behind it."""
    losses = []
    for x in batches:
        with torch.no_grad():
            net(x)
        losses.append(loss_of(net, x))
        with torch.no_grad():
            net[0](x)
    sum(losses).backward()


PROGRAMS = [_one_backward, _backward_of_each, _in_turn, _with_evaluation]


def _trains(rank, frozen, program, reshards):
    plain, model = _pair(frozen, reshards)
    for step in range(3):
        batches = [[batch_of(SIZES[0], r, 3 * step + i) for i in range(3)] for r in range(2)]
        backward_of_all(plain, 2, lambda net, r, b=batches: sum(loss_of(net, x) for x in b[r]))
        program(model, batches[rank])
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


@pytest.mark.parametrize("program", PROGRAMS)
def test_several_forwards_in_a_step(program):
    run_cases(_trains, [(frozen, program, r) for frozen in FROZEN for r in (True, False)])


class Tapped:
    """A model, its inputs that want a gradient, and what its first layer has returned."""

    def __init__(self, net, x):
        self.x = x.clone().requires_grad_()
        inside = []
        hook = net[0].register_forward_hook(lambda module, args, output: inside.append(output))
        self.output = net(self.x)
        hook.remove()
        self.inside = inside[0]


def _reaches_inputs_only(rank, frozen):
    """Backward from behind the first layer, which is frozen; the others are not reached."""
    plain, model = _pair(frozen)
    for step in range(3):
        x = batch_of(SIZES[0], rank, step)
        taps = [Tapped(net, x) for net in (plain, model)]
        for tap in taps:
            tap.inside.square().sum().backward()
        assert torch.equal(taps[0].x.grad, taps[1].x.grad)
        assert all(p.grad is None for p in model.parameters())
        backward_of_all(plain, 2, lambda net, r, step=step: loss_of(net, batch_of(3, r, step)))
        loss_of(model, x).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


def test_a_backward_that_reaches_inputs_of_a_frozen_unit_only():
    run_cases(_reaches_inputs_only, [(("0.",),), (("0.", "1."),)])


def _all_frozen(rank):
    plain, model = _pair(("",))
    for step in range(3):
        x = batch_of(SIZES[0], rank, step)
        taps = [Tapped(net, x) for net in (plain, model)]
        for tap in taps:
            tap.output.square().sum().backward()
        assert torch.equal(taps[0].x.grad, taps[1].x.grad)
    assert model.sharding_statistics()["sent_by_sums"] == 0
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_inputs_of_a_model_that_is_all_frozen():
    run_ranks(_all_frozen)


def _gradients_are_returned(rank, frozen):
    """torch.autograd.grad with respect to inputs leaves parameters without gradients."""
    plain, model = _pair(frozen)
    for step in range(3):
        x = batch_of(SIZES[0], rank, step)
        found = []
        for net in (plain, model):
            tap = Tapped(net, x)
            found.append(torch.autograd.grad(tap.output.square().sum(), tap.x)[0])
        assert torch.equal(*found)
        assert all(p.grad is None for p in model.parameters())
        backward_of_all(plain, 2, lambda net, r, step=step: loss_of(net, batch_of(3, r, step)))
        loss_of(model, x).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)


def test_gradients_of_inputs_that_are_returned():
    run_cases(_gradients_are_returned, [(("0.",),), (("1.", "2.weight"),)])
