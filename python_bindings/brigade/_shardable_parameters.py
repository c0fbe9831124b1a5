"""Checks of a parameter and its module before it is sharded, so that training is not wrong.

A parameter must be a plain tensor that its module only reads, and share no memory with a
parameter of another unit or with a tensor that is not sharded.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from brigade._sharded_tensors import TensorShard

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


def require_plain(parameter: nn.Parameter, where: str) -> None:
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"fully_shard: parameter {where} is a DTensor, split over a mesh of its own.\nShard "
            "plain tensors: this rank's, along dp_mesh_dims."
        )
    for extension in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        if hasattr(parameter, extension):
            raise NotImplementedError(
                f"fully_shard: parameter {where} has {extension}(), by which it would be gathered "
                "in a form of its own.\nShard plain tensors, or name it in ignored_params."
            )
    # Gradients have any dtype where this is missing or None.
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise NotImplementedError(
            f"fully_shard: parameter {where} of {parameter.dtype} has grad_dtype "
            f"{parameter.grad_dtype}.\nLeave it out, and sum in that by MixedPrecisionPolicy("
            "reduce_dtype=...)."
        )


def require_read_only(module: nn.Module, prefix: str, ignored: set[nn.Parameter]) -> None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
        return
    if module.weight not in ignored:
        raise NotImplementedError(
            f"fully_shard: {type(module).__name__} '{prefix.rstrip('.')}' has max_norm, by which "
            "its forward writes into its weight: what it writes would be lost.\nLeave max_norm "
            "out, or name its weight in ignored_params."
        )


def require_count(value: object, what: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"fully_shard: {what}: expected a whole number of at least {least}, found {value!r}.\n"
            "Give one."
        )
    return value


# ---- Tied parameters.


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Memory that a parameter of a unit had before it was sharded."""

    storage: StorageWeakRef  # keeps the address from being used again, not the memory
    begin: int
    end: int  # in bytes
    unit: weakref.ref[Unit]
    name: str


# By the address of the storage: memory that another tensor still has.
_left_behind: dict[int, list[_Memory]] = {}


def require_free(parameter: nn.Parameter, where: str) -> None:
    """Raises ValueError, which names it by `where`, if it is tied to a parameter of a unit."""
    if isinstance(parameter, TensorShard):
        unit = parameter._unit()
        raise ValueError(
            f"fully_shard: parameter {where} is '{unit.name_of(parameter)}' of {unit.describe()} "
            "already.\nShard modules that share a parameter together, by their parent."
        )
    if (memory := _left_behind_of(parameter)) is not None:
        raise ValueError(
            f"fully_shard: parameter {where} has the memory of "
            f"'{memory.name}' of {memory.unit().describe()}, and would no longer be tied to it.\n"
            "Register the one parameter in both places, and shard their modules together, by "
            "their parent; or clone() it."
        )


def require_untied(tensor: torch.Tensor, where: str) -> None:
    """Raises ValueError if an unsharded tensor, "buffer 'scale'", has a sharded one's memory."""
    if (memory := _left_behind_of(tensor)) is not None:
        raise ValueError(
            f"fully_shard: {where} has the memory of parameter '{memory.name}' of "
            f"{memory.unit().describe()}, and is no longer tied to it.\nclone() it before, or "
            "shard neither."
        )


def memory_of(unit: Unit, names: list[str], parameters: list[nn.Parameter]) -> list[_Memory]:
    """Of a unit that is about to be sharded."""
    return [
        _Memory(StorageWeakRef(storage), begin, end, weakref.ref(unit), name)
        for name, parameter in zip(names, parameters, strict=True)
        for storage, begin, end in _interval_of(parameter)
    ]


def require_apart(memories: list[_Memory]) -> None:
    """Raises ValueError if two of one unit share memory, which a move would separate."""
    in_order = sorted(memories, key=lambda memory: (memory.storage.cdata, memory.begin))
    for one, next_one in itertools.pairwise(in_order):
        if one.storage.cdata == next_one.storage.cdata and next_one.begin < one.end:
            raise ValueError(
                f"fully_shard: parameter '{next_one.name}' shares its memory with '{one.name}', "
                "and would no longer be tied to it.\nRegister the one parameter in both places, or "
                "clone() it."
            )


def remember(memories: list[_Memory]) -> None:
    """Adds those of a unit that has been sharded; forgets memory that no tensor has any more."""
    known = [memory for memories in _left_behind.values() for memory in memories]
    _left_behind.clear()
    for memory in known + memories:
        if memory.unit() is not None and not memory.storage.expired():
            _left_behind.setdefault(memory.storage.cdata, []).append(memory)


def _left_behind_of(tensor: torch.Tensor) -> _Memory | None:
    """The memory of a living unit's parameter that this tensor shares."""
    for storage, begin, end in _interval_of(tensor) if _left_behind else ():
        for memory in _left_behind.get(storage._cdata, ()):
            if memory.unit() is not None and memory.begin < end and begin < memory.end:
                return memory
    return None


def _interval_of(tensor: torch.Tensor) -> list[tuple[torch.UntypedStorage, int, int]]:
    """The storage and its bytes; empty if the tensor has none."""
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
