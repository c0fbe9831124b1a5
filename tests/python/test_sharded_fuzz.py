"""Random programs of fully_shard equal plain modules whose gradients are averaged over ranks.

All values are whole numbers, and gradients multiples of what they are divided by, so that sums
are exact in any order.

More seeds by hand: PYTHONPATH=build/release/python python tests/python/test_sharded_fuzz.py
--seeds 200 --ranks 3
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import math
import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import brigade

from exact_training import UserError
from ranks import run_ranks
from whole_numbers import expect_parameters, own_part

ONE = 12  # gradients are multiples of it, and averages over 2, 3 and 4 ranks whole
MOST = 3  # of activations; of their gradients in multiples of ONE
SEEDS = {2: range(16), 3: range(16, 26), 4: range(26, 38)}  # by number of ranks
MESHES = {2: [None, (2,), (1, 2), (2, 1)], 3: [None, (3,)], 4: [None, (2, 2), (4,), (4, 1)]}


class Bounded(torch.autograd.Function):
    """Whole numbers that stay small, and so do their gradients."""

    @staticmethod
    def forward(ctx, x):
        return torch.remainder(x, 2 * MOST + 1) - MOST

    @staticmethod
    def backward(ctx, gradient):
        return torch.remainder(gradient, ONE * (2 * MOST + 1)) - ONE * MOST


@dataclasses.dataclass
class Call:
    """Of one block in a forward."""

    block: int
    checkpoint: str = ""
    raises: str = ""
    unshards: int | None = None  # another block, ahead of its need


@dataclasses.dataclass
class Forward:
    """Of one rank."""

    calls: list[Call]
    outputs: str = "main"
    input_has_gradient: bool = False


def whole_numbers(shape, seed, most=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def _recomputed(function, x, is_recomputed):
    return checkpoint(function, x, use_reentrant=False) if is_recomputed else function(x)


class Block(nn.Module):
    """Linear layers, a scale and buffers, or some of them."""

    def __init__(self, draw: random.Random, size: int) -> None:
        super().__init__()
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        self.up = self.down = self.scale = self.empty = None
        kind = draw.choice(["linear", "two", "tied", "scale", "scale and linear"])
        if kind != "scale":
            inner = draw.choice([1, 3, 8]) if kind == "two" else size
            self.up = nn.Linear(size, inner, bias=draw.random() < 0.6)
        if kind in ("two", "tied"):
            self.down = nn.Linear(inner, size, bias=draw.random() < 0.6)
        if kind == "tied":
            self.down.weight = self.up.weight
        if "scale" in kind:
            self.scale = nn.Parameter(torch.empty(draw.choice([(), (1,), (size,), (1, size)])))
        if draw.random() < 0.15:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if kind == "two" and draw.random() < 0.4:
            self.down.weight = nn.Parameter(torch.empty(inner, size).t())
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)
        self.kind = kind

    def forward(self, x, call):
        if self.training:
            self.calls += 1
        if call.raises == "inside":
            raise UserError("inside of a block")
        y = x.to(self.dtype)
        return _recomputed(self._inner, y, call.checkpoint in ("inside", "both")).to(x.dtype)

    def _inner(self, y):
        if self.up is not None:
            y = Bounded.apply(self.up(y))
        if self.scale is not None:
            y = y * self.scale
        if self.down is not None:
            y = self.down(y)
        if self.empty is not None:
            y = y + self.empty.sum()
        return y + self.shift * self.unsaved


class Net(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.size = draw.choice([3, 5, 7])
        self.blocks = nn.ModuleList([Block(draw, self.size) for _ in range(draw.randint(3, 6))])
        self.head = nn.Linear(self.size, draw.choice([1, 2, 5]), bias=draw.random() < 0.5)

    def forward(self, x, forward: Forward):
        aux = x
        for i, call in enumerate(forward.calls):
            if call.unshards is not None and isinstance(self, brigade.FSDPModule):
                self.blocks[call.unshards].unshard(async_op=i % 2 == 0)
            if call.raises == "before":
                raise UserError("between blocks")
            run = functools.partial(self.blocks[call.block], call=call)
            x = x + _recomputed(run, x, call.checkpoint in ("around", "both"))
            x = Bounded.apply(x)
            if call.raises == "backward":
                x.register_hook(_raise)
            if i == 0:
                aux = x
        if any(call.raises == "at the end" for call in forward.calls):
            raise UserError("behind all blocks")
        return {"main": self.head(x), "aux": [aux]}


def _raise(gradient):
    raise UserError("in backward")


def _loss_of(outputs, which):
    terms = {"main": [outputs["main"]], "aux": outputs["aux"]}
    terms["both"] = terms["main"] + terms["aux"]
    return ONE * sum((term * whole_numbers(term.shape, 3, 1)).sum() for term in terms[which])


def make_net(draw: random.Random) -> Net:
    net = Net(draw).to(torch.float32)
    for block in net.blocks:
        for module in (block.up, block.down):
            if module is not None:
                module.to(block.dtype)
        if block.scale is not None:
            block.scale.data = block.scale.data.to(block.dtype)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(whole_numbers(parameter.shape, i))
            parameter.requires_grad_(draw.random() < 0.85)
    net.head.weight.requires_grad_(True)
    return net


class Reference:
    """A plain module on each rank, whose gradients are averaged."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.parameters = list(net.parameters())
        self.waiting: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.divisors = [dist.get_world_size()] * len(self.parameters)

    def backward(self, loss, reduced: set[int], **arguments) -> None:
        """`reduced`: indices of parameters; what others have is added up."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(**arguments)
        own = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient
        self.waiting = [_sum(*pair) for pair in zip(self.waiting, own, strict=True)]
        sums = self._sums_over_ranks() if reduced else []
        for i in reduced:
            if sums[i] is not None:
                average = sums[i] * (1.0 / self.divisors[i])
                self.parameters[i].grad = _sum(self.parameters[i].grad, average)
            self.waiting[i] = None

    def forget(self) -> None:
        self.waiting = [None] * len(self.parameters)

    def _sums_over_ranks(self):
        pairs = list(zip(self.parameters, self.waiting, strict=True))
        filled = [torch.zeros_like(p) if grad is None else grad for p, grad in pairs]
        used = torch.tensor([float(grad is not None) for _, grad in pairs])
        flat = torch.cat([each.reshape(-1).double() for each in (used, *filled)]).detach()
        assert flat.abs().max() < 2**22
        dist.all_reduce(flat)
        used, *sums = flat.split([len(pairs), *(each.numel() for each in filled)])
        return [
            total.view(p.shape).to(p.dtype) if is_used else None
            for is_used, total, p in zip(used, sums, self.parameters, strict=True)
        ]


def _sum(first, second):
    if first is None or second is None:
        return second if first is None else first
    return first + second


class Program:
    """Drawn while it runs, alike on all ranks."""

    def __init__(self, rank: int, seed: int, folder: str) -> None:
        self.rank, self.ranks = rank, range(dist.get_world_size())
        self.draw = random.Random(seed)
        self.folder = Path(folder) / str(seed)
        self.log: list[str] = []
        self.batches = 1000 * seed
        self.saves = 0
        net = make_net(self.draw)
        self.units = self._draw_units(net)  # names of modules, in the order that they are sharded
        self.reference = Reference(copy.deepcopy(net))
        self.plain = self.reference.net
        self.model = self._shard(net)
        self.unit_of = self._units_of_parameters()
        self.parts = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(
            self.parts.values(), lr=1.0, foreach=self.draw.random() < 0.5
        )
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=1.0)

    def run(self) -> None:
        draw = self.draw
        actions = draw.choices(list(ACTIONS), list(ACTIONS.values()), k=draw.randint(6, 10))
        for action in actions:
            self.log.append(action)
            getattr(self, action)()
            self._expect_equal_parts()
            if draw.random() < 0.4:
                self._expect_equal_state()
        self._expect_equal_state()

    # ------------------------------------------------------------------- the model

    def _draw_units(self, net: Net) -> list[list[str]]:
        draw = self.draw
        units, joint = [], []
        for i, block in enumerate(net.blocks):
            name = f"blocks.{i}"
            kind = draw.choice(["unit", "unit", "nested", "child", "joint", "joint", ""])
            if kind in ("nested", "child") and block.up is not None and block.kind != "tied":
                units.append([f"{name}.up"])
            if kind in ("unit", "nested"):
                units.append([name])
            if kind == "joint":
                joint.append(name)
        if joint:
            first, last = (net.get_submodule(name) for name in (joint[0], joint[-1]))
            alike = first.kind == last.kind == "linear" and first.dtype == last.dtype
            if len(joint) > 1 and alike:
                last.up.weight = first.up.weight
            units.insert(draw.randint(0, len(units)), joint)
        if draw.random() < 0.2:
            units.append(["head"])
        return [*units, [""]]

    def _shard(self, net: Net) -> Net:
        draw = self.draw
        world_size = len(self.ranks)
        if self.rank > 0:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.fill_(50)
        shapes = draw.choice(MESHES[world_size]), draw.choice(MESHES[world_size])
        depth = draw.choice([0, 1, 1, 2])
        self.numbers: dict[str, bool | int | None] = {}  # of ranks that keep parts, by first name
        self.replicated: set[int] = set()  # units of meshes with several rows
        for unit, names in enumerate(self.units):
            shape = draw.choice(shapes)
            shards = world_size if shape is None else shape[-1]
            if shards < world_size:
                self.replicated.add(unit)
            numbers = [n for n in range(1, shards + 1) if shards % n == 0]
            value = draw.choice([None, True, False, draw.choice(numbers)])
            self.numbers[names[0]] = value
            modules = [net.get_submodule(name) for name in names]
            brigade.fully_shard(
                modules if len(names) > 1 else modules[0],
                mesh=_mesh(shape),
                reshard_after_forward=value,
                prefetch_depth=depth,
            )
            self.log.append(f"{names}: mesh {shape}, reshards {value}")
        return net

    def _units_of_parameters(self) -> list[int]:
        """By index of parameter."""
        places = {id(parameter): i for i, parameter in enumerate(self.reference.parameters)}
        found: dict[int, int] = {}
        for number, names in enumerate(self.units):
            for name in names:
                for parameter in self.plain.get_submodule(name).parameters():
                    found.setdefault(places[id(parameter)], number)
        return [found[i] for i in range(len(places))]

    def _module(self, unit: int) -> nn.Module:
        return self.model.get_submodule(self.draw.choice(self.units[unit]))

    def _own_parameters(self, unit: int) -> list[str]:
        names = [name for name, _ in self.plain.named_parameters()]
        return [name for name, of in zip(names, self.unit_of, strict=True) if of == unit]

    # ---------------------------------------------------------------- expectations

    def _expect_equal_parts(self) -> None:
        found = dict(self.model.named_parameters())
        assert found.keys() == self.parts.keys()
        assert all(found[name] is part for name, part in self.parts.items())
        expect_parameters(self.model, self.plain)
        self._expect_gradients()

    def _expect_equal_state(self) -> None:
        state = self.model.full_state_dict()  # first, since peers may need units again
        expected = self.plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value.cpu()), (name, state[name], value)
        name = self.draw.choice(list(self.parts))
        gradient = self.parts[name].grad
        if gradient is not None:
            assert torch.equal(gradient.full_tensor(), self.plain.get_parameter(name).grad), name

    def _expect_gradients(self) -> None:
        pairs = zip(self.parts.items(), self.reference.parameters, strict=True)
        for (name, part), whole in pairs:
            assert part.requires_grad == whole.requires_grad, name
            assert (part.grad is None) == (whole.grad is None), (name, part.grad, whole.grad)
            if whole.grad is not None:
                expected = own_part(part, whole.grad)
                assert torch.equal(part.grad.elements(), expected), (name, part.grad, expected)

    # --------------------------------------------------------------------- forwards

    def _draw_forwards(self, alike: bool | None = None) -> list[Forward]:
        """One of each rank."""
        draw = self.draw
        if alike is None:
            alike = draw.random() < 0.5
        if not alike:
            return [self._draw_forward(draw.random() < 0.3) for _ in self.ranks]
        one = self._draw_forward(draw.random() < 0.7)
        for call in one.calls:
            units = [i for i in range(len(self.plain.blocks)) if self._is_unit(i)]
            if units and draw.random() < 0.1:
                call.unshards = draw.choice(units)
        return [one] * len(self.ranks)

    def _is_unit(self, block: int) -> bool:
        return any(f"blocks.{block}" in names for names in self.units)

    def _draw_forward(self, of_all: bool) -> Forward:
        draw = self.draw
        blocks = list(range(len(self.plain.blocks)))
        if not of_all:
            blocks = draw.choices(blocks, k=draw.randint(1, 4))
            if draw.random() < 0.6:
                blocks = sorted(set(blocks))
        kinds = ["", "", "", "around", "inside", "both"]
        one_kind = draw.choice([None, "", draw.choice(kinds)])
        calls = [Call(i, draw.choice(kinds) if one_kind is None else one_kind) for i in blocks]
        outputs = draw.choice(["main", "main", "both", "aux"])
        return Forward(calls, outputs, outputs == "aux" or draw.random() < 0.4)

    def _batch(self, forward: Forward) -> torch.Tensor:
        shape = (2, self.plain.size)
        x = whole_numbers(shape, 10 * self.batches + self.rank, MOST)
        return x.requires_grad_(forward.input_has_gradient)

    def _forward(self, forwards: list[Forward]):
        """Losses and inputs of the model and of the reference; the losses are equal."""
        forward = forwards[self.rank]
        self.batches += 1
        found = []
        for net in (self.model, self.plain):
            x = self._batch(forward)
            found.append((_loss_of(net(x, forward), forward.outputs), x))
        (loss, _), (expected, _) = found
        assert torch.equal(loss, expected), (loss, expected)
        assert loss.requires_grad == expected.requires_grad
        return found

    def _backward(self, found, reduced: set[int] | None = None, **arguments) -> None:
        """`reduced`: units."""
        (loss, x), (expected, expected_x) = found
        parameters = {
            i for i, unit in enumerate(self.unit_of) if reduced is None or unit in reduced
        }
        loss.backward(**arguments)
        self.reference.backward(expected, parameters, **arguments)
        assert (x.grad is None) == (expected_x.grad is None)
        assert x.grad is None or torch.equal(x.grad, expected_x.grad)

    def _forward_only(self) -> None:
        way = self.draw.choice(["no_grad", "eval", "dropped", "inference"])
        self.log.append(f"  {way}")
        forwards = self._draw_forwards()
        for net in (self.model, self.plain):
            net.train(way != "eval")
        with torch.set_grad_enabled(way == "dropped"), torch.inference_mode(way == "inference"):
            self._forward(forwards)
        for net in (self.model, self.plain):
            net.train()

    # ----------------------------------------------------------------------- actions

    def step(self) -> None:
        draw = self.draw
        self._zero_grad()
        if draw.random() < 0.35:
            self._accumulate()
        self._synchronised()
        self._step_optimizer()

    def _zero_grad(self) -> None:
        how = self.draw.choice([True, True, False, None])
        if how is not None:
            self.optimizer.zero_grad(set_to_none=how)
            self.plain_optimizer.zero_grad(set_to_none=how)
        self.log.append(f"  zero_grad: {how}")

    def _accumulate(self) -> None:
        draw = self.draw
        every = set(range(len(self.units)))
        if self.replicated and draw.random() < 0.4:
            return self._accumulate_over_rows(every)
        chosen = every if draw.random() < 0.5 else set(draw.sample(sorted(every), 1))
        self.log.append(f"  accumulate: units {sorted(chosen)}")
        self._set_synchronises(chosen, False)
        for _ in range(draw.randint(1, 3)):
            self._backward(self._forward(self._draw_forwards()), every - chosen)
            if draw.random() < 0.2:
                self._forward_only()
        self._set_synchronises(chosen, True)
        return None

    def _set_synchronises(self, chosen: set[int], value: bool) -> None:
        if len(chosen) == len(self.units):
            self.model.set_requires_gradient_sync(value)
            return
        for unit in chosen:
            self._module(unit).set_requires_gradient_sync(value, recurse=False)

    def _accumulate_over_rows(self, every: set[int]) -> None:
        self.log.append("  accumulate over rows")
        self.model.set_requires_all_reduce(False)
        for _ in range(self.draw.randint(1, 2)):
            self._backward(self._forward(self._draw_forwards()), every - self.replicated)
        self.model.set_requires_all_reduce(True)

    def _synchronised(self) -> None:
        draw = self.draw
        way = draw.choice(["one", "one", "each", "reversed", "by rank", "together", "in turns"])
        many = 1 if way == "one" else draw.randint(2, 3)
        self.log.append(f"  {way}: {many}")
        if way == "in turns":
            for _ in range(many):
                self._backward(self._forward(self._draw_forwards()))
            return
        found = [self._forward(self._draw_forwards()) for _ in range(many)]
        if draw.random() < 0.25:
            self._forward_only()
        if way == "reversed" or (way == "by rank" and self.rank % 2):
            found.reverse()
        if way == "together":
            self._backward_together(found)
            return
        for each in found:
            if draw.random() < 0.1:
                self.log.append("  twice")
                self._backward(each, retain_graph=True)
            self._backward(each)

    def _backward_together(self, found) -> None:
        losses = [sum(of_net[0] for of_net in each) for each in zip(*found, strict=True)]
        xs = [each[0][1] for each in found], [each[1][1] for each in found]
        nothing = torch.zeros(1)
        self._backward([(losses[0], nothing), (losses[1], nothing)])
        for x, expected in zip(*xs, strict=True):
            assert x.grad is None or torch.equal(x.grad, expected.grad)

    def _step_optimizer(self) -> None:
        draw = self.draw
        self._expect_gradients()
        if draw.random() < 0.1:
            return  # the next step adds to these gradients
        if draw.random() < 0.25 and self._has_gradients():
            self._clip()
        else:
            for parameters in (self.parts.values(), self.reference.parameters):
                nn.utils.clip_grad_value_(parameters, 1.0)
        self.optimizer.step()
        self.plain_optimizer.step()

    def _has_gradients(self) -> bool:
        return any(p.grad is not None and p.grad.any() for p in self.plain.parameters())

    def _clip(self) -> None:
        has_empty = any(p.grad is not None and not p.numel() for p in self.plain.parameters())
        order = self.draw.choice([1.0, 2.0, 2.0 if has_empty else math.inf])
        of_torch = self.draw.random() < 0.5
        self.log.append(f"  clip: {order}, {of_torch}")
        gradients = [p.grad for p in self.plain.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([g.double() for g in gradients], order)
        most = norm.item() / self.draw.choice([0.5, 4])
        nn.utils.clip_grad_norm_(self.plain.parameters(), most, order)
        if of_torch:
            found = nn.utils.clip_grad_norm_(self.parts.values(), most, order)
        else:
            found = self.model.clip_grad_norm_(most, order)
        torch.testing.assert_close(found, norm, check_dtype=False, rtol=1e-5, atol=0)
        for part, whole in zip(self.parts.values(), self.plain.parameters(), strict=True):
            if whole.grad is not None:
                expected = own_part(part, whole.grad)
                torch.testing.assert_close(part.grad.elements(), expected, rtol=1e-5, atol=0)
                part.grad.sign_()
                whole.grad.sign_()

    def forwards(self) -> None:
        for _ in range(self.draw.randint(1, 2)):
            self._forward_only()

    def fail(self) -> None:
        """In one rank or in all: gradients are as before, others are dropped."""
        draw = self.draw
        self._zero_grad()
        if draw.random() < 0.3:
            self._backward(self._forward(self._draw_forwards()))
        if draw.random() < 0.3:
            self._accumulate()
        forwards = copy.deepcopy(self._draw_forwards())
        failing = draw.choice([set(self.ranks), {draw.choice(self.ranks)}])
        raises = draw.choice(["before", "inside", "at the end", "backward"])
        self.log.append(f"  {raises}, ranks {failing}")
        self.batches += 1
        for forward in forwards:
            forward.outputs, forward.input_has_gradient = "main", True
        own = forwards[self.rank]
        if self.rank in failing:
            own.calls[len(own.calls) // 2].raises = raises
        with pytest.raises(UserError if self.rank in failing else dist.DistBackendError):
            _loss_of(self.model(self._batch(own), own), "main").backward()
        self.reference.forget()
        for name, buffer in self.plain.named_buffers():
            buffer.copy_(self.model.get_buffer(name))

    def unshard(self) -> None:
        draw = self.draw
        unit = draw.randrange(len(self.units))
        module = self._module(unit)
        way = draw.choice(["read", "write", "train", "eval", "late"])
        self.log.append(f"  {way}: unit {unit}")
        handle = module.unshard(async_op=draw.random() < 0.5)
        if handle is not None and way in ("read", "write"):
            handle.wait()
        if way in ("read", "write"):
            for name in self._own_parameters(unit):
                whole = self.model.get_parameter(name)
                assert not isinstance(whole, brigade.ShardedParameter), name
                assert torch.equal(whole, self.plain.get_parameter(name)), name
                if way == "write":
                    with torch.no_grad():
                        whole.neg_()
                        self.plain.get_parameter(name).neg_()
        if way == "train":
            self.step()
        if way == "eval":
            self._forward_only()
        module.reshard(writes=way == "write")
        if handle is not None and way == "late":
            handle.wait()

    def whole(self) -> None:
        draw = self.draw
        writes = draw.random() < 0.5
        with self.model.whole_parameters(writes=writes), torch.no_grad():
            pairs = zip(self.model.named_parameters(), self.plain.parameters(), strict=True)
            for (name, whole), expected in pairs:
                assert torch.equal(whole, expected), name
                if writes:
                    whole.neg_()
                    expected.neg_()
            for _ in range(draw.choice([0, 1, self.rank])):
                forwards = [Forward([Call(i) for i in range(len(self.plain.blocks))])]
                self._forward(forwards * len(self.ranks))
        self.batches += 10 * len(self.ranks)
        counts = [None] * len(self.ranks)
        dist.all_gather_object(counts, self.batches)
        self.batches = max(counts)

    def save_and_load(self) -> None:
        draw = self.draw
        self._expect_equal_state()
        kind = draw.choice(["full", "full", "checkpoint", "whole", "shards"])
        self.log.append(f"  {kind}")
        self.saves += 1
        path = f"{self.folder}-{self.saves}"
        expected = copy.deepcopy(self.plain.state_dict())
        if kind == "full":
            state = self.model.full_state_dict()
        elif kind == "checkpoint":
            brigade.save_checkpoint(path, self.model, self.optimizer)
        else:
            save = brigade.save_whole if kind == "whole" else brigade.save_shards
            with pytest.warns(UserWarning, match=r"buffers .* are not saved"):
                save(self.model, path, self.optimizer)
        self.step()
        if kind == "full":
            for each in (state, expected):
                for name in each:
                    if name.endswith("calls"):
                        each[name].zero_()
            self.model.load_full_state_dict(state)
        elif kind == "checkpoint":
            brigade.load_checkpoint(path, self.model, self.optimizer)
        elif kind == "whole":
            brigade.load_whole(self.model, path, self.optimizer)
        else:
            brigade.load_shards(self.model, path, self.optimizer)
        if kind in ("whole", "shards"):
            expected = {name: expected[name] for name, _ in self.plain.named_parameters()}
        self.plain.load_state_dict(expected, strict=kind in ("full", "checkpoint"))

    def settings(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self._set_one()

    def _set_one(self) -> None:
        draw = self.draw
        unit = draw.randrange(len(self.units))
        module = self._module(unit)
        recurse = draw.random() < 0.3
        kind = draw.choice(list(SETTINGS))
        value = draw.choice(SETTINGS[kind])
        if kind == "set_reshard_after_forward" and not recurse:
            number = self.numbers[self.units[unit][0]]
            value = draw.choice([True, False, value if number is None else number])
        if "prefetch" in kind:
            others = [i for i in range(len(self.units)) if i != unit]
            chosen = draw.sample(others, min(len(others), value))
            self.log.append(f"  {kind}: unit {unit}, {chosen}")
            getattr(module, kind)([self._module(i) for i in chosen])
            return
        self.log.append(f"  {kind}: unit {unit}, {value}, {recurse}")
        if kind == "set_gradient_divide_factor":
            module.set_gradient_divide_factor(value)
            for i, of in enumerate(self.unit_of):
                if of == unit:
                    self.reference.divisors[i] = value
            return
        getattr(module, kind)(value, recurse=recurse)

    def freeze(self) -> None:
        names = [name for name, _ in self.plain.named_parameters() if name != "head.weight"]
        for name in self.draw.sample(names, min(len(names), self.draw.randint(1, 2))):
            value = not self.plain.get_parameter(name).requires_grad
            self.log.append(f"  {name}: {value}")
            self.parts[name].requires_grad_(value)
            self.plain.get_parameter(name).requires_grad_(value)


# By name, how often they are drawn.
ACTIONS = {
    "step": 8,
    "forwards": 1,
    "fail": 2,
    "unshard": 2,
    "whole": 1,
    "save_and_load": 1,
    "settings": 3,
    "freeze": 1,
}
SETTINGS = {
    "set_reshard_after_forward": [True, False],
    "set_reshard_after_backward": [True, False],
    "set_keep_unsharded_storage": [True, False],
    "set_gradient_divide_factor": [1.0, 2.0, 4.0],
    "set_reduce_scatter_max_input_buffers": [1, 2, 3],
    "set_modules_to_forward_prefetch": [0, 1, 2],
    "set_modules_to_backward_prefetch": [0, 1, 2],
}


@functools.cache
def _mesh(shape):
    return None if shape is None else dist.device_mesh.init_device_mesh("cpu", shape)


def _fuzz(rank: int, seeds: list[int], folder: str) -> collections.Counter[str]:
    seen: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        log = ["made"]
        try:
            program = Program(rank, seed, folder)
            log = program.log
            program.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}\n" + "\n".join(log)) from error
        seen.update(line.split(":")[0].strip() for line in log)
    return seen


@pytest.mark.parametrize("world_size", SEEDS)
def test_random_programs_equal_plain_modules(world_size, tmp_path):
    seeds = list(SEEDS[world_size])
    seen = run_ranks(_fuzz, seeds, str(tmp_path), world_size=world_size, timeout_s=30)
    assert seen[0].keys() >= ACTIONS.keys(), seen[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    begin = time.monotonic()
    seeds = list(range(arguments.first, arguments.first + arguments.seeds))
    with tempfile.TemporaryDirectory() as folder:
        seen = run_ranks(_fuzz, seeds, folder, world_size=arguments.ranks, timeout_s=30)
    print(f"{len(seeds)} seeds in {time.monotonic() - begin:.1f} s: {dict(seen[0])}")


if __name__ == "__main__":
    main()
