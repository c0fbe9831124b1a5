"""Tensors of which each rank holds a part: parameters, and what is made of them.

A part is an interval of its tensor's elements, in the order of memory. It is one
dimension, empty where a rank holds nothing; in the tensor's own shape where it holds all.
Its norms are those of the whole tensor, so that torch's clip_grad_norm_ and whatever
prints a norm are right. Copies of it, and tensors made like it, as an optimizer's state
is, are parts too; all else that is computed of it is a tensor of this rank alone.

torch.distributed.checkpoint saves and loads the whole tensor through its parts, since
each tells which boxes of it it holds.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from brigade._shard_boxes import Box, boxes_of

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """Of what a rank holds a part, and which."""

    # Weak: what C++ holds of a tensor keeps all that Python has put there.
    unit: weakref.ref[Unit]
    whole_shape: torch.Size
    order: tuple[int, ...]  # the dimensions, from the one with the largest stride
    begin: int  # of its elements are before this rank's, in that order

    @staticmethod
    def of(unit: Unit, whole: torch.Tensor, begin: int) -> ShardPlace:
        """`whole`: dense."""
        strides = whole.stride()
        order = sorted(range(whole.dim()), key=lambda dim: -strides[dim])
        return ShardPlace(weakref.ref(unit), whole.shape, tuple(order), begin)

    @property
    def shape_in_memory(self) -> tuple[int, ...]:
        """The whole tensor's, as if it were contiguous."""
        return tuple(self.whole_shape[dim] for dim in self.order)

    def from_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its dimensions, which are in the order of memory, as the whole tensor's are."""
        return tensor.permute([self.order.index(dim) for dim in range(len(self.order))])

    def in_memory(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor's elements in the order of memory, 1D."""
        return whole.permute(self.order).reshape(-1)

    def __deepcopy__(self, memo: dict) -> ShardPlace:
        return self


class TensorShard(torch.Tensor):
    """This rank's part of a tensor: of a gradient, for instance.

    Its norms are collective: all ranks of the model's group call them, in one order.
    """

    _brigade_place: ShardPlace

    @property
    def whole_shape(self) -> torch.Size:
        """Of the tensor that this is a part of."""
        return self._brigade_place.whole_shape

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _NORMS:
            return _norm(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            return _as_its_copy(result, args[0] if args else kwargs["input"])
        return result

    def plain(self) -> torch.Tensor:
        """The same memory, as a tensor of this rank alone."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def elements(self) -> torch.Tensor:
        """The same, 1D in the order of memory."""
        plain, place = self.plain(), self._brigade_place
        return place.in_memory(plain) if plain.shape == place.whole_shape else plain

    def __deepcopy__(self, memo: dict) -> TensorShard:
        copied = as_shard(self.plain().clone(), self._brigade_place, type(self))
        memo[id(self)] = copied
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"this rank's part of a tensor of {tuple(self.whole_shape)} can't be pickled.\nSave "
            "with torch.distributed.checkpoint, or full_state_dict(); plain() is this part alone."
        )

    # ---- For torch.distributed.checkpoint.

    @property
    def global_shape(self) -> torch.Size:
        """What checkpoints are compared with."""
        return self.whole_shape

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Where each is in the whole tensor, and its memory."""
        plain, place = self.plain(), self._brigade_place
        if plain.shape == place.whole_shape or math.prod(place.whole_shape) == 0:
            yield (0,) * len(place.whole_shape), plain.view(place.whole_shape)
            return
        start = 0
        for box in boxes_of(place.shape_in_memory, place.begin, place.begin + plain.numel()):
            memory = plain.narrow(0, start, box.numel).view(box.sizes)
            yield _in_dimensions_of(place, box), place.from_memory(memory)
            start += box.numel

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=memory.shape)
            for offsets, memory in self._boxes()
        ]

    def __create_write_items__(self, name: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.whole_shape
                ),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, memory in self._boxes():
            if offsets == tuple(index.offset):
                return memory
        raise ValueError(
            f"'{index.fqn}': expected a box that begins at {tuple(index.offset)}, found "
            f"{[offsets for offsets, _ in self._boxes()]}.\nPlan anew with what is there."
        )


