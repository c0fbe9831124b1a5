"""A process that is gone in the middle of saving: the checkpoint before is whole, and stays."""

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist

import brigade

from ranks import on_ranks, run_ranks
from sharded_training import batch_of, expect_alike, make_net, shard_blocks

HOUR_S = 3600  # of the group: nobody may wait for that
DEADLINE_S = 60
# Where the survivor misses its peer: in a gather, or where they tell each other how it went.


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
    found = brigade.full_optimizer_state_dict(model, optimizer)["state"]
    wanted = brigade.full_optimizer_state_dict(expected, expected_optimizer)["state"]
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for key, value in values.items():
            assert torch.equal(found[name][key], value), (name, key)


def _kill_in_call(name, number):
    """Of os: this process is gone instead."""
    own, calls = getattr(os, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(os, name, call)


def _saves_checkpoint(rank, folder, victim, kill):
    model, optimizer = _trained(rank, 1)
    brigade.save_checkpoint(f"{folder}/1", model, optimizer, shared={"step": 1})
    model, optimizer = _trained(rank, 2)
    if rank == victim:
        _kill_in_call(*kill)
        brigade.save_checkpoint(f"{folder}/2", model, optimizer, shared={"step": 2})
    with pytest.raises(RuntimeError):
        brigade.save_checkpoint(f"{folder}/2", model, optimizer, shared={"step": 2})
    dist.destroy_process_group()


def _goes_on_from_checkpoint(rank, folder):
    with pytest.raises(ValueError, match="no list of its files"):
        brigade.load_checkpoint(f"{folder}/2", shard_blocks(make_net()))
    model, optimizer = _trained(rank, 0)
    assert brigade.load_checkpoint(f"{folder}/1", model, optimizer).shared == {"step": 1}
    _expect_state_of(rank, model, optimizer, 1)
    model, optimizer = _trained(rank, 2)
    brigade.save_checkpoint(f"{folder}/2", model, optimizer, shared={"step": 2})
    model, optimizer = _trained(rank, 0)
    assert brigade.load_checkpoint(f"{folder}/2", model, optimizer).shared == {"step": 2}
    _expect_state_of(rank, model, optimizer, 2)


@pytest.mark.parametrize(
    ("victim", "kill"),
    [
        (1, ("fsync", 1)),  # of its part
        pytest.param(0, ("fsync", 2), marks=pytest.mark.slow),  # of torch's metadata
        pytest.param(0, ("fsync", 3), marks=pytest.mark.slow),  # of the digests
        (0, ("rename", 2)),  # of the folder: all but its name is there
    ],
)
def test_the_folder_before_is_whole_and_the_next_one_not_there(victim, kill, tmp_path):
    ended = run_ranks(
        _saves_checkpoint,
        str(tmp_path),
        victim,
        kill,
        timeout_s=HOUR_S,
        deadline_s=DEADLINE_S,
        may_die=[victim],
    )
    assert ended[victim] == -signal.SIGKILL and ended[1 - victim] is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2.part"]
    (tmp_path / "2.part" / "__7_0.distcp").write_text("of more ranks than there are now")
    run_ranks(_goes_on_from_checkpoint, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    names = sorted(p.name for p in (tmp_path / "2").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "digests.json"]


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
