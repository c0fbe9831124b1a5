"""Optimizers that go through lists of parts at once, as they do on GPUs, beside one by one."""

import pytest
import torch
from torch.optim.optimizer import _foreach_supported_types

from ranks import on_ranks
from sharded_training import batch_of, make_net, shard_blocks

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks()
def test_lists_are_stepped_as_each(rank, name):
    cls, options = OPTIMIZERS[name]
    found = []
    for foreach in (False, True):
        model = shard_blocks(make_net())
        optimizer = cls(model.parameters(), lr=0.01, foreach=foreach, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        found.append([p.full_tensor().detach() for p in model.parameters()])
    for one_by_one, together in zip(*found, strict=True):
        torch.testing.assert_close(together, one_by_one)


@on_ranks()
def test_it_is_the_default(rank):
    """As on devices, where it is torch's default for its own parameters."""
    model = shard_blocks(make_net())
    assert all(type(parameter) in _foreach_supported_types for parameter in model.parameters())
