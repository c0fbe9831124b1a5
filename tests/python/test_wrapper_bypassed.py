"""Backwards without a forward of the wrapper."""

import warnings

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks


def _loss(module):
    return module(torch.ones(2, 3)).square().sum()


@on_ranks()
def test_a_warning_if_the_wrapped_module_trains_alone(rank):
    ddp = brigade.DistributedDataParallel(nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"first gradient: parameter 1 \('bias'\), after"):
        _loss(ddp.module).backward()
    with warnings.catch_warnings():  # warns once
        warnings.simplefilter("error")
        _loss(ddp.module).backward()
        _loss(ddp).backward()


@on_ranks()
def test_an_error_with_one_backward_per_forward(rank):
    ddp = brigade.DistributedDataParallel(nn.Linear(3, 2), one_backward_per_forward=True)
    _loss(ddp).backward()
    with pytest.raises(RuntimeError, match=r"without a forward .* after iteration 1"):
        _loss(ddp.module).backward()
    ddp.zero_grad()
    _loss(ddp).backward()
    averaged = ddp.module.weight.grad.clone()
    ddp.zero_grad()
    with ddp.no_sync():
        _loss(ddp).backward()
    assert torch.equal(ddp.module.weight.grad, averaged)
