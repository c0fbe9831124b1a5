"""Forwards that KeyboardInterrupt or SystemExit leave, of which hooks are not told."""

import threading

import pytest
import torch

import brigade

from ranks import on_ranks
from sharded_training import batch_of, expect_equal, make_net, shard_blocks, step_of_all


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
def test_steps_behind_it_are_exact(rank, place, error, is_alike, by_hand):
    plain, model = make_net(), shard_blocks(make_net())
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    for step in range(4):
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        if step == 1:
            if is_alike or rank == 0:
                _leave_forward(model, rank, place, error)
                if by_hand:
                    model.reset_iter_state()
                    assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
            else:
                with pytest.raises(RuntimeError, match="rank 0 failed"):
                    model(batch_of(rank, 1)).square().mean().backward()
        model(batch_of(rank, step)).square().mean().backward()
        optimizers[1].step()
    expect_equal(model, plain)


@on_ranks()
def test_a_forward_inside_of_another_is_a_part_of_it(rank):
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


@on_ranks()
def test_reset_iter_state_ends_one_of_another_thread(rank):
    plain, model = make_net(), shard_blocks(make_net())
    model(batch_of(rank, 0)).sum().backward()
    thread = threading.Thread(
        target=_leave_forward, args=(model, rank, "blocks.0", KeyboardInterrupt)
    )
    thread.start()
    thread.join()
    model.blocks[1].reset_iter_state()
    model(batch_of(rank, 0)).sum().backward()
    expect_equal(model, plain)
