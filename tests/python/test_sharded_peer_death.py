"""A rank's process dies in a sharded step: the survivors' errors and parameters."""

import io
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import brigade

from ranks import on_ranks
from sharded_training import (
    Pair,
    batch_of,
    make_net,
    shard_blocks,
    step_of_all,
)

HOUR_S = 3600  # the group's timeout, which no rank may wait for
DEADLINE_S = 60
STEPS_BEFORE = 2


def _vanish(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _vanish_in_backward(model):
    """Dies in a hook of the second block's output gradient."""
    model.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(_vanish) and None
    )


def _vanish_before_a_step(model):
    model.register_forward_pre_hook(_vanish, prepend=True)


def _expect_sharded(model, before):
    """Expects this rank's shards to be unchanged, and saves them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, brigade.ShardedParameter), name
        assert parameter.grad is None, name
        assert torch.equal(parameter.to_local(), before[name]), name
    file = io.BytesIO()
    torch.save({name: p.to_local() for name, p in model.named_parameters()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], part) for name, part in before.items())


@pytest.mark.parametrize("vanish", [_vanish_in_backward, _vanish_before_a_step])
@on_ranks(3, timeout_s=HOUR_S, deadline_s=DEADLINE_S, may_die=[2])
def test_survivors_raise_an_error_with_the_rank_and_keep_their_shards(rank, vanish):
    """Runs two exact steps before the death."""
    pair = Pair(rank, reshard_after_forward=True, prefetch_depth=0)
    model = pair.model
    for step in range(STEPS_BEFORE):
        pair.step(step)
    pair.expect_equal()
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    if rank == 2:
        vanish(model)
    with pytest.raises(dist.DistBackendError, match=r"^fully_shard: (?s:.*)rank 2\b"):
        pair.step(STEPS_BEFORE)

    _expect_sharded(model, before)
    for collective in (
        lambda: pair.step(STEPS_BEFORE),
        model.full_state_dict,
        lambda: model.clip_grad_norm_(1.0),
        lambda: model.blocks[0].unshard(),
    ):
        with pytest.raises(RuntimeError):
            collective()
        _expect_sharded(model, before)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(timeout_s=HOUR_S, deadline_s=DEADLINE_S, may_die=[0])
def test_survivors_resume_from_a_checkpoint_on_fewer_ranks(rank, world_size, tmp_path):
    store = dist.distributed_c10d._get_default_store()
    pair = Pair(rank, torch.optim.AdamW)
    for step in range(STEPS_BEFORE):
        pair.step(step)
    metadata = {"step": str(STEPS_BEFORE)}
    brigade.save_shards(pair.model, f"{tmp_path}/2", pair.optimizers[1], metadata=metadata)
    if rank == 0:
        _vanish_in_backward(pair.model)
    with pytest.raises(dist.DistBackendError, match=r"rank 0\b"):
        pair.step(STEPS_BEFORE)
    del pair
    dist.destroy_process_group()

    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank - 1, world_size=world_size - 1
    )
    pair = Pair(rank - 1, torch.optim.AdamW)
    loaded = brigade.load_shards(pair.model, f"{tmp_path}/2", pair.optimizers[1])
    for step in range(STEPS_BEFORE):
        step_of_all(pair.plain, pair.optimizers[0], step, world_size)
    for step in range(int(loaded["step"]), int(loaded["step"]) + 2):
        pair.step(step)
    pair.expect_equal()


@pytest.mark.parametrize("way", ["save_whole", "save_shards"])
@on_ranks(timeout_s=HOUR_S, deadline_s=DEADLINE_S, may_die=[1])
def test_saving_without_a_peer_is_an_error_before_the_timeout(rank, way, tmp_path):
    model = shard_blocks(make_net())
    _ = model(batch_of(rank, 0))
    if rank == 1:
        _vanish()
    path = tmp_path / way
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has ended"):
        getattr(brigade, way)(model, path)
    assert not path.is_file() and not (path / "index.safetensors").exists()
    dist.destroy_process_group()


@pytest.mark.parametrize("place", ["register_forward_pre_hook", "register_forward_hook"])
@on_ranks(3, timeout_s=HOUR_S, deadline_s=DEADLINE_S, may_die=[0])
def test_a_dead_peer_does_not_affect_models_of_other_ranks(rank, place):
    """Ranks 0 and 1 train one model, 1 and 2 another; rank 0 dies."""
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2))]
    if rank < 2:
        mesh = DeviceMesh.from_group(groups[0], "cpu")
        first = Pair(rank, world_size=2, mesh=mesh, prefetch_depth=0)
        first.expect_step(0)
    if rank == 0:
        getattr(first.model.blocks[1], place)(_vanish, prepend=True)
        first.loss(1)
    second = Pair(rank - 1, world_size=2, mesh=DeviceMesh.from_group(groups[1], "cpu"))
    second.expect_step(0)
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"fully_shard: .*rank 0\b"):
            first.loss(1).backward()
        assert all(isinstance(p, brigade.ShardedParameter) for p in first.model.parameters())
    for step in range(1, 4):
        second.expect_step(step)
        if rank == 1:
            with pytest.raises(RuntimeError):
                first.loss(step)
    # The default group has lost a rank, so no rank may wait in it.
    dist.destroy_process_group()
