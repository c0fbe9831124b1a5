"""Random training programs, drawn from a seed and compared with a reference.

A program is a model of random parts, a wrapper (DDP with some of its options, or `fully_shard` of
random units), an optimizer, and a list of actions. Each rank runs it twice in lockstep: on the
wrapped model and on a reference. The reference is a plain module whose gradients are averaged over
the ranks, or torch's own class. Each action ends with a comparison of the two.

With a plain module all values are integers, and gradients are multiples of their divisor, so that
sums are exact in any order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import random
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

import brigade

from exact_training import SumOverRanks, UserError
from sharded_training import full_optimizer_state
from training import CLASSES
from whole_numbers import expect_parameters, own_shard

ONE = 12  # divides all gradients, so that averages over 2, 3 and 4 ranks are integers
MOST = 3  # largest activation, and largest gradient of one in multiples of ONE
ROWS = 9  # of embedding tables
WIDE = 3000  # a weight of 60 KB, whose gradient fills a bucket
MESHES = {2: [None, (2,), (1, 2), (2, 1)], 3: [None, (3,)], 4: [None, (2, 2), (4,), (4, 1)]}


# ---------------------------------------------------------------------------- the model


class Bounded(torch.autograd.Function):
    """Keeps activations and their gradients small integers."""

    @staticmethod
    def forward(ctx, x):
        return torch.remainder(x, 2 * MOST + 1) - MOST

    @staticmethod
    def backward(ctx, gradient):
        return torch.remainder(gradient, ONE * (2 * MOST + 1)) - ONE * MOST


@dataclasses.dataclass
class Call:
    part: int
    checkpoint: str = ""  # around, inside, both or reentrant
    raises: str = ""  # before, inside, at the end or backward
    unshards: int | None = None  # a later part to unshard ahead of its use


@dataclasses.dataclass
class Forward:
    calls: list[Call]
    outputs: str = "main"  # main, aux or both
    input_has_gradient: bool = False
    way: int = 0  # the branch taken by parts with several branches
    with_collective: bool = False  # a collective that backward reaches before the first part


def whole_numbers(shape, seed, most=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def _recomputed(function, x, how):
    if how in ("around", "both", "reentrant"):
        return checkpoint(function, x, use_reentrant=how == "reentrant")
    return function(x)


class Part(nn.Module):
    """Layers of one of the kinds below, of `size` inputs and outputs, and buffers."""

    def __init__(self, draw: random.Random, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        self.up = self.down = self.scale = self.empty = self.table = self.norm = self.conv = None
        self.ways = None
        inner = size
        if kind in ("linear", "two", "tied", "scale and linear", "strided", "wide"):
            inner = {"two": draw.choice([1, 3, 8]), "wide": WIDE}.get(kind, size)
            self.up = nn.Linear(size, inner, bias=draw.random() < 0.6)
        if kind in ("two", "tied", "wide"):
            self.down = nn.Linear(inner, size, bias=draw.random() < 0.6)
        if kind == "tied":
            self.down.weight = self.up.weight
        if kind in ("scale", "scale and linear"):
            self.scale = nn.Parameter(torch.ones(draw.choice([(), (1,), (size,), (1, size)])))
        if draw.random() < 0.15:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if kind == "strided" or (kind == "two" and draw.random() < 0.4):
            layer = self.down if kind == "two" else self.up
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        if kind in ("table", "sparse table"):
            self.table = nn.Embedding(ROWS, size, sparse=kind == "sparse table")
        if kind == "branches":
            self.ways = nn.ModuleList(nn.Linear(size, size) for _ in range(draw.randint(2, 3)))
        if kind == "never":
            self.unused = nn.Linear(2, 3)
        if kind == "convolution":
            self.conv = nn.Conv2d(1, draw.randint(1, 3), (2, 3), padding=(0, 1))
            if draw.random() < 0.5:
                self.conv.to(memory_format=torch.channels_last)
        if kind == "norm":
            self.norm = draw.choice([nn.BatchNorm1d, nn.LayerNorm])(size)
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)

    def forward(self, x, call, way, squash):
        if self.training and torch._C._current_graph_task_id() == -1:
            self.calls += 1
        if call.raises == "inside":
            raise UserError("inside of a part")
        inside = functools.partial(self._inner, way=way, squash=squash)
        dtype = next((p.dtype for p in self.parameters()), x.dtype)
        how = "around" if call.checkpoint in ("inside", "both") else ""
        return _recomputed(inside, x.to(dtype), how).to(x.dtype)

    def _inner(self, y, way, squash):
        if self.ways is not None:
            y = self.ways[way % len(self.ways)](y)
        if self.up is not None:
            y = squash(self.up(y))
        if self.scale is not None:
            y = y * self.scale
        if self.down is not None:
            y = self.down(y)
        if self.empty is not None:
            y = y + self.empty.sum()
        if self.table is not None:
            # A sum would give the table and x gradients in the same memory.
            y = y + 1 * self.table(torch.arange(len(y)) + way % (ROWS - len(y)))
        if self.conv is not None:
            y = self.conv(torch.stack([y, y * y], 1).unsqueeze(1)).sum(1).squeeze(1)
        if self.norm is not None:
            y = self.norm(y)
        return y + (self.shift * self.unsaved).to(y.dtype)


KINDS = ("linear", "two", "tied", "scale", "scale and linear", "strided")
DDP_KINDS = ("table", "wide")
UNUSED_KINDS = ("branches", "branches", "branches", "never")
FLOAT_KINDS = ("norm", "convolution")


class Net(nn.Module):
    def __init__(self, draw: random.Random, kinds: list[str], whole: bool) -> None:
        super().__init__()
        self.size, self.whole = draw.choice([3, 5, 7]), whole
        chosen = [draw.choice(kinds) for _ in range(draw.randint(3, 6))]
        self.parts = nn.ModuleList(Part(draw, self.size, kind) for kind in chosen)
        self.head = nn.Linear(self.size, draw.choice([1, 2, 5]), bias=draw.random() < 0.5)

    def squash(self, x):
        return Bounded.apply(x) if self.whole else torch.tanh(x)

    def forward(self, x, forward: Forward):
        aux = x
        if forward.with_collective:
            x = x * 1
        for i, call in enumerate(forward.calls):
            if call.unshards is not None and isinstance(self, brigade.FSDPModule):
                self.parts[call.unshards].unshard(async_op=i % 2 == 0)
            if call.raises == "before":
                raise UserError("between parts")
            part = self.parts[call.part]
            run = functools.partial(part, call=call, way=forward.way, squash=self.squash)
            x = self.squash(x + _recomputed(run, x, call.checkpoint))
            if call.raises == "backward":
                x.register_hook(_raise)
            if i == 0:
                aux = x
                if forward.with_collective:
                    x = self.squash(SumOverRanks.apply(x))
        if any(call.raises == "at the end" for call in forward.calls):
            raise UserError("after all parts")
        return {"main": self.head(x), "aux": [aux]}


def _raise(gradient):
    raise UserError("in backward")


def _loss_of(outputs, which, whole):
    terms = {"main": [outputs["main"]], "aux": outputs["aux"]}
    terms["both"] = terms["main"] + terms["aux"]
    if not whole:
        return sum(term.abs().square().sum() for term in terms[which])
    return ONE * sum((term * whole_numbers(term.shape, 3, 1)).sum() for term in terms[which])


class Second(nn.Module):
    """A second model in the same backward: the sum of two parameters, times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.a + x * self.b).sum()


