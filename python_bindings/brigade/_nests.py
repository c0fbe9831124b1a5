"""Tensors in inputs and outputs of modules: tuples, lists, dicts and dataclasses of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    else:
        for part in _parts_of(nest).values():
            yield from tensors_in(part)


def map_tensors(nest: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest, with `function` of each tensor; parts where nothing changes are not copied."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    parts = _parts_of(nest)
    mapped = {key: map_tensors(part, function) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return nest
    if isinstance(nest, tuple):
        return _tuple_like(nest, list(mapped.values()))
    made = copy.copy(nest)
    for key, part in mapped.items():
        if isinstance(nest, (list, dict)):
            made[key] = part
        else:
            object.__setattr__(made, key, part)  # frozen ones, too
    return made


def move_to(nest: Any, device: torch.device) -> Any:
    """The same nest, with its tensors there."""
    return map_tensors(nest, lambda t: t if t.device == device else t.to(device))


def cast_floating(nest: Any, dtype: torch.dtype) -> Any:
    """The same nest, with its floating tensors in `dtype`."""
    return map_tensors(nest, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _parts_of(nest: Any) -> dict[Any, Any]:
    """By index, key or name of a field."""
    if isinstance(nest, (tuple, list)):
        return dict(enumerate(nest))
    if isinstance(nest, dict):
        return nest
    if hasattr(nest, "__dataclass_fields__") and not isinstance(nest, type):
        names = nest.__dataclass_fields__
        return {name: getattr(nest, name) for name in names if hasattr(nest, name)}
    return {}


def _tuple_like(like: tuple, parts: list[Any]) -> tuple:
    if hasattr(like, "_fields"):
        return type(like)(*parts)
    if hasattr(like, "n_sequence_fields"):  # of torch.max(), say
        return type(like)(parts)
    return tuple(parts)
