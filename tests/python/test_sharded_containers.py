"""Units that take and return tensors in containers: gathered and reduced as those of tensors."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

import brigade

from ranks import run_ranks
from sharded_training import Block, batch_of, expect_equal, step_of_all

Named = collections.namedtuple("Named", ["hidden", "skip"])


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    skip: torch.Tensor | None
    note: str = "no tensor"


# How two tensors are put together, and taken apart.
FORMS = {
    "tuple": (lambda a, b: (a, b), lambda both: both),
    "list": (lambda a, b: [a, b], lambda both: both),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda both: (both["a"], both["b"])),
    "namedtuple": (Named, lambda both: both),
    "dataclass": (State, lambda both: (both.hidden, both.skip)),
    "nested": (
        lambda a, b: ("first", (a, [None, {"b": (b,)}]), 3),
        lambda both: (both[1][0], both[1][1][1]["b"][0]),
    ),
    "dataclass_inside": (
        lambda a, b: [{"state": State(a, None)}, (State(b, None), 1)],
        lambda both: (both[0]["state"].hidden, both[1][0].hidden),
    ),
}


class Layer(nn.Module):
    """Both tensors go through parameters that backward reads."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = Block(5), Block(5)

    def forward(self, both):
        together, apart = FORMS[self.form]
        a, b = apart(both)
        return together(self.first(a) + b, self.second(b))


class Layers(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Linear(5, 5)
        self.layers = nn.ModuleList([Layer(form) for _ in range(3)])

    def forward(self, x):
        together, apart = FORMS[self.form]
        both = together(self.embed(x), x)
        for layer in self.layers:
            both = layer(both)
        return torch.cat(apart(both))


def _make(form):
    torch.manual_seed(0)
    return Layers(form)


def _trains(rank, form):
    plain, model = _make("tuple"), _make(form)
    for layer in model.layers:
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    for step in range(4):
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizers[1].step()
    expect_equal(model, plain)
    return model.sharding_statistics()


@pytest.mark.parametrize("form", FORMS)
def test_units_of_containers_equal_one_process(form):
    for statistics in run_ranks(_trains, form):
        # In each step all units in forward, and the layers again in backward.
        assert statistics["late_gathers"] == statistics["unneeded_gathers"] == 0
        assert statistics["ahead_gathers"] == 4 * (4 + 3)
        assert statistics["reductions_launched"] == 4 * 4
        if "dataclass" not in form:  # whose tensors don't tell when backward has left a unit
            assert statistics["peak_whole_bytes"] == statistics["planned_bytes"]
