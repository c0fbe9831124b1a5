"""torch's `fake` process group, which simulates one rank of many in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks

_NUM_RANKS = 8


def _be_one_of_many():
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=_NUM_RANKS)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


@on_ranks(1)
def test_data_parallel_training_needs_no_peers(rank):
    _be_one_of_many()
    plain, module = _net(), _net()
    model = brigade.DistributedDataParallel(module, bucket_cap_mb=1e-4)
    x = torch.ones(2, 4)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        plain(x).sum().backward()
        model(x).sum().backward()
        for expected, found in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)  # as if all ranks had equal gradients


@on_ranks(1)
def test_sharded_training_has_the_memory_of_one_rank_of_many(rank):
    _be_one_of_many()
    model = _net()
    for layer in (model[0], model[2]):
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    statistics = model.sharding_statistics()
    assert statistics["peak_buffer_bytes"] == statistics["buffer_bytes"] > 0
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held == (4 * 16 + 16 + 16 * 4 + 4) // _NUM_RANKS + 1
