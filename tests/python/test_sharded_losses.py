"""Losses and gradients of units on 4 ranks, step by step: sharded, replicated, both."""

import copy

import pytest
import torch.distributed as dist
from torch import nn

import brigade

from rank_cases import run_cases
from whole_numbers import batch_of, expect_gradients, layers, loss_of, step_by_sign

WORLD_SIZE = 4
SIZES = [(7, 15, 3), (16, 17, 8, 1), (3, 1, 5, 2)]


def _shard_each(net, shard=brigade.fully_shard, **arguments):
    for layer in net[:-1]:
        shard(layer, **arguments)
    return shard(net, **arguments)


def _by_mesh(net):
    return _shard_each(net, mesh=dist.init_device_mesh("cpu", (2, 2)))


def _replicated_below_sharded(net):
    brigade.replicate(net[0])
    return brigade.fully_shard(net)


def _sharded_below_replicated(net):
    brigade.fully_shard(net[0])
    return brigade.replicate(net)


def _side_by_side(net):
    """Each layer is an outermost one."""
    for i, layer in enumerate(net):
        (brigade.replicate if i == 0 else brigade.fully_shard)(layer)
    return net


WAYS = {
    "one unit": brigade.fully_shard,
    "units": _shard_each,
    "kept": lambda net: _shard_each(net, reshard_after_forward=False),
    "kept by neighbours": lambda net: _shard_each(net, reshard_after_forward=2),
    "mesh": _by_mesh,
    "replicated": lambda net: _shard_each(net, brigade.replicate),
    "replicated below sharded": _replicated_below_sharded,
    "sharded below replicated": _sharded_below_replicated,
    "side by side": _side_by_side,
}


def _as_data_parallel(rank, way, sizes):
    plain = layers(*sizes)
    model = WAYS[way](copy.deepcopy(plain))
    parallel = nn.parallel.DistributedDataParallel(plain)
    for step in range(4):
        x = batch_of(sizes[0], rank, step)
        losses = [loss_of(net, x) for net in (model, parallel)]
        assert losses[0].item() == losses[1].item(), step
        for loss in losses:
            loss.backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)


@pytest.mark.parametrize("sizes", SIZES)
def test_equal_those_of_torchs_data_parallelism(sizes):
    run_cases(_as_data_parallel, [(way, sizes) for way in WAYS], WORLD_SIZE)
