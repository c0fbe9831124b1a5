"""Sharded training: each rank holds a part of every parameter, in place of torch's fully_shard.

    import brigade

    for block in model.blocks:
        brigade.fully_shard(block)
    brigade.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

A module that is sharded is a unit: its parameters that no other unit has are gathered
when it runs, and their gradients are summed together. Between forward and backward
``module.weight`` is this rank's part; inside of its unit's forward it is whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as _TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from brigade import _C

_UNIT = "_brigade_unit"

# Of torch.Tensor and torch, to be called on plain tensors.
_NORMS = {
    torch.norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch._foreach_norm,
}


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient. Its norms are those of the whole gradient.

    Norms are collective: all ranks call them. Everything else is of the part alone.
    """

    _brigade_unit: weakref.ref[_Unit]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _NORMS:
            return _norm(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ShardedParameter(nn.Parameter):
    """This rank's part of a parameter, which an optimizer is given.

    One dimension, in the order of memory; empty where this rank holds nothing of it; in
    the parameter's own shape where it holds all.
    """

    # Weak: what C++ holds of a tensor keeps all that Python has put there.
    _brigade_unit: weakref.ref[_Unit]

    @property
    def whole_shape(self) -> torch.Size:
        """Of the parameter that this is a part of."""
        return self._brigade_whole_shape

    @property
    def grad(self) -> ShardedGradient | None:
        """The average over ranks of the gradients, of this part."""
        gradient = torch.Tensor.grad.__get__(self)
        if gradient is None or isinstance(gradient, ShardedGradient):
            return gradient
        gradient.__class__ = ShardedGradient
        gradient._brigade_unit = self._brigade_unit
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _NORMS:
            return _norm(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _unit_of(tensor: torch.Tensor) -> _Unit | None:
    reference = getattr(tensor, "_brigade_unit", None)
    return None if reference is None else reference()


def _norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The norms of whole parameters or gradients, of whose parts `args` has a list or one."""
    is_list = func is torch._foreach_norm
    first = args[0]
    parts = list(first) if is_list else [first]
    p = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    p = 2.0 if p is None or p == "fro" else float(p)
    others = [*args[2:]]
    others += [kwargs[name] for name in kwargs if name not in ("ord", "p", "dtype")]
    if p <= 0 or any(other is not None and other is not False for other in others):
        raise NotImplementedError(
            f"a norm of sharded parameters: expected the norm of all elements for p > 0, "
            f"found p = {p} and other arguments.\nTake it of the whole parameters, "
            "inside of unshard()."
        )
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise NotImplementedError(
            "a norm of sharded parameters has no gradient.\nTake it under no_grad, or of the "
            "whole parameters inside of forward."
        )
    units = [_unit_of(part) for part in parts]
    roots = {unit.root() for unit in units if unit is not None}
    if len(roots) != 1 or None in units:
        raise NotImplementedError(
            "norms of sharded tensors together with others: they are local for the one, and "
            "global for the other.\nTake them apart."
        )
    (root,) = roots
    takes_largest = p == float("inf")
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norms = [
            torch.linalg.vector_norm(part, p, dtype=torch.float64)
            if part.numel()
            else torch.zeros((), dtype=torch.float64)
            for part in parts
        ]
        values = torch.stack(norms)
        if not takes_largest:
            values.pow_(p)
        root.sum_over_shards(values, takes_largest)
        if not takes_largest:
            values.pow_(1 / p)
        dtype = kwargs.get("dtype") or parts[0].dtype
        found = list(values.to(dtype).unbind())
    return found if is_list else found[0]


class FSDPModule(_TorchFSDPModule):
    """What a sharded module can do beside what its own class does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """One of the module's own class, as slices of a Sequential are made."""
        own = cls.__mro__[cls.__mro__.index(_TorchFSDPModule) + 1]
        return own(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        raise NotImplementedError(
            "fully_shard: a sharded module can't be copied.\nCopy it before it is sharded, and "
            "load full_state_dict()."
        )

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        raise NotImplementedError(
            "fully_shard: a sharded module can't be moved or cast.\nDo so before it is sharded."
        )

    def _unit(self) -> _Unit:
        return getattr(self, _UNIT)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards are reduced; if not, gradients add up on this rank, whole."""
        self._unit().root().synchronizes = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Without effect: every backward is complete by itself."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """From the next forward on."""
        for unit in self._unit().below(recurse):
            unit.set_reshards_after_forward(reshard_after_forward)

    def unshard(self, async_op: bool = False) -> None:
        """Collective: all units of the root are whole until reshard()."""
        root = self._unit().require_root()
        root.shared.unshard()
        root.is_unsharded = True
        for unit in root.units:
            unit.show_whole()

    def reshard(self, *, writes: bool = False) -> None:
        """Sharded again; `writes`: with the values that the whole parameters have now."""
        root = self._unit().require_root()
        root.is_unsharded = False
        for unit in root.units:
            unit.show_shards()
        root.shared.reshard(writes)

    @contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """All units of the root are whole inside; `writes`: what is changed there is kept."""
        self.unshard()
        try:
            yield
        finally:
            self.reshard(writes=writes)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all units by their norm over all ranks, which it returns."""
        shared = self._unit().require_root().shared
        return torch.tensor(shared.clip_grad_norm(max_norm, norm_type))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Collective: whole parameters in their own dtype, and buffers, copied, on every rank."""
        root = self._unit().require_root()
        wholes: dict[int, torch.Tensor] = {}
        for index, unit in enumerate(root.units):
            for shard, whole in zip(unit.shards, root.shared.gather_unit(index), strict=True):
                wholes[id(shard)] = whole
        state = self.state_dict(keep_vars=True)
        return {
            name: wholes[id(value)] if id(value) in wholes else value.detach().clone()
            for name, value in state.items()
        }

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Collective: from whole parameters and buffers, equal on all ranks.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing is changed.
        """
        root = self._unit().require_root()
        own = self.state_dict(keep_vars=True)
        if own.keys() != state.keys():
            names = sorted(own.keys() ^ state.keys())
            raise ValueError(f"load_full_state_dict: expected the module's names, found {names}.")
        wholes: dict[int, torch.Tensor] = {}
        for name, value in own.items():
            shape = value.whole_shape if isinstance(value, ShardedParameter) else value.shape
            if state[name].shape != shape:
                raise ValueError(
                    f"load_full_state_dict: '{name}': expected {tuple(shape)}, found "
                    f"{tuple(state[name].shape)}."
                )
            wholes[id(value)] = state[name]
        with torch.no_grad():
            for index, unit in enumerate(root.units):
                found = [
                    wholes.get(id(shard), whole)
                    for shard, whole in zip(
                        unit.shards, root.shared.gather_unit(index), strict=True
                    )
                ]
                root.shared.assign_unit(index, found)
            for name, value in own.items():
                if not isinstance(value, ShardedParameter):
                    value.copy_(state[name])

    def explain(self) -> str:
        """Units, bytes and padding, in words."""
        return self._unit().require_root().shared.explain()

    def sharding_statistics(self) -> dict[str, int]:
        """Counts since the first forward, bytes as they are now."""
        return self._unit().require_root().shared.statistics()

    def reset_iter_state(self) -> None:
        """Without effect: a failure leaves nothing behind."""


def _lacks(name: str) -> Callable:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"brigade.fully_shard lacks {name}() so far.")

    method.__name__ = name
    return method


for _name in (
    "finalize_backward",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_reduce_scatter_max_input_buffers",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
):
    setattr(FSDPModule, _name, _lacks(_name))


class _Place:
    """Where a parameter is registered."""

    __slots__ = ("name", "parameters")

    def __init__(self, parameters: dict[str, Any], name: str) -> None:
        self.parameters = parameters
        self.name = name


class _Root:
    """The units below the outermost module that is sharded, and what they share."""

    def __init__(self, units: list[_Unit]) -> None:
        self.units = units
        options = units[0].options
        self.shared = _C.ShardedRoot([unit.made for unit in units], units[0].group, options)
        self.is_unsharded = False
        for index, unit in enumerate(units):
            unit.index = index


class _Unit:
    """One module that is sharded, with its hooks."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: _C.ShardingOptions,
        policy: MixedPrecisionPolicy,
        reshards: bool | None,
        ignored: set[nn.Parameter],
    ) -> None:
        self.module = weakref.ref(module)
        self.group = group
        self.options = options
        self.policy = policy
        self.reshards = reshards
        self.index = -1
        self.joined: _Root | None = None
        self.calls: list[_C.UnitCall] = []
        self.inputs: list[torch.Tensor] = []

        places: dict[nn.Parameter, list[_Place]] = {}
        names: dict[nn.Parameter, str] = {}
        for prefix, child in _own_modules(module):
            for name, parameter in child._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                other = _unit_of(parameter)
                if other is not None:
                    raise ValueError(
                        f"fully_shard: parameter '{prefix}{name}' of {type(module).__name__} is "
                        f"'{other.name_of(parameter)}' of {other.describe()} already.\n"
                        "Shard modules that share a parameter together, by their parent."
                    )
                places.setdefault(parameter, []).append(_Place(child._parameters, name))
                names.setdefault(parameter, prefix + name)
        self.wholes = list(places)
        self.places = list(places.values())
        self.names = [names[parameter] for parameter in self.wholes]
        self.shards: list[ShardedParameter] = []
        self.made: _C.ShardedUnit | None = None
        if self.wholes:
            self._shard(type(module).__name__)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def _shard(self, name: str) -> None:
        shapes = [parameter.shape for parameter in self.wholes]
        self.made = _C.ShardedUnit(name, self.names, self.wholes, self.group, self.options)
        for shape, shard in zip(shapes, self.made.shards, strict=True):
            # The very tensor whose .grad is set when a backward has been reduced.
            shard.__class__ = ShardedParameter
            shard._brigade_unit = weakref.ref(self)
            shard._brigade_whole_shape = shape
            self.shards.append(shard)
        for whole in self.wholes:
            whole._brigade_unit = weakref.ref(self)
        # What is to be put where, in a list that costs little to go through.
        self.to_whole = [
            (place.parameters, place.name, whole)
            for whole, places in zip(self.wholes, self.places, strict=True)
            for place in places
        ]
        self.to_shards = [
            (place.parameters, place.name, shard)
            for shard, places in zip(self.shards, self.places, strict=True)
            for place in places
        ]
        self.show_shards()

    def name_of(self, parameter: nn.Parameter) -> str:
        for name, whole, shard in zip(self.names, self.wholes, self.shards, strict=True):
            if parameter is whole or parameter is shard:
                return name
        return ""

    def describe(self) -> str:
        module = self.module()
        return f"a sharded {type(module).__name__.removeprefix('FSDP')}"

    # ---- The root.

    def root(self) -> _C.ShardedRoot:
        return self.require_root().shared

    def require_root(self) -> _Root:
        if self.joined is None:
            module = self.module()
            assert module is not None
            _join(module)
        return self.joined

    def below(self, recurse: bool) -> list[_Unit]:
        module = self.module()
        assert module is not None
        return _units_of(module) if recurse else [self]

    def set_reshards_after_forward(self, value: bool) -> None:
        self.reshards = value
        if self.joined is not None and self.index >= 0:
            self.joined.shared.set_unit_reshards_after_forward(self.index, value)
        elif self.made is not None:
            self.made.set_reshards_after_forward(value)

    # ---- What the module's attributes are.

    def show_whole(self) -> None:
        for parameters, name, whole in self.to_whole:
            parameters[name] = whole

    def show_shards(self) -> None:
        for parameters, name, shard in self.to_shards:
            parameters[name] = shard

    # ---- A call of the module.

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        joined = self.joined
        if joined is None:
            _join(module)
            joined = self.joined
        shared = joined.shared
        if joined.units[0] is self:
            shared.begin_forward()
        policy = self.policy
        dtype = policy.param_dtype if policy.cast_forward_inputs else None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        if dtype is not None:
            args = _map(args, cast)
            kwargs = _map(kwargs, cast)
        inputs = (
            [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
            if torch.is_grad_enabled()
            else []
        )
        if self.made is None and self.index < 0:
            return args, kwargs
        call, stand_ins = shared.begin_call(self.index, inputs)
        self.calls.append(call)
        self.show_whole()
        if inputs:
            replaced = dict(zip(map(id, inputs), stand_ins, strict=True))
            args = _map(args, lambda tensor: replaced.get(id(tensor), tensor))
            kwargs = _map(kwargs, lambda tensor: replaced.get(id(tensor), tensor))
        return args, kwargs

    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        joined = self.joined
        if joined is None:  # it could not be joined
            return None
        shared = joined.shared
        error = sys.exc_info()[1] if output is None else None
        if self.index >= 0 and self.calls:
            call = self.calls.pop()
            if not self.calls and not joined.is_unsharded:
                self.show_shards()
            if error is None:
                outputs = [
                    tensor for tensor in _tensors(output, opens=True) if tensor.grad_fn is not None
                ]
                shared.end_call(call, outputs)
            else:  # also of a checkpoint that has computed again all it needs
                shared.abort_call(call)
        if joined.units[0] is self:
            if error is not None:
                shared.forward_failed(f"{type(error).__name__}: {error}")
            else:
                shared.end_forward()
        if error is None and self.policy.output_dtype is not None:
            dtype = self.policy.output_dtype
            return _map(
                output,
                lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
            )
        return None


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it that are in no unit of their own."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not hasattr(child, _UNIT):
            yield from _own_modules(child, f"{prefix}{name}.")


def _units_of(module: nn.Module) -> list[_Unit]:
    """Those of a module and of all below it, outermost first."""
    units = []
    for child in module.modules():
        unit = getattr(child, _UNIT, None)
        if unit is not None and unit not in units:
            units.append(unit)
    return units


def _join(module: nn.Module) -> None:
    """Makes `module` the outermost one of all sharded modules below it. Collective."""
    units = _units_of(module)
    outermost = units[0]
    joined = [unit for unit in units if unit.joined is not None]
    if joined:
        raise RuntimeError(
            "fully_shard: forward ran through a module below this one first, which made it the "
            "outermost.\nRun the first forward through the outermost module."
        )
    if outermost.made is None:
        raise ValueError(
            "fully_shard: the outermost module has no parameters of its own, which all units "
            "below it have.\nLeave one of them to it, or don't shard it."
        )
    if outermost.reshards is None:
        outermost.set_reshards_after_forward(False)
    names = {id(child): name for name, child in module.named_modules()}
    for unit in units:
        if unit.made is not None:
            name = names[id(unit.module())]
            unit.made.rename(name, f"{name}." if name else "")
    if any(unit.group is not outermost.group for unit in units):
        raise ValueError("fully_shard: units of one model have different meshes.\nGive all one.")
    root = _Root([unit for unit in units if unit.made is not None])
    for unit in units:
        unit.joined = root


def _tensors(nest: Any, opens: bool = False) -> Iterator[torch.Tensor]:
    """Those in a nest; `opens`: dataclasses too, whose tensors can't be replaced."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from _tensors(part, opens)
    elif isinstance(nest, dict):
        for part in nest.values():
            yield from _tensors(part, opens)
    elif opens and hasattr(nest, "__dataclass_fields__"):
        for name in nest.__dataclass_fields__:
            yield from _tensors(getattr(nest, name), opens)


def _map(nest: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, tuple):
        parts = [_map(part, function) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else tuple(parts)
    if isinstance(nest, list):
        return [_map(part, function) for part in nest]
    if isinstance(nest, dict):
        mapped = {key: _map(part, function) for key, part in nest.items()}
        return mapped if type(nest) is dict else type(nest)(mapped)
    return nest


def _group_of(mesh: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The group of all ranks of a mesh, and how many of them are a row of it."""
    if mesh is None:
        if not dist.is_initialized():
            raise ValueError(
                "fully_shard: there is no process group.\nCall "
                "torch.distributed.init_process_group() first."
            )
        return dist.group.WORLD, None
    if mesh.ndim == 1:
        return mesh.get_group(), None
    in_order = list(range(dist.get_world_size()))
    if mesh.ndim == 2 and mesh.mesh.flatten().tolist() == in_order:
        return dist.group.WORLD, mesh.size(1)
    raise NotImplementedError(
        f"fully_shard: expected a mesh of one dimension, or of two over all ranks in order, "
        f"found {mesh}."
    )


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    prefetch_depth: int = 1,
    broadcasts_parameters: bool = True,
) -> nn.Module:
    """Shards the parameters of a module that are in no unit below it. Collective.

    Args:
        module: shard modules below it first; forward begins at the outermost one.
        mesh: of one dimension, whose ranks share the parameters (default: all ranks); of
            two, (replicas, shards): shards along the second.
        reshard_after_forward: whether it is released between forward and backward. None:
            unless it is the outermost.
        shard_placement_fn: not so far.
        mp_policy: what forward computes in, gradients are summed in and outputs are cast
            to. Parameters stay in their own dtype.
        offload_policy: not so far.
        ignored_params: left as they are, on every rank its own.
        dp_mesh_dims: not so far.
        prefetch_depth: units that are gathered ahead of their need.
        broadcasts_parameters: all ranks begin with the parameters of rank 0.

    Returns:
        The module, whose class is now one of its own and of FSDPModule.

    Raises:
        ValueError: bad arguments, or ranks differ; on all ranks alike.
        NotImplementedError: what brigade lacks, by name.
    """
    if isinstance(module, (list, tuple)):
        raise NotImplementedError(
            "fully_shard: several modules as one unit.\nShard their parent, or each of them."
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError("fully_shard: reshard_after_forward to a smaller group.")
    for name, value in (
        ("shard_placement_fn", shard_placement_fn),
        ("dp_mesh_dims", dp_mesh_dims),
    ):
        if value is not None:
            raise NotImplementedError(f"fully_shard: {name}.")
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError("fully_shard: offload_policy: parameters stay where they are.")
    policy = mp_policy or MixedPrecisionPolicy()
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError("fully_shard: mp_policy.param_dtype_override_fn.")
    if hasattr(module, _UNIT):
        raise ValueError("fully_shard: this module is sharded already.")
    group, num_shards = _group_of(mesh)
    options = _C.ShardingOptions(
        num_shards=num_shards,
        reshards_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        prefetch_depth=prefetch_depth,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        broadcasts_parameters=broadcasts_parameters,
    )
    unit = _Unit(module, group, options, policy, reshard_after_forward, set(ignored_params or ()))
    object.__setattr__(module, _UNIT, unit)
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return module
