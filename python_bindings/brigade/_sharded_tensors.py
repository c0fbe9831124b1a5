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

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from brigade._shard_boxes import Box, boxes_of
from brigade._shard_place import ShardPlace, place_of
from brigade._sharded_draws import OF_WHOLE_DRAWS
from brigade._sharded_reductions import OF_WHOLE_TENSORS

_OF_WHOLE = {**OF_WHOLE_TENSORS, **OF_WHOLE_DRAWS}


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
        of_whole = _OF_WHOLE.get(func)
        if of_whole is not None:
            return of_whole(func, args, kwargs or {})
        if func == torch.Tensor.data.__get__:
            func = torch.Tensor.detach  # counts what is written through it
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
        with torch._C.DisableTorchFunctionSubclass():
            gradient = torch.Tensor.grad.__get__(self)
        if gradient is None or isinstance(gradient, TensorShard):
            return gradient
        return as_shard(gradient, self._brigade_place)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
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


# So that torch's clip_grad_norm_ asks for all norms at once: one collective, not one for each.
torch.utils._foreach_utils._foreach_supported_types.append(TensorShard)

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
