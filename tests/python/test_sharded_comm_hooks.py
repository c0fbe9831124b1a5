"""Comm hooks of sharded modules, and the bytes sent. Gradients are small integers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from ranks import on_ranks

_DTYPES = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class Terms(nn.Module):
    """Each child's gradient is its input; children may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.children_of = nn.ModuleList([nn.Linear(n, 1, bias=False) for n in (5, 9, 2)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, factor, left_out=()):
        terms = [
            child(factor * torch.arange(1.0, child.in_features + 1)).sum()
            for i, child in enumerate(self.children_of)
            if i not in left_out
        ]
        return sum(terms) + factor * self.scale.sum()


def _sharded(**arguments):
    torch.manual_seed(0)
    model = Terms()
    for child in model.children_of:
        brigade.fully_shard(child, **arguments)
    return brigade.fully_shard(model, **arguments)


def _mesh(world_size, num_shards):
    if num_shards == world_size:
        return None
    return dist.device_mesh.init_device_mesh("cpu", (world_size // num_shards, num_shards))


def _gradients(model):
    """Returns unsharded gradients by name."""
    return {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }


def _expect(found, sums, world_size, dtype):
    """`sums`: of the inputs over ranks, by child, in the dtype of the hook."""
    average = [
        (s * torch.arange(1.0, n + 1) * (1.0 / world_size)).to(dtype).float()
        for s, n in zip(sums, (5, 9, 2), strict=True)
    ]
    for i, expected in enumerate(average):
        assert torch.equal(found[f"children_of.{i}.weight"].flatten(), expected)


@pytest.mark.parametrize("name", sorted(_DTYPES))
@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 2), (2, 1), (3, 3), (4, 2)])
@on_ranks()
def test_gradients_are_averages_in_the_hooks_dtype(rank, world_size, num_shards, name):
    dtype, mesh = _DTYPES[name], _mesh(world_size, num_shards)
    all_ranks = sum(range(1, world_size + 1))
    model = _sharded(comm_hook=name, mesh=mesh)
    model(1.0 + rank).backward()
    _expect(_gradients(model), [all_ranks] * 3, world_size, dtype)

    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(1.0 + rank).backward()
    model.set_requires_gradient_sync(True)
    model(1.0 + rank).backward()
    _expect(_gradients(model), [2 * all_ranks] * 3, world_size, dtype)

    for _ in range(2):  # rank 0 runs other branches, the same in each step
        model.zero_grad()
        model(1.0 + rank, left_out=(1,) if rank == 0 else ()).backward()
        _expect(_gradients(model), [all_ranks, all_ranks - 1, all_ranks], world_size, dtype)


@on_ranks()
def test_hooks_halve_the_bytes_sent(rank):
    plain = _sharded()
    model = _sharded(comm_hook="fp16_compress")
    for trained in (plain, model):
        trained(1.0 + rank).backward()
    before, after = plain.sharding_statistics(), model.sharding_statistics()
    assert before["sent_by_sums"] == 4 * 22 // 2
    assert after["sent_by_sums"] == 2 * 22 // 2
    # The root unit stays unsharded.
    assert before["sent_by_gathers"] == after["sent_by_gathers"] == 4 * (18 * 2 + 4) // 2


@on_ranks()
def test_other_hooks_on_one_rank_are_an_error(rank):
    with pytest.raises(ValueError, match=r"comm_hook.* differs[^:]*:\n.*fp16_compress"):
        brigade.fully_shard(nn.Linear(3, 3), comm_hook="fp16_compress" if rank == 0 else None)
    with pytest.raises(
        NotImplementedError, match="comm_hook to be one of fp16_compress, bf16_compress"
    ):
        brigade.fully_shard(nn.Linear(3, 3), comm_hook="allreduce")


@pytest.mark.parametrize("arguments", ["hook", "reduce dtype"])
@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 2), (2, 1), (4, 2)])
@on_ranks()
def test_only_averages_must_fit_into_float16(rank, world_size, num_shards, arguments):
    """Sums of two ranks' gradients, 9 * 4096 each, do not."""
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = _sharded(
        mesh=_mesh(world_size, num_shards),
        **({"comm_hook": "fp16_compress"} if arguments == "hook" else {"mp_policy": half}),
    )
    for factor, sums_over_replicas in ((4096.0, False), (0.0, True)):
        model.set_requires_all_reduce(sums_over_replicas)
        model(factor).backward()
    _expect(_gradients(model), [world_size * 4096.0] * 3, world_size, torch.float16)
