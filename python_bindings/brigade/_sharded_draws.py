"""What is drawn at random into tensors that ranks hold parts of: whole, then cut.

Every rank draws the whole tensor and keeps its part, so that ranks whose generators are
alike have what one process has, and go on alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from brigade._shard_place import ShardPlace, place_of

if TYPE_CHECKING:
    from brigade._sharded_units import Unit

# Not collective: code that draws until it likes what it has does so on each rank alone.
_DRAWS = (
    torch.Tensor.bernoulli_,
    torch.Tensor.cauchy_,
    torch.Tensor.exponential_,
    torch.Tensor.geometric_,
    torch.Tensor.log_normal_,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
)
_INITS = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)


def _draw(func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    part, *others = args
    if any(isinstance(other, torch.Tensor) for other in (*others, *kwargs.values())):
        raise NotImplementedError(
            f"{func.__name__}() of this rank's part: expected numbers, found a tensor of them.\n"
            "Draw whole parameters, inside of whole_parameters(writes=True)."
        )
    if torch.is_grad_enabled() and part.requires_grad:
        return func(part.plain().requires_grad_(), *others, **kwargs)  # which torch refuses
    unit = place_of(part).unit()
    if unit is not None and unit.has_replicas():
        if unit.root is not None:
            raise NotImplementedError(
                f"{func.__name__}() of this rank's part, of which other ranks have copies: they "
                "may draw something else.\nDraw whole parameters, inside of "
                "whole_parameters(writes=True), alike on all ranks."
            )
        unit.may_differ_in_replicas = True  # until there is a root
    fill(part, lambda whole: func(whole, *others, **kwargs), is_shared=False)
    return part


def _initialize(func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """As torch.nn.init passes itself on: with all arguments by name, the tensor twice."""
    others = dict(kwargs)
    part = others.pop("tensor", *args[:1])
    fill(part, lambda whole: func(whole, **others))
    return part


# By function: what is called with it, its arguments and its keyword arguments.
OF_WHOLE_DRAWS = {**dict.fromkeys(_DRAWS, _draw), **dict.fromkeys(_INITS, _initialize)}


def fill(part: Any, function: Callable[[torch.Tensor], Any], *, is_shared: bool = True) -> None:
    """Writes this rank's part of what `function` writes into a whole tensor; nothing on meta.

    `is_shared`: collective, all ranks take the first one's.
    """
    place: ShardPlace = part._brigade_place
    elements = part.elements()
    if elements.is_meta:
        return
    in_memory = torch.empty(place.shape_in_memory, dtype=elements.dtype, device=elements.device)
    with torch.no_grad():
        function(place.from_memory(in_memory))
        if is_shared:
            share(place.unit(), in_memory)
        own = in_memory.view(-1)[place.begin : place.begin + elements.numel()]
        elements.copy_(own)


def share(unit: Unit | None, in_memory: torch.Tensor) -> None:
    """Collective, unless each rank of the unit keeps its own: the first rank's values.

    `in_memory`: contiguous.
    """
    if unit is None or not unit.broadcasts_parameters:
        return
    if unit.group.size() > 1 and in_memory.numel() > 0:
        dist.broadcast(in_memory.view(-1).view(torch.uint8), group=unit.group, group_src=0)
