"""References to a gradient keep their values, even if it shares the bucket's memory."""

import numpy as np
import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks

WIDTH = 160  # weights of 100 KB, whose gradients may use the bucket's memory
STEPS = 5

# Ways to keep a gradient, and to read its values later.
FORMS = {
    "tensor": (lambda g: g, lambda kept: kept),
    "alias": (lambda g: g.detach(), lambda kept: kept),
    "row": (lambda g: g[0], lambda kept: kept),
    "data": (lambda g: g.data, lambda kept: kept),
    "array": (lambda g: g.numpy(), torch.from_numpy),
    "DLPack": (lambda g: np.from_dlpack(g), torch.from_numpy),
    "shared": (lambda g: g.share_memory_(), lambda kept: kept),
    "storage": (
        lambda g: (g.untyped_storage(), g.storage_offset()),
        lambda kept: torch.empty(0).set_(kept[0], kept[1], (WIDTH, WIDTH)),
    ),
}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(STEPS)]


def _step(model, x):
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().sum().backward()


@pytest.mark.parametrize("form", FORMS)
@on_ranks()
def test_kept_gradients_keep_their_values(rank, form):
    """A reference taken during backward gets the average at the end of backward."""
    keep, read = FORMS[form]
    model = brigade.DistributedDataParallel(_net())
    first, second = model.module[0].weight, model.module[2].weight
    kept, early = [], []
    second.register_post_accumulate_grad_hook(lambda p: early.append(keep(p.grad)))
    for x in _inputs(rank):
        _step(model, x)
        kept.append((keep(first.grad), first.grad.clone()))
        for mine, expected in (*kept, (early.pop(), second.grad)):
            values = read(mine)
            assert torch.equal(values, expected[0] if values.dim() == 1 else expected)
