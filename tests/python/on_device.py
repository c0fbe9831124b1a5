"""Lets tests that name no device run on another one, with the same numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Tensors that are made inside lie on `device`, and meshes are of it.

    Unlike with `torch.set_default_device()` they are drawn on the CPU, from its generators, so
    that a test finds the numbers that it would find there. What names a device keeps it.
    """
    if device == "cpu":
        yield
        return
    with _MadeOnCpu(device), _meshes_of(torch.device(device).type):
        yield


class _MadeOnCpu(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_elsewhere = kwargs.get("device") is not None or kwargs.get("out") is not None
        if is_elsewhere or func not in _device_constructors():
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self._device).requires_grad_(requires_grad)


@contextlib.contextmanager
def _meshes_of(device_type: str) -> Iterator[None]:
    """Meshes of the CPU, as tests ask for them by name, are of another device."""

    def of_device(asked: str, *args: Any, **kwargs: Any) -> Any:
        return init_device_mesh(device_type if asked == "cpu" else asked, *args, **kwargs)

    users = [
        module
        for module in list(sys.modules.values())
        if module.__dict__.get("init_device_mesh") is init_device_mesh
        and module.__name__ != __name__
    ]
    for module in users:
        module.init_device_mesh = of_device
    try:
        yield
    finally:
        for module in users:
            module.init_device_mesh = init_device_mesh
