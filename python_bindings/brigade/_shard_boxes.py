"""Cuts an interval of a tensor's elements into boxes, which checkpoints are made of."""

from __future__ import annotations

import dataclasses
import functools
import math


@dataclasses.dataclass(frozen=True)
class Box:
    """Neighbours in a tensor of row-major order, which lie in memory one after the other."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements are in it."""
        return math.prod(self.sizes)


@functools.lru_cache(maxsize=4096)
def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> tuple[Box, ...]:
    """The elements from `begin` up to `end`, in row-major order, as boxes in that order.

    At most 2 * len(shape) - 1 of them, none of them empty.
    """
    if begin == end:
        return ()
    if not shape:
        return (Box((), ()),)
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-begin // row), end // row
    if first_whole > end_whole:  # inside of one row
        return _in_row(shape, end_whole, begin, end)
    boxes: tuple[Box, ...] = ()
    if begin < first_whole * row:
        boxes += _in_row(shape, first_whole - 1, begin, first_whole * row)
    if first_whole < end_whole:
        zeros = (0,) * (len(shape) - 1)
        boxes += (Box((first_whole, *zeros), (end_whole - first_whole, *shape[1:])),)
    if end_whole * row < end:
        boxes += _in_row(shape, end_whole, end_whole * row, end)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, begin: int, end: int) -> tuple[Box, ...]:
    start = index * math.prod(shape[1:])
    return tuple(
        Box((index, *box.offsets), (1, *box.sizes))
        for box in boxes_of(shape[1:], begin - start, end - start)
    )
