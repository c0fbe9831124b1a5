"""Finds parameters that are another unit's already: the very object, or one with its memory."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from brigade._sharded_tensors import TensorShard

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


@dataclasses.dataclass(frozen=True)
class _Memory:
    """That a parameter of a unit had before it was sharded, and that something else has still."""

    storage: StorageWeakRef  # keeps the address from being used again, not the memory
    begin: int
    end: int  # in bytes
    unit: weakref.ref[Unit]
    name: str


# By the address of the storage. A part of no parameter has it, once it is sharded.
_left_behind: dict[int, list[_Memory]] = {}


def require_free(parameter: nn.Parameter, where: str) -> None:
    """Raises ValueError, in which it is named by `where`, if it is tied to one of a unit."""
    if isinstance(parameter, TensorShard):
        unit = parameter._unit()
        raise ValueError(
            f"fully_shard: parameter {where} is "
            f"'{unit.name_of(parameter)}' of {unit.describe()} already.\n"
            "Shard modules that share a parameter together, by their parent."
        )
    memory = _left_behind_of(parameter)
    if memory is not None:
        raise ValueError(
            f"fully_shard: parameter {where} has the memory of "
            f"'{memory.name}' of {memory.unit().describe()}, and would no longer be tied to it.\n"
            "Register the one parameter in both places, and shard their modules together, by "
            "their parent; or clone() it."
        )


def require_untied(tensor: torch.Tensor, where: str) -> None:
    """Raises ValueError if one that stays as it is has the memory of one that was sharded.

    `where`: "buffer 'scale'".
    """
    memory = _left_behind_of(tensor)
    if memory is not None:
        raise ValueError(
            f"fully_shard: {where} has the memory of parameter '{memory.name}' of "
            f"{memory.unit().describe()}, and is no longer tied to it.\nclone() it before, or "
            "shard neither."
        )


def memory_of(unit: Unit, names: list[str], parameters: list[nn.Parameter]) -> list[_Memory]:
    """Of a unit that is about to be sharded."""
    found = []
    for name, parameter in zip(names, parameters, strict=True):
        interval = _interval_of(parameter)
        if interval is not None:
            storage, begin, end = interval
            found.append(_Memory(StorageWeakRef(storage), begin, end, weakref.ref(unit), name))
    return found


def require_apart(memories: list[_Memory]) -> None:
    """Raises ValueError if two of one unit have the same memory, which a move would part."""
    in_order = sorted(memories, key=lambda memory: (memory.storage.cdata, memory.begin))
    for one, next_one in itertools.pairwise(in_order):
        if one.storage.cdata == next_one.storage.cdata and next_one.begin < one.end:
            raise ValueError(
                f"fully_shard: parameter '{next_one.name}' shares its memory with '{one.name}', "
                "and would no longer be tied to it.\nRegister the one parameter in both places, or "
                "clone() it."
            )


def remember(memories: list[_Memory]) -> None:
    """Of a unit that has been sharded: such as is in use still. What no longer is is forgotten."""
    known = [memory for memories in _left_behind.values() for memory in memories]
    _left_behind.clear()
    for memory in known + memories:
        if memory.unit() is not None and not memory.storage.expired():
            _left_behind.setdefault(memory.storage.cdata, []).append(memory)


def _left_behind_of(tensor: torch.Tensor) -> _Memory | None:
    """What a unit that still lives had, and this one has some of."""
    interval = _interval_of(tensor) if _left_behind else None
    if interval is None:
        return None
    storage, begin, end = interval
    for memory in _left_behind.get(storage._cdata, ()):
        if memory.unit() is not None and memory.begin < end and begin < memory.end:
            return memory
    return None


def _interval_of(parameter: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """The storage and which bytes of it; None of what has none."""
    if isinstance(parameter, TensorShard):
        return None
    if nn.parameter.is_lazy(parameter) or parameter.layout != torch.strided:
        return None
    if parameter.is_meta or parameter.numel() == 0 or not torch._C._has_storage(parameter):
        return None
    size = parameter.element_size()
    begin = parameter.storage_offset() * size
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    extent = 1 + sum((length - 1) * stride for length, stride in steps)
    return parameter.untyped_storage(), begin, begin + extent * size
