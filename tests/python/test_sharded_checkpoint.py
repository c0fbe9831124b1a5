"""States of sharded training, saved, loaded and gathered by torch's functions."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import (
    Pair,
    expect_equal,
    expect_same,
    full_optimizer_state,
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
from torch.distributed.checkpoint.staging import BlockingAsyncStager  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_WHOLE = StateDictOptions(full_state_dict=True, strict=False)  # unused parameters lack a state


def _optimizer(model, **options):
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.1, **options)


def _trained(rank, steps=2):
    model = shard_blocks(make_net())
    optimizer = _optimizer(model)
    for step in range(steps):
        train_step(model, optimizer, step, rank)
    return model, optimizer


def _nest(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


@on_ranks()
def test_values_loaded_while_units_are_unsharded_are_trained(rank, tmp_path):
    pair = Pair(rank, reshard_after_forward=False)
    model = pair.model
    model.set_reshard_after_backward(False)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/begin")
    pair.step(5)
    sent = []
    for _ in range(2):
        pair.loss(6).backward()
        sent.append(model.sharding_statistics()["sent_by_gathers"])
    assert sent[0] == sent[1]  # all units are unsharded
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/begin")
    pair.plain.load_state_dict(make_net().state_dict())
    for step in (7, 8):
        pair.expect_step(step)


@on_ranks()
def test_saving_while_units_are_unsharded(rank, tmp_path):
    model, optimizer = _trained(rank)
    state = _nest(model, optimizer)
    whole = full_state(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=f"{tmp_path}/later")
    saving.result()
    train_step(model, optimizer, 2, rank)
    dcp.load(state, checkpoint_id=f"{tmp_path}/later")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    expect_same(full_state(model, optimizer), whole)


@pytest.mark.parametrize("caches", [False, True])
@on_ranks()
def test_a_stager_copies_shards(rank, caches, tmp_path):
    """Later steps change neither the copy nor the checkpoint made of it."""
    model, optimizer = _trained(rank)
    stager = BlockingAsyncStager(cache_staged_state_dict=caches)
    for step in range(2):
        state = {"model": model.state_dict()}
        before = {"model": model.full_state_dict()}
        staged = stager.stage(state)["model"]
        saving = dcp.async_save(state, checkpoint_id=f"{tmp_path}/{step}", async_stager=stager)
        train_step(model, optimizer, 2 + step, rank)
        getattr(saving, "upload_completion", saving).result()
        for name, value in before["model"].items():
            assert torch.equal(staged[name].full_tensor(), value), name
        dist.barrier()
        read = {"model": make_net().state_dict()}
        dcp.load(read, checkpoint_id=f"{tmp_path}/{step}")
        expect_same(read, before)


@on_ranks()
def test_copies_of_a_shard_are_shards(rank):
    model, optimizer = _trained(rank)
    shard = model.blocks[0].up.weight
    whole = model.full_state_dict()["blocks.0.up.weight"]
    state = get_optimizer_state_dict(model, optimizer)
    exp_avg = state["state"]["blocks.0.up.weight"]["exp_avg"]
    pairs = [(copy.deepcopy(each), each) for each in (shard, shard.grad, exp_avg)]
    pairs += [(shard.detach(), shard), (shard.detach().clone(), shard), (shard.data, shard)]
    for copied, tensor in pairs:
        assert torch.equal(copied.full_tensor(), tensor.full_tensor())
        assert copied.device_mesh == shard.device_mesh
    assert type(pairs[0][0]) is type(shard) and pairs[0][0].requires_grad
    assert torch.equal(pairs[0][0].full_tensor(), whole)
    with pytest.raises(NotImplementedError, match="can't be pickled"):
        pickle.dumps(shard)
    assert torch.equal(pickle.loads(pickle.dumps(shard.to_local())), shard.to_local())


@on_ranks(3)
def test_other_memory_formats_scalars_buffers(rank, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 2))
    model = model.to(memory_format=torch.channels_last)
    model.register_parameter("scalar", nn.Parameter(torch.tensor(3.0)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    plain = copy.deepcopy(model)
    brigade.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (3 * model(torch.ones(1, 3, 5, 5)).sum()).backward()
        optimizer.step()
    expected = model.full_state_dict()
    dcp.save(_nest(model, optimizer), checkpoint_id=f"{tmp_path}/a")
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=f"{tmp_path}/a")
    expect_same(dict(plain.state_dict()), dict(expected))
    whole = full_optimizer_state(model, optimizer)
    moment = whole["state"]["0.weight"]["momentum_buffer"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/a")
    set_optimizer_state_dict(model, optimizer, whole, options=_WHOLE)
    expect_same(full_state(model, optimizer), (expected, whole))


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_full_optimizer_state(rank, world_size):
    plain = make_net()
    plain_optimizer = _optimizer(plain, foreach=False)
    for step in range(2):
        step_of_all(plain, plain_optimizer, step, world_size)
    expected = get_optimizer_state_dict(plain, plain_optimizer)
    model, optimizer = _trained(rank)
    found = full_optimizer_state(model, optimizer)
    expect_same(found["state"], expected["state"])
    alone = (
        model.full_state_dict(rank0_only=True),
        full_optimizer_state(model, optimizer, rank0_only=True),
    )
    if rank == 0:
        expect_same(alone, (dict(plain.state_dict()), found))
    else:
        assert alone == ({}, {})
    model, optimizer = _trained(rank, steps=0)
    model.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(model, optimizer, expected, options=_WHOLE)
    step_of_all(plain, plain_optimizer, 2, world_size)
    train_step(model, optimizer, 2, rank)
    expect_equal(model, plain)
    if rank == 0:
        del optimizer.state[model.head.bias]["exp_avg"]
    words = r"(?s)sharded tensor \d+ differs between ranks:.*state.head.bias.exp_avg"
    with pytest.raises(RuntimeError, match=words):
        full_optimizer_state(model, optimizer)


# The second parameter's shard begins like the first one's on one rank only.
@on_ranks()
def test_states_of_parameters_of_equal_shape_are_gathered(rank):
    model = nn.Module()
    model.weights = nn.ParameterList([torch.full((4,), float(i)) for i in range(3)])
    model.forward = lambda: sum((weight * weight).sum() for weight in model.weights)
    brigade.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model().backward()
    optimizer.step()
    found = full_optimizer_state(model, optimizer)["state"]
    for i in range(3):
        buffer = found[f"weights.{i}"]["momentum_buffer"]
        assert torch.equal(buffer, torch.full((4,), 2.0 * i)), i
