"""Units whose inputs and outputs are containers of tensors."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from ranks import on_ranks
from sharded_training import Block, Pair
from whole_numbers import expect_gradients

Named = collections.namedtuple("Named", ["hidden", "skip"])


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    skip: torch.Tensor | None
    note: str = "no tensor"


# Functions that pack two tensors into a container, and unpack it.
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
    """Multiplies both tensors by parameters that backward needs."""

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


@pytest.mark.parametrize("form", FORMS)
@on_ranks()
def test_units_of_containers_equal_one_process(rank, form):
    plain, model = _make("tuple"), _make(form)
    for layer in model.layers:
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    pair = Pair(rank, nets=(plain, model))
    for step in range(4):
        pair.step(step)
    pair.expect_equal()
    # Each step gathers all units in forward, and the layers again in backward.
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2
    assert statistics["all_gathers"] == 4 * (4 + 3)
    assert statistics["reductions"] == 4 * 4
    assert statistics["peak_buffer_bytes"] == statistics["buffer_bytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    config: State


class _Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, nest, *others):
        self.seen = [nest, *others]
        x = nest.x if isinstance(nest, Frozen) else nest["x"]
        return State(self.linear(x), None)


@on_ranks()
def test_tensors_in_dataclasses_are_cast(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = brigade.fully_shard(_Casting(), mp_policy=policy)
    config = State("a word", 3)
    out = model(Frozen(torch.ones(2, 4), config), config, [1, {"a": config}])
    assert out.hidden.dtype == torch.float64
    given, *others = model.seen
    assert given.x.dtype == torch.bfloat16
    assert given.config is config  # objects without tensors are not copied
    assert others[0] is config
    assert others[1][1]["a"] is config


@on_ranks()
def test_containers_keep_their_classes(rank):
    model = brigade.fully_shard(_Casting())
    default = collections.defaultdict(list, n=[1], x=torch.ones(2, 4, requires_grad=True))
    model(default, torch.ones(2, 4).max(dim=1)).hidden.sum().backward()
    given, largest = model.seen
    assert given.default_factory is list
    assert given["n"] is default["n"]
    assert largest.indices.shape == (2,)


class _View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).view(-1)


@on_ranks()
def test_an_output_that_is_a_view_may_be_written_in_place(rank):
    torch.manual_seed(0)
    plain, model = _View(), _View()
    model.load_state_dict(plain.state_dict())
    brigade.fully_shard(model)
    for net in (plain, model):
        net(torch.ones(2, 3)).mul_(2).sum().backward()
    expect_gradients(model, plain)
