"""Operators on sharded parameters outside forward: the unsharded value, or an error on all ranks.

The matrix is cut within rows, and no rank holds all of it. fsdp/shard_operators.cc has the rules;
tests/fsdp/operators/check_operators.py checks all operators.
"""

from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol
import torch.fx.experimental.proxy_tensor
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import brigade

from ranks import on_ranks
from sharded_training import replicated
from whole_numbers import backward_of_all, batch_of, expect_gradients, layers


def _scripted(p: torch.Tensor):
    return p.reshape(-1)[0:2].sum()


def _group():
    return dist.distributed_c10d._get_default_group()


# Results by expression, which is computed with shards and with unsharded tensors.
RIGHT = {
    "as itself": lambda p: p.view_as(p).norm() + p.expand_as(p).norm(),
    "as another's type": lambda p: p.type_as(p.double()).norm(),
    "counts": lambda p: (p > 0).int().sum() + (p > 0).long().sum() + (p > 0).bool().sum(),
    "masked": lambda p: p.masked_fill(p < 0, 0).sum(),
    "activations": lambda p: functional.gelu(p).norm() + functional.leaky_relu(p, 0.1).sum(),
}
REFUSED = {
    "a row": lambda p: p[0],
    "all of it": lambda p: p[:],
    "a mask's elements": lambda p: p[p > 0],
    "a loss": lambda p: functional.binary_cross_entropy_with_logits(p, torch.ones_like(p)),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: numpy.asarray(p),
    "item": lambda p: p.item(),
    "a number": lambda p: float(p),
    "iteration": lambda p: list(p),
    "into another": lambda p: torch.index_select(p, 0, torch.tensor([0]), out=torch.empty(1)),
    "tolist": lambda p: p.tolist(),
    "sets rows": lambda p: p.__setitem__(slice(1, 3), 0),
    "zeros a row": lambda p: p[1].zero_(),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "all-reduce": lambda p: dist.all_reduce(p),
    "all-gather": lambda p: dist.all_gather([torch.empty(p.shape)], p),
    "all-reduce of a group": lambda p: _group().allreduce([p]).wait(),
    "all-gather of a group": lambda p: _group().allgather(
        [[torch.empty(p.shape) for _ in range(_group().size())]], [p]
    ),
    "all-gather into a tensor": lambda p: dist.all_gather_into_tensor(
        torch.empty(_group().size() * p.shape[0], p.shape[1]), p
    ),
    "reduce-scatter of a group": lambda p: _group().reduce_scatter(
        [torch.empty(p.shape)], [[p] * _group().size()]
    ),
    "coalesced broadcast": lambda p: dist._broadcast_coalesced(_group(), [p], 1 << 20, 0),
    "functional all-reduce": lambda p: fcol.all_reduce(p, "sum", _group()).sum(),
    "send": lambda p: dist.send(p, (_group().rank() + 1) % _group().size()),
    "receive": lambda p: dist.recv(p, (_group().rank() + 1) % _group().size()),
    "script": lambda p: torch.jit.script(_scripted)(p),
    "address": lambda p: p.data_ptr(),
    "DLPack": lambda p: torch.utils.dlpack.to_dlpack(p),
    "shared memory": lambda p: p.share_memory_(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "set in the whole": lambda p: torch.zeros(p.shape).__setitem__(slice(None), p),
    "an average of the whole": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
    "lists": lambda p: torch._foreach_lerp_([torch.zeros(p.shape)], [p], 0.5),
    "a column": lambda p: p * torch.ones(7, 1),
    "its piece": lambda p: torch.empty(p.shape).copy_(p),
}


class _Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


def _make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), _Scaled())


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_a_result_equals_the_unsharded_one_or_is_an_error(rank, world_size):
    whole, net = _make()[0].weight.detach(), brigade.fully_shard(_make())
    part = net[0].weight.detach()
    for name, of in RIGHT.items():
        torch.testing.assert_close(of(part), of(whole), msg=name)
    before = part.to_local().clone()
    for name, of in REFUSED.items():
        with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
            pytest.fail(f"{name} gave {of(part)}")
    assert torch.equal(part.to_local(), before)
    assert torch.equal(brigade.TensorShard.full_tensor(part * 2), whole * 2)
    masked = part.clone()
    masked.masked_fill_(masked > 0, 0)  # `masked[masked > 0] = 0` since torch 2.15
    torch.testing.assert_close(masked.full_tensor(), whole.clamp(max=0))


@on_ranks()
def test_unsharded_replicas_support_any_operator(rank):
    part = replicated(_make())[0].weight.detach()
    assert part[0].shape == (5,) and part.T.shape == (5, 7)
    assert torch.equal(torch.zeros(7, 5).copy_(part).flatten(), part.to_local())
    dist.broadcast(part, 0)


@on_ranks()
def test_a_loss_that_uses_a_full_tensor_is_an_error_in_backward(rank):
    net = brigade.fully_shard(_make())
    for _ in range(2):
        loss = net(torch.ones(2, 5)).square().mean() * net[1].scale.full_tensor()
        with pytest.raises(RuntimeError, match=r"full_tensor\(\) is not recorded"):
            loss.backward()
    with torch.no_grad():
        scale = net[1].scale.full_tensor()
    (net(torch.ones(2, 5)).square().mean() * scale).backward()
    assert scale.item() == 2 and net[1].scale.grad is not None


