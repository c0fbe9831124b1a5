"""Mixed precision of sharded training, compared with the same casts in one process."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from cases import pairwise
from ranks import on_ranks
from sharded_training import batch_of, expect_equal, make_net

FULL, LOW = torch.float32, torch.bfloat16
POLICIES = {
    "reduce": MixedPrecisionPolicy(reduce_dtype=LOW),
    "param": MixedPrecisionPolicy(param_dtype=LOW),
    "param and reduce": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW),
    "reduce in more": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float64),
    "output": MixedPrecisionPolicy(param_dtype=LOW, output_dtype=torch.float64),
    "no inputs": MixedPrecisionPolicy(param_dtype=LOW, cast_forward_inputs=False),
    "no inputs, output": MixedPrecisionPolicy(LOW, LOW, LOW, cast_forward_inputs=False),
}


def _vectors_stay(parameter):
    return parameter.dtype if parameter.dim() == 1 else None


def _override_of(policy):
    return getattr(policy, "param_dtype_override_fn", None)


if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):  # of torch 2.15
    POLICIES |= {
        f"{name}, vectors stay": dataclasses.replace(
            POLICIES[name], param_dtype_override_fn=_vectors_stay
        )
        for name in ("param", "param and reduce")
    }


class Product(nn.Module):
    """Takes an input of any dtype; the result has the promoted dtype of input and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * self.weight + self.bias


def _make(policy):
    net = make_net()
    if not policy.cast_forward_inputs or _override_of(policy):
        net.embed, net.head = Product(), Product()
        net.blocks = nn.ModuleList([Product() for _ in range(3)])
    return net


def _units_of(net, policy, is_joint):
    """Returns each unit's modules and policy, innermost first."""
    of_blocks = dataclasses.replace(policy, output_dtype=None)
    yield from (([block], of_blocks) for block in net.blocks)
    if is_joint:
        yield [net.embed, net.head], policy
    yield [net], policy


def _cast_by_hand(module, policy):
    """Casts a unit's parameters, inputs and outputs."""
    override = _override_of(policy) or (lambda parameter: None)
    module._apply(lambda p: p.to(override(p) or policy.param_dtype or p.dtype))
    if policy.cast_forward_inputs:
        module.register_forward_pre_hook(lambda _, args: args[0].to(policy.param_dtype))
    module.register_forward_hook(lambda _, args, output: output.to(policy.output_dtype))


def _loss(net, rank, step):
    return net(batch_of(rank, step)).square().mean()


def _average_by_hand(plain, seen, policy, step, world_size):
    """Averages all ranks' gradients of the cast net `seen` into `plain`.

    They are rounded to the reduce dtype, summed at least in FULL, and rounded once.
    """
    reduce_dtype = policy.reduce_dtype or FULL
    sums = [0.0] * len(list(plain.parameters()))
    for rank in range(world_size):
        seen.zero_grad()
        _loss(seen, rank, step).backward()
        for i, parameter in enumerate(seen.parameters()):
            sent = parameter.grad.to(reduce_dtype)
            sums[i] = sums[i] + sent.to(torch.promote_types(reduce_dtype, FULL))
    for parameter, total in zip(plain.parameters(), sums, strict=True):
        parameter.grad = (total * (1.0 / world_size)).to(reduce_dtype).to(FULL)


@pairwise(
    is_joint=[False, True],
    policy=POLICIES.values(),
    world_size=[2, 3],
)
@on_ranks()
def test_equals_one_process_that_casts_by_hand(rank, world_size, policy, is_joint):
    plain, model = _make(policy), _make(policy)
    for modules, of_unit in _units_of(model, policy, is_joint):
        brigade.fully_shard(modules if len(modules) > 1 else modules[0], mp_policy=of_unit)
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    dtypes = []
    model.embed.register_forward_pre_hook(
        lambda module, args: dtypes.append((module.weight.dtype, args[0].dtype))
    )
    for step in range(3):
        seen = copy.deepcopy(plain)
        for modules, of_unit in reversed(list(_units_of(seen, policy, is_joint))):
            for module in modules:
                _cast_by_hand(module, of_unit)
        _average_by_hand(plain, seen, policy, step, world_size)
        optimizers[1].zero_grad()
        output = model(batch_of(rank, step))
        assert output.dtype == seen(batch_of(rank, step)).dtype
        output.square().mean().backward()
        of_weight = policy.param_dtype or FULL
        of_input = of_weight if policy.cast_forward_inputs else FULL
        assert dtypes.pop() == (of_weight, of_input)
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == FULL
        for optimizer in optimizers:
            optimizer.step()
        expect_equal(model, plain)


class Weighted(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x):
        return x * self.weight


# Gradients of micro-batches, by rank. bfloat16 has 256 + 1 = 256 and 512 + 2 = 512.
GRADIENTS = ((256.0, 1.0), (512.0, 2.0))


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "synchronizes", "expected"),
    [
        (FULL, FULL, False, 385.5),
        (FULL, None, False, 385.5),  # reduces in the parameter's dtype
        (FULL, LOW, False, 384.0),  # 256 + 512
        (FULL, LOW, True, 385.5),  # averages accumulate in the parameter's dtype
        (LOW, FULL, False, 386.0),  # 385.5, rounded once
        (LOW, None, False, 384.0),
    ],
)
@on_ranks()
def test_micro_batches_accumulate_in_the_reduce_dtype(
    rank, dtype, reduce_dtype, synchronizes, expected
):
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=reduce_dtype)
    model = brigade.fully_shard(Weighted(dtype), mp_policy=policy)
    for _ in range(2):
        for batch, value in enumerate(GRADIENTS[rank]):
            model.set_requires_gradient_sync(synchronizes or batch == 1)
            model(torch.full((3,), value, dtype=dtype)).sum().backward()
        assert model.weight.grad.dtype == dtype
        assert model.weight.grad.to_local().tolist() == [expected] * model.weight.to_local().numel()
        model.zero_grad()
