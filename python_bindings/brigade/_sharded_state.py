"""Whole state dicts of sharded models and of their optimizers.

A model's go through units, one in memory at a time; an optimizer's too. Names, not
indices, tell which parameter a state belongs to, as in
torch.distributed.checkpoint.state_dict, whose form it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade._group_device import device_of
from brigade._shard_place import ShardPlace, place_of
from brigade._sharded_root import Root
from brigade._sharded_tensors import ShardedParameter, TensorShard, as_shard, set_gather
from brigade._sharded_units import Unit

OptimizerState = dict[str, Any]


def full_state_dict(module: nn.Module, root: Root, rank0_only: bool) -> dict[str, torch.Tensor]:
    """Collective; see FSDPModule."""
    if rank0_only:
        _require_all_on_rank0(root)
    keeps = not rank0_only or root.outermost.group.rank() == 0
    wholes: dict[int, torch.Tensor] = {}
    for index, unit in enumerate(root.units):
        gathered = root.native.gather_unit(index)
        if keeps:
            # One unit at a time has to have room on a device.
            on_host = [whole.cpu() for whole in gathered]
            wholes.update(zip(map(id, unit.shards), on_host, strict=True))
    if not keeps:
        return {}
    return {
        name: wholes[id(value)] if id(value) in wholes else _copy_of(value)
        for name, value in module.state_dict(keep_vars=True).items()
    }


def _require_all_on_rank0(root: Root) -> None:
    if root.native.has_other_units_elsewhere():
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
        shape = value.whole_shape if isinstance(value, ShardedParameter) else value.shape
        if state[name].shape != shape:
            raise ValueError(
                f"load_full_state_dict: '{name}': expected {tuple(shape)}, found "
                f"{tuple(state[name].shape)}."
            )


def load_full_state_dict(module: nn.Module, root: Root, state: dict[str, torch.Tensor]) -> None:
    """Collective; see FSDPModule. REQUIRES: require_whole_state()."""
    own = module.state_dict(keep_vars=True)
    wholes = {id(value): state[name] for name, value in own.items()}
    with torch.no_grad():
        for index, unit in enumerate(root.units):
            found = [
                wholes.get(id(shard), whole)
                for shard, whole in zip(unit.shards, root.native.gather_unit(index), strict=True)
            ]
            root.native.assign_unit(index, found)
        for name, value in own.items():
            if not isinstance(value, ShardedParameter):
                value.copy_(state[name])


# ---- Optimizers.


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> OptimizerState:
    """The optimizer's state by names of parameters, this rank's parts of it.

    For torch.distributed.checkpoint, which saves whole tensors through them. A tensor of
    the sizes of this rank's part of its parameter is taken for a part of a whole one.

    Args:
        model: Whose parameters the optimizer has, or some of them.
        optimizer: Of any class whose state is by parameter.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{"params": [name], ...}]}``.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's.
    """
    names = _names_in_order(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
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
    """The other way round.

    Raises:
        ValueError: The state has other parameters than the optimizer, or is of other parts of
            them; the optimizer is unchanged.
    """
    names = _names_in_order(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    require_same_groups(model, optimizer, state)
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, TensorShard) and value.shape != parameter.shape:
                raise ValueError(
                    f"load_sharded_optimizer_state_dict: '{name}', {key}: expected this rank's "
                    f"part, {tuple(parameter.shape)}, found {tuple(value.shape)}."
                )
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
    """The optimizer's state by names of parameters, whole. Collective.

    Goes from unit to unit: with `rank0_only`, a rank that keeps nothing has one tensor for
    each parameter of a unit in memory beside its parts.

    Args:
        model: Whose parameters the optimizer has, or some of them.
        optimizer: Of any class whose state is by parameter; alike on all ranks.
        rank0_only: Others return an empty dict.

    Returns:
        What a single process's would be: the same as from sharded_optimizer_state_dict(),
        with whole tensors, copied.

    Raises:
        ValueError: A parameter of the optimizer is none of the model's.
        RuntimeError: Ranks hold different kinds of state; on all ranks.
    """
    return gather_nest(sharded_optimizer_state_dict(model, optimizer), rank0_only)


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState
) -> None:
    """From a whole one, of a single process or of any number of ranks; equal on all ranks.

    Raises:
        ValueError: The state has other parameters than the optimizer, or a tensor is neither
            of its parameter's sizes nor a scalar; the optimizer is unchanged.
    """
    names = _names_in_order(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    require_same_groups(model, optimizer, state)
    by_name = dict(zip(names, parameters, strict=True))
    parts = {
        name: {key: _part_of(name, key, value, by_name[name]) for key, value in values.items()}
        for name, values in state["state"].items()
    }
    load_sharded_optimizer_state_dict(model, optimizer, {**state, "state": parts})


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
    place = place_of(parameter)
    if place is None or not isinstance(value, torch.Tensor) or isinstance(value, TensorShard):
        return value
    if value.dim() == 0 or value.shape != parameter.shape:
        return value
    return as_shard(value.detach(), place)


def _part_of(name: str, key: str, value: Any, parameter: torch.Tensor) -> Any:
    """Of a whole value, what this rank has of it."""
    place = place_of(parameter)
    if place is None or not isinstance(value, torch.Tensor):
        return _copy_of(value)
    if value.shape != place.whole_shape:
        if value.dim() == 0:
            return _copy_of(value)
        raise ValueError(
            f"load_full_optimizer_state_dict: '{name}', {key}: expected "
            f"{tuple(place.whole_shape)}, found {tuple(value.shape)}."
        )
    if parameter.shape == place.whole_shape:
        return as_shard(value.detach().clone(), place)
    elements = place.in_memory(value)
    part = elements[place.begin : place.begin + parameter.numel()]
    return as_shard(part.clone(), place)


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


# ---- Parts, wherever they are.


def gather_nest(nest: dict[str, Any], rank0_only: bool) -> dict[str, Any]:
    """A nest of dicts and lists, copied, whose parts are whole tensors. Collective.

    `rank0_only`: others return an empty dict.
    """
    parts = [(where, value) for where, value in leaves_of(nest) if isinstance(value, TensorShard)]
    if not parts:
        return copy.deepcopy(nest)
    root = parts[0][1]._brigade_place.require_unit().require_root()
    if rank0_only:
        _require_all_on_rank0(root)
    kinds: dict[dist.ProcessGroup, list[str]] = {}
    for where, value in parts:
        group = value._brigade_place.require_unit().group
        kinds.setdefault(group, []).append(f"{where}, {value.dtype}")
    for group, found in kinds.items():
        _require_same_kinds(group, found)
    wholes: dict[int, torch.Tensor] = {}
    for unit, together in _of_one_unit(part for _, part in parts):
        gathered = gather_parts(together, unit, rank0_only)
        wholes.update(zip(map(id, together), gathered, strict=bool(gathered)))
    if rank0_only and root.outermost.group.rank() != 0:
        return {}
    return _copied(nest, wholes)


def leaves_of(nest: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    items = nest.items() if isinstance(nest, dict) else enumerate(nest)
    for key, value in items:
        inner = f"{where}.{key}" if where else str(key)
        if isinstance(value, (dict, list)):
            yield from leaves_of(value, inner)
        else:
            yield inner, value


def _copied(value: Any, wholes: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner, wholes) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner, wholes) for inner in value]
    return wholes[id(value)] if id(value) in wholes else _copy_of(value)


def _of_one_unit(parts: Iterable[TensorShard]) -> Iterator[tuple[Unit, list[TensorShard]]]:
    """Lists of one dtype, in which a unit's parameters are once."""
    seen: dict[tuple[ShardPlace, torch.dtype], int] = {}
    lists: dict[tuple[Unit, torch.dtype, int], list[TensorShard]] = {}
    for part in parts:
        place = part._brigade_place
        number = seen.setdefault((place, part.dtype), 0)
        seen[place, part.dtype] += 1
        lists.setdefault((place.require_unit(), part.dtype, number), []).append(part)
    for (unit, _, _), together in lists.items():
        yield unit, together


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


