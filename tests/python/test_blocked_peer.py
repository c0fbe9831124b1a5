"""One rank's backward raises while its peer is blocked in a collective of its own backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import quick
from exact_training import MODES, SumOverRanks, UserError
from ranks import run_ranks

HOUR_S = 3600  # of the group: nobody may wait for that


class AroundCollective(nn.Module):
    """Backward comes to b, then to the collective, then to a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))
        self.b = nn.Parameter(torch.tensor([5.0]))

    def forward(self, x):
        return SumOverRanks.apply(x * self.a) + x * self.b


def _expect_step(rank, wrapped, step):
    wrapped.zero_grad()
    xs = [12.0 * (step + 1) + 48 * r for r in range(dist.get_world_size())]
    wrapped(torch.tensor([xs[rank]])).sum().backward()
    average = torch.tensor([sum(xs) / len(xs)])
    assert torch.equal(wrapped.module.a.grad, len(xs) * average)
    assert torch.equal(wrapped.module.b.grad, average)


def _raises_before_the_collective(rank, options, steps_before, bucket_cap_mb):
    model = AroundCollective()
    wrapped = brigade.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)
    for step in range(steps_before):
        _expect_step(rank, wrapped, step)
    assert wrapped.reducer.can_continue()

    def fail(gradient):
        raise UserError("no room")

    if rank == 0:
        model.b.register_hook(fail)
    loss = wrapped(torch.tensor([4.0])).sum()
    with pytest.raises(UserError if rank == 0 else RuntimeError) as caught:
        loss.backward()
    assert not wrapped.reducer.can_continue()
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "steps_before"), quick([(2, 3), (3, 0)], [(3, 0)]))
@pytest.mark.parametrize("mode", quick(MODES, ["find_unused"]))
def test_both_raise_long_before_the_timeout(mode, steps_before, world_size):
    texts = run_ranks(
        _raises_before_the_collective,
        MODES[mode],
        steps_before,
        1e-6,
        world_size=world_size,
        timeout_s=HOUR_S,
        deadline_s=60,
    )
    assert texts[0] == "no room"


def test_both_raise_where_one_bucket_waits_for_what_lies_behind_the_collective():
    arguments = (MODES["plain"], 3, 25)
    texts = run_ranks(_raises_before_the_collective, *arguments, timeout_s=HOUR_S, deadline_s=60)
    assert texts[0] == "no room"
