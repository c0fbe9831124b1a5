"""Dtypes that meet: in one unit, in one sum of micro-batches, in what a unit is given."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from rank_cases import run_cases
from sharded_training import batch_of

FULL, LOW = torch.float32, torch.bfloat16


class TwoDtypes(nn.Module):
    """A weight in float32, and a shift in another dtype. All in small whole numbers."""

    def __init__(self, dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.0, 2.0]))
        self.shift = nn.Parameter(torch.tensor([2.0, 1.0, -1.0], dtype=dtype))

    def forward(self, x):
        return (x * self.weight).sum() * self.shift.to(x.dtype)


def _in_one_unit(rank, dtype, name_of_policy):
    """Averages are exact in bfloat16, too: there are 8 bits of them at most."""
    policy = POLICIES[name_of_policy]
    x = torch.tensor([1.0, 2.0, 1.0, 0.0, -1.0])
    plain = TwoDtypes(dtype)
    model = brigade.fully_shard(copy.deepcopy(plain), mp_policy=policy)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args: seen.extend([module.weight.dtype, module.shift.dtype])
    )
    for _ in range(2):
        for r in range(2):
            plain(x * (1 + r)).sum().backward()
        model(x * (1 + rank)).sum().backward()
        for name, whole in plain.named_parameters():
            part = model.get_parameter(name)
            assert part.dtype == part.grad.dtype == whole.dtype, name
            begin = brigade._C.offset_of(part)
            expected = whole.grad[begin : begin + part.to_local().numel()] / 2
            assert torch.equal(part.grad.to_local(), expected), name
        plain.zero_grad()
        model.zero_grad()
    param_dtype = None if policy is None else policy.param_dtype
    assert seen == [param_dtype or FULL, param_dtype or dtype] * 2


POLICIES = {
    "none": None,
    "param": MixedPrecisionPolicy(param_dtype=LOW),
    "reduce": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "both": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=FULL),
}


def test_two_dtypes_of_parameters_in_one_unit():
    run_cases(_in_one_unit, itertools.product((LOW, torch.float64), POLICIES))


class Product(nn.Module):
    """The gradient of its weight is what it is called with."""

    def __init__(self, dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x):
        return x * self.weight


# Gradients of micro-batches, by rank. bfloat16 has 256 + 1 = 256 and 512 + 2 = 512.
GRADIENTS = ((256.0, 1.0), (512.0, 2.0))


def _sum_of_micro_batches(rank, dtype, reduce_dtype, synchronizes, expected):
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=reduce_dtype)
    model = brigade.fully_shard(Product(dtype), mp_policy=policy)
    for _ in range(2):
        for batch, value in enumerate(GRADIENTS[rank]):
            model.set_requires_gradient_sync(synchronizes or batch == 1)
            model(torch.full((3,), value, dtype=dtype)).sum().backward()
        assert model.weight.grad.dtype == dtype
        assert model.weight.grad.to_local().tolist() == [expected] * model.weight.to_local().numel()
        model.zero_grad()


def test_micro_batches_are_added_up_in_the_reduce_dtype():
    """By the parameter's dtype, the reduce dtype, and whether each backward is reduced."""
    cases = [
        (FULL, FULL, False, 385.5),
        (FULL, None, False, 385.5),  # in the parameter's own
        (FULL, LOW, False, 384.0),  # 256 + 512
        (FULL, LOW, True, 385.5),  # averages are added up in the parameter's own
        (LOW, FULL, False, 386.0),  # 385.5, rounded once
        (LOW, None, False, 384.0),
    ]
    run_cases(_sum_of_micro_batches, cases)


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "rms": lambda: nn.RMSNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
}


def _make(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), NORMS[norm](), nn.Linear(6, 2))


