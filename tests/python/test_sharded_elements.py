"""What is computed of parts element by element: parts again, whose totals are of the whole."""

import gc

import pytest
import torch
from torch import nn

import brigade

from ranks import run_ranks
from sharded_training import batch_of, expect_equal, make_net, shard_blocks, step_of_all

pytestmark = pytest.mark.slow


def _make_pair():
    """A network that each rank holds whole, and one sharded, with the same gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    sharded.load_state_dict(plain.state_dict())
    brigade.fully_shard(sharded[2])
    brigade.fully_shard(sharded)
    x = torch.arange(8.0, dtype=torch.double).view(2, 4) / 8
    for net in (plain, sharded):
        net(x).pow(2).sum().backward()
    return plain, sharded


# Each gives a number, or a truth.
_TOTALS = {
    "scaled": lambda t: (2 * t - 1).norm(),
    "squares": lambda t: (t * t).sum(),
    "powers": lambda t: t.pow(2).mean().sqrt(),
    "largest": lambda t: t.abs().max(),
    "flat": lambda t: t.flatten().norm(),
    "reshaped": lambda t: t.reshape(-1).norm() + t.view(-1).norm(),
    "flat product": lambda t: t.flatten().dot((2 * t).flatten()),
    "finite": lambda t: torch.isfinite(t).all(),
    "positive": lambda t: (t > 0).any(),
    "counted": lambda t: (t > 0.01).sum(),
    "clamped": lambda t: torch.clamp(t, -0.1, 0.1).sum(),
    "chosen": lambda t: torch.where(t > 0, t, torch.zeros_like(t)).sum(),
    "cast": lambda t: t.float().mul(3).norm(),
    "of a list": lambda t: torch._foreach_norm(torch._foreach_mul([t], 2.0))[0],
}


def _takes(rank):
    plain, sharded = _make_pair()
    with torch.no_grad():
        for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
            for w, p in ((whole, part), (whole.grad, part.grad)):
                for name, take in _TOTALS.items():
                    found, expected = take(p), take(w)
                    assert found.dtype == expected.dtype, name
                    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_totals_are_of_the_whole(world_size):
    run_ranks(_takes, world_size=world_size)


def _sees_nan(rank):
    found = []
    _, sharded = _make_pair()
    for part in sharded.parameters():
        if rank == 1 and part.numel() > 0:
            part.grad.to_local().view(-1)[0] = float("nan")
        with torch.no_grad():
            found.append((bool(torch.isfinite(part.grad).all()), part.grad.isnan().any().item()))
    return found


def test_a_nan_in_one_ranks_part_is_seen_by_all():
    first, second = run_ranks(_sees_nan)
    assert first == second
    assert (False, True) in first


def _decay_matrices(net):
    """The usual idiom, in either spelling."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


class _Lamb(torch.optim.Optimizer):
    """Steps by a ratio of norms: of the parameter, and of its update."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})

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
                update = update + group["weight_decay"] * p
                ratio = p.norm() / (update.norm() + 1e-6)
                p.add_(update * ratio, alpha=-group["lr"])


_OPTIMIZERS = {
    "decay": lambda net: torch.optim.AdamW(_decay_matrices(net), lr=0.1, foreach=False),
    "lamb": lambda net: _Lamb(_decay_matrices(net)),
}


def _trains(rank, name):
    plain, model = make_net(), shard_blocks(make_net())
    optimizers = [_OPTIMIZERS[name](net) for net in (plain, model)]
    for group, like in zip(optimizers[1].param_groups, optimizers[0].param_groups, strict=True):
        assert len(group["params"]) == len(like["params"])
    for step in range(3):
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizers[1].step()
    if name == "decay":
        return expect_equal(model, plain)
    found = model.full_state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_of_ones_own_step_as_in_one_process(name):
    run_ranks(_trains, name)


def _other_ways(rank):
    plain, sharded = _make_pair()
    for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert (part.dim(), part.ndim, part.grad.ndimension()) == (whole.dim(),) * 3
        assert isinstance(part.detach() * 2, brigade.TensorShard)
        kept = part.detach()
        assert kept.mul_(1) is kept
        with pytest.raises(NotImplementedError, match="has no gradient"):
            (part * part).sum()
        with torch.no_grad(), pytest.raises(NotImplementedError, match="_foreach_max"):
            torch._foreach_max([part])


def test_what_else_is_of_parts():
    run_ranks(_other_ways)


def _with_others(rank):
    """Whatever the part is on a rank: the whole, some of it, or nothing."""
    net = nn.Linear(4, 4)
    net.register_parameter("number", nn.Parameter(torch.tensor(3.0)))
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    plain = [p.detach().clone() for p in net.parameters()]
    brigade.fully_shard(net)
    with torch.no_grad():
        for whole, part in zip(plain, net.parameters(), strict=True):
            for number in (torch.ones(1), torch.full((), 2.0), torch.ones(1, 1, 1)):
                torch.testing.assert_close((part * number).norm(), (whole * number).norm())
            assert part.isnan().any().item() is False
            assert part.isfinite().all().item() is True
            with pytest.raises(NotImplementedError, match="as many elements"):
                part * torch.ones(4, 1)
        own = torch.ones_like(net.weight.to_local())
        assert isinstance(net.weight + own, brigade.TensorShard)
        torch.mul(net.weight, 2, out=own)
        assert not isinstance(own, brigade.TensorShard)


def test_parts_meet_numbers_and_elements_of_their_own():
    run_ranks(_with_others)


def _outlives_its_module(rank):
    part = next(iter(_make_pair()[1].parameters()))
    gc.collect()
    part.detach().mul_(2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Keep the module"):
        part.norm()
    with torch.no_grad(), pytest.raises(RuntimeError, match="Keep the module"):
        (part > 0).any()
    assert torch.isfinite(part.to_local()).all()


def test_a_part_whose_module_is_gone_says_so():
    run_ranks(_outlives_its_module)
