"""Tensors of which each rank holds a part: parameters, and what is made of them.

A part is an interval of its tensor's elements, in the order of memory. It is one
dimension, empty where a rank holds nothing; in the tensor's own shape where it holds all.
Its norms are those of the whole tensor, so that torch's clip_grad_norm_ and whatever
prints a norm are right; so is its number of dimensions, by which optimizers' groups are
made, while its shape is this part's own. Copies of it, tensors made like it, as an
optimizer's state is, and what is computed of it element by element are parts too; all else
that torch computes of it raises, as it would be another thing on each rank.

torch.distributed.checkpoint saves and loads the whole tensor through its parts, since
each tells which boxes of it it holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._pytree import tree_leaves

from brigade._shard_boxes import Box, boxes_of
from brigade._shard_place import ShardPlace, place_of
from brigade._sharded_draws import OF_WHOLE_DRAWS
from brigade._sharded_elements import (
    COPIES,
    OF_ELEMENTS,
    OF_LISTS,
    flattens,
    gives_no_tensor,
    is_in_place,
    is_of_this_rank,
    is_seen_as_a_part,
    takes_all,
    writes_elsewhere,
)
from brigade._sharded_reductions import OF_WHOLE_TENSORS, are_whole, require_whole


def _number_of_dimensions(func: Callable, args: tuple, kwargs: dict[str, Any]) -> int:
    return len(args[0].whole_shape)


def _address(func: Callable, args: tuple, kwargs: dict[str, Any]) -> int:
    """Not for a file of safetensors: a part looks like any tensor there, and is not the whole."""
    asks = sys._getframe(2)  # behind __torch_function__
    if asks.f_globals.get("__name__") == "safetensors.torch" and not are_whole([args[0]]):
        whole = tuple(args[0].whole_shape)
        raise NotImplementedError(
            f"safetensors would save this rank's part of a tensor of {whole} as if it were all of "
            "it.\nSave model.full_state_dict() (save_pretrained's state_dict=), or by "
            "brigade.save_whole()."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# What torch raises of these is right for parts, too.
_KNOWN = COPIES | OF_ELEMENTS | OF_LISTS
_OF_WHOLE = {
    **OF_WHOLE_TENSORS,
    **OF_WHOLE_DRAWS,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.dim: _number_of_dimensions,
    torch.Tensor.ndimension: _number_of_dimensions,
    torch.Tensor.ndim.__get__: _number_of_dimensions,
}


_IN_PLACE_OF = {
    "_local_tensor": "plain()",
    "device_mesh": "the mesh that fully_shard was given",
    "placements": "whole_shape",
    "redistribute": "full_tensor()",
    "to_local": "plain()",
}


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
        if func in OF_ELEMENTS:
            _require_elements((*args, *(kwargs or {}).values()))
        elif is_in_place(func):
            is_of_memory = func.__name__ == "__set__"  # other memory, not other elements
            meets_others = writes_elsewhere(args, TensorShard) or _has_others(args[1:])
            if meets_others and not is_of_memory:
                _require_elements_in_place(args)
        elif getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
            _refuse_to_send(func, args, kwargs or {})
        has_out = kwargs is not None and kwargs.get("out") is not None
        if has_out and func not in _KNOWN:
            require_whole(func, args, kwargs)
        if func == torch.Tensor.data.__get__:
            func = torch.Tensor.detach  # counts what is written through it
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError, ValueError) as error:
            is_about_memory = isinstance(error, torch.OutOfMemoryError)
            if func in _KNOWN or is_about_memory or is_in_place(func) or gives_no_tensor(func):
                raise
            require_whole(func, args, kwargs or {}, cause=error)
            raise
        if has_out or is_seen_as_a_part(func, args):
            return result
        if func in COPIES:
            return _as_its_copy(result, args[0] if args else kwargs["input"])
        if func in OF_ELEMENTS:
            return _as_part_of_one(result, (*args, *(kwargs or {}).values()))
        if func in OF_LISTS:
            return _as_parts_of_each(result, args[0])
        if flattens(func, args, kwargs or {}):
            return as_shard(_alias(result), args[0]._brigade_place.flat)
        if takes_all(func, args):
            same = _alias(result) if result is args[0] else result
            return as_shard(same, place_of(args[0]))
        if is_in_place(func):
            return result
        # What gives the tensor itself on one rank gives another's view, or copy, on others.
        is_itself = isinstance(result, TensorShard) and args and result is args[0]
        if (is_itself or _has_others(result)) and not is_of_this_rank(func):
            require_whole(func, args, kwargs or {})
        return _alias(result) if is_itself else result

    def __getattr__(self, name: str) -> Any:
        """Of what there is none: says what takes its place of what DTensors have."""
        instead = _IN_PLACE_OF.get(name)
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'"
            + ("" if instead is None else f", which DTensors have: use {instead}")
        )

    def plain(self) -> torch.Tensor:
        """The same memory, as a tensor of this rank alone."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, copied, as a DTensor's. All ranks that share it call it."""
        return _gather([self])[0].to(self.device)

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
# So that optimizers go through lists where that is their default, on devices.
_of_optimizers.append(ShardedParameter)


