"""Which part of a tensor a rank holds: an interval of its elements, in the order of memory."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


@dataclasses.dataclass(frozen=True, eq=False)  # a place is one parameter's
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

    def require_unit(self) -> Unit:
        """RuntimeError if its module is gone, which held what knows the other parts."""
        unit = self.unit()
        if unit is None:
            raise RuntimeError(
                f"a part of a sharded tensor of {tuple(self.whole_shape)}: expected its module to "
                "exist, through which ranks meet, found that nothing holds it any more.\nKeep the "
                "module as long as its parameters are used."
            )
        return unit

    @functools.cached_property
    def flat(self) -> ShardPlace:
        """Of the same elements in one dimension; in their order here, whatever that is."""
        numel = torch.Size([self.whole_shape.numel()])
        return ShardPlace(self.unit, numel, (0,), self.begin)

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


def place_of(tensor: torch.Tensor) -> ShardPlace | None:
    """None if ranks don't share it."""
    return getattr(tensor, "_brigade_place", None)
