"""Training whose gradients are known exactly, for tests of failures and recovery."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6}  # from the second iteration
SIZES = (2, 3, 5)
MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}
LEARNING_RATE = 1 / 64


class SumOverRanks(torch.autograd.Function):
    """Identity whose backward all-reduces the gradient, and waits."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class UserError(Exception):
    pass


class Toy(nn.Module):
    """Its gradients are its inputs. Later parameters get theirs first."""

    def __init__(self) -> None:
        super().__init__()
        self.p0, self.p1, self.p2 = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def forward(self, weights):
        pairs = zip(self.parameters(), weights, strict=True)
        return sum((p * w).sum() for p, w in pairs if w is not None)


def weights_of(rank: int, iteration: int) -> list[torch.Tensor | None]:
    """Returns weights that differ by rank, parameter, element and iteration.

    They are multiples of 12, so that averages over 2 and 3 ranks are exact.
    """
    return [
        12.0 * (torch.arange(size) + 7 * i + 30 * iteration + 100 * rank + 1)
        for i, size in enumerate(SIZES)
    ]


class Training:
    """SGD training of a Toy.

    Args:
        rank: Of this process.
        options: Arguments of the wrapper. With find_unused_parameters, rank 0 never uses p1.
        wrapper: The class that wraps the Toy.
    """

    def __init__(
        self,
        rank: int,
        options: dict[str, Any],
        wrapper: type[nn.Module] = brigade.DistributedDataParallel,
    ) -> None:
        self.rank = rank
        self.model = Toy()
        self.wrapped = wrapper(self.model, **ONE_BUCKET_EACH, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.iteration = 0
        self._rank_0_never = 1 if "find_unused_parameters" in options else None

    def backward(self, without: int | None = None) -> None:
        self.iteration += 1
        self.optimizer.zero_grad()
        weights = self._weights_of(self.rank)
        if without is not None:
            weights[without] = None
        self.wrapped(weights).backward()

    def expect_gradients(self, without: int | None = None) -> list[torch.Tensor | None]:
        """Runs backward, checks that gradients are the averages, and returns these."""
        self.backward(without)
        of_ranks = [self._weights_of(rank) for rank in range(dist.get_world_size())]
        averages = []
        for i, p in enumerate(self.model.parameters()):
            of_one = [w[i] for w in of_ranks if w[i] is not None]
            average = None if i == without else sum(of_one) / len(of_ranks)
            averages.append(average)
            is_right = p.grad is None if average is None else torch.equal(p.grad, average)
            assert is_right, (self.iteration, i, p.grad, average)
        return averages

    def expect_steps(self, steps: int, *, without: int | None = None) -> None:
        """Trains, and checks gradients, and that parameters are equal on all ranks."""
        for _ in range(steps):
            before = [p.detach().clone() for p in self.model.parameters()]
            averages = self.expect_gradients(without)
            self.optimizer.step()
            for p, old, average in zip(self.model.parameters(), before, averages, strict=True):
                if average is not None:
                    assert torch.equal(p.detach(), old - LEARNING_RATE * average)
        flat = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        all_flat = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(all_flat, flat)
        assert all(torch.equal(flat, other) for other in all_flat)

    def expect_failure(self, failing, error, own_text, peers_text=None) -> None:
        """Expects backward to raise: `error` on failing ranks, an error naming them on others."""
        iteration = self.iteration + 1
        if self.rank in failing:
            with pytest.raises(error, match=own_text) as caught:
                self.backward()
            assert not isinstance(caught.value, dist.DistBackendError), caught.value
            return
        with pytest.raises(dist.DistBackendError) as caught:
            self.backward()
        text = str(caught.value)
        ranks = ", ".join(str(rank) for rank in failing)
        who = f"rank {ranks}" if len(failing) == 1 else f"ranks {ranks}"
        start = f"Reducer: {who} failed in iteration {iteration} at launch "
        assert text.startswith(start), text
        assert re.search(peers_text or own_text, text), text

    def _weights_of(self, rank: int) -> list[torch.Tensor | None]:
        weights = weights_of(rank, self.iteration)
        if rank == 0 and self._rank_0_never is not None:
            weights[self._rank_0_never] = None
        return weights
