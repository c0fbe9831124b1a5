"""Training with integers, so that sums have the same bits in any order.

Weights and inputs are small integers in float64, and steps add or subtract 1. Averages over 2 or 4
ranks are exact too.
"""

import itertools

import torch
from torch import nn

import brigade


def linear(num_inputs, num_outputs, seed=0):
    layer = nn.Linear(num_inputs, num_outputs, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.arange(parameter.numel()) * 3 + seed
            parameter.copy_((values % 5 - 2).view_as(parameter))
    return layer


def layers(*sizes):
    """Returns a chain of linear layers; loss_of() is not linear."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(linear(*pair, seed) for seed, pair in enumerate(pairs)))


def num_bytes(*sizes):
    """Returns the size of these layers' parameters."""
    return 8 * sum(a * b + b for a, b in itertools.pairwise(sizes))


def batch_of(size, rank, step):
    """Returns a batch that differs for each of 4 ranks and 10 steps."""
    values = 7 * torch.arange(2.0 * size, dtype=torch.float64) + rank + 4 * step
    return (values % 41 - 20).view(2, size)


def loss_of(net, x):
    return net(x).square().sum()


def backward_of_all(plain, world_size, loss_on):
    """Runs the backwards of all ranks in one process; `loss_on(model, rank)` returns a loss."""
    for rank in range(world_size):
        loss_on(plain, rank).div(world_size).backward()


def own_shard(part, whole):
    """Returns this rank's shard of an unsharded tensor, 1D in memory order."""
    in_order = torch.empty_strided(part.shape, part.stride(), dtype=whole.dtype)
    in_order.copy_(whole.detach())
    begin = brigade._C.offset_of(part)
    return in_order.as_strided((whole.numel(),), (1,))[begin:][: part.to_local().numel()]


def expect_gradients(model, plain):
    """Expects the shards of `plain`'s gradients, and None where it has None."""
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, part), whole in pairs:
        assert (part.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            expected = own_shard(part, whole.grad)
            assert torch.equal(part.grad.to_local(), expected), (name, part.grad, expected)


def expect_parameters(model, plain):
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, part), whole in pairs:
        assert isinstance(part, brigade.ShardedParameter), name
        assert torch.equal(part.to_local(), own_shard(part, whole)), name


@torch.no_grad()
def step_by_sign(*models):
    """Adds or subtracts 1, so that parameters stay small integers, and clears gradients."""
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            if isinstance(parameter, brigade.ShardedParameter):
                parameter.to_local().sub_(parameter.grad.to_local().sign())
            else:
                parameter.sub_(parameter.grad.sign())
        model.zero_grad()
