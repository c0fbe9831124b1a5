"""Python classes of sharded tensors: the unsharded shape, with this rank's shard as the memory.

C++ implements the operators by dispatch key (fsdp/shard_operators.cc). These classes add DTensor's
methods and the protocol of torch.distributed.checkpoint, which saves a shard as chunks.
"""

from __future__ import annotations

import dataclasses
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
from torch.distributed.tensor import Replicate, Shard

from brigade import _C

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from brigade._sharded_units import Unit


# ---- Chunks of checkpoints.


# Offsets and sizes of a box of elements that are consecutive in memory.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(maxsize=4096)
def _boxes_of(shape: tuple[int, ...], begin: int, end: int) -> tuple[_Box, ...]:
    """Returns the row-major elements [begin, end) as nonempty boxes, in order.

    There are at most 2 * len(shape) - 1.
    """
    if begin == end:
        return ()
    if not shape:
        return (((), ()),)
    size = math.prod(shape[1:])

    def in_row(row: int, begin: int, end: int) -> tuple[_Box, ...]:
        inner = _boxes_of(shape[1:], begin - row * size, end - row * size)
        return tuple(((row, *offsets), (1, *sizes)) for offsets, sizes in inner)

    first, last = -(-begin // size), end // size  # of the complete rows
    if first > last:
        return in_row(last, begin, end)
    complete = ((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    return (
        in_row(first - 1, begin, first * size)
        + ((complete,) if first < last else ())
        + in_row(last, last * size, end)
    )


# ---- Tensors.


@dataclasses.dataclass(frozen=True)
class Origin:
    """The parameter's unit and requested placement; its gradient and state share them.

    `spec`: of the DTensor whose local tensor is sharded; None for a plain tensor.
    """

    unit: weakref.ref[Unit]
    placement: Shard
    spec: DTensorSpec | None = None


class _FullTensor(torch.autograd.Function):
    """full_tensor() of a sharded tensor, without a gradient: no backward would reduce it."""

    @staticmethod
    def forward(ctx: Any, shard: TensorShard) -> torch.Tensor:
        return shard._gathered() if isinstance(shard, TensorShard) else _C.full_tensor(shard)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise RuntimeError(
            "full_tensor() is not recorded by autograd.\nUse the parameter inside of forward, or "
            "call full_tensor() under torch.no_grad()."
        )


class TensorShard(torch.Tensor):
    """A sharded tensor: a parameter, its gradient, or the detach() or clone() of one.

    Outside of forward and backward, elementwise operators act on this rank's elements.
    `shape` is the unsharded shape. It has DTensor's to_local(), full_tensor(), device_mesh and
    placements, but is not a DTensor. It can't be pickled.

    Other results of operators, such as an optimizer's state, are sharded torch.Tensors without
    these methods: call them by the class.

    For example:

        gradient = model.weight.grad
        gradient.to_local().isfinite().all()  # on this rank
        gradient.full_tensor()  # collective
        brigade.TensorShard.full_tensor(optimizer.state[model.weight]["exp_avg"])
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _brigade_origin: Origin
    _shard_class: type[TensorShard]  # of detach() and similar methods

    def to_local(self) -> torch.Tensor:
        """Returns this rank's elements as a 1-D view, in memory order.

        Read or write it before the next forward.
        """
        return _C.local_of(self)

    def full_tensor(self) -> torch.Tensor:
        """Returns a copy of the unsharded tensor. Collective over the ranks that share it.

        The copy of a tensor that requires gradients raises RuntimeError in backward.
        """
        if self.is_meta:
            return TensorShard._empty(self)  # `self` may be an optimizer's torch.Tensor
        return _FullTensor.apply(self)

    def _empty(self) -> torch.Tensor:
        """Returns an uninitialized unsharded tensor."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)

    def _gathered(self) -> torch.Tensor:
        return _C.full_tensor(self)

    def _part_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the part of the full tensor that the ranks of the unit share."""
        return full

    def _shard_of(self, full: torch.Tensor) -> TensorShard:
        """Returns a full tensor, perhaps a DTensor, sharded as this one."""
        full = full.full_tensor() if hasattr(full, "full_tensor") else full
        return as_shard(_C.shard_like(self._part_of(full), self), self)

    @property
    def device_mesh(self) -> Any:
        """The mesh passed to fully_shard(), otherwise a mesh of its ranks."""
        return self._unit().device_mesh()

    @property
    def placements(self) -> tuple:
        """DTensor's counterpart: (Shard(0),), or (Replicate(), Shard(0)) on a 2-D mesh.

        Only approximate: shards are cut in memory order, perhaps within a row, even if
        `shard_placement_fn` returned another Shard. A tensor without dimensions has Replicate().
        """
        replicas = (Replicate(),) * (self._unit().device_mesh().ndim - 1)
        return (*replicas, self._brigade_origin.placement if self.dim() > 0 else Replicate())

    def _unit(self) -> Unit:
        origin = getattr(self, "_brigade_origin", None)
        unit = None if origin is None else origin.unit()
        if unit is None:
            raise RuntimeError(
                "the module of this sharded tensor was freed.\nKeep a reference to the module."
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
        """Returns a sharded copy; in forward and backward, an unsharded one."""
        copied = torch.Tensor.clone(self, memory_format=memory_format)
        return as_shard(copied, self) if _C.is_sharded(copied) else copied

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Returns an alias for its own shape; that keeps the gradient accumulator reachable."""
        if other.shape == self.shape:
            return torch.ops.aten.alias(self)
        return torch.Tensor.view_as(self, other)

    expand_as = view_as

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        begin = _C.offset_of(self)
        end = begin + _C.local_of(self).numel()
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', elements [{begin}, {end}) of {self.numel()} on this rank)"
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
            f"a sharded tensor of shape {tuple(self.shape)} can't be pickled: this rank holds only "
            "a shard.\nSave with torch.distributed.checkpoint or full_state_dict(), or pickle "
            "to_local()."
        )

    # torch derives the device of these from the highest dispatch key.

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a plain tensor."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **kwargs)

    def new_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a plain tensor."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(*args, **kwargs)

    def is_shared(self) -> bool:
        """Returns False. torch's method would crash: it reads the storage."""
        return False

    # ---- For torch.distributed.checkpoint.

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yields (offsets in the unsharded tensor, view of this rank's memory)."""
        local, begin = _C.local_of(self), _C.offset_of(self)
        with torch._C.DisableTorchFunctionSubclass():
            sizes, strides = torch.Tensor.size(self), torch.Tensor.stride(self)
        if sizes.numel() == 0:  # so that checkpoints have its name
            yield (0,) * self.dim(), local.view(sizes)
            return
        order = sorted(range(self.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
        back = [order.index(dim) for dim in range(self.dim())]
        shape = tuple(sizes[dim] for dim in order)
        start = 0
        for offsets, sizes in _boxes_of(shape, begin, begin + local.numel()):
            numel = math.prod(sizes)
            memory = local.narrow(0, start, numel).view(sizes).permute(back)
            yield tuple(offsets[dim] for dim in back), memory
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
            f"'{index.fqn}': expected a chunk with offsets {tuple(index.offset)}, found "
            f"{[offsets for offsets, _ in self._boxes()]}.\nMake a new plan for this model."
        )

    @property
    def global_shape(self) -> torch.Size:
        """The shape that checkpoints are compared with."""
        return self.shape


TensorShard._shard_class = TensorShard

# torch uses the checkpoint protocol above only for tensors that also have these attributes.
for _name in ("global_offsets", "local_offsets", "local_sizes"):
    setattr(TensorShard, _name, ())


_plain_grad = torch.Tensor.grad.__get__


class ShardedParameter(TensorShard, nn.Parameter):
    """A sharded parameter. Optimizers of torch update this rank's shard of it.

    fully_shard() changes the class of the module's parameters to this one, in place. In forward and
    backward, operators see the unsharded parameter; outside, they act on the shard.
    """

    @property
    def grad(self) -> TensorShard | None:
        """The averaged gradient, sharded like the parameter, or None."""
        gradient = _plain_grad(self)
        if type(gradient) is torch.Tensor and _C.is_sharded(gradient):
            return as_shard(gradient, self)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None or _C.is_sharded(value):
            torch.Tensor.grad.__set__(self, value)
        else:  # of torch.autograd.grad(), as in schedules of split backwards
            root = self._unit().root
            if root is None:
                raise RuntimeError(
                    "fully_shard: expected no gradient before the first forward, found an "
                    "unsharded tensor.\nRun a forward and backward()."
                )
            root.native.add_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)


def as_shard(
    tensor: torch.Tensor, like: TensorShard, cls: type[TensorShard] | None = None
) -> TensorShard:
    """Gives `tensor` a class, by default that of tensors like `like`, and the origin of `like`."""
    tensor.__class__ = cls or like._shard_class
    if (origin := getattr(like, "_brigade_origin", None)) is not None:
        tensor._brigade_origin = origin
    return tensor


@torch.no_grad()
def write_shard(parameter: TensorShard, value: torch.Tensor) -> None:
    """Writes this rank's shard of a sharded, DTensor or full value. Collective for a DTensor.

    Inside of whole_parameters() it writes the unsharded parameter; then also collective for a
    sharded value.
    """
    if value is parameter:
        return
    root = parameter._unit().root
    is_unsharded = root is not None and root.is_unsharded
    if is_unsharded and not root.keeps_writes:
        raise RuntimeError(
            "fully_shard: values written inside of whole_parameters() would be lost.\nUse "
            "whole_parameters(writes=True), or write outside of it."
        )
    if is_unsharded and _C.is_sharded(value) and _C.alias_key(value) == _C.alias_key(parameter):
        return
    specs = {getattr(getattr(t, "_brigade_origin", None), "spec", None) for t in (value, parameter)}
    if _C.is_sharded(value) and len(specs) > 1:
        value = TensorShard.full_tensor(value)
    if is_unsharded:
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        value = parameter._part_of(full)
    elif not _C.is_sharded(value):
        value = parameter._shard_of(value)
    if parameter.is_meta and not value.is_meta:
        _C.set_shard(parameter, value.detach().to(parameter.dtype))
    else:
        parameter.copy_(value)


@functools.cache
def parameter_class(own: type[nn.Parameter]) -> type[ShardedParameter]:
    """Returns the class of a sharded parameter whose class was `own`; keeps its methods."""
    if own is nn.Parameter:
        return ShardedParameter
    return type(f"Sharded{own.__name__}", (ShardedParameter, own), {})
