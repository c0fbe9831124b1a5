"""Runs sharded modules: what their forward hooks tell brigade's ShardedRoot.

A unit's parameters are gathered together. While its forward runs, the attributes of its
modules are whole parameters; otherwise this rank's parts of them. The root is what all
units below the outermost sharded module share; it is made by the first forward, or by
whatever else needs it.

A unit of several modules stays whole from the first of their forwards until all have run,
or until the root's forward ends: that is a round. In backward, it is whole from the first
output of a round that is reached until all modules of the round have been left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.optimizer import register_optimizer_step_post_hook

from brigade import _C
from brigade._checks import failure_told_to_peers
from brigade._device_moves import destinations, move
from brigade._function_transforms import require_none_that_differentiates
from brigade._nests import cast_floating, map_tensors, move_to, tensors_in
from brigade._shard_place import ShardPlace
from brigade._shardable_parameters import (
    require_count,
    require_no_hooks,
    require_plain,
    require_read_only,
)
from brigade._sharded_root import Root, make_root, names_below
from brigade._sharded_tensors import ShardedParameter, as_shard
from brigade._tied_parameters import memory_of, remember, require_apart, require_free
from brigade._unit_slots import Slot, UnitSlots

_UNIT = "_brigade_unit"
_numbers = itertools.count()


@functools.cache
def count_optimizer_steps() -> None:
    """From here on each step counts as a change of the parts that it is about.

    Fused optimizers write without counting, and what is whole would seem up to date.
    """

    def count(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        torch.autograd.graph.increment_version(
            [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if isinstance(parameter, ShardedParameter)
            ]
        )

    register_optimizer_step_post_hook(count)


def split_reshards(value: bool | int, num_shards: int) -> tuple[bool, int | None]:
    """Whether a unit is released behind forward, and on how many ranks it stays in slices."""
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


class _Running(threading.local):
    """Units whose forwards this thread is in, outermost first."""

    def __init__(self) -> None:
        self.units: list[Unit] = []


_running = _Running()


def running_units() -> list[Unit]:
    """Those whose forwards the calling thread is in, outermost first."""
    return list(_running.units)


@contextmanager
def shown_whole(unit: Unit) -> Iterator[None]:
    """As in its forward; in backward, where it is whole and computes again."""
    _running.units.append(unit)
    unit.num_shown += 1
    unit.slots.show_whole()
    try:
        yield
    finally:
        unit.num_shown -= 1
        unit.leave_running()
        unit.show_shards_if_unused()


def unit_of(module: nn.Module) -> Unit | None:
    """The one that was made of this very module."""
    return getattr(module, _UNIT, None)


@dataclasses.dataclass
class _Round:
    """A forward through the modules of one unit, whose first call is left open."""

    first_call: _C.UnitCall
    waits_for: set[int]  # modules, by id, that have not run
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Unit:
    """Modules whose parameters are sharded together, one as a rule, with their hooks."""

    def __init__(
        self,
        modules: list[nn.Module],
        group: dist.ProcessGroup,
        num_shards: int,
        options: _C.ShardingOptions,
        policy: MixedPrecisionPolicy,
        reshards: bool | None,
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None = None,
        device_type: str | None = None,
    ) -> None:
        """Shards the parameters that are in no unit yet. Collective.

        Args:
            modules: Their attributes are replaced. None is inside of another one.
            group: Of the ranks that have these parameters, all of the root's as a rule.
            num_shards: So many of them, one after the other, hold everything once.
            options: Alike on all ranks.
            policy: What inputs and outputs are cast to.
            reshards: None: unless it is the outermost.
            ignored: Parameters that stay as they are.
            block_numel_fn: Of a parameter, the elements that are never cut.
            device_type: The mesh's, to which what is elsewhere moves; None: there is no mesh.

        Raises:
            ValueError: A parameter is another unit's, or ranks differ; on all ranks alike.
        """
        self._modules = [weakref.ref(module) for module in modules]
        self.group = group
        self.num_shards = num_shards
        self.options = options
        self.policy = policy
        self.reshards = reshards
        self.root: Root | None = None
        self.number = next(_numbers)  # of those that were made
        self.num_shown = 0  # contexts in which it is shown whole
        self.path = ""  # in the outermost module
        self.max_reducing: int | None = None  # the least of all units' is the root's
        self.finalizes_by_hand = False  # of the outermost: the root does
        self.post_optim_event: torch.Event | None = None  # of the outermost: a step's end
        self.wire_dtype: torch.dtype | None = None  # of a comm hook that was registered
        self.broadcasts_parameters = options.broadcasts_parameters
        self.is_from_meta = False
        self.may_differ_in_replicas = False  # until there is a root
        self._around: weakref.ref[Unit] | None = None  # that was made around this one
        self.index = -1  # in the root; -1 without parameters
        self.native: _C.ShardedUnit | None = None  # None without parameters
        self._calls: list[_C.UnitCall] = []  # between their ends
        self._round: _Round | None = None

        self.names: list[str] = []
        # By parameter: in which modules, and where. A tied one is in several places.
        self._paths: list[list[tuple[int, str]]] = []
        self.wholes: list[nn.Parameter] = []
        self.shards: list[ShardedParameter] = []
        self._block_numels: list[int] | None = None  # by parameter, as the dtypes
        self._dtypes: list[torch.dtype | None] | None = None
        self.slots = self._slots_of([], ignored)
        self._shard(modules, ignored, block_numel_fn, device_type)
        if self.native is None:
            self.slots.fill([], [])
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)
            object.__setattr__(module, _UNIT, self)
        for unit in self.with_those_below():
            if unit is not self and unit.around() is None:
                unit._around = weakref.ref(self)

    def around(self) -> Unit | None:
        """The next unit around this one; None of what is the outermost so far."""
        return None if self._around is None else self._around()

    def outermost(self) -> Unit:
        """The root's, or that which is the outermost so far."""
        if self.root is not None:
            return self.root.outermost
        around = self.around()
        return self if around is None else around.outermost()

    def _slots_of(self, slots: list[Slot], ignored: set[nn.Parameter]) -> UnitSlots:
        reference = weakref.ref(self)  # it is freed when its modules are

        def own() -> list[nn.Module]:
            modules = reference().modules()
            return [child for each in modules for _, child in own_modules(each)]

        return UnitSlots(slots, own, lambda: names_below(reference().outermost()), ignored)

    def _shard(
        self,
        modules: list[nn.Module],
        ignored: set[nn.Parameter],
        block_numel_fn: Callable[[nn.Parameter], int] | None,
        device_type: str | None,
    ) -> None:
        found: dict[nn.Parameter, list[tuple[int, str]]] = {}
        slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        starts = [f"[{index}]." if len(modules) > 1 else "" for index in range(len(modules))]
        for index, module in enumerate(modules):
            for prefix, child in own_modules(module):
                with failure_told_to_peers(self.group):
                    require_read_only(child, prefix, ignored)
                for name, parameter in child._parameters.items():
                    if parameter is None or parameter in ignored:
                        continue
                    path = prefix + name
                    where = f"'{starts[index]}{path}' of {type(module).__name__}"
                    with failure_told_to_peers(self.group):
                        require_plain(parameter, where)
                        require_no_hooks(parameter, where)
                        require_free(parameter, where)
                    found.setdefault(parameter, []).append((index, path))
                    slots.append((child._parameters, name, parameter))
        buffers = [
            buffer
            for module in modules
            for _, child in own_modules(module)
            for buffer in child._buffers.values()
            if buffer is not None
        ]
        if not found:
            moves = destinations(buffers, self.group, device_type)
            with failure_told_to_peers(self.group):
                for tensor, device in moves:
                    move(tensor, device)
            if moves:  # else peers hear of a failure where the parameters are compared
                names = [type(module).__name__ for module in modules]
                _C.require_agreement(self.group, "moved module", names)
            return
        wholes, self._paths = list(found), list(found.values())
        self.names = [starts[index] + path for (index, path), *_ in self._paths]
        numbers = {whole: i for i, whole in enumerate(wholes)}
        self.slots = self._slots_of(
            [(where, name, numbers[parameter]) for where, name, parameter in slots], ignored
        )
        override = getattr(self.policy, "param_dtype_override_fn", None)
        with failure_told_to_peers(self.group):
            if block_numel_fn is not None:
                self._block_numels = [
                    require_count(block_numel_fn(whole), f"block_numel_fn of '{name}'")
                    for whole, name in zip(wholes, self.names, strict=True)
                ]
            if override is not None:
                self._dtypes = [override(whole) for whole in wholes]
        self.is_from_meta = any(whole.is_meta for whole in wholes)
        self.may_differ_in_replicas = self.is_from_meta
        self.options.allows_meta = self.is_from_meta
        memories = memory_of(self, self.names, wholes)
        with failure_told_to_peers(self.group):
            moves = destinations([*wholes, *buffers], self.group, device_type)
            if moves:
                require_apart(memories)
            for tensor, device in moves:
                move(tensor, device)
        self._make(wholes)
        remember(memories)
        # What is called here and there, and kept, is planned as such.
        self.native.settings.spans_passes = len(modules) > 1 and self.reshards is False

    def _make(self, wholes: list[nn.Parameter], kept: list[torch.Tensor] | None = None) -> None:
        """Collective. `kept`: tensors that become this rank's parts."""
        self.native = _C.ShardedUnit(
            ", ".join(type(module).__name__ for module in self.modules()),
            self.names,
            wholes,
            self.group,
            self.options,
            self._block_numels,
            self._dtypes,
            kept,
        )
        self.wholes, self.shards = wholes, []
        for i, whole in enumerate(wholes):
            place = ShardPlace.of(self, whole, self.native.offsets[i])
            # The very tensor whose .grad is set when a backward has been reduced.
            self.shards.append(as_shard(self.native.shards[i], place, ShardedParameter))
            whole._brigade_place = place
        self.slots.fill(wholes, self.shards)

    # ---- Made anew, of parts in another dtype, or of the first ones with memory.

    def make_anew(self, parts: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
        """Collective. A rank's other elements of a whole parameter are not looked at.

        `parts`: by parameter, of the sizes that this rank has now. They are copied.
        """
        self.options.broadcasts_parameters = False
        if self._dtypes is not None:  # a parameter that is seen in its own dtype stays so
            self._dtypes = [
                part.dtype if dtype == shard.dtype else dtype
                for part, dtype, shard in zip(parts, self._dtypes, self.shards, strict=True)
            ]
        wholes = [
            _whole_around(part, shard, whole)
            for part, shard, whole in zip(parts, self.shards, self.wholes, strict=True)
        ]
        stay = all(p.device == s.device for p, s in zip(parts, self.shards, strict=True))
        before = self.shards
        for shard in before:
            shard.grad = None
        self._make(wholes, before if stay else None)
        for shard, other in zip(before, self.shards, strict=True):
            if other is not shard and shard._post_accumulate_grad_hooks:
                other._post_accumulate_grad_hooks = shard._post_accumulate_grad_hooks
        for shard, gradient in zip(self.shards, gradients, strict=True):
            if gradient is not None:
                shard.grad = as_shard(gradient, shard._brigade_place)
        if self.wire_dtype is not None:
            _C.ShardedUnit.register_compression([self.native], self.wire_dtype, self.group)

    def settings_to_keep(self) -> dict[str, Any]:
        """For set_kept(), of what make_anew() makes."""
        settings = self.settings()
        return {name: getattr(settings, name) for name in dir(settings) if name[0] != "_"}

    def set_kept(self, settings: dict[str, Any]) -> None:
        """What settings_to_keep() has returned."""
        for name, value in settings.items():
            setattr(self.native.settings, name, value)

    def refuse_gradients_of_before(self) -> None:
        """A backward through a forward of the root before would lose them."""
        for name, whole in zip(self.names, self.wholes, strict=True):
            if whole.requires_grad:
                whole.register_hook(functools.partial(_refuse_gradient, name))

    def has_replicas(self) -> bool:
        """Other ranks have copies of its parts."""
        return self.num_shards < self.group.size()

    def name_of(self, parameter: nn.Parameter) -> str:
        """In its module; of several, behind the module's place among them."""
        for name, whole, shard in zip(self.names, self.wholes, self.shards, strict=True):
            if parameter is whole or parameter is shard:
                return name
        return ""

    def describe(self) -> str:
        """For errors."""
        kinds = [
            type(module).__name__.removeprefix("FSDP").removeprefix("Replicate")
            for module in self.modules()
        ]
        return f"a sharded {' with '.join(kinds)}"

    def modules(self) -> list[nn.Module]:
        """Those that still live."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def require_root(self) -> Root:
        """Made if there is none: of this unit and all below it. Collective then."""
        return self.root or make_root(self)

    def with_those_below(self) -> list[Unit]:
        """Outermost first."""
        units = []
        for module in self.modules():
            for child in module.modules():
                unit = unit_of(child)
                if unit is not None and unit not in units:
                    units.append(unit)
        return units

    def rename(self, names: dict[nn.Module, str]) -> None:
        """`names`: of modules in the root's; for errors."""
        own = [names.get(module(), f"[{i}]") for i, module in enumerate(self._modules)]
        self.path = ", ".join(own)
        if self.native is None:
            return
        self.native.rename(self.path, self._paths_in_root(own, names))

    def names_on_meta(self, names: dict[nn.Module, str]) -> list[str]:
        """Of its parameters; `names`: as rename()'s."""
        own = [names.get(module(), f"[{i}]") for i, module in enumerate(self._modules)]
        paths = self._paths_in_root(own, names)
        return [path for path, shard in zip(paths, self.shards, strict=True) if shard.is_meta]

    def _paths_in_root(self, own: list[str], names: dict[nn.Module, str]) -> list[str]:
        """Of a tied one the first, as named_parameters() has it."""

        @functools.cache
        def turns() -> dict[str, int]:
            return {path: turn for turn, path in enumerate(names.values())}

        def first(paths: list[str]) -> str:
            if len(paths) == 1:
                return paths[0]
            return min(paths, key=lambda path: turns().get(path.rpartition(".")[0], len(names)))

        return [
            first([f"{own[i]}.{path}" if own[i] else path for i, path in places])
            for places in self._paths
        ]

    def settings(self) -> _C.UnitSettings | None:
        """That may be changed between a pass and the next; None without parameters."""
        if self.native is None:
            return None
        return self.native.settings if self.root is None else self.root.native.settings(self.index)

    def set_reshards_after_forward(self, value: bool | int) -> None:
        """From the next forward on."""
        self.reshards, reshards_to = split_reshards(value, self.num_shards)
        if (settings := self.settings()) is not None:
            settings.reshards_after_forward = self.reshards
            settings.reshards_to = reshards_to

    def begin_unshard(self) -> None:
        """Collective. Launches its gather; it is whole behind await_unshard()."""
        root = self.outermost().require_root()
        if self.native is not None and not root.is_unsharded:
            root.native.unshard_unit(self.index)

    def await_unshard(self) -> None:
        """Shows whole parameters until it is sharded again."""
        if self.native is None or self.root.is_unsharded:
            return
        reference = weakref.ref(self)

        def show_shards_again() -> None:
            unit = reference()
            if unit is not None:
                unit.show_shards_if_unused()

        if self.root.native.await_unit(self.index, show_shards_again):
            self.slots.require_as_sharded()
            self.slots.show_whole()

    def reshard(self, writes: bool) -> None:
        """`writes`: with the values that the whole parameters have now."""
        if self.native is not None and self.root is not None and not self.root.is_unsharded:
            self.root.native.reshard_unit(self.index, writes)

    # ---- A forward of the module, or of another method that is to be one.

    def run(
        self, module: nn.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Calls the module's `method` as if it were its forward."""
        try:
            args, kwargs = self._before_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self._after_forward(module, args, None)
            raise
        replaced = self._after_forward(module, args, output)
        return output if replaced is None else replaced

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.root is None or not self.root.is_unsharded:
            require_none_that_differentiates()
        root = self.require_root()
        if root.outermost is self and root.device.type != "cpu":
            args, kwargs = move_to((args, kwargs), root.device)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        if root.is_unsharded and not torch.is_grad_enabled():
            return args, kwargs  # as of any module: ranks may run as many as they like
        if root.outermost is self:
            root.begin_forward()
        if not root.is_unsharded:  # else what is there is computed with
            self.slots.require_as_sharded()
        if self.native is None:
            return args, kwargs
        inputs = (
            [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            if torch.is_grad_enabled()
            else []
        )
        call, stand_ins = root.native.begin_call(self.index, inputs)
        self._calls.append(call)
        _running.units.append(self)
        if len(self._modules) > 1 and self._round is None and root.is_in_forward:
            self._round = _Round(call, {id(module) for module in self.modules()})
        self.slots.show_whole()
        if inputs:
            replaced = dict(zip(map(id, inputs), stand_ins, strict=True))
            return map_tensors((args, kwargs), lambda t: replaced.get(id(t), t))
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        root = self.root
        if root is None:  # it could not be made
            return None
        error = sys.exc_info()[1] if output is None else None
        if self._calls:
            try:
                self._end_call(module, output, error)
            except Exception as failure:
                if root.outermost is self and root.is_in_forward:
                    root.end_forward(failure)
                raise
        if root.outermost is self and root.is_in_forward:
            root.end_forward(error)
        if error is None and self.policy.output_dtype is not None:
            return cast_floating(output, self.policy.output_dtype)
        return None

    def _end_call(self, module: nn.Module, output: Any, error: BaseException | None) -> None:
        call = self._calls.pop()
        self.leave_running()
        native = self.root.native
        if error is not None:  # also of a checkpoint that has computed again all it needs
            if self._round is not None and self._round.first_call is call:
                self._round = None
            native.abort_call(call)
            self.show_shards_if_unused()
            return
        tensors = tensors_in(output)
        outputs = [tensor for tensor in tensors if tensor.grad_fn is not None]
        try:
            if self._round is None:
                native.end_call(call, outputs)
            else:
                self._round.outputs += outputs
                self._round.waits_for.discard(id(module))
                if call is not self._round.first_call:
                    native.end_call(call, outputs)
                if not self._round.waits_for and not self._calls:
                    self.end_round()
        except Exception:
            native.abort_call(call)
            raise
        finally:
            self.show_shards_if_unused()

    def end_round(self, error: BaseException | None = None) -> None:
        """Without effect if there is none. `error`: forward has raised."""
        ended, self._round = self._round, None
        if ended is None:
            return
        if error is not None:
            self.root.native.abort_call(ended.first_call)
        else:
            # So that any output opens what the first call's inputs will close.
            self.root.native.end_call(ended.first_call, ended.outputs)
        self.show_shards_if_unused()

    def forget_calls(self) -> None:
        """That have ended in no way that hooks are told of."""
        if not self._calls and self._round is None:
            return
        first = [] if self._round is None else [self._round.first_call]
        for call in dict.fromkeys(first + self._calls):
            self.root.native.abort_call(call)
        for _ in self._calls:
            self.leave_running()
        self._calls, self._round = [], None
        self.show_shards_if_unused()

    def leave_running(self) -> None:
        """Ends the last of its calls in the calling thread, if there is one."""
        places = [place for place, unit in enumerate(_running.units) if unit is self]
        if places:
            del _running.units[places[-1]]

    def show_shards_if_unused(self) -> None:
        """Unless its forward goes on, or is computed again, or all units are whole."""
        if self.num_shown > 0 or self.root is None:
            return
        if not self._calls and self._round is None and not self.root.is_unsharded:
            self.slots.show_shards()


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it that are in no unit of their own."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None:
            yield from own_modules(child, f"{prefix}{name}.")


def _whole_around(part: torch.Tensor, shard: ShardedParameter, like: nn.Parameter) -> nn.Parameter:
    """Of the part's dtype, on its device, and nothing but that part of it is written."""
    place = shard._brigade_place
    whole = torch.empty_strided(like.shape, like.stride(), dtype=part.dtype, device=part.device)
    elements = place.in_memory(part) if part.shape == place.whole_shape else part
    in_memory = whole.as_strided((whole.numel(),), (1,))
    in_memory[place.begin : place.begin + elements.numel()] = elements
    made = torch.Tensor._make_subclass(type(like), whole, shard.requires_grad)
    vars(made).update(vars(like))
    return made


def _refuse_gradient(name: str, gradient: torch.Tensor) -> None:
    raise RuntimeError(
        f"fully_shard: the module of parameter '{name}' was cast between its forward and its "
        "backward.\nCast it between steps."
    )
