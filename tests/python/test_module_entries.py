"""A wrapped module's tables, and what becomes of its parameters."""

import random
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade
from brigade._C import entries_of, has_entries


class Leaf(nn.Module):
    def __init__(self, rng) -> None:
        super().__init__()
        for name in rng.sample("abcde", rng.randrange(4)):
            match rng.randrange(4):
                case 0:
                    self.register_parameter(name, None)
                case 1:
                    self.register_buffer(name, torch.zeros(2))
                case 2:
                    self.register_parameter(name, nn.Parameter(torch.zeros(3)))
                case _:
                    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
                    self.register_parameter(name, frozen)


class KeepsOrder(Leaf):
    """Tables of another class, whose order is not that of insertion."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        self._parameters = OrderedDict(self._parameters)
        for name in list(self._parameters)[:1]:
            self._parameters.move_to_end(name)


def random_module(rng):
    made = []

    def make(depth):
        # A module, or a parameter of it, may be in several places.
        if made and rng.random() < 0.15:
            return rng.choice(made)
        module = rng.choice([Leaf, Leaf, Leaf, KeepsOrder])(rng)
        made.append(module)
        if made and rng.random() < 0.3:
            shared = [p for m in made for p in m._parameters.values() if p is not None]
            if shared:
                module.register_parameter("shared", rng.choice(shared))
        for i in range(rng.randrange(4) if depth < 3 else 0):
            module.add_module(str(i), None if rng.random() < 0.1 else make(depth + 1))
        if rng.random() < 0.2:
            embedding = nn.Embedding(3, 2, sparse=rng.random() < 0.5)
            module.add_module("embedding", embedding)
        return module

    return make(0)


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_that_is_its_own_descendant(alone):
    module = nn.Linear(2, 2)
    module.child = nn.Linear(2, 2)
    module.child.parent = module
    frozen = module.child.bias.requires_grad_(False)
    wrapped = brigade.DistributedDataParallel(module)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert frozen.grad is None
    assert len(list(wrapped.parameters())) == 4


@pytest.mark.parametrize("seed", range(50))
def test_a_change_of_the_tables_is_seen(seed):
    rng = random.Random(seed)
    module = random_module(rng)
    tables = [t for m in module.modules() for t in (m._parameters, m._modules)]
    entries = entries_of(tables)
    assert has_entries(tables, entries)
    changed = rng.choice(list(module.modules()))
    before = changed._parameters.pop("new", None)
    assert before is None
    changed._parameters["new"] = nn.Parameter(torch.zeros(1))
    assert not has_entries(tables, entries)
    del changed._parameters["new"]
    assert has_entries(tables, entries)
    changed._modules["new"] = nn.ReLU()
    assert not has_entries(tables, entries)
    if len(entries) > 0:
        del changed._modules["new"]
        table = next(t for t in tables if t)
        name = next(iter(table))
        table[name] = nn.Parameter(torch.zeros(1))
        assert not has_entries(tables, entries)


def test_a_parameter_ignored_by_its_second_name_may_be_unfrozen(alone):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].bias = module[0].bias.requires_grad_(False)
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    wrapped = brigade.DistributedDataParallel(module)
    module[0].bias.requires_grad_(True)
    wrapped(torch.ones(1, 2)).sum().backward()
