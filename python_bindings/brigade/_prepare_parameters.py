"""Checks fully_shard()'s parameters before they are sharded, and moves them to the mesh's device.

A parameter must be a plain tensor that its module only reads. It must not share memory with a
parameter of another unit or with an unsharded tensor: sharding would separate them silently.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brigade._sharded_tensors import TensorShard

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


def require_plain(parameter: nn.Parameter, where: str) -> None:
    for extension in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        if hasattr(parameter, extension):
            raise NotImplementedError(
                f"fully_shard: parameter {where} has {extension}(); all-gather extensions are not "
                "supported.\nShard plain tensors, or name it in ignored_params."
            )
    if is_traceable_wrapper_subclass(parameter):
        raise NotImplementedError(
            f"fully_shard: expected plain tensors, found that parameter {where} is a "
            f"{type(parameter).__name__}.\nShard plain tensors, or name it in ignored_params."
        )
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise NotImplementedError(
            f"fully_shard: parameter {where} of {parameter.dtype} has grad_dtype "
            f"{parameter.grad_dtype}.\nUse MixedPrecisionPolicy(reduce_dtype=...) instead."
        )


def require_read_only(module: nn.Module, prefix: str, ignored: set[nn.Parameter]) -> None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
        return
    if module.weight not in ignored:
        raise NotImplementedError(
            f"fully_shard: {type(module).__name__} '{prefix.rstrip('.')}' has max_norm: its "
            "forward writes its weight, and resharding would drop the writes.\nLeave max_norm out, "
            "or name the weight in ignored_params."
        )


# ---- Tied parameters.


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Memory of a unit's parameter before it was sharded."""

    storage: StorageWeakRef  # prevents reuse of the address, does not keep the memory
    begin: int  # in bytes
    end: int
    unit: weakref.ref[Unit]
    name: str


# By address of the storage; only storages that other tensors still own.
_former_memory: dict[int, list[_Memory]] = {}


def require_in_no_unit(parameter: nn.Parameter, where: str) -> None:
    """Raises ValueError if the parameter, or one that is tied to it, is sharded already."""
    if isinstance(parameter, TensorShard):
        unit = parameter._unit()
        raise ValueError(
            f"fully_shard: parameter {where} is already '{unit.name_of(parameter)}' of "
            f"{unit.describe()}.\nPut modules that share a parameter into one unit: shard their "
            "parent."
        )
    if (memory := _former_memory_of(parameter)) is not None:
        raise ValueError(
            f"fully_shard: parameter {where} shares memory with '{memory.name}' of "
            f"{memory.unit().describe()}; sharding would untie them.\nRegister one parameter in "
            "both places and shard their common parent, or clone() it."
        )


def require_untied(tensor: torch.Tensor, where: str) -> None:
    """Raises ValueError if an unsharded tensor shared memory with a sharded parameter."""
    if (memory := _former_memory_of(tensor)) is not None:
        raise ValueError(
            f"fully_shard: {where} shared memory with parameter '{memory.name}' of "
            f"{memory.unit().describe()} and is no longer tied to it.\nclone() it before "
            "fully_shard, or shard neither."
        )


def memory_of(unit: Unit, names: list[str], parameters: list[nn.Parameter]) -> list[_Memory]:
    """Returns the memory of a unit's parameters; call it before they are sharded."""
    return [
        _Memory(StorageWeakRef(storage), begin, end, weakref.ref(unit), name)
        for name, parameter in zip(names, parameters, strict=True)
        for storage, begin, end in _interval_of(parameter)
    ]


def require_no_overlap(memories: list[_Memory]) -> None:
    """Raises ValueError if two parameters of one unit share memory; a move would untie them."""
    in_order = sorted(memories, key=lambda memory: (memory.storage.cdata, memory.begin))
    for one, next_one in itertools.pairwise(in_order):
        if one.storage.cdata == next_one.storage.cdata and next_one.begin < one.end:
            raise ValueError(
                f"fully_shard: parameter '{next_one.name}' shares memory with '{one.name}'; moving "
                "them would untie them.\nRegister one parameter in both places, or clone() it."
            )


def remember_memory(memories: list[_Memory]) -> None:
    """Records the former memory of a sharded unit; drops freed memory."""
    known = [memory for memories in _former_memory.values() for memory in memories]
    _former_memory.clear()
    for memory in known + memories:
        if memory.unit() is not None and not memory.storage.expired():
            _former_memory.setdefault(memory.storage.cdata, []).append(memory)


def _former_memory_of(tensor: torch.Tensor) -> _Memory | None:
    """Returns the former memory of a live unit's parameter that overlaps this tensor."""
    for storage, begin, end in _interval_of(tensor) if _former_memory else ():
        for memory in _former_memory.get(storage._cdata, ()):
            if memory.unit() is not None and memory.begin < end and begin < memory.end:
                return memory
    return None


def _interval_of(tensor: torch.Tensor) -> list[tuple[torch.UntypedStorage, int, int]]:
    """Returns [(storage, begin, end)] in bytes; [] for a tensor without a storage."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(tensor, TensorShard) or nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return []
    if not torch._C._has_storage(tensor):
        return []
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((length - 1) * stride for length, stride in steps)
    return [(tensor.untyped_storage(), begin, begin + extent * size)]


# ---- Device moves.


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the CPU if the group has a backend for it, otherwise the backend's device."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    bound = group.bound_device_id
    return bound if bound is not None and bound.type == device.type else device


def destinations(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device_type: str | None
) -> list[tuple[torch.Tensor, torch.device]]:
    """Returns the tensors to move, each with its destination. Meta tensors stay.

    Tensors on any device of the mesh's type stay; torch moves them to the current device.
    Without a mesh, CPU tensors move to the group's device if the group has no CPU backend.
    """
    moves = [(t, _device_for(t.device, group, device_type)) for t in tensors if not t.is_meta]
    return [(tensor, device) for tensor, device in moves if device != tensor.device]


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Moves in place: the Python object stays the same. Raises ValueError for a DTensor."""
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"fully_shard: expected tensors on the mesh's device type, {device.type}, found a "
            f"DTensor over {tensor.device_mesh}.\nPass a mesh of the DTensor's device type."
        )
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = tensor.data.to(device)
        return
    with torch.no_grad():
        moved = tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


def _device_for(
    found: torch.device, group: dist.ProcessGroup, device_type: str | None
) -> torch.device:
    if device_type is None:
        served = {device.type for device in group._device_types}  # empty: undeclared
        stays = found.type != "cpu" or not served or "cpu" in served
        return found if stays else device_of(group)
    if found.type == device_type:
        return found
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
