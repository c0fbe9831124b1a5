"""The root of sharded modules: what all units below the outermost one share."""

from __future__ import annotations

import collections
import sys
import threading
import types
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from brigade import _C
from brigade._checks import failure_told_to_peers, some_of
from brigade._shard_place import place_of
from brigade._sharded_draws import share
from brigade._tied_parameters import require_untied

if TYPE_CHECKING:
    from brigade._sharded_units import Unit


class Root:
    """The units below the outermost module that is sharded, in C++'s order."""

    def __init__(self, outermost: Unit, units: list[Unit]) -> None:
        """Collective. `units`: all that have parameters of their own, outermost first."""
        self.outermost = outermost
        self.units = units
        self.native = _C.ShardedRoot(
            [unit.native for unit in units],
            outermost.group,
            outermost.options,
            _meshes_in(outermost, units),
        )
        self.device = units[0].shards[0].device
        self.is_unsharded = False
        self.is_in_forward = False  # and not in what a backward computes again
        # Of the forward that has begun: who calls the outermost module, in which thread.
        self._caller: types.FrameType | None = None
        self._thread = -1
        self.native.synchronizes = not outermost.finalizes_by_hand
        for index, unit in enumerate(units):
            unit.index = index
        self.apply_max_reducing()
        for unit in units:
            if unit.may_differ_in_replicas:
                self._make_replicas_alike(unit)

    def _make_replicas_alike(self, unit: Unit) -> None:
        """Collective. They take the first one's parameters."""
        unit.may_differ_in_replicas = False
        if not unit.has_replicas():
            return
        wholes = self.native.gather_unit(unit.index)
        for shard, whole in zip(unit.shards, wholes, strict=True):
            share(unit, shard._brigade_place.in_memory(whole))
        self.native.assign_unit(unit.index, wholes)

    def dissolve(self) -> None:
        """Its units are to be made anew, and to get another root."""
        for unit in self.outermost.with_those_below():
            unit.root = None
        for unit in self.units:
            unit.refuse_gradients_of_before()
        self.native = None

    def apply_max_reducing(self) -> None:
        """The least that a unit was given."""
        caps = [unit.max_reducing for unit in self.units if unit.max_reducing is not None]
        if caps:
            self.native.set_max_reducing(min(caps))

    def set_finalizes_by_hand(self, value: bool) -> None:
        """True: backwards are reduced by finalize()."""
        self.outermost.finalizes_by_hand = value
        self.native.synchronizes = not value

    def finalize(self) -> None:
        """Collective: reduces what backwards have added up of units that are to be reduced."""
        is_due = any(unit.settings().synchronizes for unit in self.units)
        if self.outermost.finalizes_by_hand and is_due:
            self.native.synchronizes = True
            try:
                self.native.reduce()
            finally:
                self.native.synchronizes = False

    def meet_peers(self) -> None:
        """A rank whose last forward needed a unit once more than its peers' gathers it with them.

        Collective; what else a program launches there would meet that gather.
        """
        self.native.meet_peers()

    def begin_forward(self) -> None:
        """Collective."""
        if torch._C._current_graph_task_id() != -1:
            self.is_in_forward = False
            self.native.begin_forward()
            return
        if self.is_in_forward:
            self._end_forward_left()
        for unit in self.units:
            unit.forget_calls()
        event, self.outermost.post_optim_event = self.outermost.post_optim_event, None
        if event is not None:
            event.wait()  # the current stream, which gathers are behind
        self.is_in_forward = True
        self._caller, self._thread = sys._getframe(2), threading.get_ident()
        self.native.begin_forward()

    def end_forward(self, error: BaseException | None) -> None:
        """`error`: that forward has raised."""
        raised = None
        for unit in self.units:
            try:
                unit.end_round(error)
            except Exception as failure:
                error = raised = failure
        self.is_in_forward, self._caller = False, None
        if error is not None:
            self.native.forward_failed(f"{type(error).__name__}: {error}")
        else:
            self.native.end_forward()
        if raised is not None:
            raise raised

    def _end_forward_left(self) -> None:
        """One that KeyboardInterrupt or the like has ended, of which hooks are not told."""
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "fully_shard: a forward began in another thread and has not ended.\nLet it end "
                "first; if an exception has ended it, call reset_iter_state()."
            )
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self._caller:
                raise RuntimeError(
                    "fully_shard: a forward began inside of another one of the same root.\nLet "
                    "the outer one end first."
                )
            frame = frame.f_back
        self.abandon_forward()

    def abandon_forward(self) -> None:
        """Ends a forward that has begun, as one that failed. Without effect if there is none."""
        if not self.is_in_forward:
            return
        for unit in self.units:
            unit.forget_calls()
        self.end_forward(RuntimeError("the forward was left by an exception such as an interrupt"))

    def unshard(self) -> None:
        """Collective."""
        self.native.unshard()
        self.is_unsharded = True
        try:
            for unit in self.units:
                unit.slots.require_as_sharded()
        except RuntimeError:
            self.reshard(writes=False)
            raise
        for unit in self.units:
            unit.slots.show_whole()

    def reshard(self, writes: bool) -> None:
        """`writes`: with the values that the whole parameters have now."""
        self.is_unsharded = False
        for unit in self.units:
            unit.slots.show_shards()
        self.native.reshard(writes)


