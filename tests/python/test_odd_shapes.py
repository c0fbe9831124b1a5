"""Parameters of sizes that fit 4 ranks badly, gathered and reduced, element by element."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

import brigade

from rank_cases import run_cases
from whole_numbers import own_part

WORLD_SIZE = 4
SHAPES = [(3,), (1,), (17, 5), (1, 1, 1), (0,), (), (129,), (5, 1, 3), (2, 0, 3)]


def _whole_values(start, shape):
    """No two elements of all parameters are alike."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _values():
    starts = [1000 * i + 1 for i in range(len(SHAPES))]
    return [_whole_values(start, shape) for start, shape in zip(starts, SHAPES, strict=True)]


def _gradient(values, rank):
    """Of one rank; another one for each element, and not in the order of ranks."""
    return values * 4 + (10000, 70000, 20000, 50000)[rank]


class Odd(nn.Module):
    """The gradient of its parameter is what it is called with."""

    def __init__(self, values) -> None:
        super().__init__()
        self.value = nn.Parameter(values.clone())
        self.seen = None

    def forward(self, gradient):
        self.seen = self.value.detach().clone()
        return (self.value * gradient).sum()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Odd(values) for values in _values()])

    def forward(self, gradients):
        return sum(part(gradient) for part, gradient in zip(self.parts, gradients, strict=True))


def _each_a_unit(model, **arguments):
    for part in model.parts:
        brigade.fully_shard(part, **arguments)
    return brigade.fully_shard(model, **arguments)


def _one_unit(model, **arguments):
    return brigade.fully_shard(model, **arguments)


def _rows_are_not_cut(model):
    return _each_a_unit(model, block_numel_fn=lambda p: max(1, p.shape[-1]) if p.dim() > 1 else 1)


def _on_a_mesh(model):
    return _each_a_unit(model, mesh=dist.init_device_mesh("cpu", (2, 2)))


WAYS = {
    "one unit": _one_unit,
    "each a unit": _each_a_unit,
    "kept by neighbours": lambda model: _each_a_unit(model, reshard_after_forward=2),
    "on a mesh": _on_a_mesh,
    "rows are not cut": _rows_are_not_cut,
    "replicated": lambda model: _each_a_unit(model, mesh=dist.init_device_mesh("cpu", (4, 1))),
}


def _expect_parts_of_all(model, num_shards):
    """Ranks of a row have each element once."""
    for part, values in zip(model.parts, _values(), strict=True):
        held = [None] * WORLD_SIZE
        dist.all_gather_object(held, part.value.to_local().tolist())
        for start in range(0, WORLD_SIZE, num_shards):
            row = itertools.chain.from_iterable(held[start : start + num_shards])
            assert list(row) == values.flatten().tolist()


def _odd(rank, way):
    model = WAYS[way](Several())
    num_shards = {"on a mesh": 2, "replicated": 1}.get(way, WORLD_SIZE)
    _expect_parts_of_all(model, num_shards)
    for step in range(2):
        model([_gradient(values, rank) for values in _values()]).backward()
        for part, values in zip(model.parts, _values(), strict=True):
            assert torch.equal(part.seen, values), (step, values.shape)
            average = sum(_gradient(values, r) for r in range(WORLD_SIZE)) / WORLD_SIZE
            found = part.value.grad
            assert found.shape == values.shape
            assert torch.equal(found.to_local(), own_part(part.value, average)), values.shape
        model.zero_grad()
    with model.whole_parameters():
        for part, values in zip(model.parts, _values(), strict=True):
            assert torch.equal(part.value, values)
    state = model.full_state_dict()
    for i, values in enumerate(_values()):
        assert torch.equal(state[f"parts.{i}.value"], values)


def test_elements_and_averages_are_right():
    run_cases(_odd, [(way,) for way in WAYS], WORLD_SIZE)
