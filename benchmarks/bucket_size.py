"""Workloads for `brigade bench` with the parameter shapes of ResNet-50, BERT-base and GPT-2.

    torchrun --standalone --nproc-per-node 2 -m brigade bench benchmarks/bucket_size.py:resnet50

Other workloads: bert_base, gpt2. Nothing is computed: backward sleeps 1 ms per MB of gradients
before each gradient is ready, as if a GPU computed it. This measures the reducer and the network,
with real overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

SECONDS_PER_BYTE = 1e-9

Shape = tuple[int, ...]
Workload = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward; gradients are ones."""

    @staticmethod
    def forward(ctx, x, unit, *parameters):
        ctx.shapes, ctx.unit = [p.shape for p in parameters], unit
        _ = [p[:1] for p in parameters]  # without an operator, a sharded unit expects no gradient
        time.sleep(unit.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.unit.sleep_in_backward()
        return grad, None, *[torch.ones(shape) for shape in ctx.shapes]


class Unit(nn.Module):
    """Parameters whose forward and backward are slept, as if a GPU computed.

    `backward_s` counts from the begin of `first`'s backward, if that is set.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
        self.first: list[Unit] = []
        self.forward_s = self.backward_s = self.begin_s = self.ready_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self, *self.weights)

    def sleep_in_backward(self) -> None:
        self.begin_s = time.monotonic()
        begin_s = self.first[0].begin_s if self.first else self.begin_s
        time.sleep(max(0.0, begin_s + self.backward_s - time.monotonic()))
        self.ready_s = time.monotonic() - begin_s


class Stack(nn.Module):
    def __init__(self, units: Iterable[Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit(tensors) for tensors in units)

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for block in self.blocks:
            x = block(x)
        return x

    def set_ends(self, ends_s: Sequence[float]) -> None:
        """Makes gradients ready at given times after the begin of backward."""
        for unit, end_s in zip(self.blocks, ends_s, strict=True):
            unit.first, unit.backward_s = [self.blocks[-1]], end_s


def _linear(out: int, width: int) -> list[Shape]:
    return [(out, width), (out,)]


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def resnet50() -> Workload:
    """Returns 161 parameters, 25,557,032 elements (He et al. 2015)."""

    def convolution(out: int, channels: int, side: int) -> list[Shape]:
        return [(out, channels, side, side), *_norm(out)]

    shapes = convolution(64, 3, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, channels, 1) + convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, channels, 1)
            channels = 4 * width
    return _workload(shapes + _linear(1000, channels))


def bert_base() -> Workload:
    """Returns 199 parameters, 109,482,240 elements (Devlin et al. 2018, uncased, with pooler)."""
    width = 768
    shapes = [(30522, width), (512, width), (2, width), *_norm(width)]
    for _ in range(12):
        shapes += 4 * _linear(width, width) + _norm(width)
        shapes += _linear(4 * width, width) + _linear(width, 4 * width) + _norm(width)
    return _workload(shapes + _linear(width, width))


def gpt2() -> Workload:
    """Returns 148 parameters, 124,439,808 elements (Radford et al. 2019, smallest model)."""
    width = 768
    shapes = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += _norm(width) + _linear(3 * width, width) + _linear(width, width)
        shapes += _norm(width) + _linear(4 * width, width) + _linear(width, 4 * width)
    return _workload(shapes + _norm(width))


def _workload(shapes: list[Shape]) -> Workload:
    stack = Stack([torch.empty(shape)] for shape in shapes)
    for unit in stack.blocks:
        unit.backward_s = unit.weights[0].nbytes * SECONDS_PER_BYTE
    return stack, lambda model: model()
