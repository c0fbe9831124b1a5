"""Sharded parameters that are no plain blocks of memory: scalars, and those with gaps."""

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import Pair, expect_equal


class Scalar(nn.Module):
    """Has fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x):
        return x * self.scale


class Views(nn.Module):
    """Its parameters are views of tensors that are larger than they are, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))
        self.gapped = nn.Parameter(torch.randn(10, 12).narrow(1, 3, 4))
        self.every_third = nn.Parameter(torch.randn(50)[1::3])
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.permuted = nn.Parameter(torch.randn(4, 5, 6)[:, 1:4, ::3].permute(2, 0, 1))
        self.scale = nn.Parameter(torch.randn(3)[1])

    def forward(self, x):
        """Of single elements, whose bits do not depend on their places in memory."""
        tensors = (self.gapped, self.every_third, self.transposed, self.permuted)
        elements = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return (elements * x.mean() + self.shift) * self.scale


def _make():
    torch.manual_seed(0)
    return nn.Sequential(Scalar(), Views(), Scalar())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_scalars_and_views_with_gaps_equal_one_process(rank, world_size, reshards):
    plain, model = _make(), _make()
    assert plain[1].gapped.stride() == (12, 1)
    for module in model[:2]:
        brigade.fully_shard(module, reshard_after_forward=reshards)
    brigade.fully_shard(model)
    expect_equal(model, plain)
    pair = Pair(rank, torch.optim.AdamW, nets=(plain, model))
    for step in range(3):
        pair.expect_step(step)
    for name, part in model.named_parameters():
        assert part.shape == plain.get_parameter(name).shape
