"""Small models and training loops, run with brigade's and with torch's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import brigade

CLASSES = {"brigade": brigade.DistributedDataParallel, "torch": TorchDistributedDataParallel}


class Perceptron(nn.Module):
    """Three layers and a batch norm, whose buffers must be broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 9),
            nn.BatchNorm1d(9),
            nn.ReLU(),
            nn.Linear(9, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def inputs(rank: int, steps: int, shape: tuple[int, ...] = (4, 6)) -> list[torch.Tensor]:
    """Returns data that differ by rank and step, and are equal in each run."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def train(
    wrapped: nn.Module, batches: list[Any], *, set_to_none: bool = True
) -> list[torch.Tensor | None]:
    """Runs SGD steps. Returns copies of each step's gradients, then the final state."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1 / 128, momentum=0.5)
    seen: list[torch.Tensor | None] = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(wrapped(batch)).backward()
        seen += gradients_of(wrapped)
        optimizer.step()
    return seen + [tensor.clone() for tensor in wrapped.state_dict().values()]


def loss_of(output: Any) -> torch.Tensor:
    tensors = torch.utils._pytree.tree_leaves(output)
    return sum(t.abs().square().sum() for t in tensors if torch.is_tensor(t) and t.requires_grad)


def gradients_of(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def completed_future(value: Any) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(value)
    return future


def expect_torchs_bits(run: Callable[[Callable[..., nn.Module]], list[Any]]) -> None:
    """Calls `run` with each class and the same seed; expects tensors with equal bits."""
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        results[name] = run(wrapper)
    assert_same_bits(results)


def both(
    make_model: Callable[[], nn.Module],
    batches: list[Any],
    prepare: Callable[[nn.Module], None] = lambda wrapped: None,
    *,
    set_to_none: bool = True,
    **options: Any,
) -> dict[str, list[torch.Tensor | None]]:
    """Trains the same model with each class and the same seed."""
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(make_model(), **options)
        prepare(wrapped)
        results[name] = train(wrapped, batches, set_to_none=set_to_none)
    return results


def assert_same_bits(results: dict[str, list[torch.Tensor | None]]) -> None:
    assert_equal(results["brigade"], results["torch"])


def assert_equal(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> None:
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert a is b, f"tensor {i}: {a} and {b}"
            continue
        a, b = (t.coalesce().to_dense() if t.is_sparse else t for t in (a, b))
        assert a.dtype == b.dtype and torch.equal(a, b), f"tensor {i}: {a} and {b}"
