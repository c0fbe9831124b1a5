"""A unit's parameters: of outer and inner modules, ignored, added late, scalars, strided views."""

import copy
import re

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import Pair, expect_equal
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    linear,
    loss_of,
    own_shard,
)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(4, 4, 1)
        self.norm = linear(4, 4, 2)

    def forward(self, x):
        return self.norm(self.linear(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear(3, 4, 3)
        self.inner = Inner()
        self.plain = Inner()
        self.scale = nn.Parameter(torch.tensor([2.0, -1.0, 1.0, 2.0], dtype=torch.float64))
        self.register_buffer("shift", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return self.plain(self.inner(self.first(x))) * self.scale + self.shift


@on_ranks()
def test_each_parameter_belongs_to_its_innermost_unit_or_is_ignored(rank):
    plain = Outer()
    model = copy.deepcopy(plain)
    modules = list(model.modules())
    ignored = {model.inner.norm.bias, model.plain.linear.weight, model.first.bias}
    names = {n for n, p in model.named_parameters() if p in ignored}
    assert names == {"inner.norm.bias", "plain.linear.weight", "first.bias"}
    brigade.fully_shard(model.inner, ignored_params=ignored)
    brigade.fully_shard(model, ignored_params=ignored)

    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert re.search(r" \(root\) +5 ", model.explain())
    assert re.search(r" inner +3 ", model.explain())
    assert {p for p in model.parameters() if type(p) is nn.Parameter} == ignored
    assert type(model.shift) is torch.Tensor

    def loss_on(net, r):
        return loss_of(net, batch_of(3, r, 0))

    # Gradients of ignored parameters are each rank's own.
    loss_on(plain, rank).backward()
    own = {n: p.grad.clone() for n, p in plain.named_parameters() if n in names}
    plain.zero_grad()
    backward_of_all(plain, 2, loss_on)
    loss_on(model, rank).backward()
    for name, whole in plain.named_parameters():
        part = model.get_parameter(name)
        if name in names:
            assert torch.equal(part.grad, own[name]) and not torch.equal(part.grad, whole.grad)
        else:
            assert torch.equal(part.grad.to_local(), own_shard(part, whole.grad)), name


@on_ranks()
def test_no_unit_shards_what_an_inner_unit_ignores(rank):
    model = Outer()
    bias = model.inner.norm.bias
    brigade.fully_shard(model.inner, ignored_params={bias})
    brigade.fully_shard(model)
    assert model.inner.norm.bias is bias and type(bias) is nn.Parameter
    loss_of(model, batch_of(3, rank, 0)).backward()
    assert bias.grad is not None and not isinstance(bias.grad, brigade.TensorShard)


LATE = {
    "extra": lambda model: setattr(model, "extra", nn.Parameter(torch.ones(3))),
    "inner.late.weight": lambda model: model.inner.add_module("late", linear(4, 4)),
}


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["all", "one"])
@pytest.mark.parametrize("path", LATE)
@on_ranks()
def test_parameters_registered_before_the_first_forward_are_named(rank, path, ranks):
    plain = Outer()
    model = copy.deepcopy(plain)
    brigade.fully_shard(model.inner)
    brigade.fully_shard(model)
    if rank in ranks:
        LATE[path](model)
    words = f"'{path}'" if rank in ranks else f"rank 0.*'{path}'"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            loss_of(model, batch_of(3, rank, 0)).backward()
    owner, _, name = path.removesuffix(".weight").rpartition(".")
    if rank in ranks:
        delattr(model.get_submodule(owner), name)
    backward_of_all(plain, 2, lambda net, r: loss_of(net, batch_of(3, r, 0)))
    loss_of(model, batch_of(3, rank, 0)).backward()
    expect_gradients(model, plain)


# ---- Scalars and views with gaps.


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x):
        return x * self.scale


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))
        self.gapped = nn.Parameter(torch.randn(10, 12).narrow(1, 3, 4))
        self.every_third = nn.Parameter(torch.randn(50)[1::3])
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.permuted = nn.Parameter(torch.randn(4, 5, 6)[:, 1:4, ::3].permute(2, 0, 1))
        self.scale = nn.Parameter(torch.randn(3)[1])

    def forward(self, x):
        """Computes elementwise, so that bits do not depend on the memory layout."""
        tensors = (self.gapped, self.every_third, self.transposed, self.permuted)
        elements = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return (elements * x.mean() + self.shift) * self.scale


def _make():
    torch.manual_seed(0)
    return nn.Sequential(Scalar(), Views(), Scalar())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_scalars_and_views_with_gaps_equal_one_process(rank, world_size, reshards):
    plain, model = _make(), _make()
    assert plain[1].gapped.stride() == (12, 1)
    for module in model[:2]:
        brigade.fully_shard(module, reshard_after_forward=reshards)
    brigade.fully_shard(model)
    expect_equal(model, plain)
    pair = Pair(rank, torch.optim.AdamW, nets=(plain, model))
    for step in range(3):
        pair.expect_step(step)
    for name, part in model.named_parameters():
        assert part.shape == plain.get_parameter(name).shape


@on_ranks()
def test_a_root_without_parameters_has_torchs_methods(rank):
    model = brigade.fully_shard(nn.Sequential(nn.ReLU()))
    for act in (
        model.unshard,
        model.reshard,
        lambda: model.unshard(async_op=True).wait(),
        lambda: model.set_modules_to_forward_prefetch([model]),
        lambda: model.set_modules_to_backward_prefetch([model]),
        lambda: model.set_requires_gradient_sync(False),
        lambda: model.load_state_dict(model.state_dict()),
    ):
        act()
        assert torch.equal(model(torch.ones(2)), torch.ones(2))
    with pytest.raises(ValueError, match="has no parameters to shard"):
        model.explain()
    assert brigade.fully_shard.state(model) is not None
    assert brigade.fully_shard.state(model[0]) is None
