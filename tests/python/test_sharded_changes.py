"""Parameters replaced, removed or added after fully_shard; functional_call."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

import brigade

from ranks import on_ranks
from sharded_training import (
    Pair,
    batch_of,
    loss_of,
    make_net,
    shard_blocks,
    step_of_all,
    train_step,
)


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("place", ["blocks.1.up.weight", "head.bias"])
@on_ranks()
def test_a_replaced_parameter_is_an_error_until_restored(rank, place, is_alike):
    pair = Pair(rank)
    model = pair.model
    pair.step(0)
    owner, _, name = place.rpartition(".")
    module = model.get_submodule(owner)
    own, given = module._parameters[name], nn.Parameter(torch.full((3, 2), 7.0))
    if is_alike or rank == 0:
        setattr(module, name, given)
        words = f"parameter '{place}' was replaced .* found a Parameter of \\(3, 2\\)"
    else:
        words = f"rank 0.*'{place}'"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            pair.loss(1).backward()
    assert torch.equal(given, torch.full((3, 2), 7.0))
    setattr(module, name, own)
    pair.step(1)
    pair.expect_equal()


@on_ranks()
def test_a_removed_parameter_is_an_error_until_restored(rank):
    pair = Pair(rank)
    model = pair.model
    own = model.blocks[0].up.bias
    del model.blocks[0].up.bias
    model.blocks[0].up.bias = None
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias' was removed"):
        pair.loss(0)
    model.blocks[0].up.bias = own
    head, model.head = model.head, nn.Identity()
    with pytest.raises(RuntimeError, match=r"'(weight|head.weight)' was removed"):
        pair.loss(0)
    model.head = head
    for step in range(2):
        pair.step(step)
    pair.expect_equal()


@on_ranks()
def test_the_error_names_added_modules(rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    brigade.fully_shard(net[1])
    brigade.fully_shard(net[0])
    brigade.fully_shard(net)  # has no parameters of its own
    x = torch.ones(2, 4)
    net(x).sum().backward()
    net.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"'2\.weight', '2\.bias' were added"):
        net(x)
    net[2].requires_grad_(False)  # equal on all ranks
    net(x).sum().backward()
    del net[2]
    net[1].append(nn.LayerNorm(4))
    with pytest.raises(RuntimeError, match=r"'1\.1\.weight', '1\.1\.bias' were added"):
        net(x)
    brigade.fully_shard(net[1][1])
    net(x).sum().backward()
    assert all(p.grad is not None for p in net[1].parameters())
    net[0].scale = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"'0\.scale' were added"):
        net(x)


@on_ranks()
def test_functional_call_uses_its_arguments_or_is_an_error(rank):
    pair = Pair(rank)
    model = pair.model
    pair.step(0)
    given = {name: torch.full_like(p, 0.5) for name, p in pair.plain.named_parameters()}
    kept = {name: value.clone() for name, value in given.items()}
    x = batch_of(rank, 0)
    with pytest.raises(RuntimeError, match="functional_call needs whole_parameters"):
        torch.func.functional_call(model, given, (x,))
    some = {"blocks.2.down.weight": given["blocks.2.down.weight"]}
    with pytest.raises(RuntimeError, match=r"'blocks\.2\.down\.weight'.*found a Tensor of"):
        torch.func.functional_call(model, some, (x,))
    with model.whole_parameters(), torch.no_grad():
        for values in (given, some):
            expected = torch.func.functional_call(pair.plain, values, (x,))
            assert torch.equal(torch.func.functional_call(model, values, (x,)), expected)
    for name, value in given.items():
        assert torch.equal(value, kept[name]), name
    own = dict(model.named_parameters())
    torch.func.functional_call(model, own, (x,)).sum().backward()
    pair.step(1)
    pair.expect_equal()


@on_ranks()
def test_parameters_replaced_while_unsharded_are_not_overwritten(rank):
    pair = Pair(rank)
    model = pair.model
    pair.step(0)
    own = model.blocks[0].up.bias
    given = nn.Parameter(torch.zeros(3))
    model.blocks[0].up.bias = given
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias'"), model.whole_parameters():
        raise AssertionError
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias'"):
        model.blocks[0].unshard()
    model.blocks[0].reshard()
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias'"):
        model.to(torch.float64)
    model.blocks[0].up.bias = own
    with model.whole_parameters():
        model.blocks[0].up.bias = given
    assert model.blocks[0].up.bias is given and torch.equal(given, torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias'"):
        pair.loss(1)
    model.blocks[0].up.bias = own
    pair.step(1)
    pair.expect_equal()


@pytest.mark.parametrize("has_root", [True, False])
@pytest.mark.parametrize("is_old_optimizer", [True, False])
@on_ranks()
def test_optimizers_train_a_parameter_that_was_initialized_again(rank, has_root, is_old_optimizer):
    plain, model = make_net(), shard_blocks(make_net())
    if has_root:
        loss_of(model, rank, 0).backward()
    pair = Pair(rank, nets=(plain, model)) if is_old_optimizer else None
    for net in (plain, model):
        torch.manual_seed(5)
        net.head.weight = nn.Parameter(torch.randn_like(net.head.weight))
        net.blocks[1].up.register_parameter("bias", nn.Parameter(torch.ones(15)))
    assert all(type(p) is brigade.ShardedParameter for p in model.parameters())
    assert model.head.weight.grad is None
    pair = pair or Pair(rank, nets=(plain, model))
    if is_old_optimizer:  # the plain one holds the parameters that were replaced
        pair.optimizers[0] = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    pair.expect_equal()
    for step in range(2):
        train_step(model, pair.optimizers[1], step, rank)
        step_of_all(plain, pair.optimizers[0], step, 2)
        pair.expect_equal()


@on_ranks()
def test_assigned_values_while_unsharded(rank):
    pair = Pair(rank)
    model, bias = pair.model, pair.model.blocks[0].up.bias
    pair.step(0)
    with model.whole_parameters(writes=True):
        model.blocks[0].up.bias = nn.Parameter(torch.ones(15))
    assert bias.full_tensor().eq(1).all()
    with pytest.raises(RuntimeError, match=r"would be lost"), model.whole_parameters():
        model.blocks[0].up.bias = nn.Parameter(torch.zeros(15))
    model.blocks[0].unshard()
    model.blocks[0].up.bias = nn.Parameter(torch.full((15,), 3.0))
    assert model.blocks[0].up.bias is bias
    pair.plain.blocks[0].up.bias.data.fill_(3)
    pair.expect_equal()
    pair.step(1)
    pair.expect_equal()
    model.blocks[0].up.bias = nn.Parameter(torch.ones(15), requires_grad=False)
    pair.loss(2).backward()
    assert model.blocks[0].up.bias is bias and bias.grad is None and not bias.requires_grad


@on_ranks()
def test_assigned_parameters_that_do_not_fit_are_errors(rank):
    pair = Pair(rank)
    model = pair.model
    own = model.blocks[0].up.bias
    mesh = dist.init_device_mesh("cpu", (2,))
    for given, words in (
        (torch.ones(15, device="meta"), "found a Parameter of"),
        (torch.ones(15, dtype=torch.float64), "float64"),
        (distribute_tensor(torch.ones(15), mesh), "found a"),
        (model.blocks[1].up.bias, "found a ShardedParameter"),  # would tie them
    ):
        is_tied = isinstance(given, nn.Parameter)
        model.blocks[0].up.bias = given if is_tied else nn.Parameter(given)
        with pytest.raises(RuntimeError, match=rf"'blocks\.0\.up\.bias' was replaced.*{words}"):
            pair.loss(0)
        model.blocks[0].up.bias = own
    model.set_requires_gradient_sync(False)
    pair.loss(0).backward()
    model.blocks[0].up.bias = nn.Parameter(torch.ones(15))  # the gradients belong to the other
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.bias' was replaced"):
        pair.loss(0)
    model.blocks[0].up.bias = own
    model.set_requires_gradient_sync(True)
    pair.optimizers[1].zero_grad()
    pair.loss(0).backward()
    pair.step(0)
    pair.expect_equal()


@pytest.mark.parametrize("is_whole", [True, False])
@on_ranks()
def test_exchanging_data_is_an_error_and_changes_nothing(rank, is_whole):
    """`a.data, b.data = b.data, a.data` would exchange the parameters' memory."""
    pair = Pair(rank)
    pair.step(0)
    first, second = pair.model.blocks[0].up.weight, pair.model.blocks[1].up.weight
    words = r"'blocks\.\d\.up\.weight' got another parameter's memory"
    with pytest.raises(RuntimeError, match=words):
        if is_whole:
            with pair.model.whole_parameters(writes=True):
                first.data, second.data = second.data, first.data
        else:
            first.data, second.data = second.data, first.data
            pair.loss(1)
    pair.step(1)
    pair.expect_equal()


