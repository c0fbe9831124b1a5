"""Gradients summed in rank order: the same bits for any buckets, plans and views."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import expect_same
from training import completed_future

VARIANTS = {
    "1 KB": {"bucket_cap_mb": 1 / 1024},
    "1 MB": {"bucket_cap_mb": 1, "gradient_as_bucket_view": True},
    "25 MB": {},
    "static graph": {"static_graph": True, "bucket_cap_mb": 1 / 1024},
    "unused parameters": {"find_unused_parameters": True, "bucket_cap_mb": 1 / 1024},
    "connects later": {"init_sync": False},
}


def _net():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(31, 31), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(31, 3))


def _input(rank, step):
    return torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + rank))


def _gradients(net, rank, step):
    net.zero_grad()
    net(_input(rank, step)).square().mean().backward()
    return [p.grad for p in net.parameters()]


def _sum_in_order(tensors):
    total = [t.clone() for t in tensors[0]]
    for more in tensors[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


def _sum_by_shard_group(each, shard_group_size):
    return _sum_in_order(
        [
            _sum_in_order(each[r : r + shard_group_size])
            for r in range(0, len(each), shard_group_size)
        ]
    )


def _train(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        model(_input(rank, step)).square().mean().backward()
        optimizer.step()


def _train_alone(world_size, shard_group_size, steps=3):
    """Trains in one process: sums gradients within each shard group, then over the groups."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        each = [_gradients(net, rank, step) for rank in range(world_size)]
        total = _sum_by_shard_group(each, shard_group_size)
        for p, gradient in zip(net.parameters(), total, strict=True):
            p.grad = gradient * (1.0 / world_size)
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_bits_do_not_depend_on_buckets_graphs_views_and_shards(rank, world_size):
    world_size = dist.get_world_size()
    expected = _train_alone(world_size, world_size)
    for name, options in VARIANTS.items():
        model = brigade.DistributedDataParallel(_net(), reproducible=True, **options)
        _train(model, rank)
        expect_same(model.module.state_dict(), expected, name)
    sharded = _net()
    for layer in (sharded[0], sharded[2], sharded[4]):
        brigade.fully_shard(layer)
    brigade.fully_shard(sharded)
    _train(sharded, rank)
    expect_same(sharded.full_state_dict(), expected, "fully_shard")


def _average_by_shard_group(group, bucket):
    """A comm hook that sums shard groups of 2 ranks first, then the groups' sums."""
    each = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    dist.all_gather(each, bucket.buffer(), group)
    total = _sum_by_shard_group([[t] for t in each], 2)[0]
    return completed_future(total * (1.0 / group.size()))


@on_ranks(4)
def test_sums_by_shard_group_equal_those_of_hybrid_sharding(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    sharded = brigade.fully_shard(_net(), mesh=mesh)
    _train(sharded, rank)
    expected = _train_alone(4, shard_group_size=2)
    expect_same(sharded.full_state_dict(), expected, "fully_shard")
    for name, options in VARIANTS.items():
        model = brigade.DistributedDataParallel(_net(), **options)
        model.register_comm_hook(dist.group.WORLD, _average_by_shard_group)
        _train(model, rank)
        expect_same(model.module.state_dict(), expected, name)


@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_without_data_count_as_zeros(rank, world_size, by_world_size):
    world_size = dist.get_world_size()
    model = brigade.DistributedDataParallel(_net(), reproducible=True, bucket_cap_mb=0.001)
    with model.join(divide_by_initial_world_size=by_world_size):
        for step in range(rank + 1):
            model.zero_grad()
            model(_input(rank, step)).square().mean().backward()
            with_data = range(step, world_size)
            total = _sum_in_order([_gradients(_net(), r, step) for r in with_data])
            divisor = world_size if by_world_size else len(with_data)
            for p, gradient in zip(model.parameters(), total, strict=True):
                assert torch.equal(p.grad, gradient * (1.0 / divisor)), step


@on_ranks()
def test_reductions_without_rank_order_are_errors_on_every_rank(rank):
    net = _net()
    precision = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    delayed = {
        "delay_all_reduce_named_params": [("0.weight", net[0].weight)],
        "param_to_hook_all_reduce": net[2].weight,
    }
    for text, options in (
        ("reproducible and mixed_precision exclude", {"mixed_precision": precision}),
        ("reproducible and delay_all_reduce_named_params exclude", delayed),
    ):
        with pytest.raises(RuntimeError, match=text):
            brigade.DistributedDataParallel(net, **{"reproducible": True, **options})
    model = brigade.DistributedDataParallel(net, reproducible=True)
    with pytest.raises(RuntimeError, match="reproducible is set"):
        model.register_comm_hook(None, lambda state, bucket: None)
    _train(model, rank)
