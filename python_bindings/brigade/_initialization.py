"""Initialises parameters that ranks hold parts of, as one process would.

Functions that initialise look at the shape of a parameter, and at rows of it. So they get
whole ones: in methods of modules that are known for it, such as reset_parameters(), in
apply() of a model that comes from meta, and in those of torch.nn.init. Collective: ranks
keep their parts of what the first rank of the unit's mesh has then. What is whole at a
time are the parameters of one call: those of its module that are in the module's unit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from brigade import _C
from brigade._checks import failure_told_to_peers
from brigade._sharded_draws import fill
from brigade._sharded_state import gather_parts
from brigade._sharded_tensors import ShardedParameter, TensorShard
from brigade._sharded_units import Unit, own_modules

# Of torch's modules, torchtitan's and transformers' models, and others.
_METHODS = (
    "_init_parameters",
    "_init_weights",
    "_initialize_weights",
    "_reset_parameters",
    "init_parameters",
    "init_states",
    "init_weights",
    "initialize_parameters",
    "initialize_weights",
    "reset_parameters",
)
# Those that do not pass themselves on to TensorShard.__torch_function__().
_FUNCTIONS = (
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "xavier_normal_",
    "xavier_uniform_",
)

# Where a parameter is registered: a module's parameters, the name there and this rank's part.
_Slot = tuple[dict[str, Any], str, ShardedParameter]


@functools.cache
def teach_torch_to_initialize() -> None:
    """torch.nn.init gives parts the values of whole tensors. Names bound before stay torch's."""
    for name in _FUNCTIONS:
        setattr(nn.init, name, _of_whole(getattr(nn.init, name)))


def _of_whole(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, TensorShard):
            return function(tensor, *args, **kwargs)
        fill(tensor, lambda whole: function(whole, *args, **kwargs))
        return tensor

    return run


def initialize_whole(modules: list[nn.Module]) -> None:
    """Their methods that initialise see whole parameters; so do those of modules below."""
    for module in modules:
        for _, child in own_modules(module):
            for name in _METHODS:
                function = inspect.getattr_static(type(child), name, None)
                if isinstance(function, types.FunctionType) and name not in vars(child):
                    method = types.MethodType(_with_whole_parameters(function), child)
                    object.__setattr__(child, name, method)


@functools.cache
def _with_whole_parameters(method: Callable) -> Callable:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]
        with whole_inside([self, *given]):
            return method(self, *args, **kwargs)

    return run


@contextlib.contextmanager
def whole_inside(modules: list[nn.Module]) -> Iterator[None]:
    """Parameters of the modules' units, in the modules and below, are whole inside. Collective.

    Not those of units below. What is written there is kept.

    Raises:
        ValueError: a parameter was replaced by one of another shape.
        RuntimeError: ranks initialise different parameters, or a peer has raised inside.
    """
    slots: dict[Unit, list[_Slot]] = {}
    for module in modules:
        for _, child in own_modules(module):
            for name, part in child._parameters.items():
                unit = part._brigade_place.unit() if isinstance(part, ShardedParameter) else None
                if unit is not None:
                    slots.setdefault(unit, []).append((child._parameters, name, part))
    with contextlib.ExitStack() as stack:
        for unit, of_unit in slots.items():
            stack.enter_context(_whole(unit, of_unit))
        yield


@contextlib.contextmanager
def _whole(unit: Unit, slots: list[_Slot]) -> Iterator[None]:
    parts = list(dict.fromkeys(part for _, _, part in slots))
    if parts[0].is_meta:
        wholes = [torch.empty(part.whole_shape, device="meta", dtype=part.dtype) for part in parts]
    else:
        items = [f"'{unit.name_of(part)}' of {unit.describe()}" for part in parts]
        _C.require_agreement(unit.group, "initialized parameter", items)
        wholes = _gathered(unit, parts)
    shown = {}
    for part, whole in zip(parts, wholes, strict=True):
        shown[part] = nn.Parameter(whole, requires_grad=part.requires_grad)
    for parameters, name, part in slots:
        parameters[name] = shown[part]
    try:
        with failure_told_to_peers(None if parts[0].is_meta else unit.group):
            yield
            for parameters, name, part in slots:  # perhaps another one
                shown[part] = _require_shape(parameters[name], name, part)
    finally:
        for parameters, name, part in slots:
            parameters[name] = part
    if parts[0].is_meta:
        return
    _C.require_agreement(unit.group, "option", [])  # that no peer has raised
    for part, value in shown.items():
        fill(part, functools.partial(_copy, value))


def _copy(value: torch.Tensor, whole: torch.Tensor) -> None:
    whole.copy_(value)


def _require_shape(found: Any, name: str, part: ShardedParameter) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.shape != part.whole_shape:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else found
        raise ValueError(
            f"fully_shard: expected '{name}' to be initialized as {tuple(part.whole_shape)}, found "
            f"{shape}.\nShard the module when its parameters have their shapes."
        )
    return found.detach()


def _gathered(unit: Unit, parts: list[ShardedParameter]) -> list[torch.Tensor]:
    """Whole, in the order of memory of each. Collective."""
    wholes: dict[ShardedParameter, torch.Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        of_dtype = [part for part in parts if part.dtype == dtype]
        gathered = [whole.to(parts[0].device) for whole in gather_parts(of_dtype, unit)]
        wholes.update(zip(of_dtype, gathered, strict=True))
    return [wholes[part] for part in parts]
