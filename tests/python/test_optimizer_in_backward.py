"""Optimizers that step in backward, alone and with a comm hook."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward

import brigade

from cases import pairwise
from exact_training import MODES, Toy, UserError, weights_of
from ranks import on_ranks

OPTIONS = {"lr": 0.25, "momentum": 0.5}


def _own_average(state, bucket):
    """A comm hook that returns its own tensor, not the bucket's buffer."""
    average = bucket.buffer().clone().div_(dist.get_world_size())
    return dist.all_reduce(average, async_op=True).get_future().then(lambda f: f.value()[0])


HOOKS = {"none": None, "fp16": default_hooks.fp16_compress_hook, "own": _own_average}


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
    net[2].bias.requires_grad_(False)
    return net


def _wrap(net, hook, **options):
    model = brigade.DistributedDataParallel(net, bucket_cap_mb=0.00005, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


@pairwise(
    stepped=[7, 3],
    views=[False, True],
    hook=HOOKS,
)
@on_ranks()
def test_steps_in_backward_equal_steps_after_it(rank, hook, views, stepped):
    hook = HOOKS[hook]
    net, expected = _net(), _net()
    some = [p for p in list(net.parameters())[:stepped] if p.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, some, OPTIONS)
    model = _wrap(net, hook, gradient_as_bucket_view=views)
    reference = _wrap(expected, hook, gradient_as_bucket_view=views)
    trained = [p for p in list(expected.parameters())[:stepped] if p.requires_grad]
    optimizer = torch.optim.SGD(trained, **OPTIONS)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(6, 4)
        for parameter in [*net.parameters(), *expected.parameters()]:
            parameter.grad = None
        if step == 2:
            with model.no_sync(), reference.no_sync():
                model(x + 1).square().sum().backward()
                reference(x + 1).square().sum().backward()
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        optimizer.step()
        for i, (p, q) in enumerate(zip(net.parameters(), expected.parameters(), strict=True)):
            assert torch.equal(p, q), (step, i)
            if i < stepped:
                assert p.grad is None, (step, i)
            elif p.requires_grad:
                assert torch.equal(p.grad, q.grad), (step, i)


# -------------------------------------------------- gradients that need no wait


# ----------------------------------------------------------------------- failures


def _averages(iteration, world_size=2):
    by_rank = [weights_of(rank, iteration) for rank in range(world_size)]
    return [sum(each) / world_size for each in zip(*by_rank, strict=True)]


def _expect_exact_step(model, rank, iteration):
    expected = [
        p.detach() - 0.25 * average
        for p, average in zip(model.parameters(), _averages(iteration), strict=True)
    ]
    model(weights_of(rank, iteration)).backward()
    for p, q in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p, q), (iteration, p, q)
        assert p.grad is None


def _assert_equal_on_ranks(model):
    for parameter in model.parameters():
        by_rank = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, parameter.detach())
        assert all(torch.equal(each, by_rank[0]) for each in by_rank)


@pairwise(
    which=[0, 1],  # after other buckets are launched
    failing=[[0, 1], [1]],
    mode=["plain", "views", "find_unused"],
    hook=["none", "own"],
)
@on_ranks()
def test_gradients_of_a_failed_backward_are_discarded(rank, mode, hook, failing, which):
    net = Toy()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.25})
    model = _wrap(net, HOOKS[hook], **MODES[mode])
    fails = False

    def raise_sometimes(gradient):
        if fails:
            raise UserError("in backward")
        return gradient

    list(net.parameters())[which].register_hook(raise_sometimes)
    for iteration in range(0, 8, 4):
        for i in range(2):
            _expect_exact_step(model, rank, iteration + i)
        with model.no_sync():
            model(weights_of(rank, iteration)).backward()  # part of the failed iteration
        fails = rank in failing
        kind, text = (UserError, "in backward") if fails else (RuntimeError, "rank 1 failed")
        with pytest.raises(kind, match=text):
            model(weights_of(rank, iteration + 2)).backward()
        fails = False
        _assert_equal_on_ranks(net)
        _expect_exact_step(model, rank, iteration + 3)


# ------------------------------------------------------------------- accumulation


# --------------------------------------------------------------------------- join


@pytest.mark.parametrize("hook", ["none", "own"])
@on_ranks()
def test_joined_ranks_do_not_step_and_end_with_the_others_parameters(rank, hook):
    results = []
    for in_backward in (True, False):
        net = Toy()
        if in_backward:
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.25})
        model = _wrap(net, HOOKS[hook])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
        with model.join():
            for iteration in range(2 + 2 * rank):
                net.zero_grad()
                model(weights_of(rank, iteration)).backward()
                optimizer.step()  # finds no gradients, because backward has stepped
        _assert_equal_on_ranks(net)
        results.append([p.detach().clone() for p in net.parameters()])
    for stepped, expected in zip(*results, strict=True):
        assert torch.equal(stepped, expected)
