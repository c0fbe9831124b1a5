"""Post-accumulate-grad hooks of sharded parameters."""

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from ranks import on_ranks
from sharded_training import Pair, batch_of, loss_of, make_net, shard_blocks

OPTIONS = {"lr": 0.1, "foreach": False}


def _own_optimizers(model):
    """Registers an optimizer per parameter, which steps when the gradient is ready."""
    optimizers = {p: torch.optim.SGD([p], **OPTIONS) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def _by_torch(model):
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), OPTIONS)


@pytest.mark.parametrize("register", [_own_optimizers, _by_torch])
@pytest.mark.parametrize(("world_size", "reshards"), [(1, True), (2, True), (2, False), (3, True)])
@on_ranks()
def test_optimizers_that_step_in_backward(rank, register, reshards, world_size):
    pair = Pair(rank, reshard_after_forward=reshards)
    register(pair.model)
    for step in range(4):
        pair.step_plain(step)
        pair.loss(step).backward()
        assert all(p.grad is None for p in pair.model.parameters())
    pair.expect_equal()


def _log(model):
    called = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name, own=parameter: called.append((name, p is own, p.grad is not None))
        )
    return called


@on_ranks()
def test_a_hook_runs_once_per_gradient_set_or_accumulated(rank):
    model = shard_blocks(make_net())
    names = [name for name, _ in model.named_parameters()]
    called = _log(model)
    assert not called
    loss_of(model, rank, 0).backward()
    assert sorted(called) == sorted((name, True, True) for name in names)
    called.clear()
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 1).backward()
    assert not called
    model.set_requires_gradient_sync(True)
    model.blocks[0].set_requires_gradient_sync(False)
    loss_of(model, rank, 2).backward()  # other parameters; gradients accumulate
    assert sorted(name for name, _, _ in called) == sorted(
        name for name in names if not name.startswith("blocks.0.")
    )
    called.clear()
    model.set_requires_gradient_sync(True)
    model.head.bias.requires_grad_(False)
    if rank == 0:
        model.step_without_data()
    else:
        (0 * loss_of(model, rank, 3)).backward()
    assert sorted(name for name, _, _ in called) == sorted(
        name for name in names if name != "head.bias"
    )
    called.clear()
    torch.autograd.grad(
        loss_of(model, rank, 3), batch_of(rank, 3).requires_grad_(), allow_unused=True
    )
    assert not called


@pytest.mark.parametrize("failing", [["blocks.1.up.weight"], ["embed.bias", "head.weight"]])
@on_ranks()
def test_a_hook_that_raises_ends_backward_after_all_other_hooks(rank, failing):
    pair = Pair(rank)
    model = pair.model

    def fail(parameter):
        raise KeyError(f"the hook of {tuple(parameter.shape)}")

    handles = [
        model.get_parameter(name).register_post_accumulate_grad_hook(fail)
        for name in failing
        if rank == 0
    ]
    called = _log(model)
    num_expected = len(list(model.parameters())) - len(handles)
    for step in range(2):
        pair.step_plain(step)
        model.zero_grad()
        called.clear()
        loss = loss_of(model, rank, step)
        if rank == 0:
            with pytest.raises(KeyError, match="the hook of"):
                loss.backward()
        else:
            loss.backward()
        assert len(called) == num_expected
        pair.optimizers[1].step()
    for handle in handles:
        handle.remove()
    called.clear()
    pair.step(2)
    assert len(called) == len(list(model.parameters()))
    pair.expect_equal()


@on_ranks()
def test_hooks_remain_when_shards_are_replaced(rank):
    with torch.device("meta"):
        net = make_net()
    model = shard_blocks(net)
    called = _log(model)
    model.to_empty(device="cpu")
    model.load_state_dict(make_net().state_dict())
    loss_of(model, rank, 0).backward()
    assert {name for name, _, _ in called} == {name for name, _ in model.named_parameters()}
    called.clear()
    model.double()
    model(batch_of(rank, 0).double()).sum().backward()
    assert len(called) == len(list(model.parameters()))
