"""Unsharded state dicts of sharded models and optimizers, one tensor in memory at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C
from brigade._sharded_tensors import TensorShard, as_shard
from brigade._sharded_units import Unit

# Numbers in the states of torch's optimizers, also of parameters without dimensions.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def sharded_state(parameter: TensorShard, values: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state: sharded tensors as they are, of others copies; pieces of wholes."""
    state = {}
    for key, value in values.items():
        fits = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        if fits and key not in _NUMBERS and not _C.is_sharded(value):
            value = as_shard(_C.shard_like(value.to(parameter.device), parameter), parameter)
        state[key] = value if isinstance(value, TensorShard) else _copy_of(value)
    return state


# ---- Sharded tensors, wherever they are.


def gather_nest(nest: dict[str, Any], rank0_only: bool) -> dict[str, Any]:
    """A nest of dicts and lists, copied, whose sharded tensors are whole. Collective.

    `rank0_only`: others return an empty dict, and have one whole tensor in memory at a time.
    """
    parts = [(where, value) for where, value in leaves_of(nest) if isinstance(value, TensorShard)]
    if not parts:
        return copy.deepcopy(nest)
    root = parts[0][1]._unit().require_root()
    root.native.meet_peers()
    size = root.outermost.group.size()
    if rank0_only and any(unit.group.size() < size for unit in root.units):
        raise NotImplementedError(
            "rank0_only: units have meshes of fewer ranks than the model, and rank 0 has those "
            "of its own meshes only.\nSave with save_shards(), or leave rank0_only out: then "
            "each rank has what its module has."
        )
    kinds: dict[Unit, list[str]] = {}
    for where, value in parts:
        unit = value._unit()
        own = where if unit.group is root.outermost.group else ""
        kinds.setdefault(unit, []).append(f"{own}, {value.dtype}")
    for unit, found in kinds.items():
        _require_same_kinds(unit.group, found)
    keeps = not rank0_only or root.outermost.group.rank() == 0
    wholes: dict[tuple, torch.Tensor] = {}
    for _, part in parts:
        key = _memory_of(part)
        if key not in wholes:
            whole = part.full_tensor()
            wholes[key] = whole.cpu() if keeps else torch.empty(0)
    return _copied(nest, wholes) if keeps else {}


def _memory_of(part: TensorShard) -> tuple:
    """Equal for tensors of the same elements, such as tied parameters, on all ranks."""
    return (_C.place_of(part), part._unit(), part.shape)


def leaves_of(nest: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """With their paths."""
    items = nest.items() if isinstance(nest, dict) else enumerate(nest)
    for key, value in items:
        inner = f"{where}.{key}" if where else str(key)
        if isinstance(value, (dict, list)):
            yield from leaves_of(value, inner)
        else:
            yield inner, value


def _copied(value: Any, wholes: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner, wholes) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner, wholes) for inner in value]
    return wholes[_memory_of(value)] if isinstance(value, TensorShard) else _copy_of(value)


def _require_same_kinds(group: dist.ProcessGroup, kinds: list[str]) -> None:
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, kinds, group=group)
    for rank, found in enumerate(of_ranks):
        if found != of_ranks[0]:
            differ = sorted(set(found) ^ set(of_ranks[0]))
            raise RuntimeError(
                f"a whole state dict: ranks 0 and {rank} hold different parts: {differ[:5]}.\n"
                "Give all ranks' optimizers the same steps."
            )
