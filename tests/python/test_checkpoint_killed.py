"""A rank that cannot write: the checkpoint before is whole, and stays."""

import resource

import pytest
import torch

import brigade

from ranks import on_ranks
from sharded_training import (
    batch_of,
    expect_alike,
    make_net,
    shard_blocks,
    whole_optimizer_state,
)

HOUR_S = 3600  # of the group: nobody may wait for that
DEADLINE_S = 60
WAYS = {
    "whole": (brigade.save_whole, brigade.load_whole),
    "shards": (brigade.save_shards, brigade.load_shards),
}


def _trained(rank, steps):
    model = shard_blocks(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _expect_state_of(rank, model, optimizer, steps):
    """As training up to there has it."""
    expected, expected_optimizer = _trained(rank, steps)
    parameters = model.full_state_dict()
    for name, value in expected.full_state_dict().items():
        assert torch.equal(parameters[name], value), name
    found = whole_optimizer_state(model, optimizer)["state"]
    wanted = whole_optimizer_state(expected, expected_optimizer)["state"]
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for key, value in values.items():
            assert torch.equal(found[name][key], value), (name, key)


@on_ranks(timeout_s=HOUR_S, deadline_s=2 * DEADLINE_S)
def test_a_rank_that_cannot_write_is_told_by_all(rank, tmp_path):
    """For one rank after the other; what is there stays, and training goes on."""
    model, optimizer = _trained(rank, 1)
    later, later_optimizer = _trained(rank, 2)
    for way, victim in (("whole", 0), ("shards", 0), ("shards", 1)):
        save, load = WAYS[way]
        path = f"{tmp_path}/{way} {victim}"
        save(model, path, optimizer)
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(ValueError) as caught:
            save(later, path, later_optimizer)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        _expect_state_of(rank, later, later_optimizer, 2)
        load(later, path, later_optimizer)
        _expect_state_of(rank, later, later_optimizer, 1)
        expect_alike(str(caught.value))
        assert f"rank {victim}: " in str(caught.value) and "File too large" in str(caught.value)
        later, later_optimizer = _trained(rank, 2)
    assert [p.name for p in tmp_path.rglob("*") if ".tmp-" in p.name] == []
