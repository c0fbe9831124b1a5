"""Optimizers that step in backward, alone and behind a comm hook."""

import contextlib

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
    """Returns other memory than the bucket's."""
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
def test_steps_in_backward_are_those_after_it(rank, hook, views, stepped):
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
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        optimizer.step()
        for i, (p, q) in enumerate(zip(net.parameters(), expected.parameters(), strict=True)):
            assert torch.equal(p, q), (step, i)
            if i < stepped:
                assert p.grad is None, (step, i)
            elif p.requires_grad:
                assert torch.equal(p.grad, q.grad), (step, i)


@on_ranks()
def test_a_second_hook_is_refused(rank):
    net = nn.Linear(4, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), OPTIONS)
    model = _wrap(net, default_hooks.allreduce_hook)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="allreduce_hook already"):
        model.register_comm_hook(None, _own_average)


# ------------------------------------------------------------ what is not waited for


@on_ranks(1)
def test_a_hook_whose_result_comes_with_a_later_bucket_is_not_waited_for(rank):
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.25})
    open_futures = []

    def hook(state, bucket):
        open_futures.append((torch.futures.Future(), bucket.buffer()))
        future = open_futures[-1][0]
        if bucket.is_last():
            for each, buffer in open_futures:
                each.set_result(buffer)
            open_futures.clear()
        return future

    model = _wrap(net, hook)
    for step in range(3):  # one bucket first, then two
        before = [p.item() for p in net.parameters()]
        model(torch.ones(1, 1)).sum().backward()
        assert net[1].weight.item() == before[1] - 0.25 * before[0], step
        assert net[0].weight.item() == before[0] - 0.25 * before[1], step


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
    which=[0, 1],  # after others have been launched
    failing=[[0, 1], [1]],
    mode=["plain", "views", "find_unused"],
    hook=["none", "own"],
)
@on_ranks()
def test_gradients_of_a_backward_that_failed_are_not_added_to_the_next(
    rank, mode, hook, failing, which
):
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
            model(weights_of(rank, iteration)).backward()  # goes with what failed
        fails = rank in failing
        kind, text = (UserError, "in backward") if fails else (RuntimeError, "rank 1 failed")
        with pytest.raises(kind, match=text):
            model(weights_of(rank, iteration + 2)).backward()
        fails = False
        _assert_equal_on_ranks(net)
        _expect_exact_step(model, rank, iteration + 3)


class FailingSGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if FailingSGD.fails:
            raise UserError("no step")
        return super().step(closure)


@pytest.mark.parametrize("hook", ["none", "own"])
@on_ranks()
def test_a_step_that_fails_ends_backward_and_the_next_one_is_exact(rank, hook):
    net = Toy()
    _apply_optimizer_in_backward(FailingSGD, net.parameters(), {"lr": 0.25})
    model = _wrap(net, HOOKS[hook])
    _expect_exact_step(model, rank, 0)
    FailingSGD.fails = True
    with pytest.raises(RuntimeError, match="no step"):
        model(weights_of(rank, 1)).backward()
    FailingSGD.fails = False
    _assert_equal_on_ranks(net)
    _expect_exact_step(model, rank, 2)


# ------------------------------------------------------------------- accumulation


@on_ranks()
def test_gradients_accumulated_under_no_sync_are_stepped_with_the_next(rank):
    net = Toy()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.25})
    model = _wrap(net, None)
    expected = [
        p.detach() - 0.25 * (a + b)
        for p, a, b in zip(net.parameters(), _averages(0), _averages(1), strict=True)
    ]
    for iteration in range(2):
        with model.no_sync() if iteration == 0 else contextlib.nullcontext():
            model(weights_of(rank, iteration)).backward()
    for p, q in zip(net.parameters(), expected, strict=True):
        assert torch.equal(p, q)
        assert p.grad is None


# --------------------------------------------------------------------------- join


@pytest.mark.parametrize("divide_by_initial", [False, True])
@pytest.mark.parametrize("hook", ["none", "own"])
@on_ranks()
def test_ranks_that_have_joined_do_not_step_and_end_with_the_others_parameters(
    rank, hook, divide_by_initial
):
    results = []
    for in_backward in (True, False):
        net = Toy()
        if in_backward:
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.25})
        model = _wrap(net, HOOKS[hook])
        optimizer = None if in_backward else torch.optim.SGD(net.parameters(), lr=0.25)
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for iteration in range(2 + 2 * rank):
                net.zero_grad()
                model(weights_of(rank, iteration)).backward()
                if optimizer is not None:
                    optimizer.step()
        _assert_equal_on_ranks(net)
        results.append([p.detach().clone() for p in net.parameters()])
    for stepped, expected in zip(*results, strict=True):
        assert torch.equal(stepped, expected)
