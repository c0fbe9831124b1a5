"""Times a workload's steps under several bucket sizes, by bucket_sweep/ in C++."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C
from brigade.bench._workload import Workload

DEFAULT_SIZES = ("each", "0.25", "1", "4", "10", "25", "100", "one")
_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


@dataclass(frozen=True)
class Figures:
    """What was measured; the first row has the default's buckets."""

    table: str  # with a recommendation below
    data: dict[str, Any]  # the same
    all_right: bool  # whether all gradients were the averages


def sweep(
    workload: Workload,
    sizes: Sequence[str] = DEFAULT_SIZES,
    rounds: int = 8,
    steps: int = 3,
    group: dist.ProcessGroup | None = None,
    after_visit: Callable[[str], None] = lambda label: None,
) -> Figures:
    """Times steps with the default's buckets and with those of each size.

    Collective. The module's parameters keep their values and end without
    gradients; its buffers may change, as in training.

    Args:
        workload: What is timed.
        sizes: MiB; or "each", a bucket for each parameter, or "one" for all. Those
            that give the same buckets are measured once.
        rounds: Visits to each size.
        steps: Timed in each visit.
        group: Default: the default group.
        after_visit: Called with a row's label, at most
            (sizes + 2) * (rounds + 1) times.

    Raises:
        ValueError: A size is none of these, `rounds` or `steps` is below 1, or the loss is
            not one number.
    """

    def loss() -> torch.Tensor:
        value = workload.loss(workload.module)
        _require_loss(value)
        return value

    table, data, all_right = _C.sweep(
        workload.title(),
        workload.parameters(),
        loss,
        list(sizes),
        dist.group.WORLD if group is None else group,
        rounds=rounds,
        steps=steps,
        after_visit=after_visit,
        **{name: workload.options.get(name, False) for name in _OPTIONS},
    )
    return Figures(table, json.loads(data), all_right)


def _require_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = (
            f"a tensor of {loss.numel()} elements, requires_grad={loss.requires_grad}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise ValueError(
            "brigade.bench: a workload's loss must return a tensor of one element that depends "
            f"on the module's parameters, it returned {found}.\nReturn the loss itself, without "
            "calling backward() or item()."
        )
