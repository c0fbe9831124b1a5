"""A process that is gone in the middle of saving: the checkpoint before is whole, and stays."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import brigade

from ranks import run_ranks
from sharded_training import expect_same, make_net, shard_blocks, train_step, whole_state

HOUR_S = 3600  # of the group: nobody may wait for that
DEADLINE_S = 60


def _trained(rank, steps):
    model = shard_blocks(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        train_step(model, optimizer, step, rank)
    return model, optimizer


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
    expect_same(whole_state(model, optimizer), whole_state(*_trained(rank, 1)))
    model, optimizer = _trained(rank, 2)
    brigade.save_checkpoint(f"{folder}/2", model, optimizer, shared={"step": 2})
    model, optimizer = _trained(rank, 0)
    assert brigade.load_checkpoint(f"{folder}/2", model, optimizer).shared == {"step": 2}
    expect_same(whole_state(model, optimizer), whole_state(*_trained(rank, 2)))


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
