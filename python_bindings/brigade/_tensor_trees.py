"""Maps and iterates over the tensors in nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for child in _children(tree).values():
            yield from tensors_in(child)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies `function` to each tensor and returns the tree; copies only changed subtrees."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    children = _children(tree)
    mapped = {key: map_tensors(child, function) for key, child in children.items()}
    if all(mapped[key] is child for key, child in children.items()):
        return tree
    if isinstance(tree, tuple):
        return _tuple_like(tree, list(mapped.values()))
    result = copy.copy(tree)
    for key, child in mapped.items():
        if isinstance(tree, (list, dict)):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # also of frozen dataclasses
    return result


def move_to(tree: Any, device: torch.device) -> Any:
    return map_tensors(tree, lambda t: t if t.device == device else t.to(device))


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors to `dtype`."""
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)


def return_additions(tree: Any, mapped: Any) -> None:
    """Adds to lists and dicts of `tree` the additions of a function to their copies in `mapped`."""
    if tree is mapped:
        return
    copies = _children(mapped)
    for key, child in _children(tree).items():
        if key in copies:
            return_additions(child, copies[key])
    if isinstance(tree, list):
        tree.extend(mapped[len(tree) :])
    elif isinstance(tree, dict):
        tree.update({key: child for key, child in mapped.items() if key not in tree})


def _children(tree: Any) -> dict[Any, Any]:
    """Children by index, key or field name."""
    if isinstance(tree, (tuple, list)):
        return dict(enumerate(tree))
    if isinstance(tree, dict):
        return tree
    if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        names = tree.__dataclass_fields__
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    return {}


def _tuple_like(like: tuple, children: list[Any]) -> tuple:
    if hasattr(like, "_fields"):
        return type(like)(*children)
    if hasattr(like, "n_sequence_fields"):  # a torch.return_types class, like torch.max()'s
        return type(like)(children)
    return tuple(children)
