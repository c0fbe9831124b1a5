"""States of sharded training: saved, loaded and gathered by torch's functions."""

import copy
import pickle

import pytest
import torch
from torch import nn

import brigade
from brigade._sharded_tensors import boxes_of

from ranks import on_ranks, run_ranks
from sharded_training import (
    Pair,
    batch_of,
    expect_equal,
    make_net,
    shard_blocks,
    step_of_all,
    whole_optimizer_state,
)

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytest.importorskip(
    "torch.distributed.checkpoint.protocol",
    reason="this torch compares a part's sizes with the whole one's",
)
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_WHOLE = StateDictOptions(full_state_dict=True, strict=False)  # unused parameters lack a state


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (1, 1, 5)])
def test_boxes_are_the_interval(shape):
    numel = torch.Size(shape).numel()
    whole = torch.arange(numel).view(shape)
    for begin in range(numel + 1):
        for end in range(begin, numel + 1):
            found = []
            for box in boxes_of(shape, begin, end):
                assert box.numel > 0
                region = whole[
                    tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                ]
                found += region.flatten().tolist()
            assert found == list(range(begin, end))
            assert len(boxes_of(shape, begin, end)) <= max(1, 2 * len(shape) - 1)


def _step(model, optimizer, step, rank):
    optimizer.zero_grad()
    model(batch_of(rank, step)).square().mean().backward()
    optimizer.step()


def _optimizer(model, **options):
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.1, **options)


def _trained(rank, steps=2, **arguments):
    model = shard_blocks(make_net(), **arguments)
    optimizer = _optimizer(model)
    for step in range(steps):
        _step(model, optimizer, step, rank)
    return model, optimizer


def _expect_equal_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert found["state"][name].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(found["state"][name][key], value), (name, key)


def _nest(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _saves(rank, folder):
    model, optimizer = _trained(rank)
    dcp.save(_nest(model, optimizer), checkpoint_id=f"{folder}/torchs")
    brigade.save_whole(model, f"{folder}/whole.safetensors")
    brigade.save_shards(model, f"{folder}/shards")
    whole = {
        "model": model.full_state_dict(),
        "optimizer": whole_optimizer_state(model, optimizer),
    }
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def _whole(folder):
    return torch.load(f"{folder}/whole.pt", weights_only=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_saves, str(folder))
    return str(folder)


# What loads the parameters that _saves() has saved.
_LOADERS = {
    "whole": lambda model, folder: model.load_state_dict(_whole(folder)["model"]),
    "torchs": lambda model, folder: dcp.load(
        {"model": model.state_dict()}, checkpoint_id=f"{folder}/torchs"
    ),
    "safetensors": lambda model, folder: brigade.load_whole(model, f"{folder}/whole.safetensors"),
    "shards": lambda model, folder: brigade.load_shards(model, f"{folder}/shards"),
}


@pytest.mark.parametrize("loader", _LOADERS)
@on_ranks()
def test_what_is_loaded_while_units_are_whole_is_trained_on(rank, saved, loader):
    pair = Pair(rank, reshard_after_forward=False)
    model = pair.model
    model.set_reshard_after_backward(False)
    _step(model, pair.optimizers[1], 5, rank)
    sent = []
    for _ in range(2):
        model(batch_of(rank, 6)).sum().backward()
        sent.append(model.sharding_statistics()["sent_by_gathers"])
    assert sent[0] == sent[1]  # all units are whole
    _LOADERS[loader](model, saved)
    pair.plain.load_state_dict(_whole(saved)["model"])
    for step in (7, 8):
        pair.expect_step(step)


@on_ranks()
def test_saved_meanwhile(rank, tmp_path):
    model, optimizer = _trained(rank)
    state = _nest(model, optimizer)
    whole = model.full_state_dict(), whole_optimizer_state(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=f"{tmp_path}/later")
    saving.result()
    _step(model, optimizer, 2, rank)
    state = _nest(model, optimizer)
    dcp.load(state, checkpoint_id=f"{tmp_path}/later")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert all(torch.equal(v, whole[0][name]) for name, v in model.full_state_dict().items())
    _expect_equal_state(whole_optimizer_state(model, optimizer), whole[1])


@on_ranks()
def test_copies_of_a_part_are_parts(rank):
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
    wide = shard.detach().to(torch.float64)
    assert wide.shape == torch.zeros_like(shard).shape == whole.shape
    torch.testing.assert_close(wide.norm(), whole.double().norm())
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
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name
    whole = whole_optimizer_state(model, optimizer)
    moment = whole["state"]["0.weight"]["momentum_buffer"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert moment.shape == (5, 3, 3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/a")
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, expected[name]), name
    set_optimizer_state_dict(model, optimizer, whole, options=_WHOLE)
    _expect_equal_state(whole_optimizer_state(model, optimizer), whole)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_full_optimizer_state(rank, world_size):
    plain = make_net()
    plain_optimizer = _optimizer(plain, foreach=False)
    for step in range(2):
        step_of_all(plain, plain_optimizer, step, world_size)
    expected = get_optimizer_state_dict(plain, plain_optimizer)
    model, optimizer = _trained(rank)
    found = whole_optimizer_state(model, optimizer)
    _expect_equal_state(found, {**expected, "param_groups": found["param_groups"]})
    alone = (
        model.full_state_dict(rank0_only=True),
        whole_optimizer_state(model, optimizer, rank0_only=True),
    )
    if rank == 0:
        assert all(torch.equal(alone[0][name], p) for name, p in plain.named_parameters())
        _expect_equal_state(alone[1], found)
    else:
        assert alone == ({}, {})
    model, optimizer = _trained(rank, steps=0)
    model.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(model, optimizer, expected, options=_WHOLE)
    step_of_all(plain, plain_optimizer, 2, world_size)
    _step(model, optimizer, 2, rank)
    expect_equal(model, plain)
    if rank == 0:
        del optimizer.state[model.head.bias]["exp_avg"]
    with pytest.raises(
        RuntimeError, match=r"ranks 0 and 1 hold different parts: \[.state.head.bias.exp_avg"
    ):
        whole_optimizer_state(model, optimizer)


@on_ranks()
def test_torchs_functions_gather_parts(rank):
    model, optimizer = _trained(rank)
    whole = model.full_state_dict()
    of_optimizer = whole_optimizer_state(model, optimizer)
    for options, wants in (
        (StateDictOptions(full_state_dict=True), True),
        (StateDictOptions(full_state_dict=True, cpu_offload=True), rank == 0),
    ):
        found = get_model_state_dict(model, options=options)
        assert found.keys() == (whole.keys() if wants else set())
        assert all(torch.equal(value, whole[name]) for name, value in found.items())
        found = get_optimizer_state_dict(model, optimizer, options=options)
        if wants:
            _expect_equal_state(found, of_optimizer)
    plain = make_net()
    found = get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())


# The second begins on the one rank as the first does, and not on the other.
@on_ranks()
def test_states_of_parameters_of_one_shape_are_gathered(rank):
    model = nn.Module()
    model.weights = nn.ParameterList([torch.full((4,), float(i)) for i in range(3)])
    model.forward = lambda: sum((weight * weight).sum() for weight in model.weights)
    brigade.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model().backward()
    optimizer.step()
    found = whole_optimizer_state(model, optimizer)["state"]
    for i in range(3):
        buffer = found[f"weights.{i}"]["momentum_buffer"]
        assert torch.equal(buffer, torch.full((4,), 2.0 * i)), i
