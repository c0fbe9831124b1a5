"""Functions that write a weight's gradient themselves and give autograd none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from training import CLASSES

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early


class WritesOwnGradient(torch.autograd.Function):
    """x times weight, as a fused kernel that adds to the weight's gradient in place."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        own = gradient * x
        if weight.grad is None:
            weight.grad = own
        else:
            weight.grad.add_(own)
        return gradient * weight, None


class Model(nn.Module):
    """Backward comes to the bias, then the fused weight, then the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 2.0))
        self.fused = nn.Parameter(torch.full((2,), 3.0))
        self.bias = nn.Parameter(torch.full((2,), 5.0))

    def forward(self, x, uses):
        h = x * self.scale
        for _ in range(uses):
            h = WritesOwnGradient.apply(h, self.fused)
        return h + self.bias * x


def _x(rank, step):
    return torch.tensor([4.0, 12.0]) * (step + 1) * (rank + 1)


def _averages(uses_of_ranks, step):
    """Gradients of scale, fused weight and bias of (2 x 3^n + 5) x, averaged."""
    terms = []
    for rank, uses in enumerate(uses_of_ranks):
        x = _x(rank, step)
        of_fused = uses * 2 * 3 ** max(uses - 1, 0) * x
        terms.append([3**uses * x, of_fused, x])
    return [sum(of_one) / len(terms) for of_one in zip(*terms, strict=True)]


def _train(rank, kind, options, set_to_none, uses_of_steps):
    wrapped = CLASSES[kind](Model(), **options)
    ranks = dist.get_world_size()
    for step, uses_of_ranks in enumerate(uses_of_steps):
        uses_of_ranks = uses_of_ranks[:ranks]
        wrapped.zero_grad(set_to_none=set_to_none)
        wrapped(_x(rank, step), uses_of_ranks[rank]).sum().backward()
        averages = _averages(uses_of_ranks, step)
        parameters = wrapped.module.named_parameters()
        for (name, parameter), average in zip(parameters, averages, strict=True):
            if name == "fused" and not any(uses_of_ranks) and parameter.grad is None:
                continue
            right = torch.equal(parameter.grad, average)
            assert right, (step, name, parameter.grad, average)


MODES = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "one_bucket_each": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6},
}
SET_TO_NONE = pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])


@SET_TO_NONE
@VIEWS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_gradient_that_a_function_wrote_itself_is_averaged(kind, mode, views, set_to_none):
    options = {**MODES[mode], "gradient_as_bucket_view": views}
    run_ranks(_train, kind, options, set_to_none, [(2, 2)] * 4, timeout_s=TIMEOUT_S)


@SET_TO_NONE
@VIEWS
@pytest.mark.parametrize("mode", ["find_unused", "one_bucket_each"])
@pytest.mark.parametrize("kind", CLASSES)
def test_ranks_differ_in_whether_the_function_ran(kind, mode, views, set_to_none):
    uses_of_steps = [(1, 1), (1, 0), (0, 1), (0, 0), (2, 1), (0, 2)]
    options = {**MODES[mode], "gradient_as_bucket_view": views}
    run_ranks(_train, kind, options, set_to_none, uses_of_steps, timeout_s=TIMEOUT_S)
