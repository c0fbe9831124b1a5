"""torch.compile of modules that are sharded, before and after."""

import pytest
import torch

from cases import quick
from ranks import on_ranks
from sharded_training import Pair, batch_of, make_net, shard_blocks, step_of_all


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
def test_compiled_either_way_the_bits_are_those_of_one_process(rank, way, reshards):
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
    assert len(graphs) == num_graphs  # nothing is compiled again
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2
    assert statistics["reduced_backwards"] == 4


@pytest.mark.parametrize("way", quick(_WAYS, [_WAYS[-1]]))
@on_ranks(1)
def test_the_compiler_converts_nothing_of_sharding(rank, way):
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    converted = []
    call = CatchErrorsWrapper.__call__

    def recording(self, frame, *args):
        result = call(self, frame, *args)
        if "/brigade/" in frame.f_code.co_filename and result.guarded_code is not None:
            converted.append(frame.f_code.co_name)
        return result

    CatchErrorsWrapper.__call__ = recording
    _, run = way(make_net(), {}, [])
    for step in range(3):
        run(batch_of(rank, step)).sum().backward()
    assert converted == []


@on_ranks(1)
def test_a_compiled_backward_raises_and_is_forgotten(rank):
    from torch._dynamo import compiled_autograd

    pair = Pair(rank)
    output = pair.loss(0)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="compiled autograd can't trace a backward"),
    ):
        output.backward()
    pair.expect_step(1)
