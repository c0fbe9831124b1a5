"""Activation checkpoints inside of a unit's forward.

What they compute again in backward is to see whole parameters, as the forward did. A
checkpoint around a unit runs the unit's own hooks again, and needs nothing of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed._composable.checkpoint_activation
import torch.utils.checkpoint

from brigade._sharded_units import running_units, shown_whole

_torch = torch.utils.checkpoint
# What checkpoint() calls without reentrant autograd, in this version of torch or another,
# and who else has it under that name.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_OTHERS = (torch.distributed._composable.checkpoint_activation,)


@functools.cache
def teach_torch_checkpoints() -> None:
    """From here on torch.utils.checkpoint is right inside of units, too."""
    for name in _GENERATORS:
        for module in (_torch, *_OTHERS):
            if hasattr(module, name):
                setattr(module, name, _generating(getattr(module, name)))
    of_torch = _torch.CheckpointFunction

    class CheckpointFunction(of_torch):
        @classmethod
        def apply(cls, function: Callable, *args: Any) -> Any:
            return of_torch.apply(_with_running_units(function), *args)

    _torch.CheckpointFunction = CheckpointFunction


def _generating(generator: Callable) -> Callable:
    @functools.wraps(generator)
    def with_units(function: Callable, *args: Any, **options: Any) -> Iterator[None]:
        return generator(_with_running_units(function), *args, **options)

    return with_units


def _with_running_units(function: Callable) -> Callable:
    """The same, which in a backward sees those units whole whose forward it is called in."""
    units = running_units()
    if not units:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(shown_whole(unit))
            return function(*args, **kwargs)

    return again
