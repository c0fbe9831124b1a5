"""Optimizers that step in backward, alone and behind a comm hook."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward

import brigade

from ranks import run_ranks

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


def _steps_as_after_backward(rank, hook, views, stepped):
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


@pytest.mark.parametrize("stepped", [7, 3])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_steps_in_backward_are_those_after_it(hook, views, stepped):
    run_ranks(_steps_as_after_backward, hook, views, stepped)


def _second_hook(rank):
    net = nn.Linear(4, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), OPTIONS)
    model = _wrap(net, default_hooks.allreduce_hook)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="allreduce_hook already"):
        model.register_comm_hook(None, _own_average)


def test_a_second_hook_is_refused():
    run_ranks(_second_hook)
