"""States of optimizers that are loaded as wholes, where parameters are parts, are refused.

As of a checkpoint that one process has written: a step would take other elements of them, or
fail, and a fused one would not say so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from brigade._sharded_reductions import are_whole
from brigade._sharded_tensors import ShardedParameter, TensorShard

_load_of_torch = torch.optim.Optimizer.load_state_dict


@functools.cache
def require_parts_of_optimizers() -> None:
    """From here on load_state_dict() of torch's optimizers raises, and loads nothing."""
    torch.optim.Optimizer.load_state_dict = _load


@functools.wraps(_load_of_torch)
def _load(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group, saved in zip(self.param_groups, state_dict.get("param_groups", ()), strict=False):
        for parameter, key in zip(group["params"], saved.get("params", ()), strict=False):
            if isinstance(parameter, ShardedParameter):
                _require_part(parameter, state_dict["state"].get(key, {}))
    _load_of_torch(self, state_dict)


def _require_part(parameter: ShardedParameter, state: dict[str, Any]) -> None:
    for name, value in state.items():
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, TensorShard)
        if not is_plain or value.dim() == 0 or value.shape == parameter.shape:
            continue  # which it is where a rank holds all: others have this rank's
        if value.shape != parameter.whole_shape:
            continue
        if not are_whole([parameter]):
            raise ValueError(
                f"load_state_dict: expected this rank's part of '{name}', found all of it, "
                f"{tuple(value.shape)}.\nLoad it by brigade.load_full_optimizer_state_dict(), or "
                "by torch's set_optimizer_state_dict() with full_state_dict=True."
            )
