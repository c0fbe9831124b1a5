"""Comm hooks run with grad mode and autocast off, whatever forward ran under."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks
from training import CLASSES

MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(timeout_s=20, deadline_s=60)
def test_hooks_see_neither_grad_mode_nor_autocast(rank, kind, mode):
    seen = []

    def hook(state, bucket):
        product = torch.ones(2, 2) @ torch.ones(2, 2)  # bfloat16 under autocast
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), product.dtype))
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    wrapped = CLASSES[kind](model, bucket_cap_mb=1e-6, **MODES[mode])
    wrapped.register_comm_hook(None, hook)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = wrapped(torch.ones(2, 3)).sum()
        loss.backward()
    assert len(seen) >= 4
    assert set(seen) == {(False, False, torch.float32)}, seen
