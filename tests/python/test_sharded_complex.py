"""Sharded parameters with complex elements: averages, norms, and a state dict."""

import copy

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks


class Complex(nn.Module):
    """One matrix of complex elements, and a bias of one, which most ranks hold nothing of."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(9, dtype=torch.float32)
        self.weight = nn.Parameter(torch.complex(numbers - 4, 3 - numbers).view(3, 3))
        self.bias = nn.Parameter(torch.full((1,), 2 - 1j, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.weight + self.bias


def _batch(rank):
    return torch.complex(torch.full((2, 3), rank + 1.0), torch.full((2, 3), rank - 1.0))


def _clips(rank, p, way):
    plain = Complex()
    sum((plain(_batch(r)).abs().square().sum() for r in range(3)), start=0.0).div(3).backward()
    model = brigade.fully_shard(copy.deepcopy(plain))
    model(_batch(rank)).abs().square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, p)
    if way == "own":
        found = model.clip_grad_norm_(1.0, p)
    else:
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, p, foreach=way == "foreach")
    assert not found.is_complex()
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                parameter.sub_(parameter.grad)
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
@on_ranks(3)
def test_norms_are_those_of_one_process(rank, p):
    for way in ("own", "foreach", "each"):
        _clips(rank, p, way)
