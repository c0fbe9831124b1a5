"""Full (unsharded) state dicts of sharded models and optimizers; gathers a tensor at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from brigade import _C
from brigade._sharded_tensors import TensorShard
from brigade._sharded_units import Unit

# Optimizer state that is one number even if the parameter has the same shape, ().
_SCALARS = {"step", "mu_product", "eta", "mu"}


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def shard_optimizer_state(parameter: TensorShard, values: dict[str, Any]) -> dict[str, Any]:
    """Returns one parameter's optimizer state with its unsharded tensors sharded.

    Sharded tensors are not copied; other values are.
    """
    state = {}
    for key, value in values.items():
        fits = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        if fits and key not in _SCALARS and not _C.is_sharded(value):
            value = parameter._shard_of(value.to(parameter.device))
        state[key] = value if isinstance(value, TensorShard) else _copy_of(value)
    return state


def gather_full(state: dict[str, Any], rank0_only: bool) -> dict[str, Any]:
    """Copies nested dicts and lists; sharded tensors become full tensors on the CPU. Collective.

    `rank0_only`: other ranks return an empty dict and hold one full tensor at a time.
    """
    shards = [(path, value) for path, value in leaves(state) if isinstance(value, TensorShard)]
    if not shards:
        return copy.deepcopy(state)
    root = shards[0][1]._unit().require_root()
    root.native.meet_peers()
    size = root.outermost.group.size()
    if rank0_only and any(unit.group.size() < size for unit in root.units):
        raise NotImplementedError(
            "rank0_only: some units are on meshes of fewer ranks than the model's, so rank 0 "
            "lacks the parameters of the other meshes.\nSave with save_shards(), or leave "
            "rank0_only out: then each rank returns its own module's parameters."
        )
    kinds: dict[Unit, list[str]] = {}
    for path, value in shards:
        unit = value._unit()
        shared = path if unit.group is root.outermost.group else ""
        kinds.setdefault(unit, []).append(f"{shared}, {value.dtype}")
    for unit, found in kinds.items():
        try:
            _C.require_agreement(unit.group, "full state dict: sharded tensor", found)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise RuntimeError(
                f"{error}\nGive the optimizers of all ranks the same steps."
            ) from None
    specs = [shard._brigade_origin.spec for _, shard in shards]
    is_first = not any(spec and any(spec.mesh.get_coordinate()) for spec in specs)
    keeps = not rank0_only or (root.outermost.group.rank() == 0 and is_first)
    full_tensors: dict[tuple, torch.Tensor] = {}
    for _, shard in shards:
        key = _alias_key(shard)
        if key not in full_tensors:
            full = shard.full_tensor()
            full_tensors[key] = full.cpu() if keeps else torch.empty(0)
    return _copied(state, full_tensors) if keeps else {}


def _alias_key(shard: TensorShard) -> tuple:
    """Returns a key that tied parameters share, on all ranks: each is gathered once."""
    return (_C.alias_key(shard), shard._unit(), shard.shape)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of each value in nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, (dict, list)):
            yield from leaves(value, inner)
        else:
            yield inner, value


def _copied(value: Any, full_tensors: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner, full_tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner, full_tensors) for inner in value]
    return full_tensors[_alias_key(value)] if isinstance(value, TensorShard) else _copy_of(value)
