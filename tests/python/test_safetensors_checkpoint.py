"""safetensors checkpoints, exchanged between C++ and Python."""

import copy
import json
import pathlib
import warnings

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks, run_ranks, torchrun
from sharded_training import (
    Net,
    expect_equal_on_ranks,
    expect_same,
    full_state,
    make_net,
    shard_blocks,
    train_step,
)

_GPT = pathlib.Path(brigade.__file__).parents[2] / "examples/gpt/gpt"

_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(
        parameters, lr=0.1, momentum=0.5, centered=True
    ),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1),
}
_WAYS = {
    "whole": (brigade.save_whole, brigade.load_whole),
    "shards": (brigade.save_shards, brigade.load_shards),
}


def _make(kind, name):
    model = make_net()
    model = shard_blocks(model) if kind == "shards" else brigade.DistributedDataParallel(model)
    return model, _OPTIMIZERS[name](model.parameters())


def _state(model, optimizer):
    if isinstance(model, brigade.FSDPModule):
        parameters, states = full_state(model, optimizer)
        states = states["state"]
    else:
        parameters = dict(model.module.state_dict())
        states = dict(zip(parameters, optimizer.state_dict()["state"].values(), strict=False))
    kept = {
        f"{name}.{key}": value
        for name, values in states.items()
        for key, value in values.items()
        if value is not None
    }
    return copy.deepcopy((parameters, kept))


def _put(rank, folder, name, value):
    if rank == 0:
        torch.save(value, f"{folder}/{name}.pt")


def _get(folder, name):
    return torch.load(f"{folder}/{name}.pt", weights_only=False)


def _saves(rank, folder, name, kind):
    model, optimizer = _make(kind, name)
    for step in range(2):
        train_step(model, optimizer, step, rank)
    for way, (save, _) in _WAYS.items():
        save(model, f"{folder}/{way}", optimizer, metadata={"step": "2"})
    saved = _state(model, optimizer)
    train_step(model, optimizer, 2, rank)
    _put(rank, folder, "saved", (saved, _state(model, optimizer)))


def _loads(rank, folder, name, way, kind):
    model, optimizer = _make(kind, name)
    train_step(model, optimizer, 7, rank)  # loading undoes this
    assert _WAYS[way][1](model, f"{folder}/{way}", optimizer)["step"] == "2"
    loaded = _state(model, optimizer)
    train_step(model, optimizer, 2, rank)
    _put(rank, folder, "loaded", (loaded, _state(model, optimizer)))


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "shards") for name in _OPTIMIZERS), ("adamw", "replicas")]
)
def test_resumed_training_has_the_same_bits(tmp_path, name, kind):
    run_ranks(_saves, str(tmp_path), name, kind)
    saved, stepped = _get(tmp_path, "saved")
    for way in _WAYS:
        for loads_as, world_size in (("shards", 2), ("shards", 3), ("replicas", 2)):
            run_ranks(_loads, str(tmp_path), name, way, loads_as, world_size=world_size)
            loaded, on = _get(tmp_path, "loaded")
            expect_same(loaded, saved)
            if world_size == 2:
                expect_same(on, stepped)


def _header_of(path):
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


_OPTIONS = {"lr": 0.5, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3, "maximize": True}


