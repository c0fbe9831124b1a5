"""What programs do with parts outside of forward: the whole's value, or an error on all ranks.

Of a matrix that is cut inside of rows; no rank holds all of it.
"""

import copy

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import brigade

from ranks import run_ranks

# By what is computed of parts as of wholes.
RIGHT = {
    "all of it": lambda p: p[:].norm() + p[...].norm(),
    "as itself": lambda p: p.view_as(p).norm() + p.expand_as(p).norm(),
    "in its own shape": lambda p: p.view(p.shape).norm() + p.reshape(p.shape).norm(),
    "as another's type": lambda p: p.type_as(p.double()).norm(),
    "counts": lambda p: (p > 0).int().sum() + (p > 0).long().sum() + (p > 0).bool().sum(),
    "masked": lambda p: p.masked_fill(p < 0, 0).sum(),
    "activations": lambda p: functional.gelu(p).norm() + functional.silu(p).norm(),
    "leaky": lambda p: functional.leaky_relu(p, 0.1).sum() + functional.relu(p).sum(),
}
REFUSED = {
    "a row": lambda p: p[0],
    "rows": lambda p: p[1:],
    "a mask's elements": lambda p: p[p > 0],
    "unsqueeze": lambda p: p.unsqueeze(0),
    "squeeze": lambda p: p.squeeze(),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "chunk": lambda p: p.chunk(3),
    "split": lambda p: p.split(2),
    "flip": lambda p: p.flip(0),
    "reshape": lambda p: p.reshape(p.size(0), -1),
    "dropout": lambda p: functional.dropout(p, 0.0),
    "a loss": lambda p: functional.binary_cross_entropy_with_logits(p, torch.ones_like(p)),
    "linear": lambda p: functional.linear(torch.ones(2, p.numel()), p),
    "with another size": lambda p: functional.linear(torch.ones(2, 5), p),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: numpy.asarray(p),
    "item": lambda p: p.item(),
    "a number": lambda p: float(p),
    "iteration": lambda p: list(p),
    "into another": lambda p: torch.index_select(p, 0, torch.tensor([0]), out=torch.empty(1)),
    "tolist": lambda p: p.tolist(),
    "spectral": lambda p: torch.linalg.norm(p, 2),
    "of rows": lambda p: torch.linalg.norm(p, float("inf")),
    "nuclear": lambda p: p.norm("nuc"),
    "sets a row": lambda p: p.__setitem__(0, 0),
    "sets rows": lambda p: p.__setitem__(slice(1, 3), 0),
    "fills rows": lambda p: p.index_fill_(0, torch.tensor([0]), 0),
    "zeros a row": lambda p: p[1].zero_(),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "all-reduce": lambda p: dist.all_reduce(p),
    "all-gather": lambda p: dist.all_gather([torch.empty(p.shape)], p),
    "set in the whole": lambda p: torch.zeros(p.shape).__setitem__(slice(None), p),
    "a copy of the whole": lambda p: torch.zeros(p.shape).copy_(p),
    "an average of the whole": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
    "lists": lambda p: torch._foreach_lerp_([torch.zeros(p.shape)], [p], 0.5),
}


def _make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 1))


def _computes(rank):
    whole, net = _make()[0].weight.detach(), brigade.fully_shard(_make())
    part = net[0].weight.detach()
    for name, of in RIGHT.items():
        torch.testing.assert_close(of(part), of(whole), msg=name)
    before = part.to_local().clone()
    for name, of in REFUSED.items():
        with pytest.raises(NotImplementedError):
            pytest.fail(f"{name} gave {of(part)}")
    assert torch.equal(part.to_local(), before)
    own = torch.zeros(part.shape)
    torch._foreach_copy_([own], [part])
    assert torch.equal(own, part.to_local())
    assert torch.ones(part.numel()).view_as(part).shape == part.shape
    with pytest.raises(NotImplementedError, match="as many elements"):
        torch._foreach_copy_([torch.zeros(part.shape)], [part])
    masked = part.clone()
    masked[masked > 0] = 0
    torch.testing.assert_close(masked.sum(), whole.clamp(max=0).sum())


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_is_of_the_whole_or_an_error(world_size):
    run_ranks(_computes, world_size=world_size)


def _is_as_any_tensor(rank):
    """Where each rank has all of it."""
    part = brigade.replicate(_make())[0].weight.detach()
    assert part[0].shape == (5,) and part.T.shape == (5, 7)
    assert torch.zeros(7, 5).copy_(part).equal(part.to_local())
    dist.broadcast(part, 0)


def test_replicas_are_as_any_tensor():
    run_ranks(_is_as_any_tensor)


def _loads_wholes(rank, options):
    plain, net = _make(), brigade.fully_shard(_make())
    optimizers = [options["make"](m.parameters(), lr=0.1, **options["with"]) for m in (plain, net)]
    for model in (plain, net):
        model(torch.ones(2, 5)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    before = copy.deepcopy(brigade.full_optimizer_state_dict(net, optimizers[1]))
    with pytest.raises(ValueError, match="load_full_optimizer_state_dict"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    after = brigade.full_optimizer_state_dict(net, optimizers[1])
    assert str(after) == str(before)
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    state = {
        key: {name: value.to_local() if value.dim() else value for name, value in of_part.items()}
        for key, of_part in optimizers[1].state_dict()["state"].items()
    }
    optimizers[1].load_state_dict(optimizers[1].state_dict() | {"state": state})
    net.load_state_dict({name: value.to_local() for name, value in net.state_dict().items()})

    whole = net.full_state_dict()
    zeros = {name: torch.zeros_like(value) for name, value in whole.items()}
    with pytest.raises(RuntimeError, match=r"for 0\.weight: .* found all of it.*\n.*load_full"):
        net.load_state_dict(zeros)
    assert all(torch.equal(whole[name], v) for name, v in net.full_state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {"make": torch.optim.AdamW, "with": {"fused": True}},
        {"make": torch.optim.AdamW, "with": {}},
        {"make": torch.optim.SGD, "with": {"momentum": 0.9, "fused": True}},
    ],
)
def test_states_of_wholes_are_not_loaded_into_parts(options):
    run_ranks(_loads_wholes, options)


def _names(rank):
    part = brigade.fully_shard(_make())[0].weight
    assert not hasattr(part, "to_local")
    for name, instead in {"to_local": "plain", "redistribute": "full_tensor"}.items():
        with pytest.raises(AttributeError, match=rf"'{name}', which DTensors have: use {instead}"):
            getattr(part, name)
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="which has no forward"):
            brigade.fully_shard(container)


def test_what_is_lacking_says_what_to_use():
    run_ranks(_names)
