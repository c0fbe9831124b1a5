"""Data parallelism through units: every rank holds all parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp as torchs
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import brigade

from ranks import on_ranks
from sharded_training import Net, Pair, expect_losses_alike


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_equals_one_process(rank, world_size):
    pair = Pair(rank, torch.optim.AdamW, shard=brigade.replicate)
    plain, model = pair.plain, pair.model
    assert isinstance(model, (brigade.ReplicateModule, Net))
    assert isinstance(model, torchs.ReplicateModule)
    assert type(model).__name__ == "ReplicateNet"
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert all(p.shape == shapes[name] for name, p in model.named_parameters())
    for step in range(3):
        pair.step(step)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad.full_tensor())
    pair.expect_equal()
    statistics = model.sharding_statistics()
    assert statistics["sent_by_gathers"] == 0
    assert statistics["learned_segments"] <= 2
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(norm, expected)


@on_ranks()
def test_losses_equal_torchs_on_two_ranks(rank):
    expect_losses_alike(rank, brigade.replicate, torchs.replicate)


@on_ranks(4)
def test_meshes_precision_and_what_is_refused(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(rank % 2)  # as split along the other dimension
    model = nn.Linear(3, 2)
    ignored = model.bias
    brigade.replicate(
        model,
        mesh=mesh["data"],
        ignored_params=[ignored],
        comm_hook="bf16_compress",
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
    )
    model.forward = lambda x: x @ model.weight.t()
    assert model.bias is ignored
    assert model(torch.full((1, 3), 1.0 + rank // 2)).dtype == torch.float32
    model(torch.full((1, 3), 1.0 + rank // 2)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1.5] * 3] * 2
    weights = [None] * 4
    dist.all_gather_object(weights, model.full_state_dict()["weight"].tolist())
    assert weights[0] == weights[2] != weights[1] == weights[3]
    with pytest.raises(ValueError, match="mesh of one dimension"):
        brigade.replicate(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match="offload_policy"):
        brigade.replicate(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
    with pytest.raises(ValueError, match="sharded already"):
        brigade.fully_shard(model)


@on_ranks()
def test_install_makes_torchs_brigades(rank):
    with brigade.install():
        model = torchs.replicate(nn.Linear(3, 2))
    assert isinstance(model, brigade.ReplicateModule)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1.0] * 3] * 2
    assert not isinstance(torchs.replicate(nn.Linear(3, 2)), brigade.FSDPModule)
