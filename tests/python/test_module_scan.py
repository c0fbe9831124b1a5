"""One walk in C++ finds in a module what torch's own methods find."""

import random
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade
from brigade._C import ModuleScan, are_exactly, entries_of, has_entries, one_per_device

TORCHS = torch.nn.parallel.DistributedDataParallel


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


class HidesSome(Leaf):
    """Answers named_parameters() in its own way, as modules around others' do."""

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            if not name.endswith("a"):
                yield name, parameter

    def named_buffers(self, *args, **kwargs):
        for name, buffer in super().named_buffers(*args, **kwargs):
            if not name.endswith("b"):
                yield name, buffer


class HidesChildren(Leaf):
    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self


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
        module = rng.choice([Leaf, Leaf, Leaf, KeepsOrder, HidesSome, HidesChildren])(rng)
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


def _same(found, expected):
    assert list(found) == list(expected)
    assert all(a is b for a, b in zip(found.values(), expected.values(), strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_a_scan_finds_what_torchs_methods_find(seed):
    module = random_module(random.Random(seed))
    scan = ModuleScan(module)
    _same(scan.named_parameters(), dict(module.named_parameters()))
    _same(scan.named_buffers(), dict(module.named_buffers()))
    assert scan.classes() == {type(m) for m in module.modules()}


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _torchs_answer(module, ignored):
    """What torch's class would make a reducer of."""
    wrapper = TORCHS.__new__(TORCHS)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    wrapper.parameters_to_ignore = ignored
    tensors, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(tensors) if tensors else {}
    return tensors, [names[i] for i in range(len(tensors))], expect_sparse


@pytest.mark.parametrize("seed", range(200))
def test_reduced_parameters_are_torchs(seed):
    rng = random.Random(seed)
    module = random_module(rng)
    names = [f"{prefix}.{name}" for prefix, m in module.named_modules() for name in m._parameters]
    ignored = set(rng.sample(names, rng.randrange(3))) if len(names) > 3 else set()
    expected = _torchs_answer(module, ignored)
    reduced = ModuleScan(module).reduced_parameters(ignored)
    assert list(map(id, reduced.tensors)) == list(map(id, expected[0]))
    assert reduced.names == [name.removeprefix(".") for name in expected[1]]
    assert reduced.expect_sparse == expected[2]


@pytest.mark.parametrize("seed", range(100))
def test_parameters_are_those_that_torch_keeps(seed):
    rng = random.Random(seed)
    module = random_module(rng)
    named = dict(module.named_parameters())
    ignored = set(rng.sample(list(named), rng.randrange(3))) if len(named) > 3 else set()
    expected = [p for name, p in module.named_parameters() if name not in ignored]
    found = ModuleScan(module).parameters(ignored)
    assert list(map(id, found)) == list(map(id, expected))


def test_a_module_that_is_its_own_descendant(alone):
    module = nn.Linear(2, 2)
    module.child = nn.Linear(2, 2)
    module.child.parent = module
    frozen = module.child.bias.requires_grad_(False)
    assert list(map(id, ModuleScan(module).frozen_parameters())) == [id(frozen)]
    wrapped = brigade.DistributedDataParallel(module)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert frozen.grad is None
    assert len(list(wrapped.parameters())) == 4


def test_a_scripted_child():
    module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    _same(ModuleScan(module).named_parameters(), dict(module.named_parameters()))


def test_what_is_no_tensor_is_named():
    module = nn.Linear(2, 2)
    module._parameters["odd"] = 5
    with pytest.raises(TypeError, match="expected a tensor, got 5"):
        ModuleScan(module).reduced_parameters(set())


def test_an_error_in_a_modules_own_method_comes_out():
    class Fails(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            raise LookupError("not now")

    with pytest.raises(LookupError, match="not now"):
        ModuleScan(Fails(2, 2)).named_parameters()


@pytest.mark.parametrize("seed", range(50))
def test_a_change_of_the_tables_is_seen(seed):
    rng = random.Random(seed)
    module = random_module(rng)
    tables = ModuleScan(module).tables()
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


def test_first_of_each_device():
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    found = one_per_device([cpu, meta, torch.zeros(2), torch.zeros(2, device="meta")])
    assert list(map(id, found)) == [id(cpu), id(meta)]


def test_whether_all_are_exactly_of_a_class():
    plain, buffer = nn.Parameter(torch.zeros(1)), nn.Buffer(torch.zeros(1))
    assert are_exactly([], nn.Parameter)
    assert are_exactly([plain, plain], nn.Parameter)
    assert not are_exactly([plain, buffer], nn.Parameter)
    assert not are_exactly([plain], torch.Tensor)
    assert not are_exactly([plain, nn.UninitializedParameter()], nn.Parameter)


def test_a_parameter_ignored_by_its_second_name_may_be_unfrozen(alone):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].bias = module[0].bias.requires_grad_(False)
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    wrapped = brigade.DistributedDataParallel(module)
    module[0].bias.requires_grad_(True)
    wrapped(torch.ones(1, 2)).sum().backward()


def test_a_parameter_that_was_frozen_is_named_when_it_is_not(alone):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].bias.requires_grad_(False)
    wrapped = brigade.DistributedDataParallel(module)
    module[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"unfrozen: '0\.bias'"):
        wrapped(torch.ones(1, 2))
