"""Optimizers that step in backward, behind any comm hook.

torch.distributed.optim gives parameters optimizers of their own
(`_apply_optimizer_in_backward`). Differs from torch's DistributedDataParallel,
which steps them behind its own all-reduce alone, and only where there is an
accelerator.
"""

from __future__ import annotations

import torch


def has_optimizer(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_in_backward_optimizers")


def take_over(parameter: torch.Tensor) -> None:
    """The parameter's optimizers no longer step by themselves."""
    from torch.distributed.optim import apply_optimizer_in_backward

    for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.get(parameter, []):
        handle.remove()


def step(parameter: torch.Tensor) -> None:
    """Steps the parameter's optimizers."""
    for optimizer in parameter._in_backward_optimizers:
        optimizer.step()