def _average_by_hand(plain, dtype, is_low, rank, step):
    """Of a copy that has its parameters cast, and casts what its modules get.

    Returns this rank's buffers behind it.
    """
    buffers, sums = None, [0.0] * len(list(plain.parameters()))
    for r in range(2):
        seen = copy.deepcopy(plain)
        for module, low in zip(seen, is_low, strict=True):
            of_module = dtype if low else FULL
            for name, parameter in module.named_parameters():
                setattr(module, name, nn.Parameter(parameter.detach().to(of_module)))
            module.register_forward_pre_hook(lambda _, args, to=of_module: (args[0].to(to),))
        seen(batch_of(r, step)).float().square().mean().backward()
        for i, parameter in enumerate(seen.parameters()):
            sums[i] = sums[i] + parameter.grad.float()
        if r == rank:
            buffers = dict(seen.named_buffers())
    for parameter, total in zip(plain.parameters(), sums, strict=True):
        parameter.grad = total * 0.5
    return buffers


def _norms(rank, norm, dtype, is_low):
    plain, model = _make(norm), _make(norm)
    for module, low in zip(model, is_low, strict=True):
        param_dtype = dtype if low else FULL
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=FULL)
        brigade.fully_shard(module, mp_policy=policy)
    brigade.fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=FULL))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, foreach=False) for net in (plain, model)]
    for step in range(3):
        buffers = _average_by_hand(plain, dtype, is_low, rank, step)
        optimizers[1].zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        state = model.full_state_dict()
        for name, whole in plain.named_parameters():
            assert torch.equal(state[name], whole), (step, name)
        for name, buffer in model.named_buffers():
            assert buffer.dtype == plain.get_buffer(name).dtype
            assert torch.equal(buffer, buffers[name]), (step, name)
            plain.get_buffer(name).copy_(buffer)


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_norms_in_low_precision(dtype):
    run_cases(_norms, [(norm, dtype, (True, norm != "batch", True)) for norm in NORMS])


class Takes(nn.Module):
    """Tells in which dtypes it gets its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.got = []

    def forward(self, x, scale=None, *, extras=None):
        self.got.append((x.dtype, scale.dtype, extras["bias"].dtype, extras["index"].dtype))
        return x * self.weight * scale + extras["bias"]


class Gives(nn.Module):
    """Makes inputs of its own for the module inside of it, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = Takes()
        self.other = Takes()

    def forward(self, x):
        extras = {"bias": torch.ones(4), "index": torch.arange(4)}
        scale = torch.full((4,), 2.0)
        return self.inner(self.other(x * self.weight, scale, extras=extras), scale, extras=extras)


def _external_inputs(rank, casts, by_list):
    policy = MixedPrecisionPolicy(LOW, cast_forward_inputs=casts)
    model = Gives()
    if by_list:
        brigade.fully_shard([model.inner, model.other], mp_policy=policy)
    else:
        brigade.fully_shard(model.inner, mp_policy=policy)
        brigade.fully_shard(model.other, mp_policy=policy)
    brigade.fully_shard(model, mp_policy=MixedPrecisionPolicy(LOW))
    of_float = LOW if casts else FULL
    bias = torch.zeros(4, requires_grad=True)
    for _ in range(2):
        output = model(torch.full((2, 4), 1.0 + rank))
        assert output.dtype == of_float
        output.sum().backward()
        assert model.other.got.pop() == (LOW, of_float, of_float, torch.int64)
        assert model.inner.got.pop() == (of_float, of_float, of_float, torch.int64)
    # By itself, with inputs that want gradients: these are in their own dtype.
    x = torch.full((2, 4), 3.0, requires_grad=True)
    scale = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    extras = {"bias": bias, "index": torch.arange(4)}
    model.inner(x, scale, extras=extras).sum().backward()
    of_scale = LOW if casts else torch.float64
    assert model.inner.got.pop() == (of_float, of_scale, of_float, torch.int64)
    for tensor, expected in ((x, 2.0), (scale, 6.0), (bias, 2.0)):
        assert tensor.grad.dtype == tensor.dtype
        assert (tensor.grad == expected).all()
    # Of two forwards with two rows of 2 * (2 * (1 + rank) + 1), and two rows of 2 * 3 by itself.
    assert (model.inner.weight.grad.to_local() == 2 * 2 * 2 * (2 * 1.5 + 1) + 2 * 2 * 3).all()


def test_inputs_from_outside_are_cast_for_the_unit_they_go_to():
    run_cases(_external_inputs, itertools.product((True, False), (True, False)))
