"""Tensors of which each rank holds a part: parameters, and what is made of them.

A part is an interval of its tensor's elements, in the order of memory. It is one
dimension, empty where a rank holds nothing; in the tensor's own shape where it holds all.
Its norms are those of the whole tensor, so that torch's clip_grad_norm_ and whatever
prints a norm are right; all else that is computed of it is of the part alone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """Of what a rank holds a part, and which."""

    # Weak: what C++ holds of a tensor keeps all that Python has put there.
    unit: weakref.ref[Unit]
    whole_shape: torch.Size


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
            return func(*args, **(kwargs or {}))


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
