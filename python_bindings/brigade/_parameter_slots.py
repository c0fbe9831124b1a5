"""The places of a unit's parameters in its modules, to find what was replaced, removed or added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from brigade import _C
from brigade._C import entries_of, has_entries
from brigade._checks import some_of


class ParameterSlots:
    """Of one unit."""

    def __init__(
        self,
        slots: list[tuple[dict[str, Any], str, nn.Parameter]],
        own_modules: Callable[[], Iterable[nn.Module]],
        names: Callable[[], dict[nn.Module, str]],
        ignored: set[nn.Parameter],
    ) -> None:
        """`slots`: a module's parameters, the name and the parameter. `names`: paths of modules."""
        self._slots = slots
        self._own_modules = own_modules
        self._names = names
        self._ignored = ignored
        self._tables: list[dict] | None = None
        self._entries: list[Any] = []

    def restore_sharded(self, write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """A sharded tensor in a parameter's place, as init functions leave it, is its value."""
        for where, name, parameter in self._slots:
            found = where.get(name)
            if found is parameter or not isinstance(found, torch.Tensor):
                continue
            if _C.is_sharded(found) and found.shape == parameter.shape:
                write(parameter, found.detach())
                where[name] = parameter

    def require_unchanged(self) -> None:
        """Costs a pass over the modules' tables.

        Raises:
            RuntimeError: naming what was replaced, removed or added.
        """
        if self._tables is not None and has_entries(self._tables, self._entries):
            return
        modules = list(self._own_modules())
        self._require_own({id(module._parameters) for module in modules})
        self._require_no_others(modules)
        self._tables = [t for module in modules for t in (module._parameters, module._modules)]
        self._entries = entries_of(self._tables)

    def _require_own(self, present: set[int]) -> None:
        for where, name, parameter in self._slots:
            found = where.get(name)
            if id(where) not in present or found is None:
                raise RuntimeError(
                    f"fully_shard: parameter '{self._path(where, name)}' was removed after "
                    "fully_shard.\nPut it back, or shard a new module that lacks it."
                )
            if found is not parameter:
                raise RuntimeError(
                    f"fully_shard: expected parameter '{self._path(where, name)}' as it was "
                    f"sharded, found a {type(found).__name__} of {tuple(found.shape)} in its place."
                    "\nPut the sharded one back, and give values by load_full_state_dict(); "
                    "torch.func.functional_call works inside of whole_parameters() and no_grad()."
                )

    def _require_no_others(self, modules: list[nn.Module]) -> None:
        known = {(id(where), name) for where, name, _ in self._slots}
        others = [
            self._path(module._parameters, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if (id(module._parameters), name) not in known and self._matters(parameter)
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
