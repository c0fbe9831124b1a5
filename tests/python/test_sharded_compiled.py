"""torch.compile of modules before and after they are sharded."""

import os
import shutil

import pytest
import torch
from torch import nn

import brigade

from cases import quick
from ranks import on_ranks
from sharded_training import Pair, batch_of, make_net, shard_blocks, step_of_all
from whole_numbers import (
    backward_of_all,
    expect_gradients,
    linear,
    loss_of,
    step_by_sign,
)
from whole_numbers import (
    batch_of as exact_batch,
)


def _compile(graphs, **options):
    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return {"backend": backend, **options}


def _blocks_then_shard(model, arguments, graphs):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **_compile(graphs, fullgraph=True))
    return model, shard_blocks(model, **arguments)


def _blocks_in_place_then_shard(model, arguments, graphs):
    for block in model.blocks:
        block.compile(**_compile(graphs))
    return model, shard_blocks(model, **arguments)


def _shard_then_blocks(model, arguments, graphs):
    shard_blocks(model, **arguments)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **_compile(graphs))
    return model, model


def _shard_then_blocks_in_place(model, arguments, graphs):
    shard_blocks(model, **arguments)
    for block in model.blocks:
        block.compile(**_compile(graphs))
    return model, model


def _shard_then_all(model, arguments, graphs):
    shard_blocks(model, **arguments)
    return model, torch.compile(model, **_compile(graphs))


_WAYS = [
    _blocks_then_shard,
    _blocks_in_place_then_shard,
    _shard_then_blocks,
    _shard_then_blocks_in_place,
    _shard_then_all,
]


@pytest.mark.parametrize("way", quick(_WAYS, [_WAYS[0]]))
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_compiled_bits_equal_one_process(rank, way, reshards):
    arguments = {"reshard_after_forward": reshards}
    torch._dynamo.reset()
    graphs = []
    plain = make_net()
    model, run = way(make_net(), arguments, graphs)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        step_of_all(plain, plain_optimizer, step, 2)
        optimizer.zero_grad()
        run(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
        if step == 1:
            num_graphs = len(graphs)
    compiled = {key.replace("_orig_mod.", ""): key for key in model.state_dict()}
    state = model.full_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[compiled[name]], value), name
    assert any("tanh" in target for graph in graphs for target in graph)
    assert len(graphs) == num_graphs
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2
    assert statistics["reduced_backwards"] == 4


def _clip_and_step(net, optimizer):
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


@on_ranks()
def test_a_compiled_clip_and_optimizer_step_equal_one_process(rank):
    torch._dynamo.reset()
    plain, model = make_net(), shard_blocks(make_net())
    compiled = torch.compile(_clip_and_step, backend="aot_eager")
    for net, clip_and_step in ((plain, _clip_and_step), (model, compiled)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, batch_of(0, step)).backward()
            clip_and_step(net, optimizer)
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@on_ranks(1)
def test_training_continues_after_a_compiled_backward_raises(rank):
    from torch._dynamo import compiled_autograd

    pair = Pair(rank)
    output = pair.loss(0)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="compiled autograd can't trace a backward"),
    ):
        output.backward()
    pair.expect_step(1)


# ---- With inductor, which compiles blocks to machine code.

_COMPILER = os.environ.get("CXX", "g++")


class Fused(nn.Module):
    def __init__(self, seed) -> None:
        super().__init__()
        self.linear = linear(3, 3, seed)
        self.scale = nn.Parameter(torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        return torch.relu(y * self.scale) - y.abs() + 1


def _make():
    return nn.Sequential(Fused(1), Fused(2), linear(3, 2))


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"there is no {_COMPILER}")
@pytest.mark.parametrize("way", [_compile_then_shard, _shard_then_compile])
@on_ranks()
def test_gradients_of_inductors_blocks_equal_one_process(rank, way, tmp_path):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # ranks share compiled kernels
    from torch._inductor import config, metrics

    config.compile_threads, config.cpp_cache_precompile_headers = 1, False
    torch._dynamo.reset()
    metrics.reset()
    plain, model = _make(), way(_make())
    for step in range(3):
        backward_of_all(plain, 2, lambda net, r, step=step: loss_of(net, exact_batch(3, r, step)))
        loss_of(model, exact_batch(3, rank, step)).backward()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    assert metrics.generated_kernel_count > 0
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2
    assert statistics["reduced_backwards"] == 3