def _fill(net: nn.Module, draw: random.Random, always_trained: nn.Parameter) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(whole_numbers(parameter.shape, i, dtype=parameter.dtype))
            parameter.requires_grad_(draw.random() < 0.85)
    always_trained.requires_grad_(True)


# ------------------------------------------------------------------------- the reference


class Reference:
    """Plain modules on each rank, whose gradients are averaged over the ranks."""

    def __init__(self, *modules: nn.Module) -> None:
        self.net = modules[0]
        self.parameters = [p for module in modules for p in module.parameters()]
        self.waiting: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.divisors = [dist.get_world_size()] * len(self.parameters)

    def no_sync(self):
        return contextlib.nullcontext()

    def backward(self, loss, reduced: set[int] | None = None, **arguments) -> None:
        """`reduced`: indices of the parameters to reduce, None: all. Others accumulate locally."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(**arguments)
        own = [_dense(parameter.grad) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient
        self.waiting = [_sum(*pair) for pair in zip(self.waiting, own, strict=True)]
        reduced = set(range(len(self.parameters))) if reduced is None else reduced
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


def _dense(gradient):
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


# -------------------------------------------------------------------------- the programs


class Program:
    """A program, drawn while it runs, identically on all ranks.

    Attributes:
        model: The wrapped model.
        log: A line per draw; an action's line is its name.
    """

    actions: dict[str, int]  # weights of the draw, by name
    forwards_alone = ("no_grad", "eval", "dropped", "inference")

    def __init__(self, rank: int, seed: int, folder: str) -> None:
        self.rank, self.ranks = rank, range(dist.get_world_size())
        self.draw = random.Random(f"{type(self).__name__} {seed}")
        self.folder = Path(folder) / f"{type(self).__name__}-{seed}"
        self.log: list[str] = []
        self.batches = 1000 * seed
        self.saves = 0

    def run(self) -> None:
        draw = self.draw
        names, weights = zip(*self.actions.items(), strict=True)
        for action in draw.choices(names, weights, k=draw.randint(6, 10)):
            self.log.append(action)
            in_thread = draw.random() < 0.1
            run = getattr(self, action)
            _in_thread(run) if in_thread else run()
            self.log += ["  in a thread"] * in_thread
            self.expect_equal()
            if draw.random() < 0.4:
                self.expect_equal_state()
        self.expect_equal_state()

    def note(self, line: str) -> None:
        self.log.append(f"  {line}")

    def new_batches(self) -> int:
        """Returns the first number of ten new batches, equal on all ranks."""
        self.batches += 10
        return self.batches

    def batch(self, forward: Forward, number: int) -> torch.Tensor:
        x = whole_numbers((2, self.plain.size), 10 * number + self.rank, MOST)
        return x.requires_grad_(forward.input_has_gradient or forward.with_collective)

    def forward(self, forward: Forward, number: int):
        """Returns losses and inputs of the model and of the reference; expects equal losses."""
        found = []
        for net in (self.model, self.reference.net):
            x = self.batch(forward, number)
            found.append((_loss_of(net(x, forward), forward.outputs, self.plain.whole), x))
        (loss, _), (expected, _) = found
        self.expect_same(loss, expected, "loss")
        assert loss.requires_grad == expected.requires_grad
        return found

    def backward(self, found, reduced: set[int] | None = None, **arguments) -> None:
        """`reduced`: indices of the parameters to reduce."""
        (loss, x), (expected, expected_x) = found
        loss.backward(**arguments)
        self.reference.backward(expected, reduced, **arguments)
        assert (x.grad is None) == (expected_x.grad is None)
        if x.grad is not None:
            self.expect_same(x.grad, expected_x.grad, "input")

    def backward_together(self, found, losses: list[torch.Tensor] | None = None) -> None:
        """Runs one backward for several forwards, by default from the sum of their losses."""
        nothing = torch.zeros(1)
        losses = losses or [sum(pair[i][0] for pair in found) for i in range(2)]
        self.backward([(losses[0], nothing), (losses[1], nothing)])
        for (_, x), (_, expected) in found:
            if x.grad is not None:
                self.expect_same(x.grad, expected.grad, "input")

    def forward_only(self) -> None:
        way = self.draw.choice([*self.forwards_alone])
        self.note(way)
        forward, number = self.draw_forwards()[self.rank], self.new_batches()
        for net in (self.model, self.reference.net):
            net.train(way != "eval")
        with torch.set_grad_enabled(way == "dropped"), torch.inference_mode(way == "inference"):
            self.forward(forward, number)
        for net in (self.model, self.reference.net):
            net.train()

    def forwards(self) -> None:
        for _ in range(self.draw.randint(1, 2)):
            self.forward_only()

    def expect_same(self, ours, theirs, name) -> None:
        assert torch.equal(_dense(ours), _dense(theirs)), (name, ours, theirs)

    def make_optimizers(self, parameters) -> None:
        foreach = self.draw.random() < 0.5
        self.optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=foreach)
        self.optimizers = self.optimizer, torch.optim.SGD(self.plain.parameters(), lr=1.0)

    def zero_grad(self, *ways: bool | None) -> None:
        how = self.draw.choice(ways)
        self.note(f"zero_grad: {how}")
        for optimizer in self.optimizers if how is not None else ():
            optimizer.zero_grad(set_to_none=how)


def _in_thread(function: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


# ---------------------------------------------------------------------------------- DDP

MODES = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}
_OF_TORCH = inspect.signature(CLASSES["torch"]).parameters
FLAGS = ["gradient_as_bucket_view", "broadcast_buffers"]
FLAGS += [name for name in ("lazy_bucket_allocation", "batched_grad_copy") if name in _OF_TORCH]
HOOKS = {
    "allreduce": lambda w: w.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda w: w.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "builtin": lambda w: w._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin fp16": lambda w: w._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
}
# Forwards with one common backward: synchronized (s) or under no_sync (l). Not part of it:
# forwards without gradients (n) and dropped ones (d).
ORDERS = ("s", "s", "sl", "ls", "lsl", "sn", "ns", "ss", "sls")
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64)


class Replicated(Program):
    """DDP programs, compared with the plain module or, in floating point, with torch's class."""

    def __init__(self, rank, seed, folder, against="plain", kind="brigade") -> None:
        super().__init__(rank, seed, folder)
        draw = self.draw
        whole = against == "plain"
        self.torch_runs_it = not whole or kind == "torch"
        self.mode = draw.choice(list(MODES))
        self.dtype = torch.float32 if whole else draw.choice(FLOATS)
        self.options = self._draw_options()
        hooks = [*HOOKS] if self.dtype is torch.float32 else ["allreduce"]
        self.hook = draw.choice([None, None, None, *hooks])
        net = self._draw_net(whole)
        self.plain = copy.deepcopy(net)
        early = draw.random() < 0.5
        if early:
            self.make_optimizers(net.parameters())
        self.model = CLASSES[kind](net, **self.options)
        self.second = CLASSES[kind](Second(), find_unused_parameters=True)
        if whole:
            self.plain_second = Second()
            self.reference = Reference(self.plain, self.plain_second)
        else:
            theirs = CLASSES["torch"](self.plain, **self.options)
            self.reference = types.SimpleNamespace(
                net=theirs,
                no_sync=theirs.no_sync,
                parameters=list(self.plain.parameters()),
                backward=lambda loss, reduced=None, **arguments: loss.backward(**arguments),
            )
        for wrapped in (self.model,) if whole else (self.model, self.reference.net):
            if self.hook is not None:
                HOOKS[self.hook](wrapped)
        if not early:
            self.make_optimizers(net.parameters())
        self.actions = {"step": 8, "forwards": 2, "save_and_load": 1}
        if self.torch_runs_it:
            self.forwards_alone = ("no_grad", "eval", "inference")
        else:
            self.actions |= {"fail": 2}
        self.fixed = self._draw_calls() if self.mode == "static_graph" else None
        self.exact_bits = whole or (
            len(self.ranks) == 2
            and self.hook != "builtin fp16"
            and all(part.kind != "sparse table" for part in net.parts)
        )
        self.log.append(f"{self.mode}, {self.options}, hook {self.hook}, {self.dtype}")
        self.log += [f"kind {part.kind}" for part in net.parts]

    def _draw_options(self) -> dict[str, Any]:
        draw = self.draw
        options = MODES[self.mode] | {name: draw.random() < 0.5 for name in FLAGS}
        caps = draw.choice(["default", "one", "list"])
        if caps == "one":
            options["bucket_cap_mb"] = draw.choice([1e-6, 3e-5, 1e-4, 1])
        elif caps == "list":
            options["bucket_cap_mb_list"] = [
                draw.choice([1e-4, 3e-4, 1e-3, 1]) for _ in range(draw.randint(1, 3))
            ]
        return options

    def _draw_net(self, whole: bool) -> Net:
        draw = self.draw
        kinds = [*KINDS, "wide"] if self.dtype.is_complex else [*KINDS, *DDP_KINDS]
        if self.mode != "plain":
            kinds += UNUSED_KINDS
        is_used = self.mode != "find_unused" or not self.torch_runs_it
        is_supported = self.dtype in (torch.float32, torch.float64)
        if is_used and is_supported and "fp16" not in (self.hook or ""):
            kinds.append("sparse table")
        if not whole and not self.dtype.is_complex:
            kinds += FLOAT_KINDS
        torch.manual_seed(draw.randrange(1000))
        net = Net(draw, kinds, whole)
        if draw.random() < 0.3:  # a layer tied to the first one's weight
            alike = [part for part in net.parts if part.kind in ("linear", "tied")]
            if len(alike) > 1:
                alike[-1].up.weight = alike[0].up.weight
        if whole:
            _fill(net, draw, net.head.weight)
            return net
        for parameter in list(net.parameters())[1:]:
            parameter.requires_grad_(draw.random() < 0.95)
        net.head.weight.requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # casting to complex warns
            return net.to(self.dtype)

    def batch(self, forward: Forward, number: int) -> torch.Tensor:
        if self.plain.whole:
            return super().batch(forward, number)
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        x = torch.randn(4, self.plain.size, generator=generator).to(self.dtype)
        return x.requires_grad_(forward.input_has_gradient)

    def _draw_calls(self, left_out: bool = False) -> list[Call]:
        draw = self.draw
        parts = list(range(len(self.model.module.parts)))
        if left_out:
            parts = [i for i in parts if i == 0 or draw.random() < 0.6]
        elif draw.random() < 0.3:
            parts.append(draw.choice(parts))
        how = ["", "", "", "around", "inside"]
        if self.mode == "static_graph":
            how.append("reentrant")
        return [Call(i, draw.choice(how)) for i in parts]

    def draw_forwards(self, may_differ: bool = True) -> list[Forward]:
        draw = self.draw
        has_gradient = draw.random() < 0.4
        if self.fixed is not None:
            reentrant = any(call.checkpoint == "reentrant" for call in self.fixed)
            one = Forward(self.fixed, "main", has_gradient or reentrant)
            return [one] * len(self.ranks)
        if self.mode == "find_unused" and may_differ and draw.random() < 0.6:
            return [
                Forward(self._draw_calls(left_out=True), "main", has_gradient, draw.randrange(6))
                for _ in self.ranks
            ]
        way = draw.randrange(6) if self.mode == "find_unused" else 0
        return [Forward(self._draw_calls(), "main", has_gradient, way)] * len(self.ranks)

    def forward_only(self) -> None:
        if self.mode == "static_graph" and self.torch_runs_it:
            return  # torch's class counts these forwards
        super().forward_only()

    def step(self) -> None:
        draw = self.draw
        # A parameter unused on all ranks keeps its gradient; one rank's gradient counts once.
        # A third of an existing gradient is not an integer.
        is_exact = self.exact_bits and len(self.ranks) != 3
        again = [None] if self.mode != "find_unused" and is_exact else []
        self.zero_grad(True, True, False, *again)
        with_collective = self.plain.whole and draw.random() < 0.3
        forwards = self.draw_forwards(may_differ=not with_collective)
        if with_collective:
            forwards = [dataclasses.replace(forwards[0], with_collective=True)] * len(self.ranks)
        # Reentrant checkpoints run a parameter's hook once per forward.
        is_counted = self.fixed and any(call.checkpoint == "reentrant" for call in self.fixed)
        is_free = self.plain.whole and not is_counted
        order = draw.choice(ORDERS if is_free else ("s", "s", "ns"))
        orders = [order for _ in self.ranks]
        is_uneven = not with_collective and not self.torch_runs_it
        is_uneven = is_uneven and not self.options["broadcast_buffers"]
        if is_uneven and is_free and draw.random() < 0.3:
            orders = ["s" * draw.randint(1, 3) for _ in self.ranks]
        # torch's class sometimes reduces under no_sync after a forward without gradients.
        is_free = self.plain.whole and (self.mode == "plain" or not self.torch_runs_it)
        local = draw.choice((0, 0, 1, 2)) if is_free else 0
        extra = [(0, 0, 0) for _ in self.ranks]
        if is_uneven and draw.random() < 0.4:
            extra = [tuple(draw.choice((0, 0, 1, 2)) for _ in range(3)) for _ in self.ranks]
        second = draw.choice(["none", "same backward", "frozen"]) if self.plain.whole else "none"
        judged = [draw.random() < 0.5 for _ in self.ranks]
        self.note(f"orders {orders}, local {local}, extra {extra}, second {second}")
        for name, is_so in {
            "collective": with_collective,
            "uneven": len({*orders}) > 1 or len({*extra}) > 1,
            "no_sync": local > 0 or "l" in order,
            "left out": any(f.calls != forwards[0].calls for f in forwards),
            second: True,
        }.items():
            self.log += [f"  {name}"] * is_so
        own, number = forwards[self.rank], self.new_batches()
        for i in range(local):
            with self.model.no_sync(), self.reference.no_sync():
                self.backward(self.forward(own, number + 5 + i), set())
        before, between, after = extra[self.rank]
        order = "d" * before + orders[self.rank] + "d" * between
        found = self._joint_forwards(own, number, order)
        self._joint_backward(found, second, judged[self.rank])
        self._joint_forwards(own, number, "d" * after)
        self._step_optimizer()

    def _joint_forwards(self, forward: Forward, number: int, order: str):
        found = []
        for i, way in enumerate(order):
            if way == "n":
                with torch.no_grad():
                    self.forward(forward, number + i)
                continue
            local = self.model.no_sync() if way == "l" else contextlib.nullcontext()
            with local:
                output = self.forward(forward, number + i)
            if way != "d":
                found.append(output)
        return found

    def _joint_backward(self, found, second: str, is_judged: bool) -> None:
        losses = [sum(pair[i][0] for pair in found) for i in range(2)]
        if self.plain.whole:
            for i, module in enumerate((self.second, self.plain_second)):
                module.requires_grad_(second != "frozen")
                if second == "same backward":
                    losses[i] = losses[i] + module(torch.tensor([float(ONE * (self.rank + 1))]))
                if second == "frozen" and is_judged:
                    losses[i] = module(losses[i])
        self.backward_together(found, losses)

    def _step_optimizer(self) -> None:
        self.expect_equal()
        for each in (self.second, getattr(self, "plain_second", self.second)):
            each.zero_grad()
        if self.draw.random() < 0.1 and self.mode != "find_unused":
            return
        both = [
            [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
            for optimizer in self.optimizers
        ]
        is_dense = not any(part.kind == "sparse table" for part in self.plain.parts)
        if self.plain.whole and is_dense and self.draw.random() < 0.2:
            norms = [nn.utils.clip_grad_norm_(parameters, 10.0) for parameters in both]
            torch.testing.assert_close(*norms)
        for optimizer, parameters in zip(self.optimizers, both, strict=True):
            optimizer.param_groups[0]["lr"] = 1.0 if self.plain.whole else 1 / 256
            for parameter in parameters if self.plain.whole else ():
                gradient = parameter.grad
                is_sparse = gradient.is_sparse
                parameter.grad = gradient.coalesce().sign() if is_sparse else gradient.sign_()
            optimizer.step()

    def fail(self) -> None:
        """Fails on one rank in backward; expects an error that names it, and exact steps later."""
        draw = self.draw
        self.zero_grad(True, False)
        forwards = copy.deepcopy(self.draw_forwards(may_differ=False))
        failing, at_parameter = draw.choice(self.ranks), draw.random() < 0.5
        self.note(f"rank {failing}, at a parameter: {at_parameter}")
        own, handle = forwards[self.rank], None
        own.input_has_gradient = True
        if self.rank == failing and at_parameter:
            handle = self.model.module.head.weight.register_hook(_raise)
        elif self.rank == failing:
            own.calls[len(own.calls) // 2].raises = "backward"
        with pytest.raises(UserError if self.rank == failing else dist.DistBackendError) as caught:
            output = self.model(self.batch(own, self.new_batches()), own)
            _loss_of(output, "main", True).backward()
        if handle is not None:
            handle.remove()
        if self.rank != failing:
            assert f"rank {failing} failed" in str(caught.value), caught.value
        assert self.model.reducer.can_continue()
        self.zero_grad(True)
        for name, buffer in self.plain.named_buffers():
            buffer.copy_(self.model.module.get_buffer(name))

    def save_and_load(self) -> None:
        state = copy.deepcopy(self.model.module.state_dict())
        self.step()
        if self.draw.random() < 0.5:
            self.model.module.load_state_dict(state)
            self.plain.load_state_dict(state)

    def expect_same(self, ours, theirs, name) -> None:
        if self.exact_bits:
            return super().expect_same(ours, theirs, name)
        ours, theirs = _dense(ours), _dense(theirs)
        most = max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * most)
        return None

    def expect_equal(self) -> None:
        ours = [*self.model.module.parameters(), *self.second.parameters()]
        names = [name for name, _ in self.plain.named_parameters()] + ["second", "second"]
        for name, p, expected in zip(names, ours, self.reference.parameters, strict=False):
            self.expect_same(p.detach(), expected.detach(), name)
            gradients = [torch.zeros_like(e) if e.grad is None else e.grad for e in (p, expected)]
            self.expect_same(*gradients, f"gradient of {name}")
            assert self.plain.whole or (p.grad is None) == (expected.grad is None), name

    def expect_equal_state(self) -> None:
        own = self.model.module.state_dict()
        for name, value in self.plain.state_dict().items():
            if not name.endswith("calls"):  # each rank's own counts, which are broadcast
                self.expect_same(own[name], value, name)


# ------------------------------------------------------------------------- fully_shard

SETTINGS = {
    "set_reshard_after_forward": [True, False],
    "set_reshard_after_backward": [True, False],
    "set_keep_unsharded_storage": [True, False],
    "set_gradient_divide_factor": [1.0, 2.0, 4.0],
    "set_reduce_scatter_max_input_buffers": [1, 2, 3],
    "set_modules_to_forward_prefetch": [0, 1, 2],
    "set_modules_to_backward_prefetch": [0, 1, 2],
}


class Sharded(Program):
    """Programs with fully_shard of random units, compared with the plain module."""

    actions: ClassVar = {
        "step": 8,
        "forwards": 1,
        "fail": 2,
        "unshard": 2,
        "whole": 1,
        "save_and_load": 1,
        "settings": 3,
        "freeze": 1,
        "load_by_placements": 0.3,
    }

    def __init__(self, rank: int, seed: int, folder: str) -> None:
        super().__init__(rank, seed, folder)
        net = self._draw_net()
        self.units = self._draw_units(net)  # names of modules, in the order of sharding
        self.plain = copy.deepcopy(net)
        self.reference = Reference(self.plain)
        made = self.draw.choice(["early", "late", "late", "unsharded"])
        if made == "early":
            self.make_optimizers(net.parameters())
        self.model = self._shard(net)
        self.members = self._members()
        self.shards = dict(self.model.named_parameters())
        if made == "unsharded":
            with self.model.whole_parameters():
                self.make_optimizers(self.model.parameters())
        elif made == "late":
            self.make_optimizers(self.shards.values())
        if self.draw.random() < 0.1:
            self.log.append("norm before the first forward")
            for shard in self.shards.values():
                shard.grad = torch.zeros_like(shard)
            nn.utils.clip_grad_norm_(self.shards.values(), 1.0)
            self.optimizer.zero_grad()
        if self.draw.random() < 0.1:
            self.log.append("optimizer state before the first forward")
            with_state = torch.optim.Adagrad(self.shards.values())
            full_optimizer_state(self.model, with_state)
        self.log += [f"kind {part.kind}" for part in self.plain.parts]

    def _draw_net(self) -> Net:
        draw = self.draw
        net = Net(draw, [*KINDS, "two", "table", "branches", "never"], whole=True)
        for part in net.parts:
            if draw.random() < 0.3:
                for parameter in part.parameters():
                    parameter.data = parameter.data.double()
        _fill(net, draw, net.head.weight)
        return net

    def _draw_units(self, net: Net) -> list[list[str]]:
        draw = self.draw
        units, joint = [], []
        for i, part in enumerate(net.parts):
            name = f"parts.{i}"
            kind = draw.choice(["unit", "unit", "nested", "child", "joint", "joint", ""])
            if kind in ("nested", "child") and part.up is not None and part.kind != "tied":
                units.append([f"{name}.up"])
            if kind in ("unit", "nested"):
                units.append([name])
            if kind == "joint":
                joint.append(name)
        if joint:
            first, last = (net.get_submodule(name) for name in (joint[0], joint[-1]))
            both = first.kind == last.kind == "linear"
            if len(joint) > 1 and both and first.up.weight.dtype == last.up.weight.dtype:
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
        policy = None
        if draw.random() < 0.2:
            policy = MixedPrecisionPolicy(torch.float16, torch.float32)
        self.has_policy = policy is not None
        self.numbers: dict[str, bool | int | None] = {}  # of ranks that keep parts, by first name
        self.replicated: set[int] = set()  # units of meshes with several replica groups
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
                **({} if policy is None else {"mp_policy": policy}),
            )
            self.log.append(f"{names}: mesh {shape}, reshards {value}, policy {policy}")
        return net

    def _members(self) -> list[set[int]]:
        places = {id(parameter): i for i, parameter in enumerate(self.reference.parameters)}
        members: list[set[int]] = []
        for names in self.units:
            modules = [self.plain.get_submodule(name) for name in names]
            own = {places[id(p)] for module in modules for p in module.parameters()}
            members.append(own.difference(*members))
        return members

    def _module(self, unit: int) -> nn.Module:
        return self.model.get_submodule(self.draw.choice(self.units[unit]))

    def _of_units(self, units: set[int]) -> set[int]:
        return set().union(*(self.members[unit] for unit in units))

    def expect_equal(self) -> None:
        found = dict(self.model.named_parameters())
        assert found.keys() == self.shards.keys()
        assert all(found[name] is shard for name, shard in self.shards.items())
        expect_parameters(self.model, self.plain)
        self._expect_gradients()

    def expect_equal_state(self) -> None:
        state = self.model.full_state_dict()  # first, because peers may need units again
        expected = self.plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value.cpu()), (name, state[name], value)
        name = self.draw.choice(list(self.shards))
        gradient = self.shards[name].grad
        if gradient is not None:
            assert torch.equal(gradient.full_tensor(), self.plain.get_parameter(name).grad), name

    def _expect_gradients(self) -> None:
        pairs = zip(self.shards.items(), self.reference.parameters, strict=True)
        for (name, shard), whole in pairs:
            assert shard.requires_grad == whole.requires_grad, name
            assert (shard.grad is None) == (whole.grad is None), (name, shard.grad, whole.grad)
            if whole.grad is not None:
                expected = own_shard(shard, whole.grad)
                assert torch.equal(shard.grad.to_local(), expected), (name, shard.grad, expected)

    def draw_forwards(self) -> list[Forward]:
        draw = self.draw
        if draw.random() < 0.5:
            return [self._draw_forward(draw.random() < 0.3) for _ in self.ranks]
        one = self._draw_forward(draw.random() < 0.7)
        for call in one.calls:
            units = [i for i in range(len(self.plain.parts)) if [f"parts.{i}"] in self.units]
            if units and draw.random() < 0.1:
                call.unshards = draw.choice(units)
        return [one] * len(self.ranks)

    def _draw_forward(self, of_all: bool) -> Forward:
        draw = self.draw
        parts = list(range(len(self.plain.parts)))
        if not of_all:
            parts = draw.choices(parts, k=draw.randint(1, 4))
            if draw.random() < 0.6:
                parts = sorted(set(parts))
        kinds = ["", "", "", "around", "inside", "both"]
        one_kind = draw.choice([None, "", draw.choice(kinds)])
        calls = [Call(i, draw.choice(kinds) if one_kind is None else one_kind) for i in parts]
        outputs = draw.choice(["main", "main", "both", "aux"])
        has_gradient = outputs == "aux" or draw.random() < 0.4
        return Forward(calls, outputs, has_gradient, draw.randrange(6))

    def _forward(self):
        return self.forward(self.draw_forwards()[self.rank], self.new_batches())

    def step(self) -> None:
        draw = self.draw
        self.zero_grad(True, True, False, None)
        if draw.random() < 0.35:
            self._accumulate()
        self._synchronised()
        self._step_optimizer()

    def _accumulate(self) -> None:
        draw = self.draw
        every = set(range(len(self.units)))
        if self.replicated and draw.random() < 0.4:
            self.note("accumulate over replica groups")
            self.model.set_requires_all_reduce(False)
            for _ in range(draw.randint(1, 2)):
                self.backward(self._forward(), self._of_units(every - self.replicated))
            self.model.set_requires_all_reduce(True)
            return
        chosen = every if draw.random() < 0.5 else set(draw.sample(sorted(every), 1))
        self.note(f"accumulate: units {sorted(chosen)}")
        self._set_synchronises(chosen, False)
        for _ in range(draw.randint(1, 3)):
            self.backward(self._forward(), self._of_units(every - chosen))
            if draw.random() < 0.2:
                self.forward_only()
        self._set_synchronises(chosen, True)

    def _set_synchronises(self, chosen: set[int], value: bool) -> None:
        if len(chosen) == len(self.units):
            self.model.set_requires_gradient_sync(value)
            return
        for unit in chosen:
            self._module(unit).set_requires_gradient_sync(value, recurse=False)

    def _synchronised(self) -> None:
        draw = self.draw
        ways = ["one", "one", "collective", "each", "reversed", "by rank", "together", "in turns"]
        way = draw.choice([*ways, "one ahead"])
        many = 1 if way in ("one", "collective") else draw.randint(2, 3)
        self.note(f"{way}: {many}")
        if way == "collective":
            one = dataclasses.replace(self._draw_forward(True), with_collective=True)
            self.backward(self.forward(one, self.new_batches()))
            return
        if way == "one ahead":
            self._one_ahead(many)
            return
        if way == "in turns":
            for _ in range(many):
                self.backward(self._forward())
            return
        found = [self._forward() for _ in range(many)]
        if draw.random() < 0.25:
            self.forward_only()
        if way == "reversed" or (way == "by rank" and self.rank % 2):
            found.reverse()
        if way == "together":
            self.backward_together(found)
            return
        for each in found:
            if draw.random() < 0.1:
                self.note("twice")
                self.backward(each, retain_graph=True)
            self.backward(each)

    def _one_ahead(self, many: int) -> None:
        """Runs forwards one ahead of backwards, as pipeline stages do. Reduces each or the last."""
        reduces_each = self.draw.random() < 0.5
        found = [self._forward()]
        for i in range(many):
            is_last = i == many - 1
            if not is_last:
                found.append(self._forward())
            reduces = reduces_each or is_last
            self.model.set_requires_gradient_sync(reduces)
            self.backward(found[i], None if reduces else set())

    def _step_optimizer(self) -> None:
        draw = self.draw
        self._expect_gradients()
        if draw.random() < 0.1:
            return
        has_gradients = any(p.grad is not None and p.grad.any() for p in self.plain.parameters())
        if draw.random() < 0.25 and has_gradients:
            self._clip()
        elif has_gradients:
            for parameters in (self.shards.values(), self.reference.parameters):
                nn.utils.clip_grad_value_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def _clip(self) -> None:
        has_empty = any(p.grad is not None and not p.numel() for p in self.plain.parameters())
        order = self.draw.choice([1.0, 2.0, 2.0 if has_empty else math.inf])
        of_torch = self.draw.random() < 0.5
        self.note(f"clip: {order}, {of_torch}")
        gradients = [p.grad for p in self.plain.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([g.double() for g in gradients], order)
        most = norm.item() / self.draw.choice([0.5, 4])
        nn.utils.clip_grad_norm_(self.plain.parameters(), most, order)
        if of_torch:
            found = nn.utils.clip_grad_norm_(self.shards.values(), most, order)
        else:
            found = self.model.clip_grad_norm_(most, order)
        torch.testing.assert_close(found, norm, check_dtype=False, rtol=1e-5, atol=0)
        for shard, whole in zip(self.shards.values(), self.plain.parameters(), strict=True):
            if whole.grad is not None:
                expected = own_shard(shard, whole.grad)
                torch.testing.assert_close(shard.grad.to_local(), expected, rtol=1e-5, atol=0)
                shard.grad.sign_()
                whole.grad.sign_()

    def fail(self) -> None:
        """Fails on one rank or on all; expects the previous gradients."""
        draw = self.draw
        self.zero_grad(True, True, False, None)
        if draw.random() < 0.3:
            self.backward(self._forward())
        if draw.random() < 0.3:
            self._accumulate()
        forwards = copy.deepcopy(self.draw_forwards())
        failing = draw.choice([set(self.ranks), {draw.choice(self.ranks)}])
        raises = draw.choice(["before", "inside", "at the end", "backward"])
        self.note(f"{raises}, ranks {failing}")
        for forward in forwards:
            forward.outputs, forward.input_has_gradient = "main", True
        own = forwards[self.rank]
        if self.rank in failing:
            own.calls[len(own.calls) // 2].raises = raises
        # If several ranks fail, one may raise a peer's error.
        expected = (UserError,) if failing == {self.rank} else (UserError, dist.DistBackendError)
        with pytest.raises(expected if self.rank in failing else dist.DistBackendError):
            _loss_of(self.model(self.batch(own, self.new_batches()), own), "main", True).backward()
        self.reference.forget()
        for name, buffer in self.plain.named_buffers():
            buffer.copy_(self.model.get_buffer(name))

    def unshard(self) -> None:
        draw = self.draw
        unit = draw.randrange(len(self.units))
        module = self._module(unit)
        ways = ["train", "eval", "late"]
        way = draw.choice(ways if self.has_policy else ["read", "write", *ways])
        self.note(f"{way}: unit {unit}")
        handle = module.unshard(async_op=draw.random() < 0.5)
        if handle is not None and way in ("read", "write"):
            handle.wait()
        if way in ("read", "write"):
            names = [name for name, _ in self.plain.named_parameters()]
            for name in (names[i] for i in sorted(self.members[unit])):
                whole = self.model.get_parameter(name)
                assert torch.equal(whole, self.plain.get_parameter(name)), name
                if way == "write":
                    with torch.no_grad():
                        whole.neg_()
                        self.plain.get_parameter(name).neg_()
        if way == "train":
            self.step()
        if way == "eval":
            self.forward_only()
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
            times, number = draw.choice([0, 1, self.rank]), self.new_batches()
            for i in range(times):
                self.forward(Forward([Call(i) for i in range(len(self.plain.parts))]), number + i)

    def save_and_load(self) -> None:
        self.expect_equal_state()
        kind = self.draw.choice(["full", "full", "whole", "shards"])
        self.note(kind)
        self.saves += 1
        path = f"{self.folder}-{self.saves}"
        expected = copy.deepcopy(self.plain.state_dict())
        if kind == "full":
            state = self.model.full_state_dict()
        else:
            with pytest.warns(UserWarning, match=r"buffers .* are not saved"):
                getattr(brigade, f"save_{kind}")(self.model, path, self.optimizer)
        self.step()
        if kind == "full":
            for each in (state, expected):
                for name in each:
                    if name.endswith("calls"):
                        each[name].zero_()
            self.model.load_state_dict(state)
        else:
            getattr(brigade, f"load_{kind}")(self.model, path, self.optimizer)
            expected = {name: expected[name] for name, _ in self.plain.named_parameters()}
        self.plain.load_state_dict(expected, strict=kind == "full")

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
            self.note(f"{kind}: unit {unit}, {chosen}")
            getattr(module, kind)([self._module(i) for i in chosen])
            return
        self.note(f"{kind}: unit {unit}, {value}, {recurse}")
        if kind == "set_gradient_divide_factor":
            module.set_gradient_divide_factor(value)
            for i in self._of_units({unit}):
                self.reference.divisors[i] = value
            return
        getattr(module, kind)(value, recurse=recurse)

    def freeze(self) -> None:
        names = [name for name, _ in self.plain.named_parameters() if name != "head.weight"]
        for name in self.draw.sample(names, min(len(names), self.draw.randint(1, 2))):
            value = not self.plain.get_parameter(name).requires_grad
            self.note(f"{name}: {value}")
            self.shards[name].requires_grad_(value)
            self.plain.get_parameter(name).requires_grad_(value)

    def load_by_placements(self) -> None:
        full = {name: p.detach().neg() for name, p in self.plain.named_parameters()}
        shards = {
            name: nn.Parameter(distribute_tensor(full[name], p.device_mesh, p.placements))
            for name, p in self.shards.items()
        }
        self.model.load_state_dict(shards, assign=True, strict=False)
        self.plain.load_state_dict(full, strict=False)
        self.shards = dict(self.model.named_parameters())


@functools.cache
def _mesh(shape):
    return None if shape is None else dist.device_mesh.init_device_mesh("cpu", shape)


# ----------------------------------------------------------------------------- running


def run_programs(rank: int, make: type[Program], seeds: list[int], how: dict[str, Any]) -> set[str]:
    _mesh.cache_clear()
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for seed in seeds:
            log = ["made"]
            try:
                program = make(rank, seed, folder[0], **how)
                log = program.log
                program.run()
            except Exception as error:
                text = f"{make.__name__}, seed {seed}, {how}: {error!r}\n"
                raise AssertionError(text + "\n".join(log)) from error
            seen.update(line.split(":")[0].split(",")[0].strip() for line in log)
        dist.barrier()
    return seen