@on_ranks()
def test_assigning_one_of_two_tied_parameters_raises(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    brigade.fully_shard(model)
    before = model[0].weight.full_tensor()
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match=r"'1\.weight' was replaced"):
        model(torch.ones(1, 4))
    assert torch.equal(model[0].weight.full_tensor(), before)


@on_ranks()
def test_scopes_of_unsharded_parameters_nest(rank):
    model = shard_blocks(make_net())
    weight, inner = model.head.weight, model.blocks[0].up.weight
    with torch.no_grad():
        with model.whole_parameters(writes=True):
            weight.fill_(3)
            with pytest.raises(ValueError, match="evaluation"), model.whole_parameters():
                raise ValueError("evaluation")
            assert weight[0, 0] == 3  # still unsharded
            inner.fill_(4)
        assert weight.full_tensor().eq(3).all() and inner.full_tensor().eq(4).all()
        model.blocks[0].unshard()
        with pytest.raises(NotImplementedError, match="would be lost"), model.whole_parameters():
            weight.add_(1)
        outer = model.whole_parameters()
        writing = model.whole_parameters(writes=True)
        with pytest.raises(RuntimeError, match="unsharded without"), outer, writing:
            pass
        assert inner[0, 0] == 4  # until reshard()
        model.blocks[0].reshard()
        assert weight.full_tensor().eq(3).all()
