"""State dicts of sharded modules: their shards, and the effect of training on them."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from whole_numbers import batch_of, expect_parameters, layers, loss_of, step_by_sign


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        numel = 0
        for rows in (2, 3, 4, 5):
            for sizes in ((rows,), (rows, 3), (rows, 2, 3)):
                values = torch.arange(numel, numel + torch.Size(sizes).numel())
                name = "x".join(map(str, sizes))
                self.register_parameter(name, nn.Parameter(values.double().view(sizes)))
                numel += values.numel()
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("unsaved", torch.tensor(8), persistent=False)

    def forward(self, x):
        return x * sum(p.sum() for p in self.parameters())


def _shard(model, as_units):
    for module in model if as_units else ():
        brigade.fully_shard(module)
    return brigade.fully_shard(model)


def _assembled(part):
    """Collective. Returns the unsharded tensor of all ranks' boxes, which must partition it."""
    boxes = [
        (chunk.offsets, part.__get_tensor_shard__(_Index(chunk.offsets)))
        for chunk in part.__create_chunk_list__()
    ]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, boxes)
    whole, count = torch.zeros(part.shape, dtype=part.dtype), torch.zeros(part.shape)
    for offsets, values in (box for boxes in of_ranks for box in boxes):
        where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        whole[where] = values
        count[where] += 1 if values.numel() else 0
    assert (count == 1).all()
    return whole


class _Index:
    def __init__(self, offset):
        self.offset = offset


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("as_units", [False, True])
@on_ranks()
def test_shards_partition_tensors_of_few_rows(rank, world_size, as_units):
    plain = nn.Sequential(Uneven(), Uneven())
    with torch.no_grad():
        for parameter in plain[1].parameters():
            parameter.neg_()
    model = _shard(copy.deepcopy(plain), as_units)
    for _ in range(2):
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, whole in plain.state_dict().items():
            found = state[name]
            if name.endswith("count"):
                assert type(found) is torch.Tensor and found.item() == 7
                continue
            assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
            assert torch.equal(_assembled(found), whole), name
        full = model.full_state_dict()
        assert list(full) == list(plain.state_dict())
        assert all(torch.equal(full[name], v) for name, v in plain.state_dict().items())

        tripled = {n: v * 3 if isinstance(v, brigade.TensorShard) else v for n, v in state.items()}
        model.load_state_dict(tripled)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(3)
        expect_parameters(model, plain)
        model(torch.ones((), dtype=torch.float64)).backward()


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_an_older_state_dict_follows_training_and_copies_do_not(rank, reshards):
    """state_dict() shares the shards' memory, as any module's; full_state_dict() copies."""
    model = layers(3, 5, 2)
    plain = copy.deepcopy(model)
    brigade.fully_shard(model[0], reshard_after_forward=reshards)
    brigade.fully_shard(model, reshard_after_forward=reshards)
    begin = copy.deepcopy(plain.state_dict())
    parts, copies, full = model.state_dict(), {}, model.full_state_dict()
    for name, part in parts.items():
        copies[name] = part.clone()
        assert isinstance(copies[name], brigade.TensorShard)
    shared = plain.state_dict()
    for step in range(3):
        for r in range(2):
            loss_of(plain, batch_of(3, r, step)).div(2).backward()
        loss_of(model, batch_of(3, rank, step)).backward()
        step_by_sign(model, plain)
    assert not torch.equal(shared["0.weight"], begin["0.weight"])
    for name, whole in shared.items():
        assert torch.equal(full[name], begin[name]), name
        assert torch.equal(_assembled(parts[name]), whole), name
        assert torch.equal(_assembled(copies[name]), begin[name]), name
    model.load_state_dict(copies)
    plain.load_state_dict(begin)
    expect_parameters(model, plain)
    assert torch.equal(_assembled(parts["0.weight"]), begin["0.weight"])
    with torch.no_grad():
        assert torch.equal(model(batch_of(3, rank, 9)), plain(batch_of(3, rank, 9)))


@on_ranks()
def test_a_state_dict_within_whole_parameters_is_unsharded(rank):
    plain, model = layers(3, 5, 2), layers(3, 5, 2)
    _shard(model, as_units=True)
    parts = model.state_dict()
    with model.whole_parameters():
        for name, value in model.state_dict().items():
            whole = plain.state_dict()[name]
            assert torch.equal(value, whole), name
            assert torch.equal(_assembled(parts[name]), whole), name
        copies = copy.deepcopy(model.state_dict())
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
    saved.seek(0)
    for found in (copies, torch.load(saved, weights_only=True)):
        plain.load_state_dict(found, strict=True)
        expect_parameters(model, plain)
    assert torch.equal(parts["0.weight"].full_tensor(), plain[0].weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("scope", ["unshard", "whole_parameters"])
@on_ranks()
def test_a_state_dict_loads_while_parameters_are_unsharded(rank, scope, is_sharded, assign):
    plain, model = layers(3, 5, 2), _shard(layers(3, 5, 2), as_units=True)
    model(batch_of(3, rank, 0))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state if is_sharded else plain.state_dict()
    if scope == "unshard":
        model[0].unshard()
        model.load_state_dict(state, assign=assign)
    else:
        words = r"whole_parameters\(writes=True\)"
        with pytest.raises(RuntimeError, match=words), model.whole_parameters():
            model.load_state_dict(state, assign=assign)
        with model.whole_parameters(writes=True):
            model.load_state_dict(state, assign=assign)
            with torch.no_grad():
                model[0].bias.add_(1)
                plain[0].bias.add_(1)
            model.load_state_dict(model.state_dict())
    expect_parameters(model, plain)
    assert torch.equal(model(batch_of(3, rank, 0)), plain(batch_of(3, rank, 0)))