def _in_dimensions_of(place: ShardPlace, box: Box) -> tuple[int, ...]:
    """Where the box begins, by dimension of the whole tensor."""
    return tuple(box.offsets[place.order.index(dim)] for dim in range(len(place.order)))


# torch takes a tensor for one that is checkpointed in parts if it has these, too; they are
# for parts of as many dimensions as the whole, and the methods above come before them.
for _name in ("global_offsets", "local_offsets", "local_sizes"):
    setattr(TensorShard, _name, ())


class ShardedParameter(TensorShard, nn.Parameter):
    """This rank's part of a parameter: a leaf, which an optimizer is given."""

    @property
    def grad(self) -> TensorShard | None:
        """This part of the average over ranks of their gradients."""
        gradient = torch.Tensor.grad.__get__(self)
        if gradient is None or isinstance(gradient, TensorShard):
            return gradient
        return as_shard(gradient, self._brigade_place)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)


def as_shard(
    tensor: torch.Tensor, place: ShardPlace, cls: type[TensorShard] = TensorShard
) -> TensorShard:
    """The very tensor, which is of type `cls` from here on."""
    tensor.__class__ = cls
    tensor._brigade_place = place
    return tensor


def place_of(tensor: torch.Tensor) -> ShardPlace | None:
    """None if ranks don't share it."""
    return getattr(tensor, "_brigade_place", None)


# They give a part again, whatever they do to its elements.
_COPIES = {
    torch.Tensor.bfloat16,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.data.__get__,
    torch.Tensor.detach,
    torch.Tensor.double,
    torch.Tensor.float,
    torch.Tensor.half,
    torch.Tensor.new_empty,
    torch.Tensor.pin_memory,
    torch.Tensor.to,
    torch.Tensor.type,
    torch.clone,
    torch.detach,
    torch.empty_like,
    torch.full_like,
    torch.ones_like,
    torch.zeros_like,
}


def _as_its_copy(result: Any, part: torch.Tensor) -> Any:
    place = place_of(part)
    if place is None or not isinstance(result, torch.Tensor) or isinstance(result, TensorShard):
        return result
    return as_shard(result, place)


# torch calls them with a tensor, the last with a list.
_NORMS = {
    torch.norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch._foreach_norm,
}


def _norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The norm of a whole tensor, or of each in a list, from all ranks' parts. Collective."""
    is_list = func is torch._foreach_norm
    parts = list(args[0]) if is_list else [args[0]]
    p = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    p = 2.0 if p is None or p == "fro" else float(p)
    others = [*args[2:]]
    others += [kwargs[name] for name in kwargs if name not in ("ord", "p", "dtype")]
    if p <= 0 or any(other is not None and other is not False for other in others):
        raise NotImplementedError(
            f"a norm of sharded parameters: expected the norm of all elements for p > 0, "
            f"found p = {p} and other arguments.\nTake it of the whole parameters, "
            "inside of unshard()."
        )
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise NotImplementedError(
            "a norm of sharded parameters has no gradient.\nTake it under no_grad, or of the "
            "whole parameters inside of forward."
        )
    root = _root_of(parts)
    takes_largest = p == float("inf")
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norms = [
            torch.linalg.vector_norm(part, p, dtype=torch.float64)
            if part.numel()
            else torch.zeros((), dtype=torch.float64)
            for part in parts
        ]
        values = torch.stack(norms)
        if not takes_largest:
            values.pow_(p)
        root.native.sum_over_shards(values, takes_largest)
        if not takes_largest:
            values.pow_(1 / p)
        dtype = kwargs.get("dtype") or parts[0].dtype
        found = list(values.to(dtype).unbind())
    return found if is_list else found[0]


def _root_of(parts: list[torch.Tensor]) -> Any:
    """The one that all of them belong to."""
    places = [place_of(part) for part in parts]
    units = [None if place is None else place.unit() for place in places]
    roots = {unit.require_root() for unit in units if unit is not None}
    if len(roots) != 1 or None in units:
        raise NotImplementedError(
            "norms of sharded tensors together with others: they are local for the one, and "
            "global for the other.\nTake them apart."
        )
    return roots.pop()
