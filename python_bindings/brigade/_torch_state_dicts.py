"""Lets torch.distributed.checkpoint.state_dict, which knows DTensors, know parts as well.

Whole state dicts are gathered of parts, one unit in memory at a time, and cut into parts,
one tensor at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict

from brigade._shard_place import ShardPlace
from brigade._sharded_state import gather_nest, leaves_of
from brigade._sharded_tensors import TensorShard, as_shard

# That of get_state_dict() and set_state_dict(), and what it calls for one tensor.
_torch = torch.distributed.checkpoint.state_dict
_utils = torch.distributed._state_dict_utils


@functools.cache
def teach_torch_state_dicts() -> None:
    """From here on its `full_state_dict=True` is of sharded modules, too, both ways."""
    _torch._gather_state_dict = _gathering(_torch._gather_state_dict)
    _torch._distribute_state_dict = _cutting(_torch._distribute_state_dict)
    _utils._broadcast_tensors = _cutting(_utils._broadcast_tensors)


def _gathering(of_others: Callable) -> Callable:
    @functools.wraps(of_others)
    def gather(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        if not any(isinstance(value, TensorShard) for _, value in leaves_of(state_dict)):
            return of_others(state_dict, **options)
        whole = gather_nest(state_dict, tuple(options.get("ranks_only", ())) == (0,))
        return of_others(whole, **options)

    return gather


def _cutting(of_others: Callable) -> Callable:
    """Of a function that puts what it finds in one dict into another, by the same keys."""

    @functools.wraps(of_others)
    def put(found: dict[str, Any], own: dict[str, Any], *args: Any, **options: Any) -> None:
        parts = {key: value for key, value in own.items() if isinstance(value, TensorShard)}
        of_others(found, own, *args, **options)
        for key, part in parts.items():
            value = own[key]
            if value is not part and isinstance(value, torch.Tensor):
                own[key] = _part_of(value, part)

    return put


def _part_of(value: torch.Tensor, like: TensorShard) -> torch.Tensor:
    """Of a whole tensor, this rank's part; what is of another shape stays, for torch to name."""
    place: ShardPlace = like._brigade_place
    if value.shape != place.whole_shape:
        return value
    if like.shape == place.whole_shape:
        return as_shard(value.detach().clone(), place)
    return as_shard(place.in_memory(value.detach())[place.begin :][: like.numel()].clone(), place)
