"""A workload for brigade.bench: what decides on bucket sizes, and nothing else.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench examples/python/bench_mlp.py:mlp

A training program of one's own needs such a function too: it makes the module as
training does, and a function that runs forward on this rank's data. Every rank
makes the same module; the data may be the same batch at every step, so that
loading it isn't timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 512
BATCH_SIZE = 64

Loss = Callable[[nn.Module], torch.Tensor]


def mlp() -> tuple[nn.Module, Loss]:
    """Eight layers of equal size."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), mean_square


def mlp_with_bucket_views() -> tuple[nn.Module, Loss, dict]:
    """The same, trained with an option of DistributedDataParallel."""
    module, loss = mlp()
    return module, loss, {"gradient_as_bucket_view": True, "name": "MLP, bucket views"}


def mean_square(model: nn.Module) -> torch.Tensor:
    """A loss on this rank's batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(BATCH_SIZE, WIDTH, generator=generator)).square().mean()
