"""Sharded training, compared with one process and with torch's fully_shard."""

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import brigade

from cases import pairwise
from ranks import on_ranks
from sharded_training import (
    Net,
    Pair,
    batch_of,
    expect_equal,
    expect_equal_losses,
    make_net,
    shard_blocks,
)


@pairwise(
    world_size=[1, 2, 3],
    optimizer=["SGD", "AdamW"],
    reshards=[None, True, False],
)
@on_ranks()
def test_training_equals_one_process(rank, world_size, optimizer, reshards):
    pair = Pair(rank, getattr(torch.optim, optimizer), reshard_after_forward=reshards)
    for step in range(4):
        pair.step(step)
    pair.expect_equal()
    statistics = pair.model.sharding_statistics()
    assert (statistics["learned_segments"], statistics["segments"]) == (2, 8)


@on_ranks()
def test_the_module_has_torchs_interface(rank):
    model = shard_blocks(make_net())
    assert isinstance(model, brigade.FSDPModule)
    assert isinstance(model, Net)
    names = dict(make_net().named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, brigade.ShardedParameter)
        assert parameter.shape == names[name].shape
    held = torch.tensor(sum(p.to_local().numel() for p in model.parameters()))
    dist.all_reduce(held)
    assert held.item() == sum(p.numel() for p in names.values())
    assert re.search(r" blocks\.1 +6 ", model.explain())
    with model.whole_parameters():
        assert torch.equal(model.head.weight, make_net().head.weight)
    whole = model.blocks[1].up.weight
    assert isinstance(whole, brigade.ShardedParameter)
    for base in (ValueError, AssertionError):  # torch's is an AssertionError
        with pytest.raises(base, match="sharded already"):
            brigade.fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"'blocks\.1\.up\.weight'"):
        whole.detach() @ whole.detach().t()


@on_ranks()
def test_tied_across_units_is_an_error(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    brigade.fully_shard(model[2])
    with pytest.raises(
        ValueError, match=r"'0\.weight' of Sequential is already 'weight' of a sharded Linear"
    ):
        brigade.fully_shard(model)


@on_ranks()
def test_parameters_of_two_units_that_have_one_memory_are_an_error(rank):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    model = make()
    model[2].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"'2\.weight' .* shares (its )?memory with '0\.weight'"):
        brigade.fully_shard(model)
    brigade.fully_shard(model[0])
    words = r"'weight' of Linear shares memory with 'weight' of a sharded Linear"
    with pytest.raises(ValueError, match=words):
        brigade.fully_shard(model[2])
    with pytest.raises(ValueError, match=r"'2\.weight' of Sequential shares memory with"):
        brigade.fully_shard(model)
    model[2].weight = nn.Parameter(model[2].weight.data.clone())
    brigade.fully_shard(model)(torch.ones(2, 4)).sum().backward()

    on_one_rank = make()
    if rank == 1:
        on_one_rank[2].weight = nn.Parameter(on_one_rank[0].weight.data)
    brigade.fully_shard(on_one_rank[0])
    with pytest.raises(ValueError, match=words):
        brigade.fully_shard(on_one_rank[2])