def gather_parts(
    parts: list[TensorShard], unit: Unit, rank0_only: bool = False
) -> list[torch.Tensor]:
    """Whole tensors, of one dtype; none of them where they aren't wanted. Collective."""
    group = unit.group
    places = [part._brigade_place for part in parts]
    device = device_of(group)
    own = torch.tensor(
        [[place.begin, part.numel()] for place, part in zip(places, parts, strict=True)],
        device=device,
    )
    intervals = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(intervals, own, group=group)
    intervals = [found.cpu() for found in intervals]
    longest = max(int(found[:, 1].sum()) for found in intervals)
    # As bytes: not every backend knows every dtype.
    dtype = parts[0].dtype
    sent = torch.zeros(longest, dtype=dtype, device=device)
    held = torch.cat([part.elements() for part in parts])
    sent[: held.numel()] = held
    wants = not rank0_only or group.rank() == 0
    received = [torch.empty_like(sent) for _ in range(group.size())] if wants else []
    as_bytes = [tensor.view(torch.uint8) for tensor in received]
    if rank0_only:
        dist.gather(sent.view(torch.uint8), as_bytes or None, group=group, group_dst=0)
    else:
        dist.all_gather(as_bytes, sent.view(torch.uint8), group=group)
    if not wants:
        return []
    return _assemble(places, intervals[: unit.num_shards], [found.cpu() for found in received])


def _gather_for_program(parts: list[TensorShard]) -> list[torch.Tensor]:
    unit = parts[0]._brigade_place.require_unit()
    if unit.root is not None and unit.group is unit.outermost().group:
        unit.root.meet_peers()
    return gather_parts(parts, unit)


set_gather(_gather_for_program)


def _assemble(
    places: list[ShardPlace], intervals: Iterable[torch.Tensor], received: list[torch.Tensor]
) -> list[torch.Tensor]:
    """`intervals`: by rank, (begin, numel) of each; `received`: by rank, one behind the other."""
    wholes = [
        torch.empty(place.whole_shape.numel(), dtype=received[0].dtype, device="cpu")
        for place in places
    ]
    for of_rank, elements in zip(intervals, received, strict=False):
        start = 0
        for whole, (begin, numel) in zip(wholes, of_rank.tolist(), strict=True):
            whole[begin : begin + numel] = elements[start : start + numel]
            start += numel
    return [
        place.from_memory(whole.view(place.shape_in_memory))
        for place, whole in zip(places, wholes, strict=True)
    ]
