"""safetensors files, exchanged with the package `safetensors` and torch's reader and writer."""

from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import brigade

from ranks import on_ranks, run_ranks
from sharded_training import (
    batch_of,
    expect_same,
    full_optimizer_state,
    make_net,
    shard_blocks,
)

safetensors = pytest.importorskip("safetensors", reason="no package safetensors")
hugging_face = pytest.importorskip(
    "torch.distributed.checkpoint.hf_storage", reason="this torch has no HuggingFaceStorageReader"
)
from safetensors.torch import load_file, save_file  # noqa: E402


def _values():
    """Returns values that differ for each element of each parameter."""
    begin, found = 0, {}
    for name, parameter in make_net().named_parameters():
        numel = parameter.numel()
        found[name] = torch.arange(begin, begin + numel).view(parameter.shape).float()
        begin += numel
    return found


def _expect_values(found):
    expect_same(dict(found), _values())


@on_ranks()
def test_torchs_save_functions_reject_shards(rank, tmp_path):
    model = shard_blocks(make_net())
    model(batch_of(rank, 0)).sum().backward()
    for tensors in (model.state_dict(), {"gradient": model.head.weight.grad}):
        with pytest.raises(RuntimeError, match=r"is sharded: .*full_tensor\(\)"):
            save_file(tensors, f"{tmp_path}/{rank}.safetensors")
    save_file(model.full_state_dict(), f"{tmp_path}/{rank}.safetensors")
    found = load_file(f"{tmp_path}/{rank}.safetensors")
    assert found["head.weight"].shape == (2, 7)


def _sharded(values=None):
    model = shard_blocks(make_net())
    if values is not None:
        model.load_state_dict(values)
    return model


def _saves(rank, folder):
    model = _sharded(_values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(1e-6 * batch_of(rank, 0)).sum().backward()
    optimizer.step()
    brigade.save_whole(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
    brigade.save_whole(model, f"{folder}/../both.safetensors", optimizer)
    state = full_optimizer_state(model, optimizer)["state"]
    if rank == 0:
        torch.save(state, f"{folder}/../state.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    folder.mkdir()
    run_ranks(_saves, str(folder))
    return folder


def test_the_package_reads_brigades_files(folder):
    _expect_values(load_file(folder / "model.safetensors"))
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        part = opened.get_slice("blocks.1.up.weight")[3:5, 2:]
        assert torch.equal(part, _values()["blocks.1.up.weight"][3:5, 2:])
    both = load_file(folder.parent / "both.safetensors")
    state = torch.load(folder.parent / "state.pt", weights_only=True)
    _expect_values({name: both.pop(name) for name in _values()})
    for name, fields in state.items():
        for field, value in fields.items():
            dtype = torch.int64 if field == "step" else torch.float32
            assert torch.equal(both.pop(f"{name}.{field}"), value.to(dtype)), name
    assert not both


def _reads(rank, path):
    model = _sharded()
    assert brigade.load_whole(model, path) == {"by": "the package"}
    _expect_values(model.full_state_dict())


def test_brigade_reads_the_packages_files(tmp_path):
    path = str(tmp_path / "whole.safetensors")
    save_file(_values(), path, metadata={"by": "the package"})
    run_ranks(_reads, path, world_size=3)
    net = make_net()
    brigade.load_whole(net, path)
    _expect_values(net.state_dict())


def test_torchs_reader_in_one_process(folder):
    state = {name: torch.zeros_like(p) for name, p in make_net().state_dict().items()}
    reader = hugging_face.HuggingFaceStorageReader(str(folder))
    dcp.load(state, storage_reader=reader, no_dist=True)
    _expect_values(state)


@pytest.mark.parametrize("kind", ["brigade", "FSDP2"])
@on_ranks()
def test_torchs_reader_on_two_ranks(rank, kind, folder):
    folder = str(folder)
    reader = hugging_face.HuggingFaceStorageReader(folder)
    if kind == "brigade":
        model = _sharded()
        dcp.load(model.state_dict(), storage_reader=reader)
        return _expect_values(model.full_state_dict())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_blocks(make_net(), torch_fully_shard, mesh=mesh)
    state = model.state_dict()
    dcp.load(state, storage_reader=reader)
    return _expect_values({name: value.full_tensor() for name, value in state.items()})


def _damage(random, content):
    """Changes one to three bytes, mostly to characters with a meaning in JSON."""
    content = bytearray(content)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(content))
        change = random.randrange(4)
        if change == 0:
            del content[at]
        elif change == 1:
            content.insert(at, content[random.randrange(len(content))])
        elif change == 2:
            content[at] ^= 1 << random.randrange(8)
        else:
            content[at] = random.choice(b'{}[],:"0129-.e ')
    return bytes(content)


def _read(call):
    """Returns the bytes that `call` reads, or None if it raises."""
    try:
        tensors = call()
    except (ValueError, safetensors.SafetensorError):
        return None
    return {name: (t.shape, t.dtype, t.numpy().tobytes()) for name, t in tensors.items()}


def test_damaged_files_are_read_as_the_package_reads_them(tmp_path):
    path = tmp_path / "damaged.safetensors"
    save_file(nn.Linear(30, 4).state_dict(), path, metadata={"by": "the package"})
    content = path.read_bytes()
    forms = {name: form[:2] for name, form in _read(lambda: load_file(path)).items()}
    random = Random(23)
    num_read = 0

    def load():
        net = nn.Linear(30, 4)
        brigade.load_whole(net, path)
        return net.state_dict()

    for _ in range(3000):
        path.write_bytes(_damage(random, content))
        expected = _read(lambda: load_file(path))
        if expected and {name: form[:2] for name, form in expected.items()} != forms:
            expected = None
        assert _read(load) == expected, path.read_bytes()
        num_read += expected is not None
    assert num_read > 500


@on_ranks()
def test_torchs_writer_loses_nothing(rank, tmp_path):
    model = _sharded(_values())
    writer = hugging_face.HuggingFaceStorageWriter(f"{tmp_path}/refused")
    message = "expected one chunk per tensor and rank"
    with pytest.raises(dcp.api.CheckpointException, match=message):
        dcp.save(model.state_dict(), storage_writer=writer)
    in_rows = shard_blocks(make_net(), block_numel_fn=lambda p: p[0].numel())
    in_rows.load_state_dict(_values())
    writer = hugging_face.HuggingFaceStorageWriter(f"{tmp_path}/refused")
    with pytest.raises(
        dcp.api.CheckpointException, match=r"one rank to write file 1, found ranks \[0, 1\]"
    ):
        dcp.save(in_rows.state_dict(), storage_writer=writer)
    assert rank != 0 or not any((tmp_path / "refused").iterdir())
    apart = hugging_face.HuggingFaceStorageWriter(
        f"{tmp_path}/apart", fqn_to_index_mapping={"0": 1, "1": 2}
    )
    dcp.save({str(rank): torch.full((2,), float(rank))}, storage_writer=apart)
    dist.barrier()
    files = sorted((tmp_path / "apart").glob("*.safetensors"))
    assert [list(load_file(file)) for file in files] == [["0"], ["1"]]
    writer = hugging_face.HuggingFaceStorageWriter(
        f"{tmp_path}/rows", save_distributed=True, enable_consolidation=True
    )
    dcp.save(in_rows.state_dict(), storage_writer=writer)
    if rank == 0:
        (file,) = (tmp_path / "rows").glob("*.safetensors")
        _expect_values(load_file(file))
