"""Behaviours of torch's fully_shard on which users rely, each compared with one process.

torch's own tests of FSDP2 check the same behaviours.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import brigade

from ranks import on_ranks
from sharded_training import (
    Pair,
    batch_of,
    expect_equal,
    loss_of,
    make_net,
    shard_blocks,
    train_step,
)
from whole_numbers import backward_of_all, expect_gradients


def _random(size, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, size, generator=generator)


@pytest.mark.parametrize("reshards", [None, True, False])
@on_ranks()
def test_a_forward_and_backward_of_an_inner_unit_alone(rank, reshards):
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(net.parameters(), 0.1, foreach=False) for net in (plain, model)]
    for step in range(7):

        def loss_on(net, r, step=step):
            if step % 3 == 0:
                return net(_random(5, r, step)).square().sum()
            return net.blocks[step % 3](_random(7, r, step)).square().sum()

        for net in (plain, model):
            net.zero_grad()
        backward_of_all(plain, 2, loss_on)
        loss_on(model, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    expect_equal(model, plain)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
@on_ranks()
def test_a_scaler_skips_a_step_on_all_ranks(rank, scaler_class):
    plain, model = make_net(), shard_blocks(make_net())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (plain, model)]
    scalers = [
        make("cpu", init_scale=2.0**10, growth_interval=2)
        for make in (torch.amp.GradScaler, scaler_class)
    ]
    for step in range(5):
        for net in (plain, model):
            net.zero_grad()
        backward_of_all(plain, 2, lambda net, r, step=step: scalers[0].scale(loss_of(net, r, step)))
        scalers[1].scale(loss_of(model, rank, step)).backward()
        if step in (1, 3):  # in one rank's shard only
            plain.head.bias.grad[step // 2] = float("inf")
            own = model.head.bias
            first = brigade._C.offset_of(own)
            for index in range(own.to_local().numel()):
                if first + index == step // 2:
                    own.grad.to_local()[index] = float("inf")
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[1].get_scale() == scalers[0].get_scale()
        expect_equal(model, plain)
    assert scalers[1].get_scale() == 2.0**8


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)

    def encode(self, token):
        return torch.tanh(self.body(self.embed(token)))

    def forward(self, token):
        return self.head(self.encode(token))

    @torch.no_grad()
    def generate(self, token, steps):
        said = [token]
        for _ in range(steps):
            said.append(self(said[-1]).argmax(-1))
        return torch.stack(said)


def _generators():
    torch.manual_seed(0)
    plain = Generator()
    model = copy.deepcopy(plain)
    brigade.fully_shard(model.body)
    return plain, brigade.fully_shard(model), torch.arange(4)


@on_ranks()
def test_generation_sharded_and_unsharded(rank):
    plain, model, token = _generators()
    expected = plain.generate(token, 5)
    assert torch.equal(model.generate(token, 5), expected)
    with model.whole_parameters():
        assert torch.equal(model.head.weight, plain.head.weight)
        model(token).sum().backward()
        assert all(isinstance(p.grad, brigade.TensorShard) for p in model.parameters())
        model.zero_grad()
        assert torch.equal(model.generate(token, 5), expected)
        own, steps = token[rank:], 2 + rank  # no rank waits for another
        assert torch.equal(model.generate(own, steps), plain.generate(own, steps))
        if rank == 0:
            with pytest.raises(IndexError):
                model.generate(torch.tensor([99]), 1)
    model(token).sum().backward()
    plain(token).sum().backward()
    expect_gradients(model, plain)


@on_ranks()
def test_a_registered_forward_method(rank):
    plain, model, token = _generators()
    with pytest.raises(ValueError, match="has no method 'speak'"):
        brigade.register_fsdp_forward_method(model, "speak")
    brigade.register_fsdp_forward_method(plain, "encode")
    brigade.register_fsdp_forward_method(model, "encode")
    for net in (plain, model):
        net.encode(token).square().sum().backward()
    with pytest.raises(IndexError):
        model.encode(torch.tensor([99]))
    assert isinstance(model.embed.weight, brigade.ShardedParameter)
    expect_gradients(model, plain)


# ---- An inner unit before the first forward.


def _clip(block):
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = nn.utils.clip_grad_norm_(block.parameters(), 1.0)
    block.zero_grad()
    return norm


def _unshard(block):
    block.unshard()
    weight = block.up.weight.detach().clone()
    block.reshard()
    return weight


def _in_whole_parameters(block):
    with block.whole_parameters():
        return block.up.weight.detach().clone()


def _load(block):
    block.load_state_dict(make_net().blocks[0].state_dict())
    return block.up.weight.full_tensor()


def _weight(block):
    return block.up.weight


# Functions of a sharded block and of the plain one; both return the same value.
FIRST_USES = {
    "norm": (lambda block: block.up.weight.norm(),) * 2,
    "clip": (_clip,) * 2,
    "full state dict": (lambda block: block.full_state_dict()["up.weight"], _weight),
    "load": (_load, _weight),
    "unshard": (_unshard, _weight),
    "whole_parameters": (_in_whole_parameters, _weight),
}


@pytest.mark.parametrize("name", FIRST_USES)
@on_ranks()
def test_an_inner_unit_may_be_used_before_the_first_forward(rank, name):
    pair = Pair(rank)
    with torch.no_grad():
        found, expected = (
            use(net.blocks[0])
            for use, net in zip(FIRST_USES[name], (pair.model, pair.plain), strict=True)
        )
    torch.testing.assert_close(found, expected)
    pair.expect_step(0)
    pair.expect_step(1)


@on_ranks()
def test_an_averaged_model_is_sharded_after_its_copy(rank):
    plain, model = make_net(), make_net()
    averages = [
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for net in (plain, model)
    ]
    shard_blocks(model)
    shard_blocks(averages[1].module)
    for net, average in zip((plain, model), averages, strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            train_step(net, optimizer, step, 0)
            average.update_parameters(net)
    x = batch_of(0, 9)
    torch.testing.assert_close(averages[1](x), averages[0](x))


@on_ranks()
def test_private_names_of_torchs_states(rank):
    model = shard_blocks(make_net())
    state, inner = brigade.fully_shard.state(model), brigade.fully_shard.state(model.blocks[1])
    assert state._is_root is None
    state._lazy_init()
    state._lazy_init()
    assert state._is_root and inner._is_root is False
    assert inner._state_ctx.all_states[0] is state
    assert inner._state_ctx.all_states[1:] == [b._get_fsdp_state() for b in model.blocks]
    group = inner._fsdp_param_group
    assert group._module_fqn == "blocks.1"
    for param in group.fsdp_params:
        assert model.get_parameter(param._param_fqn) is param.sharded_param
    other = shard_blocks(make_net())
    brigade.fully_shard.state(other.blocks[0])._lazy_init()
    with pytest.raises(RuntimeError, match="became the outermost"):
        brigade.fully_shard.state(other)._lazy_init()
