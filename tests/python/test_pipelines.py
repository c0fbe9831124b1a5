"""Sharded stages of torch's pipeline schedules, also those that split the backward."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import brigade

from ranks import on_ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="earlier schedules reduce by fields of torch's own units"
)
_MICRO_BATCHES = 4


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def _make(num_stages):
    torch.manual_seed(0)
    return [_Stage().double() for _ in range(num_stages)]


def _loss(output, target):
    return (output - target).square().mean()


def _expected(num_stages, inputs, targets):
    """Returns the stages of one process with the gradients of all data-parallel ranks."""
    stages = _make(num_stages)
    for pairs in zip(inputs, targets, strict=True):
        for x, target in zip(*(part.chunk(_MICRO_BATCHES) for part in pairs), strict=True):
            for stage in stages:
                x = stage(x)
            (_loss(x, target) / _MICRO_BATCHES / len(inputs)).backward()
    return stages


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "kind", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@on_ranks(4)
def test_gradients_equal_one_process(rank, kind, deferred):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    make_schedule = getattr(schedules, f"Schedule{kind}")
    has_several = issubclass(make_schedule, schedules.PipelineScheduleMulti)
    if deferred and not has_several:
        return
    num_stages = 4 if has_several else 2
    is_v = kind in ("ZBVZeroBubble", "DualPipeV")
    mine = [place, 3 - place if is_v else place + 2] if has_several else [place]
    modules = _make(num_stages)
    for number in mine:
        brigade.fully_shard(modules[number].a, mesh=mesh["dp"])
        brigade.fully_shard(modules[number], mesh=mesh["dp"])
    stages = [
        PipelineStage(modules[n], n, num_stages, torch.device("cpu"), group=mesh["pp"].get_group())
        for n in mine
    ]
    options = {"defer_reduce_grad_wait": True} if deferred else {}
    schedule = make_schedule(
        stages if has_several else stages[0],
        n_microbatches=_MICRO_BATCHES,
        loss_fn=_loss,
        **options,
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, 2, 8, 6, generator=generator, dtype=torch.double)
        for number in mine:
            modules[number].zero_grad()
        schedule.step(
            *([inputs[data_rank]] if 0 in mine else []),
            **({"target": targets[data_rank], "losses": []} if num_stages - 1 in mine else {}),
        )
        expected = _expected(num_stages, inputs, targets)
        for number in mine:
            for found, right in zip(
                modules[number].parameters(), expected[number].parameters(), strict=True
            ):
                torch.testing.assert_close(found.grad.full_tensor(), right.grad)
