"""Tensors in what modules take and return: tuples, lists and dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(nest: Any, opens_dataclasses: bool = False) -> Iterator[torch.Tensor]:
    """All of them; those in dataclasses can't be replaced by map_tensors()."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from tensors_in(part, opens_dataclasses)
    elif isinstance(nest, dict):
        for part in nest.values():
            yield from tensors_in(part, opens_dataclasses)
    elif opens_dataclasses and hasattr(nest, "__dataclass_fields__"):
        for name in nest.__dataclass_fields__:
            yield from tensors_in(getattr(nest, name), opens_dataclasses)


def map_tensors(nest: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest, with each tensor replaced by what `function` makes of it."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, tuple):
        parts = [map_tensors(part, function) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else tuple(parts)
    if isinstance(nest, list):
        return [map_tensors(part, function) for part in nest]
    if isinstance(nest, dict):
        mapped = {key: map_tensors(part, function) for key, part in nest.items()}
        return mapped if type(nest) is dict else type(nest)(mapped)
    return nest


def cast_floating(nest: Any, dtype: torch.dtype) -> Any:
    """The same nest, with its floating tensors in `dtype`."""
    return map_tensors(nest, lambda t: t.to(dtype) if t.is_floating_point() else t)
