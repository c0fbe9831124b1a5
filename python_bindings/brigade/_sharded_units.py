"""Units of sharded modules, and the root that all units below the outermost one share.

A module's call opens a forward of the root, which C++ runs (fsdp/sharded_model.h); calls inside
of it are a part of it. The first operator that uses a parameter unshards its unit. A call also
unshards its unit at once, for compiled code, which reads memory without operators.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from brigade import _C
from brigade._checks import failure_told_to_peers, some_of
from brigade._device_moves import destinations, move
from brigade._nests import cast_floating, map_tensors, move_to, tensors_in
from brigade._parameter_watch import ParameterSlots
from brigade._shardable_parameters import (
    memory_of,
    remember,
    require_apart,
    require_count,
    require_free,
    require_plain,
    require_read_only,
    require_untied,
)
from brigade._sharded_tensors import TensorShard, parameter_class

_UNIT = "_brigade_unit"
_numbers = itertools.count()


def split_reshards(value: bool | int, num_shards: int) -> tuple[bool, int | None]:
    """Whether a unit is resharded after forward, and over how many ranks it stays in slices."""
    if isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or num_shards % value != 0:
        divisors = [n for n in range(1, num_shards + 1) if num_shards % n == 0]
        raise ValueError(
            "fully_shard: expected reshard_after_forward to be a bool, or a number of ranks that "
            f"divides the {num_shards} which share the parameters, found {value!r}.\n"
            f"Give one of {divisors}."
        )
    return value > 1, value if 1 < value < num_shards else None


def unit_of(module: nn.Module) -> Unit | None:
    return getattr(module, _UNIT, None)


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it that are in no unit of their own."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None:
            yield from own_modules(child, f"{prefix}{name}.")


class Unit:
    """Modules whose parameters are sharded together, one as a rule."""

    def __init__(
        self,
        modules: list[nn.Module],
        group: dist.ProcessGroup,
        num_shards: int,
        mesh: DeviceMesh | None,
        options: dict[str, Any],
        policy: MixedPrecisionPolicy,
        reshards: bool | None,
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None = None,
        device_type: str | None = None,
    ) -> None:
        """Shards the parameters that are in no unit yet. Collective; raises on all ranks.

        `num_shards` consecutive ranks of `group` hold everything once. `reshards` is None for:
        unless it is the outermost. `device_type` is the mesh's, None without a mesh.
        """
        self._modules = [weakref.ref(module) for module in modules]
        self.group = group
        self.num_shards = num_shards
        self._mesh = mesh
        self.options = _C.FullyShardOptions(num_shards=num_shards, **options)
        self.policy = policy
        self.reshards = reshards
        self.root: Root | None = None
        self.number = next(_numbers)  # of those that were made
        self.path = ""  # in the outermost module
        self.max_reducing: int | None = None  # the least of all units' is the root's
        self.finalizes_by_hand = False  # of the outermost: the root does
        self.post_optim_event: torch.Event | None = None  # of the outermost: a step's end
        self.is_from_meta = False
        self._around: weakref.ref[Unit] | None = None  # that was made around this one
        self.index = -1  # in the root; -1 without parameters
        self.native: _C.ShardedUnit | None = None  # None without parameters
        # By parameter: in which modules, and where. A tied one is in several places.
        self._paths: list[list[tuple[int, str]]] = []
        self.parameters: list[nn.Parameter] = []
        self._shard(modules, ignored, block_numel_fn, device_type)
        for module in modules:
            object.__setattr__(module, _UNIT, self)
            module.register_load_state_dict_pre_hook(_write_shards)
            module.register_state_dict_pre_hook(_await_statuses)
        for unit in self.with_those_below():
            if unit is not self and unit.around() is None:
                unit._around = weakref.ref(self)

    def _shard(
        self,
        modules: list[nn.Module],
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None,
        device_type: str | None,
    ) -> None:
        found: dict[nn.Parameter, list[tuple[int, str]]] = {}
        slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        buffers: list[torch.Tensor] = []
        starts = [f"[{index}]." if len(modules) > 1 else "" for index in range(len(modules))]
        block_numels = dtypes = None
        with failure_told_to_peers(self.group):
            for index, module in enumerate(modules):
                for prefix, child in own_modules(module):
                    require_read_only(child, prefix, ignored)
                    buffers += [buffer for buffer in child._buffers.values() if buffer is not None]
                    for name, parameter in child._parameters.items():
                        if parameter is None or parameter in ignored:
                            continue
                        path = prefix + name
                        where = f"'{starts[index]}{path}' of {type(module).__name__}"
                        require_plain(parameter, where)
                        require_free(parameter, where)
                        found.setdefault(parameter, []).append((index, path))
                        slots.append((child._parameters, name, parameter))
            parameters, self._paths = list(found), list(found.values())
            names = [starts[index] + path for (index, path), *_ in self._paths]
            if block_numel_fn is not None:
                block_numels = [
                    require_count(block_numel_fn(parameter), f"block_numel_fn of '{name}'")
                    for parameter, name in zip(parameters, names, strict=True)
                ]
            if (override := getattr(self.policy, "param_dtype_override_fn", None)) is not None:
                dtypes = [override(parameter) for parameter in parameters]
            memories = memory_of(self, names, parameters)
            moves = destinations([*parameters, *buffers], self.group, device_type)
            if moves:
                require_apart(memories)
            for tensor, device in moves:
                move(tensor, device)
            for parameter in parameters:
                if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                    parameter.data = parameter.detach().contiguous()
        reference = weakref.ref(self)  # it is freed when its modules are
        self.slots = ParameterSlots(
            slots,
            lambda: (c for each in reference().modules() for _, c in own_modules(each)),
            lambda: names_below(reference().outermost()),
            ignored,
        )
        if not found:
            if moves:  # else peers hear of a failure where the parameters are compared
                types = [type(module).__name__ for module in modules]
                _C.require_agreement(self.group, "moved module", types)
            return
        self.is_from_meta = any(parameter.is_meta for parameter in parameters)
        self.native = _C.ShardedUnit(
            ", ".join(type(module).__name__ for module in modules),
            names,
            parameters,
            self.group,
            self.options,
            self.reshards is not False,
            len(modules) > 1,
            block_numels,
            dtypes,
        )
        remember(memories)
        self.parameters = parameters
        for parameter in parameters:
            parameter.__class__ = parameter_class(type(parameter))
            parameter._brigade_unit = reference

    # ---- Among other units.

    def around(self) -> Unit | None:
        """The next unit around this one; None of the outermost so far."""
        return None if self._around is None else self._around()

    def outermost(self) -> Unit:
        """The root's, or that which is the outermost so far."""
        if self.root is not None:
            return self.root.outermost
        around = self.around()
        return self if around is None else around.outermost()

    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    def with_those_below(self) -> list[Unit]:
        """Outermost first."""
        units: dict[Unit, None] = {}
        for module in self.modules():
            for child in module.modules():
                if (unit := unit_of(child)) is not None:
                    units[unit] = None
        return list(units)

    def require_root(self) -> Root:
        """Made if there is none: of the outermost unit so far. Collective then."""
        return self.root or make_root(self.outermost())

    def has_parameters(self) -> bool:
        return any(True for module in self.modules() for _ in module.parameters())

    def has_replicas(self) -> bool:
        return self.num_shards < self.group.size()

    def describe(self) -> str:
        kinds = [type(module).__name__.removeprefix("FSDP") for module in self.modules()]
        return f"a sharded {' with '.join(kinds)}"

    def name_of(self, parameter: nn.Parameter) -> str:
        places = zip(self.parameters, self._paths, strict=True)
        return next((path for each, ((_, path), *_) in places if each is parameter), "")

    def rename(self, names: dict[nn.Module, str]) -> None:
        """`names`: of modules in the root's; for errors."""
        own = [names.get(module(), f"[{i}]") for i, module in enumerate(self._modules)]
        self.path = ", ".join(own)
        if self.native is not None:
            self.native.rename(self.path, self.paths_in_root(names))

    def paths_in_root(self, names: dict[nn.Module, str]) -> list[str]:
        """Of parameters; of a tied one the first, as named_parameters() has it."""
        own = [names.get(module(), f"[{i}]") for i, module in enumerate(self._modules)]
        turns = {module: turn for turn, module in enumerate(names)} if len(own) > 1 else {}
        firsts = [
            min(places, key=lambda place: turns.get(self._modules[place[0]](), 0))
            for places in self._paths
        ]
        return [f"{own[i]}.{path}" if own[i] else path for i, path in firsts]

    def device_mesh(self) -> DeviceMesh:
        """Of one dimension, or (replicas, shards)."""
        if self._mesh is None:
            kind = self.parameters[0].device.type if self.parameters else "cpu"
            ranks = torch.tensor(dist.get_process_group_ranks(self.group))
            self._mesh = DeviceMesh(
                "cpu" if kind == "meta" else kind,
                ranks.view(-1, self.num_shards) if self.has_replicas() else ranks,
            )
        return self._mesh

    def placements(self) -> tuple:
        return (Replicate(), Shard(0)) if self.device_mesh().ndim == 2 else (Shard(0),)

    # ---- Settings.

    def settings(self) -> _C.UnitSettings | None:
        """None if it has no parameters."""
        if self.native is None:
            return None
        return self.native.settings if self.root is None else self.root.native.settings(self.index)

    def set_reshards_after_forward(self, value: bool | int) -> None:
        self.reshards, reshards_to = split_reshards(value, self.num_shards)
        if (settings := self.settings()) is not None:
            settings.reshards_after_forward = self.reshards
            settings.reshards_to = reshards_to

    # ---- Unsharded by hand.

    def is_in_pass(self) -> bool:
        """Whether this thread runs a forward of the root, or a backward."""
        in_forward = self.root is not None and self.root.native.is_in_forward
        return in_forward or torch._C._current_graph_task_id() != -1

    def unshard(self) -> None:
        """Collective."""
        root = self.require_root()
        if self.native is None or root.is_unsharded:
            return
        self.slots.require_unchanged()
        if not self.is_in_pass():
            root.by_hand.add(self)
        root.native.unshard([self.index], True)

    def reshard(self, writes: bool) -> None:
        """`writes`: with the values that the whole parameters have now."""
        if self.native is None or self.root is None or self.root.is_unsharded:
            return
        self.root.by_hand.discard(self)
        self.root.native.reshard([self.index], not writes)

    # ---- A forward of the module, or of another method that is to be one.

    def run(self, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.root is None or not self.root.is_unsharded:
            _require_no_transform()
        if self.root is None and not self.outermost().has_parameters():
            return method(*args, **kwargs)  # as of a loss
        root = self.require_root()
        if root.outermost is self and root.device.type != "cpu":
            args, kwargs = move_to((args, kwargs), root.device)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        if root.is_unsharded and not torch.is_grad_enabled():
            return self._cast_outputs(method(*args, **kwargs))  # on any ranks, any number
        native = root.native
        root.await_optimizer()
        native.begin_forward()
        try:
            self.slots.require_unchanged()
            if self.index >= 0:
                native.unshard([self.index])
            output = self._cast_outputs(method(*args, **kwargs))
            output = map_tensors(output, _with_own_hooks)
            tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            self._gate(tensors)
            native.end_forward(tensors)
        except BaseException as error:
            native.forward_failed(f"{type(error).__name__}: {error}")
            raise
        if root.by_hand and not native.is_in_forward:
            root.reshard_used_by_hand()
        return output

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    def _gate(self, outputs: Iterable[torch.Tensor]) -> None:
        """Gathers the unit where backward reaches its outputs, before compiled code does."""
        if self.index < 0 or not self.settings().gathers_in_backward:
            return
        reference = weakref.ref(self)

        def gather(*_: Any) -> None:
            if (unit := reference()) is not None:
                unit.root.native.use_in_backward(unit.index)
                unit.root.reshard_after_backward()

        for output in outputs:
            output.grad_fn.register_prehook(gather)


def _require_no_transform() -> None:
    """NotImplementedError in a transform of torch.func whose backward would miss the units."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return
    kinds = {interpreter.key() for interpreter in functorch.get_interpreter_stack()}
    of_vmap = functorch.TransformType.Vmap in kinds and torch.is_grad_enabled()
    if of_vmap or kinds & {functorch.TransformType.Grad, functorch.TransformType.Jvp}:
        raise NotImplementedError(
            "fully_shard: found a transform of torch.func around the forward of a sharded module: "
            "grad, vjp, jvp or vmap with gradients.\nUse torch.autograd, or call it inside of "
            "whole_parameters()."
        )


def _with_own_hooks(output: torch.Tensor) -> torch.Tensor:
    """Hooks of the user on the output run after the root's own then, which open backward."""
    return output.view_as(output) if output._backward_hooks else output


def _await_statuses(module: nn.Module, *_: Any) -> None:
    """Before a unit's module gives its state: no bad step is saved."""
    if (root := getattr(module, _UNIT).root) is not None:
        root.native.await_statuses()


def _write_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a unit's module loads a state dict: writes this rank's pieces of its tensors.

    Of sharded ones, DTensors and whole ones alike; torch's own loading then finds the
    parameters themselves.
    """
    for path, child in own_modules(module):
        for name, parameter in child._parameters.items():
            key = prefix + path + name
            value = state.get(key)
            if not isinstance(parameter, TensorShard) or not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.shape:
                write_shard(parameter, value)
                state[key] = parameter


@torch.no_grad()
def write_shard(parameter: TensorShard, value: torch.Tensor) -> None:
    """This rank's piece of a value, sharded or whole. Collective for a DTensor."""
    if value is parameter:
        return
    if not _C.is_sharded(value):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        value = _C.shard_like(whole, parameter)
    if parameter.is_meta and not value.is_meta:
        _C.set_piece(parameter, value.detach().to(parameter.dtype))
    else:
        parameter.copy_(value)


class Root:
    """The units below the outermost module that is sharded, in C++'s order."""

    def __init__(self, outermost: Unit, units: list[Unit]) -> None:
        """Collective. `units`: all that have parameters of their own, outermost first."""
        self.outermost = outermost
        self.units = units
        self.native = _C.ShardedModel(
            [unit.native for unit in units],
            outermost.group,
            outermost.options,
            _places(outermost, units),
        )
        self.device = next(p.device for unit in units for p in unit.parameters)
        self.is_unsharded = False
        self.by_hand: set[Unit] = set()
        self.native.set_synchronizes(not outermost.finalizes_by_hand)
        for index, unit in enumerate(units):
            unit.index = index
        self.apply_max_reducing()
        for unit in units:
            if unit.is_from_meta and unit.has_replicas():
                _make_replicas_alike(unit)

    def apply_max_reducing(self) -> None:
        caps = [unit.max_reducing for unit in self.units if unit.max_reducing is not None]
        if caps:
            self.native.set_max_reducing(min(caps))

    def set_finalizes_by_hand(self, value: bool) -> None:
        self.outermost.finalizes_by_hand = value
        self.native.set_synchronizes(not value)

    def finalize(self) -> None:
        """Collective: reduces accumulated gradients of units that are to be reduced."""
        is_due = any(unit.settings().synchronizes for unit in self.units)
        if self.outermost.finalizes_by_hand and is_due:
            self.native.set_synchronizes(True)
            try:
                self.native.reduce()
            finally:
                self.native.set_synchronizes(False)

    def await_optimizer(self) -> None:
        """The current stream waits for the event that set_post_optim_event() was given."""
        event, self.outermost.post_optim_event = self.outermost.post_optim_event, None
        if event is not None:
            event.wait()

    def reshard_used_by_hand(self) -> None:
        """Units that unshard() was called of stay so until the forward that uses them ends."""
        self._reshard_due("reshards_after_forward")

    def reshard_after_backward(self) -> None:
        """In a backward: units that were unsharded by hand stay so until it ends, used or not."""
        self._reshard_due("reshards_after_backward")

    def _reshard_due(self, setting: str) -> None:
        due = [unit for unit in self.by_hand if getattr(unit.settings(), setting)]
        self.by_hand.difference_update(due)
        self.native.reshard([unit.index for unit in due], True)

    def unshard(self, writes: bool) -> None:
        for unit in self.units:
            unit.slots.require_unchanged()
        self.native.unshard(range(len(self.units)), writes)
        self.is_unsharded = True

    def reshard(self, drops_writes: bool) -> None:
        self.is_unsharded = False
        self.native.reshard(range(len(self.units)), drops_writes)


def _make_replicas_alike(unit: Unit) -> None:
    """Collective. They take the first one's parameters: each has drawn its own."""
    for parameter in unit.parameters:
        if isinstance(parameter, TensorShard):
            whole = parameter.full_tensor()
            dist.broadcast(whole, group=unit.group, group_src=0)
            write_shard(parameter, whole)


def _require_memory(outermost: Unit, units: list[Unit], names: dict[nn.Module, str]) -> None:
    """Collective. RuntimeError on all ranks if parameters are on meta on any."""
    on_meta = [
        path
        for unit in units
        for path, parameter in zip(unit.paths_in_root(names), unit.parameters, strict=True)
        if parameter.is_meta
    ]
    failure = (
        f"fully_shard: expected parameters with memory, found {len(on_meta)} on meta: "
        f"{some_of(on_meta)}.\nCall to_empty(device=...) of the outermost module, and "
        "initialize or load them."
    )
    _C.require_agreement(outermost.group, "option", [], failure if on_meta else "")


def _mesh_in(outermost: Unit, unit: Unit) -> tuple[list[int], int] | None:
    """By ranks of the outermost unit's group, and how many share. None: the same mesh."""
    if unit.group is outermost.group and unit.num_shards == outermost.num_shards:
        return None  # torch may not know the group
    of_root, ranks = map(dist.get_process_group_ranks, (outermost.group, unit.group))
    if ranks == of_root and unit.num_shards == outermost.num_shards:
        return None
    # One that isn't there is told of to all ranks, where they compare meshes.
    return [of_root.index(rank) if rank in of_root else -1 for rank in ranks], unit.num_shards


def _places(outermost: Unit, units: list[Unit]) -> list[tuple[int | None, tuple | None]]:
    """By unit, as _C.ShardedModel takes them."""
    num_before: collections.Counter[tuple] = collections.Counter()
    found = {}
    for unit in sorted(units, key=lambda unit: unit.number):
        if (mesh := _mesh_in(outermost, unit)) is not None:
            ranks, num_shards = mesh
            key = (*ranks, num_shards)
            found[unit] = ranks, num_shards, f"{unit.path}, {num_before[key]} before"
            num_before[key] += 1

    def parent_of(unit: Unit) -> int | None:
        around = unit.around()
        while around is not None and around not in units:
            around = around.around()
        return None if around is None else units.index(around)

    return [(parent_of(unit), found.get(unit)) for unit in units]


def names_below(outermost: Unit) -> dict[nn.Module, str]:
    """The paths of its modules and those below."""
    names: dict[nn.Module, str] = {}
    for index, module in enumerate(outermost.modules()):
        start = f"[{index}]" if len(outermost.modules()) > 1 else ""
        for name, child in module.named_modules(prefix=start):
            names.setdefault(child, name)
    return names


def _require_same_order(outermost: Unit, units: list[Unit]) -> None:
    """Collective. Units of one form are alike when they are made, and have met other ones."""
    of_all = [unit for unit in units if _mesh_in(outermost, unit) is None]  # no ranks' experts
    in_order = sorted(of_all, key=lambda unit: unit.number)
    names = [f"'{unit.path}'" for unit in in_order]
    try:
        _C.require_agreement(outermost.group, "fully_shard() call", names)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise  # a peer is lost
        raise ValueError(
            f"{error}\nCall fully_shard() of the same modules in the same order on all ranks; "
            "parameters of other modules have been mixed up."
        ) from None


def _require_untied(outermost: Unit) -> None:
    """Collective. ValueError on all ranks if an unsharded tensor has a parameter's memory."""
    with failure_told_to_peers(outermost.group):
        for module in outermost.modules():
            for name, parameter in module.named_parameters():
                if not isinstance(parameter, TensorShard):
                    require_untied(parameter, f"ignored parameter '{name}'")
            for name, buffer in module.named_buffers():
                require_untied(buffer, f"buffer '{name}'")


def make_root(outermost: Unit) -> Root:
    """Of a unit, and of all units below its modules. Collective."""
    units = outermost.with_those_below()
    if any(unit.root is not None for unit in units):
        raise RuntimeError(
            "fully_shard: forward ran through a module below this one first, which made it the "
            "outermost.\nRun the first forward through the outermost module."
        )
    with_parameters = [unit for unit in units if unit.native is not None]
    if not with_parameters:
        raise ValueError(
            f"fully_shard: {outermost.describe()} has no parameters to be sharded.\n"
            "Shard it after they are made, or don't."
        )
    names = names_below(outermost)
    for unit in with_parameters:
        unit.slots.restore_sharded(write_shard)
    if any(unit.is_from_meta for unit in with_parameters):
        _require_memory(outermost, with_parameters, names)
    _require_untied(outermost)
    for unit in units:
        unit.rename(names)
    _require_same_order(outermost, with_parameters)
    if outermost.reshards is None:
        outermost.set_reshards_after_forward(False)
    root = Root(outermost, with_parameters)
    for unit in units:
        unit.root = root
    return root
