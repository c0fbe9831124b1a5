"""Moves what is to be sharded to the devices of its mesh, as torch's fully_shard does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brigade._group_device import device_of, serves


def destinations(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device_type: str | None
) -> list[tuple[torch.Tensor, torch.device]]:
    """Those of the tensors that are to move, and where to; what is on meta stays there.

    Args:
        tensors: parameters and buffers.
        group: where nobody names a type, and the CPU's tensors can't travel in it, as in
            NCCL's, what is on the CPU moves to its device.
        device_type: the mesh's; None: there is none. What is on a device of that type stays,
            also if it isn't the current one; torch moves it.
    """
    found = []
    for tensor in tensors:
        if tensor.is_meta:
            continue
        device = _device_for(tensor.device, group, device_type)
        if device != tensor.device:
            found.append((tensor, device))
    return found


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """It stays the object that it is.

    Raises:
        ValueError: it is a DTensor, of other devices.
    """
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"fully_shard: expected tensors on {device.type}, as the mesh's, found a DTensor over "
            f"{tensor.device_mesh}.\nGive a mesh of its devices."
        )
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = tensor.data.to(device)
        return
    with torch.no_grad():  # what it is made of moves, too
        moved = tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


def type_of(mesh: Any) -> str | None:
    """None: there is no mesh, or a stand-in that names no type."""
    return getattr(mesh, "device_type", None)


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
