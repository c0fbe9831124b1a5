"""Unsharded state dicts of sharded models and of their optimizers, one unit in memory at a time.

An optimizer's state has names of parameters, not indices, as in
torch.distributed.checkpoint.state_dict.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade import _C
from brigade._sharded_tensors import TensorShard, as_shard
from brigade._sharded_units import Root, Unit

OptimizerState = dict[str, Any]

# Numbers in the states of torch's optimizers, also of parameters without dimensions.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def full_state_dict(module: nn.Module, rank0_only: bool) -> dict[str, torch.Tensor]:
    """Collective; see FSDPModule."""
    return gather_nest(dict(module.state_dict()), rank0_only)


def _require_all_on_rank0(root: Root) -> None:
    size = root.outermost.group.size()
    if any(unit.group.size() < size for unit in root.units):
        raise NotImplementedError(
            "rank0_only: units have meshes of fewer ranks than the model, and rank 0 has those "
            "of its own meshes only.\nSave with save_checkpoint(), or leave rank0_only out: then "
            "each rank has what its module has."
        )


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def require_whole_state(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless it has the module's names and shapes."""
    own = module.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        names = sorted(own.keys() ^ state.keys())
        raise ValueError(f"load_full_state_dict: expected the module's names, found {names}.")
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and state[name].shape != value.shape:
            raise ValueError(
                f"load_full_state_dict: '{name}': expected {tuple(value.shape)}, found "
                f"{tuple(state[name].shape)}."
            )


# ---- Optimizers.


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> OptimizerState:
    """The optimizer's state by names of parameters, this rank's shards of it.

    For torch.distributed.checkpoint, which saves whole tensors through them.

    Args:
        model: Whose parameters the optimizer has, or some of them.
        optimizer: Of any class whose state is by parameter.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{"params": [name], ...}]}``.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's.
    """
    names = _names_in_order(model, optimizer)
    parameters = _parameters_of(optimizer)
    found = optimizer.state_dict()
    state = {
        names[index]: {
            key: _as_part(value, parameters[index]) for key, value in found["state"][index].items()
        }
        for index in sorted(found["state"])
    }
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in found["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def load_sharded_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState
) -> None:
    """Loads the result of sharded_optimizer_state_dict().

    Raises:
        ValueError: The state has other parameters than the optimizer, or other shards of them;
            the optimizer is unchanged.
    """
    names = _names_in_order(model, optimizer)
    parameters = _parameters_of(optimizer)
    require_same_groups(model, optimizer, state)
    _require_shapes(TensorShard, names, parameters, state)
    indices = {name: index for index, name in enumerate(names)}
    by_index = {indices[name]: dict(values) for name, values in state["state"].items()}
    groups = [
        {**group, "params": [indices[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in state["state"].get(name, {}).items():
            # torch gives scalars that are no "step" the parameter's dtype.
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                loaded = optimizer.state[parameter][key]
                if loaded.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.clone().to(loaded.device)


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> OptimizerState:
    """The optimizer's state by names of parameters, unsharded. Collective.

    Args:
        model: Whose parameters the optimizer has, or some of them.
        optimizer: Of any class whose state is by parameter; alike on all ranks.
        rank0_only: Others return an empty dict.

    Returns:
        As sharded_optimizer_state_dict(), with copies of the unsharded tensors: the state of a
        single process.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's.
        RuntimeError: Ranks hold different kinds of state; on all ranks.
    """
    return gather_nest(sharded_optimizer_state_dict(model, optimizer), rank0_only)


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState
) -> None:
    """Loads an unsharded state, of one process or any number of ranks; equal on all ranks.

    Raises:
        ValueError: The state has other parameters than the optimizer, or a tensor is neither
            of its parameter's sizes nor a scalar; the optimizer is unchanged.
    """
    names = _names_in_order(model, optimizer)
    _require_shapes(torch.Tensor, names, _parameters_of(optimizer), state)
    load_sharded_optimizer_state_dict(model, optimizer, state)  # load_state_dict() shards it


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the optimizer's parameters, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"an optimizer's state: its parameter {i} of group {g} is none of the "
                    "model's.\nMake the optimizer from the model's parameters, after fully_shard."
                )
            found.append(names[parameter])
    return found


def _as_part(value: Any, parameter: torch.Tensor) -> Any:
    if type(value) is torch.Tensor and _C.is_sharded(value):
        return as_shard(value.detach(), parameter)
    return value


def sharded_state(parameter: TensorShard, values: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state: sharded tensors as they are, of others copies; pieces of wholes."""
    return {
        key: as_shard(_C.shard_like(value.to(parameter.device), parameter), parameter)
        if _is_whole(key, value, parameter)
        else value
        if isinstance(value, TensorShard)
        else _copy_of(value)
        for key, value in values.items()
    }


def _is_whole(key: str, value: Any, parameter: TensorShard) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return is_tensor and key not in _NUMBERS and not _C.is_sharded(value)


def _require_shapes(
    kind: type[torch.Tensor],
    names: list[str],
    parameters: list[torch.Tensor],
    state: OptimizerState,
) -> None:
    """ValueError unless tensors of this kind have their parameter's shape, or are scalars."""
    for name, parameter in zip(names, parameters, strict=True):
        if not isinstance(parameter, TensorShard):
            continue
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, kind) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"an optimizer's state: '{name}', {key}: expected {tuple(parameter.shape)}, "
                    f"found {tuple(value.shape)}."
                )


def require_same_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState
) -> None:
    """ValueError unless `state` is of the optimizer's parameters, in its order and groups."""
    names = _names_in_order(model, optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [group["params"] for group in state["param_groups"]]
    in_order = [name for group in found for name in group]
    unknown = sorted(set(state["state"]) - set(names))
    if in_order == names and [len(group) for group in found] == sizes and not unknown:
        return
    differ = sorted(set(in_order) ^ set(names)) or unknown
    raise ValueError(
        "an optimizer's state: expected that of the parameters which the optimizer has, in "
        f"groups of {sizes}, found groups of {[len(group) for group in found]}; these differ: "
        f"{differ[:5]}.\nMake the optimizer as it was made when it was saved."
    )


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
    if rank0_only:
        _require_all_on_rank0(root)
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
