"""Devices of process groups, and moves of tensors to them, as torch's fully_shard does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group has a backend for it, else its own device: NCCL's, for instance."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    bound = group.bound_device_id
    return bound if bound is not None and bound.type == device.type else device


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group can send tensors on the device, as far as it tells."""
    return not group._device_types or device.type in {d.type for d in group._device_types}


def destinations(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device_type: str | None
) -> list[tuple[torch.Tensor, torch.device]]:
    """The tensors that are to move, each with its destination; those on meta stay there.

    Tensors on a device of the mesh's type stay, also if it isn't the current one; torch moves
    them. Without a mesh, those on the CPU move to the group's device if it can't send them.
    """
    moves = [(t, _device_for(t.device, group, device_type)) for t in tensors if not t.is_meta]
    return [(tensor, device) for tensor, device in moves if device != tensor.device]


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """It stays the object that it is. Raises ValueError of a DTensor."""
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"fully_shard: expected tensors on {device.type}, as the mesh's, found a DTensor over "
            f"{tensor.device_mesh}.\nGive a mesh of its devices."
        )
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = tensor.data.to(device)
        return
    with torch.no_grad():  # its parts move, too
        moved = tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


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
