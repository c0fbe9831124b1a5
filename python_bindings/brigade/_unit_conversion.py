"""What torch.nn.Module._apply() does to sharded modules: casts them, and gives them memory.

A unit whose parts become others, in dtype or because they come from meta, is made anew;
then so is the root, by the next forward. A cast leaves the parts the objects that they
are, so that an optimizer goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from brigade import _C
from brigade._checks import failure_told_to_peers
from brigade._shard_place import place_of
from brigade._sharded_root import Root
from brigade._sharded_tensors import ShardedParameter
from brigade._sharded_units import Unit, unit_of

_Function = Callable[[torch.Tensor], torch.Tensor]


def convert(module: nn.Module, fn: _Function, recurse: bool) -> None:
    """Applies `fn` to all that is below a sharded module. Collective if parts become others.

    Raises:
        NotImplementedError: for what `fn` does: moves, other memory formats; one module alone.
        RuntimeError: inside of a forward, backward or whole_parameters(), where gradients have
            not been reduced, or ranks do something else.
    """
    _convert_units(unit_of(module), fn, recurse)
    for each in module.modules() if recurse else [module]:
        _apply_to_others(each, each._buffers, fn)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Collective. To what is on meta, of what its state dict has; what it holds is anything."""

    def fn(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    _convert_units(unit_of(module), fn, recurse=True)
    for each in module.modules():
        others = each._non_persistent_buffers_set
        kept = {name: value for name, value in each._buffers.items() if name not in others}
        _apply_to_others(each, kept, fn)
        each._buffers.update(kept)


# By parameter, what a small tensor like it becomes; None: it stays what it is.
_Changes = list[torch.Tensor | None]


def _convert_units(below: Unit, fn: _Function, recurse: bool) -> None:
    units = [unit for unit in below.with_those_below() if unit.native is not None]
    changes = {unit: [_change_of(part, fn) for part in unit.shards] for unit in units}
    changes = {unit: found for unit, found in changes.items() if any(c is not None for c in found)}
    if changes and not recurse:
        raise NotImplementedError(
            "fully_shard: a unit can't be cast or get memory in one of its modules alone.\nLeave "
            "recurse=False out."
        )
    if all(_fit(unit, found) for unit, found in changes.items()):
        for unit, found in changes.items():
            _write(unit, found, fn)
    else:
        _make_anew(below, changes, fn)


def _change_of(part: ShardedParameter, fn: _Function) -> torch.Tensor | None:
    """As `fn` would have it of any tensor of the whole one's kind, which ranks have alike."""
    sizes = (1, 2, 2, 2, 2)[: len(part.whole_shape)]
    like = torch.ones(sizes, dtype=part.dtype, device=part.device)
    found = fn(like)
    if found is like:
        return None
    if found.device != like.device and not like.is_meta:
        raise NotImplementedError(
            f"fully_shard: a sharded module can't be moved, from {like.device} to {found.device}."
            "\nDo so before it is sharded."
        )
    if (found.shape, found.stride()) != (like.shape, like.stride()):
        raise NotImplementedError(
            "fully_shard: a sharded module can't get another memory format.\nDo so before it is "
            "sharded."
        )
    return found


def _fit(unit: Unit, changes: _Changes) -> bool:
    """Whether what the parts become may be written where they are."""
    return all(
        change is None or (change.dtype, change.device) == (shard.dtype, shard.device)
        for shard, change in zip(unit.shards, changes, strict=True)
    )


def _write(unit: Unit, changes: _Changes, fn: _Function) -> None:
    with torch.no_grad():
        for shard, change in zip(unit.shards, changes, strict=True):
            if change is None:
                continue
            shard.plain().copy_(fn(shard.plain()))
            if shard.grad is not None:
                shard.grad.plain().copy_(fn(shard.grad.plain()))


def _make_anew(below: Unit, changes: dict[Unit, _Changes], fn: _Function) -> None:
    """Collective. A root's other units are made anew of what they have. One after the other."""
    root, group = below.root, below.outermost().group
    units = list(changes) if root is None else root.units
    with failure_told_to_peers(group):
        if root is not None:
            _require_idle(root)
        for unit in units:
            unit.slots.require_own()
    items = [
        f"'{name}' of {unit.describe()} to {change.dtype} on {change.device.type}"
        for unit, found in changes.items()
        for name, change in zip(unit.names, found, strict=True)
        if change is not None
    ]
    _C.require_agreement(group, "converted parameter", items)
    settings = {unit: unit.settings_to_keep() for unit in units}
    if root is not None:
        root.dissolve()
    with torch.no_grad():
        for unit in units:
            parts = [shard.plain() for shard in unit.shards]
            gradients = [None if s.grad is None else s.grad.plain() for s in unit.shards]
            for i, change in enumerate(changes.get(unit, [])):
                if change is not None:
                    parts[i] = fn(parts[i])
                    gradients[i] = None if gradients[i] is None else fn(gradients[i])
            unit.make_anew(parts, gradients)
            unit.set_kept(settings[unit])


def _require_idle(root: Root) -> None:
    if root.is_in_forward or torch._C._current_graph_task_id() != -1:
        place = "inside of a forward or backward.\nDo so between steps."
    elif root.is_unsharded:
        place = "inside of whole_parameters().\nLeave it first."
    elif root.native.holds_gradients():
        place = (
            "while backwards have added up gradients that are not reduced.\nReduce them, and step, "
            "first."
        )
    else:
        return
    raise RuntimeError(f"fully_shard: a sharded module is to be cast {place}")


def _apply_to_others(
    module: nn.Module, buffers: dict[str, torch.Tensor | None], fn: _Function
) -> None:
    """To these buffers and to parameters that are not sharded, in torch's way."""
    plain = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and place_of(parameter) is None
    }
    others = nn.Module()
    others._parameters, others._buffers = plain, buffers
    nn.Module._apply(others, fn, recurse=False)
    module._parameters.update(plain)
