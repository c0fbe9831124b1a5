"""Modules that fully_shard refuses, since training them sharded would be silently wrong."""

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks


def _embedding():
    return nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))


def _bag():
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.EmbeddingBag(5, 4, max_norm=1.0)]))


def _hooked():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    net[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return net


class _GathersItself(nn.Parameter):
    def fsdp_pre_all_gather(self, *args):
        raise AssertionError("nobody calls it")


def _extended():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    net[1].weight = _GathersItself(net[1].weight.detach())
    return net


def _with_wide_gradients():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    net[1].weight.grad_dtype = torch.float32
    return net


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (_extended, NotImplementedError, r"parameter '1\.weight' of .* has fsdp_pre_all_gather"),
        (_with_wide_gradients, NotImplementedError, r"'1\.weight' of .* has grad_dtype .*float32"),
        (_embedding, NotImplementedError, "Embedding '0' has max_norm"),
        (_bag, NotImplementedError, r"EmbeddingBag '1\.0' has max_norm"),
    ],
)
@on_ranks()
def test_the_same_error_on_all_ranks(rank, make, error, words):
    net = make() if rank == 0 else nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    if rank == 0:
        with pytest.raises(error, match=words):
            brigade.fully_shard(net)
    else:
        with pytest.raises(ValueError, match=f"rank 0: {error.__name__}: .*{words}"):
            brigade.fully_shard(net)
    net = brigade.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    net(torch.ones(2, 4)).sum().backward()
    assert net[0].weight.grad is not None


@on_ranks()
def test_ignored_parameters_may_have_all_that(rank):
    net = _embedding()
    brigade.fully_shard(net, ignored_params={net[0].weight})
    net(torch.tensor([1, 2])).sum().backward()
    net = _hooked()
    handle = net[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    handle.remove()
    brigade.fully_shard(net, ignored_params={net[1].weight})
