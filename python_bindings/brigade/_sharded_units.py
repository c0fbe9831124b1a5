"""FSDP units, and the root that all units of one outermost module share.

A call of the outermost module runs a forward of the root (fsdp/sharded_model.h); calls of
submodules are part of it. The first operator that uses a parameter unshards its unit. A module's
call also unshards its own unit, because compiled code reads memory without operators.
"""

from __future__ import annotations

import collections
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from brigade import _C
from brigade._checks import describe_error, raises_on_all_ranks, require_count, some_of
from brigade._parameter_watch import ParameterSlots, Slot
from brigade._prepare_parameters import (
    destinations,
    memory_of,
    move,
    remember_memory,
    require_in_no_unit,
    require_no_overlap,
    require_plain,
    require_read_only,
    require_untied,
)
from brigade._sharded_tensors import (
    Origin,
    ShardedParameter,
    TensorShard,
    as_shard,
    parameter_class,
    write_shard,
)
from brigade._tensor_parallel import TensorParallelParameter, local_parameter, reading_dtensors
from brigade._tensor_trees import cast_floating, map_tensors, move_to, return_additions, tensors_in

_UNIT = "_brigade_unit"
_creation_order = itertools.count()


def split_reshards(value: bool | int, num_shards: int) -> tuple[bool, int | None]:
    """Splits reshard_after_forward into a bool and the number of ranks (None: `num_shards`)."""
    if isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or num_shards % value != 0:
        divisors = [n for n in range(1, num_shards + 1) if num_shards % n == 0]
        raise ValueError(
            "fully_shard: expected reshard_after_forward to be a bool or a divisor of the shard "
            f"group's size {num_shards}, found {value!r}.\nPass one of {divisors}."
        )
    return value > 1, value if 1 < value < num_shards else None


def unit_of(module: nn.Module) -> Unit | None:
    return getattr(module, _UNIT, None)


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (prefix, module) of the module and its submodules, except those in other units."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None:
            yield from own_modules(child, f"{prefix}{name}.")


def _checked_parameters(
    modules: list[nn.Module],
    prefixes: list[str],
    ignored: set[nn.Parameter],
    group: dist.ProcessGroup,
    device_type: str | None,
) -> tuple[dict[nn.Parameter, list[tuple[int, str]]], list[Slot]]:
    """Returns a new unit's parameters with their (index in modules, path), and their slots.

    The parameters of DTensors are their local ones.
    """
    paths: dict[nn.Parameter, list[tuple[int, str]]] = {}
    slots: list[Slot] = []
    for index, module in enumerate(modules):
        for prefix, child in own_modules(module):
            require_read_only(child, prefix, ignored)
            for name, parameter in child._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                where = f"'{prefixes[index]}{prefix}{name}' of {type(module).__name__}"
                if isinstance(parameter, DTensor):
                    parameter = local_parameter(parameter, where, group, device_type)
                require_plain(parameter, where)
                require_in_no_unit(parameter, where)
                paths.setdefault(parameter, []).append((index, prefix + name))
                slots.append((child._parameters, name, parameter))
    return paths, slots


