"""Whether `.grad` holds the average of what the ranks' backwards computed."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from brigade.bench._ranks import Ranks

# Of the dtype's resolution, per rank: sums of other orders differ by less.
_TOLERANCE = 4


class GradientCheck:
    """Listens to one backward, as a context, and compares.

    Takes the gradients where autograd hands them out, before anything else sees
    them, so the loss need not be the same twice.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._local: dict[int, torch.Tensor] = {}
        self._hooks = []

    def __enter__(self) -> GradientCheck:
        for index, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_hook(self._listener(index)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def gradients_are_averages(self) -> bool:
        """Collective; the same answer on all ranks."""
        right = True
        for index, parameter in enumerate(self._parameters):
            right = self._is_average(index, parameter) and right
        return self._ranks.all_say(right)

    def _listener(self, index: int):
        def listen(gradient: torch.Tensor) -> None:
            gradient = gradient.detach().to_dense().clone()
            if index in self._local:
                gradient += self._local[index]
            self._local[index] = gradient

        return listen

    def _is_average(self, index: int, parameter: torch.Tensor) -> bool:
        local = self._local.get(index)
        if local is None:
            local = torch.zeros_like(parameter)
        average = self._ranks.average(local)
        size = self._ranks.average(local.abs())
        if parameter.grad is None:
            return not bool(size.any())
        bound = _TOLERANCE * self._ranks.size() * torch.finfo(average.dtype).eps * size
        return bool(((parameter.grad.to_dense() - average).abs() <= bound).all())
