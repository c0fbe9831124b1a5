"""A workload for `brigade bench`, which times training steps with several bucket sizes.

    torchrun --standalone --nproc-per-node 2 -m brigade bench examples/python/bench_mlp.py:mlp

To sweep your own model, write such a function. It returns the module and a function that
computes the loss on this rank's data. All ranks must return the same module. Use one batch for
all steps, so that data loading is not timed.
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
    """The same MLP with an option of DistributedDataParallel and a name."""
    module, loss = mlp()
    return module, loss, {"gradient_as_bucket_view": True, "name": "MLP, bucket views"}


def mean_square(model: nn.Module) -> torch.Tensor:
    """Returns the loss on this rank's batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(BATCH_SIZE, WIDTH, generator=generator)).square().mean()
