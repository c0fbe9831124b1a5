"""Reductions of sharded tensors to one number, and optimizers that use them."""

import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from ranks import on_ranks
from sharded_training import Pair, batch_of, make_net, replicated, shard_blocks
from whole_numbers import backward_of_all, loss_of, own_shard


def _nets():
    """Returns an unsharded and a sharded net with equal gradients; one rank holds the bias."""
    torch.manual_seed(0)
    plain, sharded = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    sharded.load_state_dict(plain.state_dict())
    brigade.fully_shard(sharded)
    x = torch.arange(6.0, dtype=torch.double).view(2, 3) - 2.5
    for net in (plain, sharded):
        net(x).pow(2).sum().backward()
    return plain, sharded


_TOTALS = {
    "sum": torch.sum,
    "mean": lambda t: t.mean(),
    "largest": lambda t: t.abs().max() - t.amin(),
    "scaled": lambda t: (2 * t - 1).norm(),
    "finite": lambda t: torch.isfinite(t).all(),
    "counted": lambda t: (t > 0.01).sum(),
    "chosen": lambda t: torch.where(t > 0, t, torch.zeros_like(t)).sum(),
    "by its type": lambda t: torch.norm(t, 1) + torch.linalg.vector_norm(t),
    "of a list": lambda t: torch._foreach_norm(torch._foreach_mul([t], 2.0))[0],
    "by row": lambda t: t.sum(0) + t.mean(0),
    "norm by row": lambda t: torch.linalg.vector_norm(t, dim=0) + t.norm(dim=-1).sum(),
    "spread": lambda t: t.std() + t.var() + t.prod(),
    "places": lambda t: t.argmax() - t.argmin() + t.count_nonzero() + (t > 0).count_nonzero(0),
    "quantiles": lambda t: t.median() + t.max(0).values + t.min(-1).values.sum(),
    "histogram": lambda t: t.histc(5),
    "close": lambda t: torch.isclose(t, t.clone()) & torch.tensor(torch.allclose(t, t + 1e-9)),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_reductions_equal_those_of_the_unsharded_tensor(rank, world_size):
    plain, sharded = _nets()
    for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
        for w, p in ((whole.detach(), part.detach()), (whole.grad, part.grad)):
            for name, take in _TOTALS.items():
                found, expected = take(p), take(w)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12, msg=name)
    with pytest.raises(RuntimeError, match=r"'weight' .* torch\.no_grad\(\)"):
        sharded.weight.sum()
    # Also with grad mode on, and beside a plain tensor.
    torch.testing.assert_close(sharded.weight, plain.weight)
    assert not torch.allclose(sharded.weight, plain.weight + 1)


def _torchs_clip(sharded, max_norm, norm_type):
    return nn.utils.clip_grad_norm_(sharded.parameters(), max_norm, norm_type)


def _own_clip(sharded, max_norm, norm_type):
    return sharded.clip_grad_norm_(max_norm, norm_type)


@pairwise(
    clip=[_torchs_clip, _own_clip],
    norm_type=[1.0, 2.0, 3.0, math.inf],
    found=[math.nan, -math.inf],
)
@on_ranks()
def test_a_nonfinite_element_of_one_shard_is_in_all_ranks_norms(rank, found, norm_type, clip):
    """Sets a gradient's first or last element, which one rank holds."""
    for where, index in (("weight", 0), ("bias", 4)):
        plain, sharded = _nets()
        whole, part = (net.get_parameter(where) for net in (plain, sharded))
        whole.grad.view(-1)[index] = found
        local, held = part.grad.to_local(), index - brigade._C.offset_of(part)
        if 0 <= held < local.numel():
            local[held] = found
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        norm = clip(sharded, 1.0, norm_type)
        assert str(norm.item()) == str(expected.item())
        if math.isinf(expected):  # clipped gradients equal torch's
            for w, p in zip(plain.parameters(), sharded.parameters(), strict=True):
                gradient = p.grad.full_tensor()
                torch.testing.assert_close(gradient, w.grad, rtol=0, atol=0, equal_nan=True)


class _Lamb(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.5})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["first"] / (state["second"].sqrt() + 1e-6)
                update = update + (group["weight_decay"] if p.dim() >= 2 else 0) * p
                ratio = p.norm() / (update.norm() + 1e-6)
                p.add_(update * ratio, alpha=-group["lr"])


@on_ranks()
def test_custom_optimizers_step_as_in_one_process(rank):
    pair = Pair(rank, lambda parameters, lr, foreach: _Lamb(parameters, lr))
    for step in range(3):
        pair.step(step)
    found = pair.model.full_state_dict()
    for key, value in pair.plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


# torch's optimizers that multiply, flatten or index rows of matrices.
_OF_WHOLES = [name for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name)]


@on_ranks()
def test_optimizers_that_need_unsharded_parameters(rank):
    """They step unsharded replicas. For shards they raise before any change."""
    for name in _OF_WHOLES:
        plain = nn.Linear(3, 4, bias=False)
        sharded, replica = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        for net in (sharded, replica):
            net.load_state_dict(plain.state_dict())
        for net in (plain, brigade.fully_shard(sharded), replicated(replica)):
            net(torch.ones(2, 3)).square().sum().backward()
        optimizers = {n: getattr(torch.optim, name)(n.parameters()) for n in (sharded, replica)}
        before = sharded.full_state_dict()["weight"]
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            optimizers[sharded].step(lambda: torch.zeros(()))
        assert torch.equal(sharded.full_state_dict()["weight"], before)
        for net, optimizer in ((plain, None), (replica, optimizers[replica])):
            optimizer = optimizer or getattr(torch.optim, name)(net.parameters())
            optimizer.step(lambda: torch.zeros(()))
        assert torch.equal(replica.full_state_dict()["weight"], plain.weight)


