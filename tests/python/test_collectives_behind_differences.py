"""Collectives behind a forward in which one rank has needed a unit once more than the other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks

pytestmark = pytest.mark.slow


class Repeats(nn.Module):
    """A layer, as often as the call says, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = self.layer(x)
        return self.head(x)


def _sharded():
    torch.manual_seed(0)
    model = Repeats()
    whole = model.layer.weight.detach().clone()
    brigade.fully_shard(model.layer)
    return brigade.fully_shard(model), whole


COLLECTIVES = {
    "full_tensor": lambda model, folder: model.layer.weight.full_tensor(),
    "save_checkpoint": lambda model, folder: brigade.save_checkpoint(f"{folder}/parts", model),
    "save_whole": lambda model, folder: brigade.save_whole(model, f"{folder}/whole.safetensors"),
    "full_state_dict": lambda model, folder: model.full_state_dict(),
    "norm": lambda model, folder: model.layer.weight.detach().norm(),
}


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
@on_ranks(timeout_s=20)
def test_ranks_meet_where_they_come_to_one(rank, collective, with_gradients, tmp_path):
    folder = str(tmp_path)
    model, whole = _sharded()
    with torch.set_grad_enabled(with_gradients):
        loss = model(torch.ones(2, 4), 1 + rank).sum()
    COLLECTIVES[collective](model, folder)
    assert torch.equal(model.layer.weight.full_tensor(), whole)
    if with_gradients:
        loss.backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
