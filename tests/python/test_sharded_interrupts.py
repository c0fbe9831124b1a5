"""Forwards that end by an interrupt or without their hooks, and torch.func transforms."""

import pytest
import torch

import brigade

from ranks import on_ranks
from sharded_training import Pair, batch_of, expect_equal, make_net, shard_blocks


def _leave_forward(model, rank, place, error):
    def leave(*_):
        raise error

    handle = model.get_submodule(place).register_forward_pre_hook(leave)
    with pytest.raises(error):
        model(batch_of(rank, 1))
    handle.remove()


@pytest.mark.parametrize(
    ("place", "error", "is_alike", "by_hand"),
    [
        ("blocks.1.up", KeyboardInterrupt, True, False),
        ("blocks.1.up", KeyboardInterrupt, False, False),
        ("blocks.1.up", SystemExit, False, True),
        ("head", SystemExit, True, True),
        ("embed", KeyboardInterrupt, False, False),
    ],
)
@on_ranks()
def test_steps_after_an_interrupt_are_exact(rank, place, error, is_alike, by_hand):
    pair = Pair(rank)
    model = pair.model
    for step in range(4):
        model.zero_grad()
        if step == 1:
            if is_alike or rank == 0:
                _leave_forward(model, rank, place, error)
                if by_hand:
                    model.reset_iter_state()
                    assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
            else:
                with pytest.raises(RuntimeError, match="rank 0 failed"):
                    model(batch_of(rank, 1)).square().mean().backward()
        pair.step(step)
    pair.expect_equal()


@on_ranks()
def test_a_nested_forward_is_part_of_the_outer_one(rank):
    plain, model = make_net(), shard_blocks(make_net())
    x, found = batch_of(rank, 0), []

    def run_once(*_):
        handle.remove()
        found.append(model(x))

    handle = model.head.register_forward_pre_hook(run_once)
    found.append(model(x))
    assert all(torch.equal(output, plain(x)) for output in found)
    found[1].sum().backward()
    model(x).sum().backward()
    expect_equal(model, plain)


# ---- torch.func transforms of a forward.


def _calls(model, x):
    def loss(inputs):
        return model(inputs).square().mean()

    return [
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.jacrev(loss)(x),
        lambda: torch.func.jvp(loss, (x,), (x,)),
        lambda: torch.func.vmap(torch.func.grad(loss))(x),
    ]


@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks()
def test_differentiating_transforms_are_errors_and_the_model_remains_usable(rank, steps_before):
    pair = Pair(rank)
    model = pair.model
    for step in range(4):
        if step == steps_before:
            for call in _calls(model, batch_of(rank, 0)):
                with pytest.raises(NotImplementedError, match=r"torch\.func transform"):
                    call()
        pair.step(step)
    pair.expect_equal()


@on_ranks()
def test_peers_raise_when_one_rank_transforms_a_unit(rank):
    plain, model = make_net(), shard_blocks(make_net())
    block = model.blocks[1]
    run = block.forward
    x = batch_of(rank, 0)
    model(x).sum().backward()
    if rank == 1:
        block.up.forward = lambda y: torch.func.grad(lambda z: model.blocks[2](z).sum())(y)
    words = "found a torch.func" if rank == 1 else r"rank 1.*found a torch.func transform"
    with pytest.raises((NotImplementedError, RuntimeError), match=words):
        model(x).sum().backward()
    if rank == 1:
        del block.up.forward
    assert run == block.forward
    model(x).sum().backward()
    expect_equal(model, plain)


@on_ranks()
def test_vmap_without_gradients_is_correct(rank):
    plain, model = make_net(), shard_blocks(make_net())
    x = torch.stack([batch_of(rank, step) for step in range(3)])
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(plain)(x))
        with model.whole_parameters():
            assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(plain)(x))
    with pytest.raises(NotImplementedError, match="vmap with gradients"):
        torch.func.vmap(model)(x)
    model(batch_of(rank, 0)).sum().backward()
    expect_equal(model, plain)
