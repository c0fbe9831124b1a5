"""Sharded training that is saved and resumed, on other numbers of ranks too."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks, run_ranks
from sharded_training import (
    batch_of,
    expect_equal,
    expect_same,
    make_net,
    shard_blocks,
    step_of_all,
    train_step,
    whole_state,
)

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytest.importorskip(
    "torch.distributed.checkpoint.protocol",
    reason="this torch compares a part's sizes with the whole one's",
)
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_optimizer_state_dict,
)


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
        train_step(model, optimizer, step, rank)
    return model, optimizer


def _saves(rank, folder, mesh=None):
    mesh = mesh and dist.device_mesh.init_device_mesh("cpu", mesh)
    model, optimizer = _trained(rank, mesh=mesh)
    own = {"random": torch.get_rng_state()}
    brigade.save_checkpoint(f"{folder}/ours", model, optimizer, shared={"step": 2}, own=own)
    whole = whole_state(model, optimizer)
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def _loads(rank, folder, mesh):
    mesh = mesh and dist.device_mesh.init_device_mesh("cpu", mesh)
    torch.manual_seed(7)
    model, optimizer = _trained(rank, steps=1, mesh=mesh)
    loaded = brigade.load_checkpoint(f"{folder}/ours", model, optimizer)
    assert loaded.shared == {"step": 2}
    assert (loaded.own is None) == (dist.get_world_size() != 2)
    whole = torch.load(f"{folder}/whole.pt", weights_only=False)
    expect_same(whole_state(model, optimizer), whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_saves, str(folder))
    return str(folder)


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)])
def test_saved_on_two_ranks_and_loaded(saved, mesh):
    world_size = torch.Size(mesh).numel()
    run_ranks(_loads, saved, mesh, world_size=world_size)


def test_saved_by_replicas(tmp_path):
    run_ranks(_saves, str(tmp_path), (2, 2), world_size=4)
    run_ranks(_loads, str(tmp_path), (3,), world_size=3)


def _goes_on(rank, folder, world_sizes):
    """Two steps on the last of these numbers of ranks, from what the one before has saved."""
    plain = make_net()
    plain_optimizer = _optimizer(plain, foreach=False)
    for step in range(2 * len(world_sizes)):
        step_of_all(plain, plain_optimizer, step, world_sizes[step // 2])
    model, optimizer = _trained(rank, steps=0)
    begin = 2 * (len(world_sizes) - 1)
    if begin > 0:
        loaded = brigade.load_checkpoint(f"{folder}/{begin}", model, optimizer)
        assert loaded.shared == {"step": begin}
    for step in range(begin, begin + 2):
        train_step(model, optimizer, step, rank)
    brigade.save_checkpoint(f"{folder}/{begin + 2}", model, optimizer, shared={"step": begin + 2})
    expect_equal(model, plain)
    found = brigade.full_optimizer_state_dict(model, optimizer)["state"]
    expect_same(found, get_optimizer_state_dict(plain, plain_optimizer)["state"])


@pytest.mark.parametrize("world_sizes", [(2, 3), (2, 1), (3, 2, 1, 3)])
def test_resumes_as_one_process_on_other_numbers_of_ranks(world_sizes, tmp_path):
    for i, world_size in enumerate(world_sizes):
        run_ranks(_goes_on, str(tmp_path), world_sizes[: i + 1], world_size=world_size)


@on_ranks()
def test_a_damaged_checkpoint_changes_nothing(rank, tmp_path):
    model, optimizer = _trained(rank)
    good = tmp_path / "good"
    brigade.save_checkpoint(good, model, optimizer)
    with pytest.raises(ValueError, match="exists"):
        brigade.save_checkpoint(good, model, optimizer)
    before = whole_state(model, optimizer)

    def expect_unchanged():
        expect_same(whole_state(model, optimizer), before)

    def write(file, content):
        dist.barrier()
        if rank == 0:
            file.unlink() if content is None else file.write_bytes(content)
        dist.barrier()

    train_step(model, optimizer, 6, rank)
    brigade.load_checkpoint(good, model, optimizer)
    expect_unchanged()
    for file in sorted(good.iterdir()):
        whole = file.read_bytes()
        for broken in (whole[:-1], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], None):
            write(file, broken)
            with pytest.raises(ValueError, match=r"no list of its files|is damaged"):
                brigade.load_checkpoint(good, model, optimizer)
            expect_unchanged()
        write(file, whole)
    brigade.load_checkpoint(good, model, optimizer)
    expect_unchanged()


@on_ranks()
def test_checkpoints_of_others(rank, tmp_path):
    model, optimizer = _trained(rank)
    brigade.save_checkpoint(f"{tmp_path}/alone", model)
    brigade.save_checkpoint(f"{tmp_path}/both", model, optimizer)
    before = model.full_state_dict()
    with pytest.raises(ValueError, match="has no optimizer's state"):
        brigade.load_checkpoint(f"{tmp_path}/alone", model, optimizer)
    with pytest.raises(ValueError, match=r"groups of \[17, 5\], found groups of \[11, 11\]"):
        one = torch.optim.AdamW([{"params": list(model.parameters())[:17]}])
        one.add_param_group({"params": list(model.parameters())[17:]})
        brigade.load_checkpoint(f"{tmp_path}/both", model, one)
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    brigade.fully_shard(other)
    with pytest.raises(ValueError, match=r"these names are in one of both: \['0.bias'"):
        brigade.load_checkpoint(f"{tmp_path}/both", other)
    plain = make_net()
    plain.head = nn.Linear(7, 3)
    with pytest.raises(ValueError, match=r"'head.weight': expected \(3, 7\), found \(2, 7\)"):
        brigade.load_checkpoint(f"{tmp_path}/both", shard_blocks(plain))
    with pytest.raises(ValueError, match="expected a module that fully_shard has sharded"):
        brigade.save_checkpoint(f"{tmp_path}/plain", make_net())
    with pytest.raises(RuntimeError, match=r"save_checkpoint: on rank 0: .*[Dd]irectory"):
        open(f"{tmp_path}/file", "w").close()
        brigade.save_checkpoint(f"{tmp_path}/file/3", model)
    expect_same(model.full_state_dict(), before)


@on_ranks()
def test_saved_meanwhile(rank, tmp_path):
    model, optimizer = _trained(rank)
    state = {
        "model": model.state_dict(),
        "optimizer": brigade.sharded_optimizer_state_dict(model, optimizer),
    }
    whole = whole_state(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=f"{tmp_path}/later")
    saving.result()
    train_step(model, optimizer, 2, rank)
    dcp.load(state, checkpoint_id=f"{tmp_path}/later")
    brigade.load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
    expect_same(whole_state(model, optimizer), whole)


@on_ranks()
def test_copies_of_a_part_are_parts(rank):
    model, optimizer = _trained(rank)
    shard = model.blocks[0].up.weight
    whole = model.full_state_dict()["blocks.0.up.weight"]
    state = brigade.sharded_optimizer_state_dict(model, optimizer)
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
    brigade.save_checkpoint(f"{tmp_path}/a", model, optimizer)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=f"{tmp_path}/a")
    expect_same(dict(plain.state_dict()), dict(expected))
    whole = brigade.full_optimizer_state_dict(model, optimizer)
    moment = whole["state"]["0.weight"]["momentum_buffer"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    brigade.load_checkpoint(f"{tmp_path}/a", model, optimizer)
    brigade.load_full_optimizer_state_dict(model, optimizer, whole)
    expect_same(whole_state(model, optimizer), (expected, whole))


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_full_optimizer_state(rank, world_size):
    plain = make_net()
    plain_optimizer = _optimizer(plain, foreach=False)
    for step in range(2):
        step_of_all(plain, plain_optimizer, step, world_size)
    expected = get_optimizer_state_dict(plain, plain_optimizer)
    model, optimizer = _trained(rank)
    found = brigade.full_optimizer_state_dict(model, optimizer)
    expect_same(found["state"], expected["state"])
    alone = (
        model.full_state_dict(rank0_only=True),
        brigade.full_optimizer_state_dict(model, optimizer, rank0_only=True),
    )
    if rank == 0:
        expect_same(alone, (dict(plain.state_dict()), found))
    else:
        assert alone == ({}, {})
    model, optimizer = _trained(rank, steps=0)
    model.load_full_state_dict(plain.state_dict())
    brigade.load_full_optimizer_state_dict(model, optimizer, expected)
    step_of_all(plain, plain_optimizer, 2, world_size)
    train_step(model, optimizer, 2, rank)
    expect_equal(model, plain)
    wrong = copy.deepcopy(expected)
    wrong["state"]["head.bias"]["exp_avg"] = torch.ones(5)
    with pytest.raises(ValueError, match=r"'head.bias', exp_avg: expected \(2,\), found \(5,\)"):
        brigade.load_full_optimizer_state_dict(model, optimizer, wrong)
    other = torch.optim.SGD(make_net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is none of the model's"):
        brigade.sharded_optimizer_state_dict(model, other)
    if rank == 0:
        del optimizer.state[model.head.bias]["exp_avg"]
    with pytest.raises(
        RuntimeError, match=r"ranks 0 and 1 hold different parts: \[.state.head.bias.exp_avg"
    ):
        brigade.full_optimizer_state_dict(model, optimizer)


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
    found = brigade.full_optimizer_state_dict(model, optimizer)["state"]
    for i in range(3):
        buffer = found[f"weights.{i}"]["momentum_buffer"]
        assert torch.equal(buffer, torch.full((4,), 2.0 * i)), i


@on_ranks()
def test_each_rank_gets_its_own_buffers_again(rank, tmp_path):
    def make():
        return brigade.fully_shard(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))

    model = make()
    model(batch_of(rank, 0)).sum().backward()
    brigade.save_checkpoint(f"{tmp_path}/saved", model)
    loaded = make()
    brigade.load_checkpoint(f"{tmp_path}/saved", loaded)
    for (name, saved), found in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(found, saved), name
    assert loaded[1].num_batches_tracked == 1


@on_ranks()
def test_scalars_of_an_optimizer_keep_their_dtype(rank):
    model = brigade.fully_shard(nn.Linear(3, 3).double())
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(2, 3).double()).sum().backward()
    optimizer.step()
    state = brigade.sharded_optimizer_state_dict(model, optimizer)
    brigade.load_sharded_optimizer_state_dict(model, optimizer, state)
    for values in optimizer.state.values():
        assert values["mu_product"].dtype == torch.float32
