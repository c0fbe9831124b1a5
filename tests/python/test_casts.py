"""Casts of sharded models, before the first forward and between steps."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from ranks import on_ranks
from sharded_training import Pair, batch_of, make_net, shard_blocks
from whole_numbers import backward_of_all


def _loss(model, rank, step):
    dtype = model.head.weight.dtype
    return model(batch_of(rank, step).to(dtype)).square().mean()


def _step(pair, step):
    for net in (pair.plain, pair.model):
        net.zero_grad()
    backward_of_all(pair.plain, 2, lambda net, r: _loss(net, r, step))
    _loss(pair.model, pair.rank, step).backward()


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_training_continues_in_another_dtype(rank, begins, reshards):
    pair = Pair(rank, reshard_after_forward=reshards)
    nets, model = (pair.plain, pair.model), pair.model
    model.blocks[1].set_reshard_after_backward(False)
    parts = list(model.parameters())
    for step, dtype in enumerate((torch.float64, torch.float64, torch.float32, torch.float64)):
        if step > 0 or not begins:
            assert all(net.to(dtype) is net for net in nets)
        assert all(p is q for p, q in zip(parts, model.parameters(), strict=True))
        _step(pair, step)
        if step == 2:
            for net in nets:  # casts the gradients too
                net.double()
            assert model.head.weight.grad.dtype == torch.float64
        for optimizer in pair.optimizers:
            optimizer.step()
        pair.expect_equal()


@on_ranks()
def test_one_block_is_cast(rank):
    pair = Pair(rank)
    plain, model = pair.plain, pair.model
    model(batch_of(rank, 0)).sum().backward()
    model.zero_grad()
    for net in (plain, model):
        net.blocks[1].double()
        net.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        net.blocks[1].register_forward_hook(lambda *call: call[2].float())
    assert model.head.weight.dtype == torch.float32
    assert model.blocks[1].up.weight.dtype == torch.float64
    _step(pair, 0)
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.expect_equal()


@pytest.mark.skipif(
    "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__,
    reason="torch has no param_dtype_override_fn",
)
@on_ranks()
def test_casts_keep_settings_policies_and_hooks(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    model = make_net()
    model.head.weight.requires_grad_(False)
    policy = MixedPrecisionPolicy(
        torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.dim() == 1 else None
    )
    shard_blocks(
        model,
        mesh=mesh,
        mp_policy=policy,
        block_numel_fn=lambda p: p.shape[-1],
        comm_hook="bf16_compress",
    )
    model.set_gradient_divide_factor(4.0)
    model.blocks[0].set_requires_gradient_sync(False)
    model.set_reduce_scatter_max_input_buffers(3)
    seen, sent = [], [0]
    model.head.register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    model.head.forward = lambda x: x @ model.head.weight.t() + model.head.bias.to(x.dtype)
    for block in model.blocks:
        block.forward = lambda x, block=block: x + block.up.bias[:7].to(x.dtype)
    model.embed.forward = lambda x: x @ model.embed.weight.t()
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        model(batch_of(rank, 0)).float().sum().backward()
        assert seen.pop() == (torch.bfloat16, dtype)
        assert model.blocks[0].up.bias.grad is None
        assert model.head.weight.grad is None
        assert model.head.bias.grad.dtype == dtype
        for p in model.parameters():
            if len(p.shape) == 2:
                assert p.to_local().numel() % p.shape[-1] == 0
        model.blocks[0].set_requires_gradient_sync(True)
        model(batch_of(rank, 0)).float().sum().backward()
        model.zero_grad()
        model.blocks[0].set_requires_gradient_sync(False)
        sent.append(model.sharding_statistics()["sent_by_sums"])
    assert sent[2] == 2 * sent[1] > 0  # in bfloat16


@on_ranks()
def test_partial_casts_and_casts_at_the_wrong_time_are_errors(rank):
    model = shard_blocks(make_net())
    for _ in range(2):
        model.blocks[0].up.double()
        with pytest.raises((RuntimeError, ValueError), match=r"(?s)others of its unit.*Convert"):
            _loss(model, rank, 0)
        model.blocks[0].up.float()
        model.to((torch.float64, torch.float16)[rank])
        with pytest.raises(ValueError, match=r"(?s)dtype of '.*'.*rank 1: Half"):
            _loss(model, rank, 0)
        model.float()
        with model.whole_parameters(), pytest.raises(RuntimeError, match="whole_parameters"):
            model.double()
        handle = model.head.register_forward_hook(lambda *_: model.double() and None)
        with pytest.raises(RuntimeError, match="inside of a forward"):
            model(batch_of(rank, 0))
        handle.remove()
        model.set_requires_gradient_sync(False)
        _loss(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match="unsynchronized gradients"):
            model.double()
        model.set_requires_gradient_sync(True)
        _loss(model, rank, 0).backward()
        model.zero_grad()
    loss = _loss(model, rank, 0)
    model.double()
    with pytest.raises(RuntimeError, match=r"needs parameter 'head\.(weight|bias)'"):
        loss.backward()
    _loss(model, rank, 0).backward()
    assert model.head.weight.grad.dtype == torch.float64


@pytest.mark.parametrize("step", [0, 2])
@on_ranks(3)
def test_settings_that_differ_between_ranks_are_named(rank, step):
    changes = [
        (lambda m, on: m.head.bias.requires_grad_(on), r"requires_grad of 'head\.bias'"),
        (lambda m, on: m.blocks[0].set_reshard_after_forward(on), r"forward of unit 'blocks\.0'"),
        (lambda m, on: m.set_requires_gradient_sync(on), "synchronization of the outermost unit"),
        (
            lambda m, on: m.blocks[1].set_gradient_divide_factor(2.0 + on),
            "divisor of unit 'blocks.1'",
        ),
    ]
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=True)
    for _ in range(step):
        _loss(model, rank, 0).backward()
    for change, name in changes:
        if rank == 1:
            change(model, False)
        with pytest.raises(ValueError, match=f"(?s){name} differs.*Make the same changes"):
            _loss(model, rank, 0)
        change(model, True)
    model.zero_grad()
    _loss(model, rank, 0).backward()
    for r in range(3):
        _loss(plain, r, 0).div(3).backward()
    for part, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad)


@on_ranks()
def test_a_write_in_param_dtype_is_reported_as_rounded(rank):
    model = shard_blocks(make_net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = [p.full_tensor() for p in model.parameters()]
    with warnings.catch_warnings(), torch.no_grad(), model.whole_parameters(writes=True):
        warnings.simplefilter("error")
        model.head.bias.copy_(model.head.bias)  # changes nothing
    for part, whole in zip(model.parameters(), before, strict=True):
        assert torch.equal(part.full_tensor(), whole)
    rounded = r"(?s)writes to parameter 'embed.weight' or others.*bfloat16.*to keep float32"
    with (
        pytest.warns(UserWarning, match=rounded),
        torch.no_grad(),
        model.whole_parameters(writes=True),
    ):
        for part in model.parameters():
            part.fill_(1.001)
    assert all((part.full_tensor() == 1).all() for part in model.parameters())


@on_ranks()
def test_buffers_and_ignored_parameters_are_cast_too(rank):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ignored = model[1].weight
    brigade.fully_shard(model, ignored_params={ignored})
    model.double()
    assert model[1].weight is ignored and ignored.dtype == torch.float64
    assert model[1].running_mean.dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert ignored.grad.dtype == torch.float64