def _require_memory(outermost: Unit, units: list[Unit], names: dict[nn.Module, str]) -> None:
    """Collective. RuntimeError on all ranks if parameters are on meta on any."""
    on_meta = [name for unit in units for name in unit.names_on_meta(names)]
    failure = ""
    if on_meta:
        failure = (
            f"fully_shard: expected parameters with memory, found {len(on_meta)} on meta: "
            f"{some_of(on_meta)}.\nCall to_empty(device=...) of the outermost module, and "
            "initialize or load them."
        )
    _C.require_agreement(outermost.group, "option", [], failure)


def _mesh_in(outermost: Unit, unit: Unit) -> tuple[list[int], int] | None:
    """By ranks of the outermost unit's group, and how many are a row. None: the same mesh."""
    if unit.group is outermost.group and unit.num_shards == outermost.num_shards:
        return None
    of_root = dist.get_process_group_ranks(outermost.group)
    ranks = dist.get_process_group_ranks(unit.group)
    if ranks == of_root and unit.num_shards == outermost.num_shards:
        return None
    # One that isn't there is told of to all ranks, where they compare meshes.
    return [of_root.index(rank) if rank in of_root else -1 for rank in ranks], unit.num_shards


def _meshes_in(outermost: Unit, units: list[Unit]) -> list[tuple[list[int], int, str] | None]:
    """By unit; with its name, and how many of its mesh were made before it: alike on its ranks."""
    meshes = {unit: _mesh_in(outermost, unit) for unit in units}
    num_before: collections.Counter[tuple] = collections.Counter()
    found = {}
    for unit in sorted(units, key=lambda unit: unit.number):
        mesh = meshes[unit]
        if mesh is None:
            continue
        ranks, num_shards = mesh
        key = (*ranks, num_shards)
        found[unit] = ranks, num_shards, f"{unit.path}, {num_before[key]} before"
        num_before[key] += 1
    return [found.get(unit) for unit in units]


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
    """Collective. ValueError on all ranks if what is not sharded has a parameter's memory."""
    with failure_told_to_peers(outermost.group):
        for module in outermost.modules():
            for name, parameter in module.named_parameters():
                if place_of(parameter) is None:
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
    if any(unit.is_from_meta for unit in with_parameters):
        _require_memory(outermost, with_parameters, names)
    _require_untied(outermost)
    for unit in units:
        unit.rename(names)
    if outermost.reshards is None:
        outermost.set_reshards_after_forward(False)
    try:
        root = Root(outermost, with_parameters)
    except ValueError as error:
        if "the same sharded units" not in str(error):
            raise
        raise ValueError(
            f"{error}\nRun the first forward through the same module on every rank: the outermost "
            "one that is sharded."
        ) from None
    _require_same_order(outermost, with_parameters)
    for unit in units:
        unit.root = root
    return root
