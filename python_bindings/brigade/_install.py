"""Puts brigade's classes in the place of torch's, for programs that don't name them."""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed

from brigade._C import Logger, Reducer
from brigade.distributed_data_parallel import DistributedDataParallel

_TORCH_DDP = torch.nn.parallel.distributed.DistributedDataParallel
_torch_register_comm_hook = dist._register_comm_hook
_torch_register_builtin_comm_hook = dist._register_builtin_comm_hook

_replaced: list[tuple[ModuleType, str, Any]] = []


class _Installed:
    """What install() returns: leaving it as a context undoes it."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        uninstall()


def install() -> _Installed:
    """Replaces torch's DistributedDataParallel and Reducer until uninstall().

    Modules outside torch that have imported the class under a name of their own,
    as frameworks do, are changed too. Instances made earlier stay what they are.

    Example::

        brigade.install()                     # for the rest of the program
        with brigade.install(): trainer.fit() # for a while
    """
    if _replaced:
        return _Installed()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or _is_left_alone(module.__name__):
            continue
        for name, value in list(vars(module).items()):
            if value is _TORCH_DDP:
                _replace(module, name, DistributedDataParallel)
    for module in (dist, dist.distributed_c10d, torch._C._distributed_c10d):
        _replace(module, "Reducer", Reducer)
        _replace(module, "Logger", Logger)
        _replace(module, "_register_comm_hook", _register_comm_hook)
        _replace(module, "_register_builtin_comm_hook", _register_builtin_comm_hook)
    return _Installed()


def uninstall() -> None:
    """Puts torch's classes back; without effect if they are there."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


def _is_left_alone(module: str) -> bool:
    """Torch's own modules ask with isinstance, which holds for both classes."""
    if module in ("torch.nn.parallel", "torch.nn.parallel.distributed"):
        return False
    return module.split(".")[0] in ("torch", "brigade")


def _replace(module: ModuleType, name: str, value: Any) -> None:
    if hasattr(module, name):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)


def _register_comm_hook(reducer: Any, state: object, comm_hook: Any) -> None:
    if isinstance(reducer, Reducer):
        reducer._register_comm_hook(state, comm_hook)
    else:
        _torch_register_comm_hook(reducer, state, comm_hook)


def _register_builtin_comm_hook(reducer: Any, comm_hook_type: dist.BuiltinCommHookType) -> None:
    if isinstance(reducer, Reducer):
        reducer._register_builtin_comm_hook(comm_hook_type)
    else:
        _torch_register_builtin_comm_hook(reducer, comm_hook_type)
