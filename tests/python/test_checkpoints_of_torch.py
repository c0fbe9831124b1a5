"""torch.distributed.checkpoint folders, exchanged between brigade, FSDP2 and one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import brigade

from ranks import on_ranks, run_ranks
from sharded_training import (
    expect_same,
    full_state,
    make_net,
    shard_blocks,
    step_of_all,
    train_step,
)

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytest.importorskip(
    "torch.distributed.checkpoint.protocol",
    reason="this torch compares a part's sizes with the whole one's",
)
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

STEPS = 2


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def _of_one_process(num_steps):
    """Trains in one process on two ranks' batches; returns the net and its optimizer."""
    plain = make_net()
    optimizer = _optimizer(plain)
    for step in range(num_steps):
        step_of_all(plain, optimizer, step, 2)
    return plain, optimizer


def _of_brigade():
    model = shard_blocks(make_net())
    return model, _optimizer(model)


def _of_torch():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_blocks(make_net(), torch_fully_shard, mesh=mesh)
    return model, _optimizer(model)


MAKERS = {"brigade": _of_brigade, "FSDP2": _of_torch}


def _nest(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _expect_state_of(model, optimizer, plain, plain_optimizer):
    if isinstance(model, brigade.FSDPModule):
        parameters, states = full_state(model, optimizer)
    else:
        nest = _nest(model, optimizer)
        nest = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), nest)
        parameters, states = nest["model"], nest["optimizer"]
    expected = get_optimizer_state_dict(plain, plain_optimizer)["state"]
    expect_same((dict(parameters), states["state"]), (dict(plain.state_dict()), expected))


def _writes(rank, folder, kind):
    model, optimizer = MAKERS[kind]()
    for step in range(STEPS):
        train_step(model, optimizer, step, rank)
    dcp.save(_nest(model, optimizer), checkpoint_id=f"{folder}/{kind}")


def _one_writes(rank, folder):
    """Trains and saves in one process, which has one thread, as the ranks do."""
    state = _nest(*_of_one_process(STEPS))
    dcp.save(state, checkpoint_id=f"{folder}/one process", no_dist=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for kind in MAKERS:
        run_ranks(_writes, str(folder), kind)
    run_ranks(_one_writes, str(folder), world_size=1)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "world_size"), [("brigade", 1), ("brigade", 2), ("brigade", 3), ("FSDP2", 2)]
)
@on_ranks()
def test_ranks_resume_from_folders_of_other_writers(rank, folder, kind, world_size):
    for written_by in ("brigade", "FSDP2", "one process"):
        model, optimizer = MAKERS[kind]()
        train_step(model, optimizer, 7, rank)  # loading undoes this
        nest = _nest(model, optimizer)
        dcp.load(nest, checkpoint_id=f"{folder}/{written_by}")
        model.load_state_dict(nest["model"])
        set_optimizer_state_dict(model, optimizer, nest["optimizer"])
        _expect_state_of(model, optimizer, *_of_one_process(STEPS))
        if dist.get_world_size() != 2:
            continue  # FSDP2 sums in another order than one process
        for step in range(STEPS, STEPS + 2):
            train_step(model, optimizer, step, rank)
        _expect_state_of(model, optimizer, *_of_one_process(STEPS + 2))


@on_ranks(1)
def test_one_process_resumes_from_folders_of_ranks(rank, folder):
    expected = _of_one_process(STEPS)
    for written_by in ("brigade", "FSDP2"):
        plain, optimizer = _of_one_process(STEPS + 1)  # loading undoes this
        nest = _nest(plain, optimizer)
        dcp.load(nest, checkpoint_id=f"{folder}/{written_by}", no_dist=True)
        plain.load_state_dict(nest["model"])
        set_optimizer_state_dict(plain, optimizer, nest["optimizer"])
        _expect_state_of(plain, optimizer, *expected)
