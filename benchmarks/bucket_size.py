"""Workloads for `brigade bench` with the parameter shapes of ResNet-50, BERT-base and GPT-2.

    torchrun --standalone --nproc-per-node 2 -m brigade bench benchmarks/bucket_size.py:resnet50

Other workloads: bert_base, gpt2. Nothing is computed: backward sleeps 1 ms per MB of gradients
before each gradient is ready, as if a GPU computed it. This measures the reducer and the network,
with real overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

SECONDS_PER_BYTE = 1e-9

Shape = tuple[int, ...]
Workload = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parameter, seconds):
        ctx.shape, ctx.seconds = parameter.shape, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, torch.ones(ctx.shape), None  # written, as by computation


class Shapes(nn.Module):
    """One parameter per shape, in registration order."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self.shapes = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for parameter in self.shapes:
            x = _Sleep.apply(x, parameter, parameter.nbytes * SECONDS_PER_BYTE)
        return x


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
    return Shapes(shapes), lambda model: model()
