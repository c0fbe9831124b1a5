"""Units that are not sharded: every rank holds all parameters."""

import pytest
import torch
from torch import nn

from ranks import on_ranks
from sharded_training import Pair, replicated


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_equals_one_process(rank, world_size):
    pair = Pair(rank, torch.optim.AdamW, shard=replicated)
    plain, model = pair.plain, pair.model
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert all(p.shape == shapes[name] for name, p in model.named_parameters())
    for step in range(3):
        pair.step(step)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad.full_tensor())
    pair.expect_equal()
    statistics = model.sharding_statistics()
    assert statistics["sent_by_gathers"] == 0
    assert statistics["learned_segments"] <= 2
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(norm, expected)