@on_ranks()
def test_a_shard_of_a_deleted_module_is_an_error(rank):
    part = _nets()[1].weight
    gc.collect()
    part.detach().mul_(2)
    for take in (lambda: part.detach().norm(), lambda: part.grad.sum(), part.full_tensor):
        with pytest.raises(RuntimeError, match="Keep the mod"):
            take()


class Complex(nn.Module):
    """A complex matrix, and a bias of one element, which one rank holds."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(9, dtype=torch.float32)
        self.weight = nn.Parameter(torch.complex(numbers - 4, 3 - numbers).view(3, 3))
        self.bias = nn.Parameter(torch.full((1,), 2 - 1j, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.weight + self.bias


def _batch(rank):
    return torch.complex(torch.full((2, 3), rank + 1.0), torch.full((2, 3), rank - 1.0))


def _clips(rank, p, way):
    plain = Complex()
    sum((plain(_batch(r)).abs().square().sum() for r in range(3)), start=0.0).div(3).backward()
    model = brigade.fully_shard(copy.deepcopy(plain))
    model(_batch(rank)).abs().square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, p)
    if way == "own":
        found = model.clip_grad_norm_(1.0, p)
    else:
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, p, foreach=way == "foreach")
    assert not found.is_complex()
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                parameter.sub_(parameter.grad)
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
@on_ranks(3)
def test_norms_equal_one_process(rank, p):
    for way in ("own", "foreach", "each"):
        _clips(rank, p, way)


@on_ranks()
def test_a_norm_covers_two_roots(rank):
    whole = [nn.Linear(4, 4), nn.Linear(4, 2)]
    for layer in whole:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    sharded = [brigade.fully_shard(copy.deepcopy(layer)) for layer in whole]
    norms = []
    for first, second in (whole, sharded):
        second(first(torch.ones(2, 4))).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1))
    torch.testing.assert_close(norms[1], norms[0], check_dtype=False)


# ---- Clipping with some parameters ignored by fully_shard.


def _partly_sharded():
    """Returns an unsharded net, and one whose last layer is not sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = copy.deepcopy(plain)
    brigade.fully_shard(model, ignored_params=set(model[2].parameters()))
    return plain, model


def _input_of(rank):
    return torch.linspace(-3, 5, 8).view(2, 4) * (rank + 1)


def _backward(plain, model, rank):
    """Runs backward; averages the gradients of ignored parameters explicitly."""
    backward_of_all(plain, 2, lambda net, r: loss_of(net, _input_of(r)))
    model(_input_of(rank)).square().sum().backward()
    for parameter in model[2].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.mul_(1 / 2)


def _split(model):
    ignored = list(model[2].parameters())
    return [p for p in model.parameters() if all(p is not i for i in ignored)], ignored


@on_ranks()
def test_torchs_function_rejects_sharded_and_ignored_parameters_together(rank):
    plain, model = _partly_sharded()
    _backward(plain, model, rank)
    before = [_local(p.grad).clone() for p in model.parameters()]
    with pytest.raises(
        NotImplementedError, match=r"(?s)sharded gradients only or none.*Clip the others separately"
    ):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    after = [_local(p.grad) for p in model.parameters()]
    assert all(map(torch.equal, after, before))


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, brigade.TensorShard) else tensor


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@on_ranks()
def test_separate_norms_combine_to_a_total_norm(rank, norm_type):
    """Follows the error's remedy: clips both by the total of separate norms."""
    plain, model = _partly_sharded()
    _backward(plain, model, rank)
    kinds = _split(model)
    norms = [nn.utils.get_total_norm([p.grad for p in kind], norm_type) for kind in kinds]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    torch.testing.assert_close(total, expected)
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, 0.5, total)
    for whole, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        gradient = whole.grad
        if isinstance(parameter, brigade.ShardedParameter):
            gradient = own_shard(parameter, gradient)
        torch.testing.assert_close(_local(parameter.grad), gradient)


@on_ranks()
def test_the_models_own_method_clips_its_units_only(rank):
    plain, model = _partly_sharded()
    _backward(plain, model, rank)
    sharded, ignored = _split(model)
    before = [p.grad.clone() for p in ignored]
    expected = nn.utils.get_total_norm([p.grad for p in plain[0].parameters()])
    found = model.clip_grad_norm_(0.5)
    torch.testing.assert_close(found, expected.to(found.dtype))
    torch.testing.assert_close(
        nn.utils.get_total_norm([p.grad for p in sharded]), torch.tensor(0.5), rtol=1e-4, atol=0
    )
    for parameter, gradient in zip(ignored, before, strict=True):
        assert torch.equal(parameter.grad, gradient)


# ---- Optimizers with foreach implementations.


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks()
def test_lists_step_as_single_tensors(rank, name):
    cls, options = OPTIMIZERS[name]
    found = []
    for foreach in (False, True):
        model = shard_blocks(make_net())
        optimizer = cls(model.parameters(), lr=0.01, foreach=foreach, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        found.append([p.full_tensor().detach() for p in model.parameters()])
    for one_by_one, together in zip(*found, strict=True):
        torch.testing.assert_close(together, one_by_one)
