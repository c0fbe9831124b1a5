"""Sharded tensors as Python sees them: of the unsharded shape, of which this rank holds a shard.

C++ knows them by a dispatch key and decides which operators they take (fsdp/shard_operators.h).
These classes add only methods: those that DTensors have, and the protocol by which
torch.distributed.checkpoint saves whole tensors through boxes of them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate

from brigade import _C

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


# ---- Boxes, of which checkpoints are made.


# Offsets and sizes of neighbours in a tensor, which lie in memory one after the other.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(maxsize=4096)
def _boxes_of(shape: tuple[int, ...], begin: int, end: int) -> tuple[_Box, ...]:
    """The elements from `begin` up to `end`, in row-major order, as boxes in that order.

    At most 2 * len(shape) - 1 of them, none of them empty.
    """
    if begin == end:
        return ()
    if not shape:
        return (((), ()),)
    size = math.prod(shape[1:])

    def in_row(row: int, begin: int, end: int) -> tuple[_Box, ...]:
        inner = _boxes_of(shape[1:], begin - row * size, end - row * size)
        return tuple(((row, *offsets), (1, *sizes)) for offsets, sizes in inner)

    first, last = -(-begin // size), end // size  # whole rows
    if first > last:
        return in_row(last, begin, end)
    whole = ((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    return (
        in_row(first - 1, begin, first * size)
        + ((whole,) if first < last else ())
        + in_row(last, last * size, end)
    )


# ---- Tensors.


class TensorShard(torch.Tensor):
    """A sharded tensor: a gradient, an optimizer's state, or a result computed from them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _brigade_unit: weakref.ref[Unit]

    def to_local(self) -> torch.Tensor:
        """This rank's elements, 1D in memory order, in the memory that they are in."""
        return _C.local_of(self)

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, copied. Collective over the ranks that share it."""
        if self.is_meta:
            return torch.empty_strided(
                self.shape, self.stride(), dtype=self.dtype, device=self.device
            )
        return _C.gather_whole(self)

    @property
    def device_mesh(self) -> Any:
        """The mesh that fully_shard() was given, or one of its ranks."""
        return self._unit().device_mesh()

    @property
    def placements(self) -> tuple:
        """Of a DTensor of the same elements; shards are cut in memory order."""
        placements = self._unit().placements()
        return placements if self.dim() > 0 else (Replicate(),) * len(placements)

    def _unit(self) -> Unit:
        reference = getattr(self, "_brigade_unit", None)
        unit = None if reference is None else reference()
        if unit is None:
            raise RuntimeError(
                "this sharded tensor belongs to no module that lives.\nKeep the module."
            )
        return unit

    def detach(self) -> TensorShard:
        return as_shard(torch.Tensor.detach(self), self)

    @property
    def data(self) -> TensorShard:
        return as_shard(torch.Tensor.data.__get__(self), self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Sharded alike, outside of forward and backward."""
        copied = torch.Tensor.clone(self, memory_format=memory_format)
        return as_shard(copied, self) if _C.is_sharded(copied) else copied

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Of its own shape, an alias: it leads to the gradient accumulator."""
        if other.shape == self.shape:
            return torch.ops.aten.alias(self)
        return torch.Tensor.view_as(self, other)

    expand_as = view_as

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        begin = _C.offset_of(self)
        end = begin + _C.local_of(self).numel()
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', elements {begin} to {end} on this rank)"
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with torch.no_grad():
            copied = torch.Tensor.detach(self).clone()
            if _C.is_sharded(copied):
                copied = as_shard(copied, self, type(self))
            elif isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
        memo[id(self)] = copied
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied = self.detach().clone()
        if not _C.is_sharded(copied):  # inside of whole_parameters()
            return copied.__reduce_ex__(protocol)
        raise NotImplementedError(
            f"a sharded tensor of {tuple(self.shape)} can't be pickled: this rank holds a piece of "
            "it.\nSave with torch.distributed.checkpoint, or full_state_dict(); to_local() is the "
            "piece alone."
        )

    # torch takes the device of these from the highest dispatch key.

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Plain, as torch's."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **kwargs)

    def new_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Plain, as torch's."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(*args, **kwargs)

    def is_shared(self) -> bool:
        """Torch's reads the storage, which would end the process."""
        return False

    # ---- For torch.distributed.checkpoint.

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Offsets in the whole tensor, and the memory."""
        local, begin = _C.local_of(self), _C.offset_of(self)
        if self.numel() == 0:  # otherwise checkpoints lack its name
            yield (0,) * self.dim(), local.view(self.shape)
            return
        order = sorted(range(self.dim()), key=lambda dim: (-self.stride(dim), -self.size(dim)))
        back = [order.index(dim) for dim in range(self.dim())]
        shape = tuple(self.size(dim) for dim in order)
        start = 0
        for offsets, sizes in _boxes_of(shape, begin, begin + local.numel()):
            numel = math.prod(sizes)
            memory = local.narrow(0, start, numel).view(sizes).permute(back)
            yield tuple(offsets[place] for place in back), memory
            start += numel

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=memory.shape)
            for offsets, memory in self._boxes()
        ]

    def __create_write_items__(self, name: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
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

    @property
    def global_shape(self) -> torch.Size:
        """Compared with checkpoints."""
        return self.shape


# torch takes a tensor for one that is checkpointed in boxes if it has these, too; the methods
# above come before them.
for _name in ("global_offsets", "local_offsets", "local_sizes"):
    setattr(TensorShard, _name, ())


class ShardedParameter(TensorShard, nn.Parameter):
    """A sharded parameter: a leaf, which an optimizer is given."""

    @property
    def grad(self) -> TensorShard | None:
        """The average of its gradients over ranks, sharded alike."""
        gradient = torch.Tensor.grad.__get__(self)
        if type(gradient) is torch.Tensor and _C.is_sharded(gradient):
            return as_shard(gradient, self)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)


def as_shard(
    tensor: torch.Tensor, like: torch.Tensor, cls: type[TensorShard] = TensorShard
) -> TensorShard:
    """The very tensor, which is of type `cls` and of the unit of `like` from here on."""
    tensor.__class__ = cls
    reference = getattr(like, "_brigade_unit", None)
    if reference is not None:
        tensor._brigade_unit = reference
    return tensor


@functools.cache
def parameter_class(own: type[nn.Parameter]) -> type[ShardedParameter]:
    """For a parameter that has been sharded: it keeps the methods of its own class."""
    if own is nn.Parameter:
        return ShardedParameter
    return type(f"Sharded{own.__name__}", (ShardedParameter, own), {})
