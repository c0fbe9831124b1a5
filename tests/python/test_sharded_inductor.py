"""Blocks that torch.compile makes machine code of, sharded before and after."""

import os
import shutil

import pytest
import torch
from torch import nn

import brigade

from rank_cases import run_cases
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    linear,
    loss_of,
    step_by_sign,
)

_COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(
    shutil.which(_COMPILER) is None,
    reason=f"inductor needs a compiler, and {_COMPILER} isn't there",
)


class Block(nn.Module):
    """Has what is fused, and is exact in whole numbers."""

    def __init__(self, seed) -> None:
        super().__init__()
        self.linear = linear(3, 3, seed)
        self.scale = nn.Parameter(torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        return torch.relu(y * self.scale) - y.abs() + 1


def _make():
    return nn.Sequential(Block(1), Block(2), linear(3, 2))


def _compile_then_shard(model):
    for i in range(2):
        model[i] = torch.compile(model[i], backend="inductor", fullgraph=True)
        brigade.fully_shard(model[i])
    return brigade.fully_shard(model)


def _shard_then_compile(model):
    for i in range(2):
        brigade.fully_shard(model[i])
    brigade.fully_shard(model)
    for i in range(2):
        model[i].compile(backend="inductor")
    return model


def _trains(rank, way, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # a kernel is compiled by one of the ranks
    from torch._inductor import config, metrics

    config.compile_threads, config.cpp_cache_precompile_headers = 1, False
    torch._dynamo.reset()
    metrics.reset()
    plain, model = _make(), way(_make())
    for step in range(3):
        backward_of_all(plain, 2, lambda net, r, step=step: loss_of(net, batch_of(3, r, step)))
        loss_of(model, batch_of(3, rank, step)).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    assert metrics.generated_kernel_count > 0
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2
    assert statistics["reduced_backwards"] == 3


@pytest.mark.slow
def test_gradients_of_compiled_blocks_are_those_of_one_process(tmp_path):
    ways = [_compile_then_shard, _shard_then_compile]
    run_cases(_trains, [(way, str(tmp_path)) for way in ways])