_gather: Callable[[list[TensorShard]], list[torch.Tensor]]


def set_gather(gather: Callable[[list[TensorShard]], list[torch.Tensor]]) -> None:
    """What makes whole tensors of parts; it needs more than parts are made of."""
    global _gather
    _gather = gather


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as another tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.view(tensor.shape)


def _as_its_copy(result: Any, part: torch.Tensor) -> Any:
    place = place_of(part)
    if place is None or not isinstance(result, torch.Tensor) or isinstance(result, TensorShard):
        return result
    # Of new_empty() without elements, too, which torch's checkpoints give memory then.
    return as_shard(result, place)


def _require_elements(operands: tuple) -> None:
    """Beside a part there are parts, numbers, or as many of this rank's own elements.

    Alike on all ranks, whatever the sizes of their parts are.
    """
    part = next((operand for operand in operands if isinstance(operand, TensorShard)), None)
    if part is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        for operand in operands:
            if not isinstance(operand, torch.Tensor) or isinstance(operand, TensorShard):
                continue
            if operand.numel() != 1 and operand.shape != part.shape:
                raise NotImplementedError(
                    f"this rank's part, {tuple(part.shape)}, of a tensor of "
                    f"{tuple(part._brigade_place.whole_shape)}, together with a tensor of "
                    f"{tuple(operand.shape)}, element by element: expected a number, or as many "
                    "elements.\nTake plain() of the part, or the whole parameter inside of "
                    "whole_parameters()."
                )


def _require_elements_in_place(args: tuple) -> None:
    """The same where another tensor, or a list of them, is written."""
    if not isinstance(args[0], (list, tuple)):
        return _require_elements(args)
    lists = [each for each in args if isinstance(each, (list, tuple))]
    for operands in zip(*lists, strict=False):
        _require_elements(operands)


def _refuse_to_send(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    parts = [e for e in tree_leaves((args, kwargs)) if isinstance(e, TensorShard)]
    if any(part._brigade_place.unit() is None for part in parts) or are_whole(parts):
        return
    raise NotImplementedError(
        f"{func.__name__}() of this rank's part of a tensor of {tuple(parts[0].whole_shape)}: "
        "other ranks have other parts.\nGradients are averages over ranks, and parameters alike, "
        "already; plain() is this part, to be sent as it is."
    )


def _has_others(result: Any) -> bool:
    """Whether there are tensors that are no parts."""
    if isinstance(result, (list, tuple)):
        return any(type(each) is torch.Tensor for each in result)
    return type(result) is torch.Tensor


def _as_part_of_one(result: Any, operands: tuple) -> Any:
    """Of parts of one tensor, and what _require_elements() lets be with them."""
    if not isinstance(result, torch.Tensor) or isinstance(result, TensorShard):
        return result
    parts = [operand for operand in operands if isinstance(operand, TensorShard)]
    if len({part._brigade_place for part in parts}) != 1:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        shape = parts[0].shape
        if result.shape != shape:  # of a number of more dimensions
            result = result.view(shape)
    return as_shard(result, parts[0]._brigade_place)


def _as_parts_of_each(results: Any, parts: Any) -> Any:
    if not isinstance(results, (list, tuple)) or not isinstance(parts, (list, tuple)):
        return results
    return [_as_part_of_one(result, (part,)) for result, part in zip(results, parts, strict=True)]
