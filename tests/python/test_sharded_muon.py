"""torch.optim.Muon multiplies whole matrices: a step is refused, and nothing is changed."""

import pytest
import torch
from torch import nn

import brigade

from ranks import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def _refused(rank):
    model = nn.Linear(6, 4, bias=False)
    brigade.fully_shard(model)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    before = model.weight.to_local().clone()
    with pytest.raises(NotImplementedError, match="full_tensor"):
        optimizer.step()
    assert torch.equal(model.weight.to_local(), before)


def test_a_step_names_the_remedy():
    run_ranks(_refused)
