"""A parameter without elements has a gradient, an empty one, when any rank used it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from training import CLASSES

CAPS = {"shared_bucket": {}, "bucket_of_its_own": {"bucket_cap_mb": 1e-6}}
VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x, uses_empty):
        loss = (self.a * x).sum() + (self.b * x).sum()
        return loss + self.empty.sum() if uses_empty else loss


def _train(rank, kind, options, uses_of_steps):
    wrapped = CLASSES[kind](WithEmpty(), **options)
    for step, users in enumerate(uses_of_steps):
        wrapped.zero_grad()
        xs = [4.0 * (step + 1) + 16 * r for r in range(dist.get_world_size())]
        wrapped(torch.tensor(xs[rank]), rank in users).backward()
        gradients = [p.grad for p in wrapped.parameters()]
        average = sum(xs) / len(xs)
        assert torch.equal(gradients[0], torch.full((2,), average)), (step, gradients)
        assert torch.equal(gradients[2], torch.full((3,), average)), (step, gradients)
        if users:
            assert gradients[1] is not None, step
            assert gradients[1].shape == (0, 3) and gradients[1].dtype == torch.float32
        else:
            assert gradients[1] is None, step


@VIEWS
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("kind", CLASSES)
def test_an_empty_parameter_that_some_ranks_use(kind, caps, views):
    options = {
        **CAPS[caps],
        "find_unused_parameters": True,
        "gradient_as_bucket_view": views,
    }
    uses_of_steps = [(0, 1), (1,), (0,), (), (1,), (0, 1)]
    run_ranks(_train, kind, options, uses_of_steps, timeout_s=20, deadline_s=60)


@VIEWS
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("kind", CLASSES)
def test_an_empty_parameter_that_one_rank_uses_in_a_static_graph(kind, caps, views):
    options = {**CAPS[caps], "static_graph": True, "gradient_as_bucket_view": views}
    run_ranks(_train, kind, options, [(1,)] * 4, timeout_s=20, deadline_s=60)