@on_ranks()
def test_a_tied_parameter_has_its_first_name(rank, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    brigade.fully_shard([model[2], model[0]])
    brigade.fully_shard(model)
    brigade.save_whole(model, tmp_path / "model.safetensors")
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    ddp = brigade.DistributedDataParallel(plain)
    brigade.load_whole(ddp, tmp_path / "model.safetensors")
    expect_equal(model, plain)


@on_ranks()
def test_losses_equal_torchs_on_two_ranks(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    expect_equal_losses(rank, brigade.fully_shard, functools.partial(torch_fully_shard, mesh=mesh))


@on_ranks()
def test_an_unreferenced_model_is_freed(rank):
    model = shard_blocks(make_net())
    model(batch_of(rank, 0)).square().mean().backward()
    assert next(model.parameters()).grad is not None
    unit = weakref.ref(model._brigade_unit)
    root = weakref.ref(model._brigade_unit.root)
    del model
    gc.collect()
    assert unit() is None
    assert root() is None
    again = shard_blocks(make_net())
    again(batch_of(rank, 0)).square().mean().backward()


@on_ranks()
def test_the_full_state_has_full_precision(rank):
    model = shard_blocks(make_net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    expect_equal(model, make_net())
    with model.whole_parameters(writes=True), torch.no_grad():
        model.head.bias.fill_(2)
        assert torch.equal(model.head.bias.full_tensor(), torch.full((2,), 2.0))
        model.head.bias.copy_(make_net().head.bias)
    expect_equal(model, make_net())
    torch.manual_seed(5)
    other = Net()
    model.load_state_dict(other.state_dict())
    expect_equal(model, other)
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        model.load_state_dict({**other.state_dict(), "head.bias": torch.ones(3)})


@on_ranks(1)
def test_modules_of_one_class_get_one_sharded_class(rank):
    first, second = shard_blocks(make_net()), shard_blocks(make_net())
    assert type(first) is type(second)
    assert type(first).__name__ == "FSDPNet"
    assert type(nn.Sequential(*first.blocks)[:1][0]) is type(second.blocks[0])


class _Product(torch.autograd.Function):
    """inputs @ weight; backward writes the weight's gradient to its reduction buffer."""

    @staticmethod
    def forward(ctx, inputs, weight, model, slots):
        ctx.save_for_backward(inputs, weight)
        ctx.model, ctx.slots = model, slots
        return inputs @ weight

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        slot = None if ctx.model is None else ctx.model.gradient_slot(weight)
        ctx.slots.append(slot)
        if slot is None:
            slot = inputs.t() @ gradient
        else:
            assert (slot.shape, slot.dtype) == (weight.shape, torch.float32)
            address = slot.data_ptr()
            torch.mm(inputs.t(), gradient, out=slot)
            assert slot.data_ptr() == address
        return gradient @ weight.t(), slot, None, None


class _Products(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(5, 5)) for _ in range(2))
        self.model, self.slots = None, []

    def forward(self, x):
        for weight in (self.first, self.second, self.first):
            x = _Product.apply(x, weight, self.model, self.slots)
        return x


@on_ranks()
def test_a_function_writes_its_gradient_to_the_reduction_buffer(rank):
    plain, net = nn.Sequential(_Products()), nn.Sequential(_Products())
    brigade.fully_shard(net[0])
    model = brigade.fully_shard(net)
    object.__setattr__(net[0], "model", model)
    assert model.gradient_slot(net[0].first) is None
    pair = Pair(rank, nets=(plain, net))
    for step in range(3):
        net[0].slots.clear()
        pair.step(step)
        # In backward order; the first weight's second gradient accumulates.
        last, second, first = net[0].slots
        assert first is None and last is not None and second is not None
        assert last.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    pair.expect_equal()
    with pytest.raises(ValueError, match="expected a parameter of this model"):
        model.gradient_slot(torch.ones(5, 5))


@pytest.mark.parametrize("on_all", [True, False])
@on_ranks()
def test_a_submodule_may_run_alone(rank, on_all):
    pair = Pair(rank)
    model, plain = pair.model, pair.plain
    if on_all or rank == 0:
        found = model.blocks[1](torch.ones(2, 7))
        assert torch.equal(found, plain.blocks[1](torch.ones(2, 7)))
    else:
        model(batch_of(rank, 0))
    pair.expect_step(0)


@on_ranks(3)
def test_sums_on_cpus_are_always_reproducible(rank):
    wanted = shard_blocks(make_net(), reproducible=True)
    default = shard_blocks(make_net())
    for model in (wanted, default):
        model(batch_of(rank, 0)).square().mean().backward()
    for ours, theirs in zip(wanted.parameters(), default.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with pytest.raises(
        ValueError, match=r"option reproducible differs.*\n.*rank 0: true\n.*: false"
    ):
        brigade.fully_shard(nn.Linear(4, 4), reproducible=rank == 0)