class Unit:
    """Modules (usually one) whose parameters are sharded and unsharded together."""

    def __init__(
        self,
        modules: list[nn.Module],
        group: dist.ProcessGroup,
        num_shards: int,
        mesh: DeviceMesh | None,
        options: dict[str, Any],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None = None,
        device_type: str | None = None,
    ) -> None:
        """Shards the modules' parameters that are in no unit yet. Collective.

        `group` and `num_shards`: see _mesh_arguments.py. `mesh`: None makes one on demand.
        `options`: arguments of FullyShardOptions. `reshard_after_forward`: None means True unless
        this is the outermost unit. `device_type`: the mesh's; None without a mesh.
        """
        self._modules = [weakref.ref(module) for module in modules]
        self.group = group
        self.num_shards = num_shards
        self._mesh = mesh
        self.options = _C.FullyShardOptions(num_shards=num_shards, **options)
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.root: Root | None = None
        self.root_lock = threading.RLock()  # collectives of make_root() release the GIL
        self.creation_index = next(_creation_order)
        self.path = ""  # of the modules in the outermost one
        self.max_input_buffers: int | None = None  # the root uses the minimum of all units
        self.post_optim_event: torch.Event | None = None  # the root uses the outermost unit's
        self.was_on_meta = False
        self._parent: weakref.ref[Unit] | None = None
        self.index = -1  # in the root; -1 without parameters
        self.native: _C.ShardedUnit | None = None  # None without parameters
        # By parameter: [(index in modules, path in that module)]; several if it is tied.
        self._paths: list[list[tuple[int, str]]] = []
        self.parameters: list[nn.Parameter] = []
        self._shard(modules, ignored, block_numel_fn, device_type)
        for module in modules:
            object.__setattr__(module, _UNIT, self)
            # torch's replicate() then refuses the module, and skips it inside of others.
            module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
            module.register_load_state_dict_pre_hook(_write_shards)
            module.register_state_dict_pre_hook(_await_statuses)
        for unit in self.subtree():
            if unit is not self and unit.parent() is None:
                unit._parent = weakref.ref(self)

    def _shard(
        self,
        modules: list[nn.Module],
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None,
        device_type: str | None,
    ) -> None:
        prefixes = [f"[{index}]." if len(modules) > 1 else "" for index in range(len(modules))]
        block_numels = dtypes = None
        with raises_on_all_ranks(self.group):
            paths, slots = _checked_parameters(modules, prefixes, ignored, self.group, device_type)
            parameters, self._paths = list(paths), list(paths.values())
            names = [prefixes[index] + path for (index, path), *_ in self._paths]
            if block_numel_fn is not None:
                block_numels = [
                    require_count(block_numel_fn(parameter), f"block_numel_fn of '{name}'")
                    for parameter, name in zip(parameters, names, strict=True)
                ]
            if (override := getattr(self.policy, "param_dtype_override_fn", None)) is not None:
                dtypes = [override(parameter) for parameter in parameters]
            memories = memory_of(self, names, parameters)
            children = [child for module in modules for _, child in own_modules(module)]
            buffers = [b for child in children for b in child._buffers.values() if b is not None]
            moves = destinations([*parameters, *buffers], self.group, device_type)
            if moves:
                require_no_overlap(memories)
            for tensor, device in moves:
                move(tensor, device)
            for parameter in parameters:
                if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                    parameter.data = parameter.detach().contiguous()
        reference = weakref.ref(self)  # the unit lives as long as its modules
        self.slots = ParameterSlots(
            slots,
            lambda: (c for each in reference().modules() for _, c in own_modules(each)),
            lambda: module_paths(reference().outermost()),
            ignored,
        )
        if not parameters:
            if moves:  # matches raises_on_all_ranks() of a peer whose move failed
                types = [type(module).__name__ for module in modules]
                _C.require_agreement(self.group, "fully_shard: moved module", types)
            return
        self.was_on_meta = any(parameter.is_meta for parameter in parameters)
        self.native = _C.ShardedUnit(
            ", ".join(type(module).__name__ for module in modules),
            names,
            parameters,
            self.group,
            self.options,
            self.reshard_after_forward is not False,
            len(modules) > 1,
            block_numels,
            dtypes,
        )
        remember_memory(memories)
        self.parameters = parameters
        for parameter in parameters:
            spec = getattr(parameter, "_brigade_spec", None)
            parameter.__class__ = (
                parameter_class(type(parameter)) if spec is None else TensorParallelParameter
            )
            placement = getattr(parameter, "_brigade_placement", Shard(0))
            parameter._brigade_origin = Origin(reference, placement, spec)
        for where, name, parameter in slots:
            where[name] = parameter
        for child in children:
            if any(isinstance(p, TensorParallelParameter) for p in child._parameters.values()):
                child.__class__ = reading_dtensors(type(child))

    # ---- Relations to other units.

    def parent(self) -> Unit | None:
        """Returns the innermost unit that contains this one, or None."""
        return None if self._parent is None else self._parent()

    def outermost(self) -> Unit:
        """Returns the root's outermost unit; before the root is made, the topmost ancestor."""
        if self.root is not None:
            return self.root.outermost
        parent = self.parent()
        return self if parent is None else parent.outermost()

    # ---- Private names of torch's FSDPState, which other programs read.

    @property
    def _comm_ctx(self) -> Unit:
        """Identifies the communication context; torch's pipeline schedules compare it."""
        return self.outermost()

    def _lazy_init(self) -> None:
        """Makes this unit the outermost one. Collective."""
        if self.root is None:
            make_root(self)

    @property
    def _is_root(self) -> bool | None:
        return None if self.root is None else self.root.outermost is self

    @property
    def _state_ctx(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(all_states=self.outermost().subtree())

    @property
    def _fsdp_param_group(self) -> types.SimpleNamespace | None:
        if self.native is None:
            return None
        names = self.parameter_names(module_paths(self.outermost()))
        params = [
            types.SimpleNamespace(_param_fqn=name, sharded_param=parameter)
            for name, parameter in zip(names, self.parameters, strict=True)
        ]
        return types.SimpleNamespace(_module_fqn=self.path, fsdp_params=params)

    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    def subtree(self) -> list[Unit]:
        """Returns this unit and the units inside of it, outermost first."""
        units = (unit_of(child) for module in self.modules() for child in module.modules())
        return list(dict.fromkeys(unit for unit in units if unit is not None))

    def require_root(self) -> Root:
        """Returns the root. Makes it, collectively, if there is none."""
        if self.root is None:
            outermost = self.outermost()
            with outermost.root_lock:
                return self.root or make_root(outermost)
        return self.root

    def has_parameters(self) -> bool:
        return any(True for module in self.modules() for _ in module.parameters())

    def has_replicas(self) -> bool:
        return self.num_shards < self.group.size()

    def describe(self) -> str:
        kinds = [type(module).__name__.removeprefix("FSDP") for module in self.modules()]
        return f"a sharded {' with '.join(kinds)}"

    def name_of(self, parameter: nn.Parameter) -> str:
        named = zip(self.parameters, self._paths, strict=True)
        return next((path for each, ((_, path), *_) in named if each is parameter), "")

    def rename(self, names: dict[nn.Module, str]) -> None:
        """Sets the names in error texts; `names` are the outermost unit's module_paths()."""
        self.path = ", ".join(self._module_names(names))
        if self.native is not None:
            self.native.rename(self.path, self.parameter_names(names))

    def _module_names(self, names: dict[nn.Module, str]) -> list[str]:
        return [names.get(module(), f"[{i}]") for i, module in enumerate(self._modules)]

    def parameter_names(self, names: dict[nn.Module, str]) -> list[str]:
        """Returns the parameters' paths; of a tied parameter the first, as named_parameters()."""
        own = self._module_names(names)
        positions = {module: i for i, module in enumerate(names)} if len(own) > 1 else {}
        firsts = [
            min(paths, key=lambda entry: positions.get(self._modules[entry[0]](), 0))
            for paths in self._paths
        ]
        return [f"{own[i]}.{path}" if own[i] else path for i, path in firsts]

    def device_mesh(self) -> DeviceMesh:
        """Returns a 1-D mesh, or a 2-D mesh (replicas, shards)."""
        if self._mesh is None:
            kind = self.parameters[0].device.type if self.parameters else "cpu"
            ranks = torch.tensor(dist.get_process_group_ranks(self.group))
            self._mesh = DeviceMesh(
                "cpu" if kind == "meta" else kind,
                ranks.view(-1, self.num_shards) if self.has_replicas() else ranks,
            )
        return self._mesh

    # ---- Settings.

    def settings(self) -> _C.UnitSettings | None:
        """Returns None if the unit has no parameters."""
        if self.native is None:
            return None
        return self.native.settings if self.root is None else self.root.native.settings(self.index)

    def set_reshard_after_forward(self, value: bool | int) -> None:
        self.reshard_after_forward, reshard_to = split_reshards(value, self.num_shards)
        if (settings := self.settings()) is not None:
            settings.reshard_after_forward = self.reshard_after_forward
            settings.reshard_to = reshard_to

    # ---- Manual unshard() and reshard().

    def is_in_pass(self) -> bool:
        """Returns True if this thread runs a forward of the root or any backward."""
        in_forward = self.root is not None and self.root.native.is_in_forward
        return in_forward or torch._C._current_graph_task_id() != -1

    def unshard(self) -> None:
        """Unshards this unit, without those inside of it. Collective."""
        if self.native is None or (root := self.require_root()).is_unsharded:
            return
        self.slots.require_unchanged()
        if not self.is_in_pass():
            root.manually_unsharded.add(self)
        root.native.unshard([self.index], True)

    def reshard(self, writes: bool) -> None:
        """`writes`: the shards take the current values of the unsharded parameters."""
        if self.native is None or self.root is None or self.root.is_unsharded:
            return
        self.root.manually_unsharded.discard(self)
        self.root.native.reshard([self.index], not writes)

    def drop_unshard(self) -> None:
        """Ends the effect of unshard(), before shards are written."""
        if self.root is not None and self in self.root.manually_unsharded:
            self.reshard(writes=False)

    # ---- Forward.

    def run(self, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs forward, or another method of the module, as a forward of the root."""
        if self.root is None or not self.root.is_unsharded:
            _require_no_transform()
        if self.root is None and not self.outermost().has_parameters():
            return method(*args, **kwargs)  # for example a loss module
        root = self.require_root()
        callers = args, kwargs
        if root.outermost is self and root.device.type != "cpu":
            args, kwargs = move_to((args, kwargs), root.device)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        if root.is_unsharded and not torch.is_grad_enabled():
            output = self._cast_outputs(method(*args, **kwargs))  # not collective
            return_additions(callers, (args, kwargs))
            return output
        native = root.native
        event, root.outermost.post_optim_event = root.outermost.post_optim_event, None
        if event is not None:  # the current stream waits once
            event.wait()
        native.begin_forward()
        try:
            self.slots.require_unchanged()
            if self.index >= 0:
                native.unshard([self.index])
            output = self._cast_outputs(method(*args, **kwargs))
            return_additions(callers, (args, kwargs))
            output = map_tensors(output, _without_user_hooks)
            native.end_forward(self.unshard_before_backward(output))
        except BaseException as error:
            native.forward_failed(describe_error(error))
            raise
        if root.manually_unsharded and not native.is_in_forward:
            root.reshard_due("reshard_after_forward")
        return output

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    def unshard_before_backward(self, output: Any) -> list[torch.Tensor]:
        """Unshards the unit when backward reaches `output`; compiled code needs that.

        Returns the tensors in `output` that backward reaches.
        """
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if self.index < 0 or not self.settings().gathers_in_backward:
            return tensors
        for node in {tensor.grad_fn for tensor in tensors}:
            units = node.metadata.get("brigade")
            if units is None:
                units = node.metadata["brigade"] = []
                node.register_prehook(partial(_unshard_in_backward, units))
            units.append(weakref.ref(self))
        return tensors


def _unshard_in_backward(units: list[weakref.ref[Unit]], *_: Any) -> None:
    """Unshards units whose forwards returned the same tensor; `units` are in the order they ended.

    Outer units come first: using one reshards its inner units.
    """
    for reference in reversed(units):
        if (unit := reference()) is not None:
            unit.root.native.use_in_backward(unit.index)
            unit.root.reshard_due("reshard_after_backward")


def _require_no_transform() -> None:
    """Raises NotImplementedError in torch.func transforms, whose backward skips our hooks."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return
    kinds = {interpreter.key() for interpreter in functorch.get_interpreter_stack()}
    of_vmap = functorch.TransformType.Vmap in kinds and torch.is_grad_enabled()
    if of_vmap or kinds & {functorch.TransformType.Grad, functorch.TransformType.Jvp}:
        raise NotImplementedError(
            "fully_shard: found a torch.func transform (grad, vjp, jvp, or vmap with gradients) "
            "around the forward of a sharded module.\nUse torch.autograd, or call it inside of "
            "whole_parameters()."
        )


def _without_user_hooks(output: torch.Tensor) -> torch.Tensor:
    """Returns a view without the user's tensor hooks: the root's hook runs before them."""
    return output.view_as(output) if output._backward_hooks else output


def _await_statuses(module: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: raises if a rank failed, so that no invalid step is saved."""
    if (root := getattr(module, _UNIT).root) is not None:
        root.native.await_statuses()


def _write_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load-state-dict pre-hook: writes this rank's shards, and puts the parameters into `state`."""
    unit_of(module).drop_unshard()
    for path, child in own_modules(module):
        for name, parameter in child._parameters.items():
            key = prefix + path + name
            value = state.get(key)
            if not isinstance(parameter, TensorShard) or not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.shape:
                write_shard(parameter, value)
                state[key] = parameter


def keep_sharded(module: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter | None:
    """Hook of register_parameter(): writes the values of `value` into the sharded parameter.

    The sharded parameter stays registered, so that optimizers hold it. Values that do not fit, or
    are for one of several tied parameters, replace it; the next forward raises.
    """
    own = module._parameters.get(name)
    if not isinstance(own, ShardedParameter) or isinstance(value, (ShardedParameter, DTensor)):
        return None
    fits = (value.shape, value.dtype) == (own.shape, own.dtype) and value.is_meta <= own.is_meta
    unit = own._unit()
    children = {child for each in unit.modules() for _, child in own_modules(each)}
    is_tied = sum(each is own for child in children for each in child._parameters.values()) > 1
    holds_gradients = unit.root is not None and unit.root.native.holds_gradients()
    if not fits or is_tied or unit.is_in_pass() or holds_gradients:
        return None
    unit.drop_unshard()
    write_shard(own, value.detach())
    own.grad = None
    return own.requires_grad_(value.requires_grad)


# ---- Module.to() and similar methods, which call _apply().


def convert(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Applies `fn` to shards, buffers and ignored parameters in place, as Module._apply() does."""
    unit = unit_of(module)
    for each in unit.subtree():
        each.slots.require_unchanged()
    root = unit.root
    if root is not None:
        if root.is_unsharded or unit.is_in_pass():
            raise RuntimeError(
                "fully_shard: a sharded module can't be converted inside of a forward, backward or "
                "whole_parameters().\nConvert it between steps."
            )
        if root.native.holds_gradients():
            raise RuntimeError(
                "fully_shard: a sharded module can't be converted while it holds accumulated, "
                "unsynchronized gradients.\nRun a backward with gradient synchronization first."
            )
    for _, child in own_modules(module) if recurse else [("", module)]:
        for parameter in child._parameters.values():
            if isinstance(parameter, TensorShard):
                _convert_shard(parameter, fn, None if root is None else root.device)
        _apply_to_unsharded(child, fn)
    if recurse:
        for inner in unit.subtree():
            for each in inner.modules():
                if each is not module and inner.parent() is unit:
                    each._apply(fn)
    return module


@torch.no_grad()
def _convert_shard(
    parameter: TensorShard,
    fn: Callable[[torch.Tensor], torch.Tensor],
    root_device: torch.device | None,
) -> None:
    changed, gradient = fn(parameter), parameter.grad
    leaves_root = root_device is not None and changed.device.type != root_device.type
    if leaves_root or (changed.is_meta and not parameter.is_meta):
        raise NotImplementedError(
            f"fully_shard: a sharded module can't be moved from {parameter.device} to "
            f"{changed.device}.\nMove it before fully_shard."
        )
    if changed is parameter:
        return
    parameter.grad = None
    _C.set_shard(parameter, changed)
    if gradient is not None:
        parameter.grad = as_shard(fn(gradient), parameter)


def _apply_to_unsharded(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Applies `fn` to the module's buffers and unsharded parameters with torch's _apply()."""
    unsharded = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, TensorShard)
    }
    holder = nn.Module()
    holder._parameters, holder._buffers = unsharded, module._buffers
    nn.Module._apply(holder, fn, recurse=False)
    module._parameters.update(unsharded)


class Root:
    """The units of one outermost module, in the order of C++'s ShardedModel."""

    def __init__(self, outermost: Unit, units: list[Unit]) -> None:
        """Collective. `units` are all units with parameters, outermost first."""
        self.outermost = outermost
        self.units = units
        self.native = _C.ShardedModel(
            [unit.native for unit in units],
            outermost.group,
            outermost.options,
            _parents_and_meshes(outermost, units),
        )
        self.device = next(p.device for unit in units for p in unit.parameters)
        self.is_unsharded = self.keeps_writes = self.manual_finalization = False
        self.manually_unsharded: set[Unit] = set()
        for index, unit in enumerate(units):
            unit.index = index
        self.apply_max_input_buffers()
        for unit in units:
            if unit.was_on_meta and unit.has_replicas():
                _broadcast_to_replicas(unit)

    def apply_max_input_buffers(self) -> None:
        caps = [unit.max_input_buffers for unit in self.units if unit.max_input_buffers is not None]
        if caps:
            self.native.set_max_reducing(min(caps))

    def finalize(self) -> None:
        """Collective: reduces accumulated gradients of the units that synchronize."""
        is_due = any(unit.settings().synchronizes for unit in self.units)
        if self.manual_finalization and is_due:
            self.native.set_synchronizes(True)
            try:
                self.native.reduce()
            finally:
                self.native.set_synchronizes(False)

    def reshard_due(self, setting: str) -> None:
        """Reshards manually unsharded units with `setting`; a running backward when it ends."""
        due = [unit for unit in self.manually_unsharded if getattr(unit.settings(), setting)]
        self.manually_unsharded.difference_update(due)
        self.native.reshard([unit.index for unit in due], True)

    @contextmanager
    def unsharded(self, writes: bool) -> Iterator[None]:
        """Unshards all units in a scope. Units that were unsharded before remain so."""
        for unit in self.units:
            unit.slots.require_unchanged()
        begun = self.native.unshard(range(len(self.units)), writes)
        before = self.is_unsharded, self.keeps_writes
        self.is_unsharded, self.keeps_writes = True, writes or self.keeps_writes
        drops_writes = True
        try:
            yield
            drops_writes = False
        finally:
            self.is_unsharded, self.keeps_writes = before
            self.native.reshard(begun, drops_writes)


def _broadcast_to_replicas(unit: Unit) -> None:
    """Broadcasts the first replica's parameters: each has drawn random ones. Collective."""
    for parameter in unit.parameters:
        if isinstance(parameter, TensorShard):
            full = parameter.full_tensor()
            dist.broadcast(full, group=unit.group, group_src=0)
            write_shard(parameter, full)


def _require_memory(outermost: Unit, units: list[Unit], names: dict[nn.Module, str]) -> None:
    """Raises RuntimeError on all ranks if parameters are on meta on any rank. Collective."""
    on_meta = [
        path
        for unit in units
        for path, parameter in zip(unit.parameter_names(names), unit.parameters, strict=True)
        if parameter.is_meta
    ]
    failure = (
        f"fully_shard: expected parameters with memory, found {len(on_meta)} on meta: "
        f"{some_of(on_meta)}.\nCall to_empty(device=...) on the outermost module, then initialize "
        "or load the parameters."
    )
    _C.require_agreement(outermost.group, "option", [], failure if on_meta else "")


def _mesh_in(outermost: Unit, unit: Unit) -> tuple[list[int], int] | None:
    """Returns (ranks in the outermost unit's group, num_shards); None: the same mesh."""
    if unit.group is outermost.group and unit.num_shards == outermost.num_shards:
        return None  # checked first: torch may not know the group
    of_root, ranks = map(dist.get_process_group_ranks, (outermost.group, unit.group))
    if ranks == of_root and unit.num_shards == outermost.num_shards:
        return None
    # ShardedModel raises on all ranks for -1.
    return [of_root.index(rank) if rank in of_root else -1 for rank in ranks], unit.num_shards


def _parents_and_meshes(
    outermost: Unit, units: list[Unit]
) -> list[tuple[int | None, tuple | None]]:
    """Returns the argument `places` of _C.ShardedModel."""
    num_before: collections.Counter[tuple] = collections.Counter()
    found = {}
    for unit in sorted(units, key=lambda unit: unit.creation_index):
        if (mesh := _mesh_in(outermost, unit)) is not None:
            ranks, num_shards = mesh
            key = (*ranks, num_shards)
            found[unit] = ranks, num_shards, f"{unit.path}, {num_before[key]} before"
            num_before[key] += 1

    def parent_of(unit: Unit) -> int | None:
        parent = unit.parent()
        while parent is not None and parent not in units:
            parent = parent.parent()
        return None if parent is None else units.index(parent)

    return [(parent_of(unit), found.get(unit)) for unit in units]


def module_paths(outermost: Unit) -> dict[nn.Module, str]:
    """Returns the paths of the unit's modules and all submodules."""
    names: dict[nn.Module, str] = {}
    for index, module in enumerate(outermost.modules()):
        prefix = f"[{index}]" if len(outermost.modules()) > 1 else ""
        for name, child in module.named_modules(prefix=prefix):
            names.setdefault(child, name)
    return names


def _require_same_order(outermost: Unit, units: list[Unit]) -> None:
    """Raises ValueError on all ranks if they called fully_shard() in different orders. Collective.

    Units of equal shapes in another order pass the comparison in fully_shard(), and mix up.
    """
    on_all_ranks = [unit for unit in units if _mesh_in(outermost, unit) is None]
    in_order = sorted(on_all_ranks, key=lambda unit: unit.creation_index)
    names = [f"'{unit.path}'" for unit in in_order]
    try:
        _C.require_agreement(outermost.group, "fully_shard: call", names)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise  # a peer is lost
        raise ValueError(
            f"{error}\nMake the model again and call fully_shard() on the same modules in the same "
            "order on all ranks; parameters have been mixed up."
        ) from None


def _require_untied(outermost: Unit) -> None:
    """Raises ValueError on all ranks if an unsharded tensor is tied to a parameter. Collective."""
    with raises_on_all_ranks(outermost.group):
        for module in outermost.modules():
            for name, parameter in module.named_parameters():
                if not isinstance(parameter, TensorShard):
                    require_untied(parameter, f"ignored parameter '{name}'")
            for name, buffer in module.named_buffers():
                require_untied(buffer, f"buffer '{name}'")


def make_root(outermost: Unit) -> Root:
    """Makes the root of a unit and all units inside of it. Collective."""
    units = outermost.subtree()
    if any(unit.root is not None for unit in units):
        raise RuntimeError(
            "fully_shard: the first forward ran through a submodule, which became the outermost "
            "module.\nRun the first forward through the outermost module."
        )
    with_parameters = [unit for unit in units if unit.native is not None]
    if not with_parameters:
        raise ValueError(
            f"fully_shard: {outermost.describe()} has no parameters to shard.\nCall fully_shard() "
            "after they are made."
        )
    names = module_paths(outermost)
    if any(unit.was_on_meta for unit in with_parameters):
        _require_memory(outermost, with_parameters, names)
    _require_untied(outermost)
    for unit in units:
        unit.rename(names)
    _require_same_order(outermost, with_parameters)
    if outermost.reshard_after_forward is None:
        outermost.set_reshard_after_forward(False)
    root = Root(outermost, with_parameters)
    for unit in units:
        unit.root = root
    return root
