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
from brigade._sharded_tensors import ShardedParameter
from brigade._sharded_units import Root, Unit, unit_of

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


def _convert_units(below: Unit, fn: _Function, recurse: bool) -> None:
    units = [unit for unit in below.with_those_below() if unit.native is not None]
    changed = {unit: parts for unit in units if (parts := _converted(unit, fn)) is not None}
    if changed and not recurse:
        raise NotImplementedError(
            "fully_shard: a unit can't be cast or get memory in one of its modules alone.\nLeave "
            "recurse=False out."
        )
    others = {unit for unit, parts in changed.items() if not _fit(unit, parts)}
    if others:
        _make_anew(below, changed, fn)
    else:
        for unit, parts in changed.items():
            _write(unit, parts, fn)


def _converted(unit: Unit, fn: _Function) -> list[torch.Tensor] | None:
    """What becomes of the parts, or None if they stay what they are."""
    is_changed = [_is_changed(part, fn) for part in unit.shards]
    if not any(is_changed):
        return None
    with torch.no_grad():
        return [
            fn(part.plain()) if changes else part.plain()
            for part, changes in zip(unit.shards, is_changed, strict=True)
        ]


def _is_changed(part: ShardedParameter, fn: _Function) -> bool:
    """As `fn` would have it of any tensor of the whole one's kind, which ranks have alike."""
    sizes = (1, 2, 2, 2, 2)[: len(part.whole_shape)]
    like = torch.ones(sizes, dtype=part.dtype, device=part.device)
    found = fn(like)
    if found is like:
        return False
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
    return True


def _fit(unit: Unit, parts: list[torch.Tensor]) -> bool:
    """Whether the parts may be written where the unit's are."""
    pairs = zip(unit.shards, parts, strict=True)
    return all((a.dtype, a.device) == (b.dtype, b.device) for a, b in pairs)


def _write(unit: Unit, parts: list[torch.Tensor], fn: _Function) -> None:
    with torch.no_grad():
        for shard, part in zip(unit.shards, parts, strict=True):
            shard.plain().copy_(part)
            if shard.grad is not None:
                shard.grad.plain().copy_(fn(shard.grad.plain()))


def _make_anew(below: Unit, changed: dict[Unit, list[torch.Tensor]], fn: _Function) -> None:
    """Collective. A root's other units are made anew of what they have."""
    root, group = below.root, below.outermost().group
    with failure_told_to_peers(group):
        if root is not None:
            _require_idle(root)
    items = [
        f"'{name}' of {unit.describe()} to {part.dtype} on {part.device.type}"
        for unit, parts in changed.items()
        for name, part in zip(unit.names, parts, strict=True)
    ]
    _C.require_agreement(group, "converted parameter", items)
    units = list(changed) if root is None else root.units
    settings = {unit: unit.settings_to_keep() for unit in units}
    if root is not None:
        root.dissolve()
    with torch.no_grad():
        for unit in units:
            parts = changed.get(unit)
            gradients = [
                None if shard.grad is None else shard.grad.plain() for shard in unit.shards
            ]
            if parts is not None:
                gradients = [None if g is None else fn(g) for g in gradients]
            unit.make_anew(parts or [shard.plain() for shard in unit.shards], gradients)
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
