"""Module.to() and similar methods of sharded modules: conversions of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from brigade import _C
from brigade._sharded_tensors import TensorShard, as_shard
from brigade._sharded_units import own_modules, unit_of


def convert(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Applies `fn` as torch's _apply() does; parameters stay the objects that they are."""
    unit = unit_of(module)
    for each in unit.with_those_below():
        each.slots.require_unchanged()
    root = unit.root
    if root is not None:
        if root.is_unsharded or unit.is_in_pass():
            raise RuntimeError(
                "fully_shard: a sharded module is to be converted inside of a forward, backward or "
                "whole_parameters().\nDo so between steps."
            )
        if root.native.holds_gradients():
            raise RuntimeError(
                "fully_shard: a sharded module is to be converted, but has gradients of backwards "
                "without synchronisation.\nReduce them first, by a backward with synchronisation."
            )
    for _, child in own_modules(module) if recurse else [("", module)]:
        for parameter in child._parameters.values():
            if isinstance(parameter, TensorShard):
                _convert(parameter, fn, None if root is None else root.device)
        _apply_to_others(child, fn)
    if recurse:
        for below in unit.with_those_below():
            for each in below.modules():
                if each is not module and below.around() is unit:
                    each._apply(fn)
    return module


@torch.no_grad()
def _convert(
    parameter: TensorShard,
    fn: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device | None,
) -> None:
    """`device`: where the model has run."""
    changed, gradient = fn(parameter), parameter.grad
    has_run = device is not None and changed.device.type != device.type
    if has_run or (changed.is_meta and not parameter.is_meta):
        raise NotImplementedError(
            f"fully_shard: a sharded module can't be moved, from {parameter.device} to "
            f"{changed.device}.\nDo so before it is sharded."
        )
    if changed is parameter:
        return
    parameter.grad = None
    _C.set_piece(parameter, changed)
    if gradient is not None:
        parameter.grad = as_shard(fn(gradient), parameter)


def _apply_to_others(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """To its buffers and to parameters that are not sharded, in torch's way."""
    plain = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, TensorShard)
    }
    others = nn.Module()
    others._parameters, others._buffers = plain, module._buffers
    nn.Module._apply(others, fn, recurse=False)
    module._parameters.update(plain)
