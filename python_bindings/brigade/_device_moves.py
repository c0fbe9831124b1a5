"""Moves what is to be sharded to the devices of its mesh, as torch's fully_shard does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade._group_device import device_of, serves
from brigade._sharded_units import own_modules


def move_to_devices(
    modules: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    group: dist.ProcessGroup,
    device_type: str | None,
) -> None:
    """Parameters stay the objects that they are; what is on meta stays there.

    Args:
        modules: of one unit; what units below them have stays.
        ignored: parameters that stay.
        group: where nobody names a type, and the CPU's tensors can't travel in it, as in
            NCCL's, what is on the CPU moves to its device.
        device_type: the mesh's; None: there is none. What is on a device of that type stays,
            also if it isn't the current one; torch moves it.
    """
    for tensor in _tensors_of(modules, ignored):
        device = _device_for(tensor.device, group, device_type)
        if device != tensor.device:
            tensor.data = tensor.data.to(device)


def type_of(mesh: Any) -> str | None:
    return None if mesh is None else mesh.device_type


def _tensors_of(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> Iterator[torch.Tensor]:
    for module in modules:
        for _, child in own_modules(module):
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is not None and tensor not in ignored and not tensor.is_meta:
                    yield tensor


def _device_for(
    found: torch.device, group: dist.ProcessGroup, device_type: str | None
) -> torch.device:
    if device_type is None:
        stays = found.type != "cpu" or serves(group, found)
        return found if stays else device_of(group)
    if found.type == device_type:
        return found
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
