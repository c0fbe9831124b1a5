"""Meshes and placements that torch's fully_shard accepts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import brigade

from ranks import on_ranks
from sharded_training import batch_of, expect_equal, make_net, shard_blocks

_Dims = fsdp.DataParallelMeshDims
_Result = common.ShardPlacementResult


def _gradient(model, rank):
    model(batch_of(rank, 0)).square().mean().backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("shard", "replicate", "bits", "num_shards"),
    [
        (("inner",), None, 0b010, 2),
        (("outer", "inner"), None, 0b110, 4),
        (("inner",), "outer", 0b110, 2),
        (("model",), ("outer", "inner"), 0b111, 2),
    ],
)
@on_ranks(8)
def test_dimensions_of_a_larger_mesh(rank, shard, replicate, bits, num_shards):
    """A rank's group has the ranks that differ in the bits of its mesh dimensions."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "model"))
    plain = make_net()
    model = shard_blocks(
        make_net(), mesh=mesh, dp_mesh_dims=_Dims(shard=shard, replicate=replicate)
    )
    unit = model._brigade_unit
    assert unit.num_shards == num_shards
    ranks = [r for r in range(8) if (r ^ rank) & ~bits == 0]
    assert dist.get_process_group_ranks(unit.group) == ranks
    _gradient(model, rank)
    expect_equal(model, plain)


@on_ranks()
def test_another_object_than_a_mesh_is_an_error(rank):
    with pytest.raises(TypeError, match=r"mesh must be a torch\.distributed\.DeviceMesh, got 'x'"):
        brigade.fully_shard(nn.Linear(2, 2), mesh="x")


@on_ranks()
def test_dimensions_outside_the_mesh_are_errors(rank):
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    for wrong in (_Dims(shard="dat"), _Dims(shard="data", replicate="data")):
        with pytest.raises(ValueError, match=r"each once.*mesh with \('data', 'model'\)"):
            brigade.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=wrong)
    with pytest.raises(ValueError, match=r"mesh with \(\)"):
        brigade.fully_shard(nn.Linear(2, 2), dp_mesh_dims=_Dims(shard="data"))
    model = brigade.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=_Dims(replicate="data"))
    assert model.weight.shape == (2, 2)
    inner = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("shards", "copies"))
    brigade.fully_shard(
        nn.Linear(2, 2), mesh=inner, dp_mesh_dims=_Dims(shard="shards", replicate="copies")
    )


def _drawn(rank, step):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@on_ranks(4)
def test_replicas_may_be_the_inner_dimension(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "copies"))
    model = nn.Linear(5, 3, bias=False)
    nn.init.ones_(model.weight)
    brigade.fully_shard(model, mesh=mesh, dp_mesh_dims=_Dims(shard="shards", replicate="copies"))
    places = {0: 0, 1: 0, 2: 8, 3: 8}  # 15 elements and one of padding
    num_held = (8, 7)[rank // 2]
    assert model.weight.to_local().numel() == num_held
    expected = torch.ones(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        (model(torch.eye(5)) * _drawn(rank, step).t()).sum().backward()
        drawn = [_drawn(r, step) for r in range(4)]  # rows are summed first
        total = (drawn[0] + drawn[2]) + (drawn[1] + drawn[3])
        expected.sub_(total.mul_(0.25), alpha=0.5)
        optimizer.step()
        part = expected.flatten()[places[rank] : places[rank] + num_held]
        torch.testing.assert_close(model.weight.to_local().flatten(), part, rtol=0, atol=0)
        whole = model.full_state_dict()["weight"]
        torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@on_ranks(4)
def test_a_mesh_whose_first_rank_is_not_the_lowest(rank):
    mesh = dist.DeviceMesh("cpu", [[3, 0], [1, 2]])
    with pytest.raises(NotImplementedError, match=r"(?s)\[3, 0, 1, 2\].*lowest rank"):
        brigade.fully_shard(nn.Linear(2, 2), mesh=mesh)


@on_ranks()
def test_sharded_tensors_are_errors(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    for _ in range(2):  # on both ranks, then on one
        with pytest.raises(ValueError, match="'weight' of Linear is a DTensor"):
            brigade.fully_shard(model)
        if rank == 0:
            model.weight = nn.Parameter(torch.ones(2, 2))


@on_ranks()
def test_placements(rank):
    expected = _gradient(shard_blocks(make_net()), rank)
    for placement_of in (
        lambda p: Shard(0),
        lambda p: Shard(-p.dim()),
        lambda p: None if p.dim() == 1 else Shard(0),
        lambda p: Shard(p.dim() - 1),
    ):
        found = _gradient(shard_blocks(make_net(), shard_placement_fn=placement_of), rank)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model = shard_blocks(make_net(), shard_placement_fn=lambda p: Shard(-1))
    _gradient(model, rank)
    for parameter in model.parameters():
        assert parameter.placements == parameter.grad.placements == (Shard(parameter.dim() - 1),)
    model = make_net()
    for shape, error, words in (
        (Shard(2), AssertionError, r"the 2 dimensions of 'embed\.weight', found Shard\(2\)"),
        (Shard(-3), ValueError, r"the 2 dimensions of 'embed\.weight', found Shard\(-3\)"),
        (Replicate(), ValueError, r"found Replicate\(\) for 'embed\.weight'"),
    ):
        with pytest.raises(error, match=words):
            brigade.fully_shard(model, shard_placement_fn=lambda p, found=shape: found)
        on_one = None if rank == 0 else shape
        words = words if rank == 1 else "rank 1"
        with pytest.raises(error if rank == 1 else ValueError, match=words):
            brigade.fully_shard(model, shard_placement_fn=lambda p, found=on_one: found)
    brigade.fully_shard(model)
    _gradient(model, rank)


@on_ranks(4)
def test_a_placement_may_name_the_units_mesh(rank):
    everyone = dist.init_device_mesh("cpu", (4,))
    both = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    info = common.HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
    row = common.FSDPMeshInfo(both["shards"], shard_mesh_dim=0)

    def shard(placement_of):
        model = make_net()
        for block in model.blocks:
            brigade.fully_shard(block, mesh=everyone, shard_placement_fn=placement_of)
        return brigade.fully_shard(model, mesh=everyone)

    model = shard(lambda p: _Result(placement=Shard(0), mesh_info=info))
    assert model.blocks[0]._brigade_unit.num_shards == 2
    assert model._brigade_unit.num_shards == 4
    _gradient(model, rank)
    expect_equal(model, make_net())
    model = shard(lambda p: _Result(placement=None, mesh_info=row))
    assert model.blocks[0]._brigade_unit.group.size() == 2
    with pytest.raises(NotImplementedError, match=r"for 'norm\.weight' and .* for 'up\.weight'"):
        shard(lambda p: _Result(placement=None, mesh_info=row) if p.dim() == 1 else None)
    with pytest.raises(NotImplementedError, match="shard_mesh_dim 0 and replicate_mesh_dim 1"):
        wrong = common.HSDPMeshInfo(both, shard_mesh_dim=0, replicate_mesh_dim=1)
        shard(lambda p: _Result(placement=None, mesh_info=wrong))
