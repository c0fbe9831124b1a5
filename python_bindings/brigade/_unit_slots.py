"""Where a unit's parameters are registered in its modules, and what is there.

That is this rank's parts, or whole parameters. What others put there in their place,
torch.func.functional_call for a call or a program for good, is never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from brigade._C import entries_of, has_entries
from brigade._checks import some_of

# A module's parameters, the name there and which of the unit's it is.
Slot = tuple[dict[str, Any], str, int]


class UnitSlots:
    """Of one unit.

    Args:
        slots: Several of one parameter, if it is tied.
        own_modules: Gives the modules that may have parameters of the unit, as they are now.
        names: Gives the paths of modules in the outermost one.
        ignored: Parameters that are nobody's business.
    """

    def __init__(
        self,
        slots: list[Slot],
        own_modules: Callable[[], Iterable[nn.Module]],
        names: Callable[[], dict[nn.Module, str]],
        ignored: set[nn.Parameter],
    ) -> None:
        self._slots = slots
        self._own_modules = own_modules
        self._names = names
        self._ignored = ignored
        self._wholes: list[nn.Parameter] = []
        self._shards: list[nn.Parameter] = []

    def fill(self, wholes: list[nn.Parameter], shards: list[nn.Parameter]) -> None:
        """By parameter, what is shown from here on: parts first, whatever is there."""
        self._wholes, self._shards = wholes, shards
        for where, name, i in self._slots:
            where[name] = shards[i]
        self._remember()

    def _remember(self) -> None:
        """What is registered, which differs in nothing but parts and whole parameters."""
        modules = list(self._own_modules())
        self._tables = [table for each in modules for table in (each._parameters, each._modules)]
        found = entries_of(self._tables)
        shards = dict(zip(map(id, self._wholes), self._shards, strict=True))
        wholes = dict(zip(map(id, self._shards), self._wholes, strict=True))
        self._with_shards = [shards.get(id(entry), entry) for entry in found]
        self._with_wholes = [wholes.get(id(entry), entry) for entry in found]
        self._whole_attributes = [(where, name, self._wholes[i]) for where, name, i in self._slots]
        self._shard_attributes = [(where, name, self._shards[i]) for where, name, i in self._slots]

    def show_whole(self) -> None:
        """As the modules' attributes."""
        self._show(self._whole_attributes, self._with_shards)

    def show_shards(self) -> None:
        """As the modules' attributes."""
        self._show(self._shard_attributes, self._with_wholes)

    def _show(self, shown: list[tuple[dict[str, Any], str, nn.Parameter]], before: list) -> None:
        if has_entries(self._tables, before):
            for where, name, parameter in shown:
                where[name] = parameter
            return
        for (where, name, parameter), (_, _, i) in zip(shown, self._slots, strict=True):
            if self._is_own(where, name, i):
                where[name] = parameter

    def _is_own(self, where: dict[str, Any], name: str, i: int) -> bool:
        found = where.get(name)
        return found is self._shards[i] or found is self._wholes[i]

    def require_as_sharded(self) -> None:
        """Nothing has been replaced, removed or added. Costs a pass over the modules' tables.

        Raises:
            RuntimeError: naming the parameters; nothing is changed.
        """
        if has_entries(self._tables, self._with_shards):
            return
        if has_entries(self._tables, self._with_wholes):
            return
        self.require_own()
        self._require_no_others()
        self._remember()  # modules were put around others, for instance

    def require_own(self) -> None:
        """Nothing has been replaced or removed.

        Raises:
            RuntimeError: naming the first parameter for which that is so.
        """
        modules = list(self._own_modules())
        present = {id(each._parameters) for each in modules}
        for where, name, i in self._slots:
            if id(where) not in present or where.get(name) is None:
                raise RuntimeError(
                    f"fully_shard: parameter '{self._path(where, name)}' was removed behind "
                    "fully_shard.\nPut it back, or shard a new module that lacks it."
                )
            if not self._is_own(where, name, i):
                found = where[name]
                kind = type(found).__name__
                raise RuntimeError(
                    f"fully_shard: expected parameter '{self._path(where, name)}' as it was "
                    f"sharded, found a {kind} of {tuple(found.shape)} in its place.\nPut the "
                    "sharded one back, and give values by load_full_state_dict(); "
                    "torch.func.functional_call works inside of whole_parameters() and no_grad()."
                )

    def _require_no_others(self) -> None:
        known = {(id(where), name) for where, name, _ in self._slots}
        others = [
            self._path(each._parameters, name)
            for each in self._own_modules()
            for name, parameter in each._parameters.items()
            if (id(each._parameters), name) not in known and self._matters(parameter)
        ]
        if others:
            raise RuntimeError(
                f"fully_shard: expected the parameters that were there when it was called, found "
                f"{some_of(others)} beside them, whose gradients nobody would average.\nAdd them "
                "before fully_shard, or freeze them."
            )

    def _matters(self, parameter: torch.Tensor | None) -> bool:
        return parameter is not None and parameter.requires_grad and parameter not in self._ignored

    def _path(self, where: dict[str, Any], name: str) -> str:
        """In the outermost module; of a module that is gone, the name there."""
        for module, path in self._names().items():
            if module._parameters is where:
                return f"{path}.{name}" if path else name
        return name
