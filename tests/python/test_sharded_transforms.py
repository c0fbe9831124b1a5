"""torch.func's transforms around a sharded module's forward."""

import pytest
import torch

from ranks import on_ranks
from sharded_training import batch_of, expect_equal, make_net, shard_blocks, step_of_all


def _calls(model, x):
    def loss(inputs):
        return model(inputs).square().mean()

    return {
        "torch.func.grad": lambda: torch.func.grad(loss)(x),
        "vjp": lambda: torch.func.vjp(loss, x),
        "jacrev": lambda: torch.func.jacrev(loss)(x),
        "jvp": lambda: torch.func.jvp(loss, (x,), (x,)),
        "jacfwd": lambda: torch.func.jacfwd(loss)(x),
        "grad": lambda: torch.func.vmap(torch.func.grad(loss))(x),
    }


@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks()
def test_those_that_differentiate_are_refused_and_leave_the_model_usable(rank, steps_before):
    plain, model = make_net(), shard_blocks(make_net())
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    for step in range(4):
        if step == steps_before:
            for name, call in _calls(model, batch_of(rank, 0)).items():
                with pytest.raises(NotImplementedError, match=name):
                    call()
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizers[1].step()
    expect_equal(model, plain)


@on_ranks()
def test_one_around_a_unit_is_told_to_the_peers(rank):
    """Of one unit, on one rank."""
    plain, model = make_net(), shard_blocks(make_net())
    block = model.blocks[1]
    run = block.forward
    x = batch_of(rank, 0)
    model(x).sum().backward()
    if rank == 1:
        block.up.forward = lambda y: torch.func.grad(lambda z: model.blocks[2](z).sum())(y)
    words = "found torch.func.grad" if rank == 1 else r"rank 1.*found torch.func.grad"
    with pytest.raises((NotImplementedError, RuntimeError), match=words):
        model(x).sum().backward()
    if rank == 1:
        del block.up.forward
    assert run == block.forward
    model(x).sum().backward()
    expect_equal(model, plain)


@on_ranks()
def test_vmap_is_right_without_gradients(rank):
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
