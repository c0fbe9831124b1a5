"""A frozen wrapped model inside another's step: nothing of it is reduced."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks
from training import CLASSES

TIMEOUT_S = 20  # of the group: ranks that wait for different things fail early
MODES = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "find_unused_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "buckets": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6},
}
# Ranks whose generator's loss goes through the discriminator, in each step.
JUDGED = [(0, 1), (0,), (1,), (), (0, 1), (0,), (1,)]


class Scale(nn.Module):
    """a b x."""

    def __init__(self, value) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([value]))
        self.b = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x):
        return x * self.a * self.b


def _x_of_ranks(step):
    return [4.0 * (step + 1) * (rank + 1) for rank in range(dist.get_world_size())]


def _expect(wrapped, values, step):
    for parameter, of_ranks in zip(wrapped.parameters(), values, strict=True):
        average = torch.tensor([sum(of_ranks) / len(of_ranks)])
        assert torch.equal(parameter.grad, average), (step, parameter.grad, average)


def _generator_step(generator, discriminator, rank, step, judged, forward_everywhere):
    discriminator.requires_grad_(False)
    generator.zero_grad()
    xs = _x_of_ranks(step)
    fake = generator(torch.tensor([xs[rank]]))
    loss = fake.sum()
    if rank in judged or forward_everywhere:
        verdict = discriminator(fake)
        if rank in judged:
            loss = loss + verdict.sum()
    loss.backward()
    # d(G + D G): 1 or 1 + 3 times x, by a = 2 and by b = 1.
    factors = [1.0 + 3.0 * (r in judged) for r in range(len(xs))]
    terms = [factor * x for factor, x in zip(factors, xs, strict=True)]
    _expect(generator, [terms, [2 * term for term in terms]], step)
    assert all(p.grad is None for p in discriminator.parameters())


def _discriminator_step(generator, discriminator, rank, step):
    discriminator.requires_grad_(True)
    discriminator.zero_grad()
    xs = _x_of_ranks(step)
    with torch.no_grad():
        fake = generator(torch.tensor([xs[rank]]))
    discriminator(fake).sum().backward()
    _expect(discriminator, [[2 * x for x in xs], [6 * x for x in xs]], step)
    discriminator.zero_grad()


# Without find_unused_parameters the forward that rebuilds buckets is everybody's.
@pytest.mark.parametrize(
    "mode, forward_everywhere",
    [(mode, True) for mode in MODES] + [(mode, False) for mode in MODES if mode != "plain"],
)
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(timeout_s=TIMEOUT_S)
def test_a_frozen_discriminator_is_passed_by_some_ranks_only(rank, kind, mode, forward_everywhere):
    wrapper = CLASSES[kind]
    generator = wrapper(Scale(2.0))
    discriminator = wrapper(Scale(3.0), **MODES[mode])
    for step, judged in enumerate(JUDGED):
        _generator_step(generator, discriminator, rank, step, judged, forward_everywhere)
        _discriminator_step(generator, discriminator, rank, step)