@on_ranks()
def test_loading_restores_saved_options_and_names_differences(rank, tmp_path):
    for way, (save, load) in _WAYS.items():
        kept, loaded = make_net(), make_net()
        first = torch.optim.AdamW(kept.parameters(), lr=0.01, weight_decay=0.1)
        second = torch.optim.AdamW(loaded.parameters(), **_OPTIONS)
        kept, loaded = (brigade.DistributedDataParallel(each) for each in (kept, loaded))
        train_step(kept, first, 0, rank)
        save(kept, f"{tmp_path}/{way}", first)
        with pytest.warns(UserWarning, match="other options of AdamW") as warned:
            load(loaded, f"{tmp_path}/{way}", second)
        for name in _OPTIONS:
            assert f"{name} = " in str(warned[0].message)
            assert second.param_groups[0][name] == first.param_groups[0][name]
        for model, optimizer in ((kept, first), (loaded, second)):
            train_step(model, optimizer, 1, rank)
        expect_same(loaded.module.state_dict(), kept.module.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(loaded, f"{tmp_path}/{way}", second)


def test_a_module_of_one_process_needs_no_group(tmp_path):
    net, other = make_net(), Net()
    optimizer, other_optimizer = (torch.optim.Adam(each.parameters()) for each in (net, other))
    train_step(net, optimizer, 0, 0)
    brigade.save_whole(net, tmp_path / "whole", optimizer, metadata={"epoch": "1"})
    loaded = brigade.load_whole(other, tmp_path / "whole", other_optimizer)
    assert loaded["epoch"] == "1"
    for model, steps in ((net, optimizer), (other, other_optimizer)):
        train_step(model, steps, 1, 0)
    expect_same(other.state_dict(), net.state_dict())


class _Nest(nn.Module):
    """A module with parameters of a file's names and shapes."""

    def __init__(self, forms):
        super().__init__()
        for name, shape in forms.items():
            *path, last = name.split(".")
            module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def _reads_what_cpp_has_saved(rank, folder, forms):
    model = brigade.fully_shard(_Nest(forms))
    optimizer = torch.optim.AdamW(model.parameters())
    metadata = brigade.load_shards(model, folder, optimizer)
    brigade.save_whole(model, f"{folder}/../whole", optimizer)
    _put(rank, f"{folder}/..", "loaded", (metadata, *_state(model, optimizer)))


@pytest.mark.skipif(not _GPT.exists(), reason="examples/gpt is not built")
def test_loads_a_checkpoint_of_a_cpp_program(tmp_path):
    folder = tmp_path / "gpt"
    options = ["--steps", "3", "--blocks", "1", "--width", "8", "--batch-size", "4"]
    options += ["--sample", "0", "--checkpoint", str(folder)]
    torchrun("--no-python", _GPT, *options)
    index = json.loads(_header_of(folder / "index.safetensors")["__metadata__"]["brigade.shards"])
    kept = (".exp_avg", ".exp_avg_sq", ".step")
    shapes = {
        tensor["name"]: tensor["shape"]
        for tensor in index["tensors"]
        if not tensor["name"].endswith(kept)
    }
    run_ranks(_reads_what_cpp_has_saved, str(folder), shapes)
    metadata, parameters, states = _get(tmp_path, "loaded")
    assert metadata["brigade.optimizer"] == "AdamW"
    assert all(value.abs().max() > 0 for value in parameters.values())
    assert {v.item() for name, v in states.items() if name.endswith(".step")} == {3}
    whole = _header_of(tmp_path / "whole")
    assert set(whole) >= {f"{name}.exp_avg" for name in parameters}


@on_ranks()
def test_a_warning_names_missing_buffers(rank, tmp_path):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    brigade.fully_shard(model, ignored_params={model[0].bias})
    with pytest.warns(UserWarning, match=r"not saved: '0.bias', '1.running_mean'"):
        brigade.save_whole(model, f"{tmp_path}/whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="Pass the model's parameters to the optimizer, or their shards"
    ):
        brigade.save_whole(model, f"{tmp_path}/whole", optimizer)


@on_ranks()
def test_ranks_with_other_arguments_raise_the_same_error(rank, tmp_path):
    model, optimizer = _make("replicas", "adamw")
    train_step(model, optimizer, 0, rank)
    brigade.save_whole(model, f"{tmp_path}/a", optimizer)
    train_step(model, optimizer, 1, rank)
    brigade.save_whole(model, f"{tmp_path}/b", optimizer)
    errors = []

    def expect_error(error, text, call):
        with pytest.raises(error, match=text) as caught:
            call()
        errors.append(str(caught.value))

    other = f"{tmp_path}/{'ab'[rank]}"
    expect_error(ValueError, "a checkpoint with checksum", lambda: brigade.load_whole(model, other))
    sharded, _ = _make("shards", "adamw")
    expect_error(
        ValueError, "a checkpoint with checksum", lambda: brigade.load_whole(sharded, other)
    )
    expect_error(ValueError, "is a file", lambda: brigade.save_shards(model, f"{tmp_path}/a"))
    own = {"rank": str(rank)}
    save = brigade.save_whole
    expect_error(
        ValueError,
        "metadata text rank differs between ranks:\n  rank 0: 0",
        lambda: save(model, other, metadata=own),
    )
    on_one = {"step": 1} if rank == 0 else {"step": "1"}
    with pytest.raises((TypeError, ValueError), match="expected metadata of strings"):
        save(model, f"{tmp_path}/c", metadata=on_one)
    brigade.load_whole(model, f"{tmp_path}/a", optimizer)
    train_step(model, optimizer, 1, rank)
    expect_equal_on_ranks(errors)


@on_ranks()
def test_names_do_not_depend_on_torchs_compiler(rank, tmp_path):
    folder = str(tmp_path)
    wrapped, _ = _make("replicas", "sgd")
    path = pathlib.Path(folder) / "whole"
    brigade.save_whole(torch.compile(wrapped), path)
    inner = brigade.DistributedDataParallel(torch.compile(make_net(), backend="eager"))
    brigade.save_whole(inner, path.with_name("inner"))
    wrapped.module.load_state_dict({k: v + 1 for k, v in wrapped.module.state_dict().items()})
    for each in (path, path.with_name("inner")):
        brigade.load_whole(wrapped, each)
        expect_same(wrapped.module.state_dict(), make_net().state_dict())


def test_the_error_names_parameters_without_memory(tmp_path):
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    for call in (brigade.save_whole, brigade.load_whole):
        with pytest.raises(ValueError, match="found 'weight' on meta"):
            call(net, tmp_path / "whole")


@on_ranks()
def test_data_assigned_within_whole_parameters_is_kept_or_an_error(rank):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    brigade.fully_shard(model)
    with model.whole_parameters(writes=True):
        model[0].weight.data = torch.full((3, 3), 2.0)
        model[1].weight.data = torch.arange(9.0).view(3, 3).t()
    written = model.full_state_dict()
    assert (written["0.weight"] == 2).all() and written["1.weight"][0, 1] == 3
    with model.whole_parameters():  # without writes=True
        model[0].weight.data = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"'0.weight' was given a plain tensor"):
        model(torch.ones(1, 3))
    expect_same(model.full_state_dict(), written)
    with (
        pytest.raises(ValueError, match=r"'1.weight' .*\[2\]"),
        model.whole_parameters(writes=True),
    ):
        model[1].weight.data = torch.ones(2)