@pytest.mark.parametrize(
    "options",
    [
        {"make": torch.optim.AdamW, "with": {"fused": True}},
        {"make": torch.optim.AdamW, "with": {"foreach": True}},
        {"make": torch.optim.NAdam, "with": {}},
        {"make": torch.optim.SGD, "with": {"momentum": 0.9}},
    ],
)
@on_ranks()
def test_unsharded_states_load_into_shards(rank, options):
    plain, net = _make(), brigade.fully_shard(_make())
    optimizers = [options["make"](m.parameters(), lr=0.1, **options["with"]) for m in (plain, net)]
    for _ in range(2):
        plain(torch.ones(2, 5)).sum().backward()
        optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    net.load_state_dict(plain.state_dict())
    for model, optimizer in zip((plain, net), optimizers, strict=True):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    for name, value in net.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@on_ranks()
def test_views_made_in_a_forward_are_errors_after_it(rank):
    net = brigade.fully_shard(_make())
    with net.whole_parameters(), torch.no_grad():
        row, turned, flat = net[0].weight[0], net[0].weight.T, net[0].weight.view(-1)
    for use in (torch.Tensor.zero_, torch.norm, lambda view: view + 1):
        with pytest.raises(NotImplementedError, match=r"view of parameter '.*weight'.* a part"):
            use(row.detach())
    before = _make()[0].weight.norm()
    for view in (turned, flat):
        torch.testing.assert_close(view.detach().norm(), before)


_TRACED = {
    "vmap": lambda part: torch.vmap(lambda s: (part * s).sum())(torch.ones(2)),
    "grad": lambda part: torch.func.grad(lambda s: (part * s).norm())(torch.ones(())),
    "jvp": lambda part: torch.func.jvp(
        lambda s: (part * s).sum(), (torch.ones(()),), (torch.ones(()),)
    ),
    "functionalize": lambda part: torch.func.functionalize(lambda p: p + 1)(part),
    "make_fx": lambda part: torch.fx.experimental.proxy_tensor.make_fx(lambda p: p * 2)(part),
    "trace": lambda part: torch.jit.trace(lambda p: p * 2, (part,)),
}


@pytest.mark.parametrize("name", _TRACED)
@on_ranks()
def test_transforms_and_tracers_are_errors_on_shards(rank, name):
    part = brigade.fully_shard(_make())[0].weight.detach()
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=r"torch\.func and tracers|is sharded"
    ):
        _TRACED[name](part)
    torch.testing.assert_close((part + 1).norm(), (_make()[0].weight + 1).norm())


@on_ranks()
def test_tensors_that_require_grad_are_errors_beside_shards(rank):
    net = brigade.fully_shard(_make())
    net(torch.ones(2, 5)).sum().backward()
    learned = torch.tensor(0.1, requires_grad=True)
    part = net[0].weight.detach()
    for use in (
        lambda: part * learned,
        lambda: torch._foreach_mul([part], [learned]),
        lambda: part.clone().mul_(learned),
    ):
        with pytest.raises(RuntimeError, match="a tensor that requires grad and a sharded tensor"):
            use()
    with torch.no_grad():
        torch.testing.assert_close((part * learned).norm(), (_make()[0].weight * learned).norm())


class _WithScale(nn.Module):
    """A body, whose units may differ, and the loss's scales in the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(4, 5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.head = nn.Parameter(torch.arange(3.0, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor(3.0, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        out = self.body(x)
        return out * self.head if self.uses_head else out


def _scaled_loss(model, rank, step):
    out = model(batch_of(4, rank, step)).sum()
    loss = out * model.scale * model.frozen + model.head.view(-1).square().sum()
    loss = loss + model.head[1] * 3 + model.scale.float().double()
    return loss + model.scale.exp() - model.scale.exp() + torch.dot(model.head, model.head)


@pytest.mark.parametrize("uses_head", [False, True], ids=["unused in forward", "used in forward"])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_loss_may_use_parameters_of_the_outermost_unit(rank, world_size, uses_head):
    _WithScale.uses_head = uses_head
    plain, model = _WithScale(), _WithScale()
    brigade.fully_shard(model.body[0])
    brigade.fully_shard(model)
    for step in range(3):
        assert model.scale.item() == plain.scale.item()
        if step == 1:  # accumulates first
            model.set_requires_gradient_sync(False)
            _scaled_loss(model, rank, 7).backward()
            model.set_requires_gradient_sync(True)
            backward_of_all(plain, world_size, partial(_scaled_loss, step=7))
        loss = _scaled_loss(model, rank, step)
        if step == 2:
            _scaled_loss(model, rank, 8)  # without a backward
            loss = _scaled_loss(model, rank, step)
        loss.backward()
        backward_of_all(plain, world_size, partial(_scaled_loss, step=step))
        expect_gradients(model, plain)
        for net in (model, plain):
            with torch.no_grad():
                for p in net.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad.sign())
            net.zero_grad()
    model.set_reshard_after_forward(True)
    loss = model(batch_of(4, rank, 0)).sum()
    with pytest.raises((RuntimeError, NotImplementedError)):
        loss * model.scale


@on_ranks()
def test_parameters_keep_their_dtype_after_a_loss(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = brigade.fully_shard(_make(), mp_policy=policy)
    penalty = net(torch.ones(2, 5)).sum() + net[0].weight.square().sum()
    assert net[0].weight.dtype == torch.float32
    other = brigade.fully_shard(_make(), mp_policy=policy)
    with pytest.raises(RuntimeError, match="is not recorded by autograd"):
        net[0].weight * other[0].weight  # that model has run no forward
    assert net[0].weight.dtype == torch.float32
    penalty.backward()
    net[0].weight.grad = net[0].weight.grad * 2


@on_ranks()
def test_a_cast_outside_of_forward_is_not_detached(rank):
    net = brigade.fully_shard(_make())
    cast = net[0].weight.double()
    with pytest.raises(RuntimeError, match="is not recorded by autograd"):
        cast.square()
    with torch.no_grad():
        assert net[0].weight.double().dtype == torch.float64
