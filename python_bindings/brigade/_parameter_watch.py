"""Detects parameters that were added, removed or replaced after a module was wrapped or sharded.

Each check compares the modules' parameter and child tables with a snapshot, and compares
parameters one by one only if the snapshot differs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from brigade import _C
from brigade._checks import some_of

_requires_grad = operator.attrgetter("requires_grad")


class _TableSnapshot:
    """The parameters and children that were registered in modules when it was taken."""

    def __init__(self) -> None:
        self._tables: list[dict] | None = None
        self._entries: list[Any] = []

    def take(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [t for module in modules for t in (module._parameters, module._modules)]
        self._entries = _C.entries_of(self._tables)

    def is_current(self) -> bool:
        return self._tables is not None and _C.has_entries(self._tables, self._entries)


class ParameterWatch:
    """Watches the parameters of a module that DistributedDataParallel reduces.

    `reduced` has None for a parameter that may be replaced. The module may have `all_parameters`.
    The names `ignored` are not watched.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced: Sequence[torch.Tensor | None],
        names: Callable[[], Sequence[str]],
        all_parameters: Sequence[torch.Tensor],
        ignored: Collection[str],
    ) -> None:
        self._module = module
        self._reduced = reduced
        self._names = names
        self._all = all_parameters
        self._ignored = ignored
        named = module.named_parameters(remove_duplicate=False) if ignored else ()
        watched = {id(p) for p in all_parameters} - {id(p) for name, p in named if name in ignored}
        self._frozen = [p for p in module.parameters() if not p.requires_grad and id(p) in watched]
        self._snapshot = _TableSnapshot()
        self._snapshot.take(module.modules())

    def check(self) -> None:
        """Raises RuntimeError if parameters were added, removed, replaced or unfrozen."""
        if self._snapshot.is_current() and not any(map(_requires_grad, self._frozen)):
            return
        known, frozen = set(map(id, self._all)), set(map(id, self._frozen))
        present = [
            (name, each, id(each) not in known and not isinstance(each, nn.Parameter))
            for name, each in self._module.named_parameters()
        ]
        reduced = zip(self._names(), self._reduced, strict=False)  # without names none is watched
        is_final = _C.check_parameters(
            type(self._module).__name__,
            present=present,
            reduced=[(name, each, False) for name, each in reduced if each is not None],
            frozen=[entry for entry in present if id(entry[1]) in frozen],
            others=self._all,
            ignored=list(self._ignored),
        )
        if is_final:
            self._snapshot.take(self._module.modules())


# (module._parameters, name, parameter); a tied parameter has several.
Slot = tuple[dict[str, Any], str, nn.Parameter]


class ParameterSlots:
    """Watches the parameters of one sharded unit; `names` returns module_paths(), for errors."""

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
        self._snapshot = _TableSnapshot()

    def require_unchanged(self) -> None:
        """Raises RuntimeError if a parameter was replaced, removed or added."""
        if self._snapshot.is_current():
            return
        modules = list(self._own_modules())
        present = {id(module._parameters) for module in modules}
        for where, name, parameter in self._slots:
            found = where.get(name)
            if id(where) not in present or found is None:
                raise RuntimeError(
                    f"fully_shard: parameter '{self._path(where, name)}' was removed after "
                    "fully_shard.\nPut it back, or shard a new module without it."
                )
            if found is not parameter:
                raise RuntimeError(
                    f"fully_shard: parameter '{self._path(where, name)}' was replaced after "
                    f"fully_shard: found a {type(found).__name__} of {tuple(found.shape)} "
                    f"and {found.dtype}.\nPut the sharded parameter back and load values with "
                    "load_state_dict(), or assign a parameter of its shape and dtype. "
                    "torch.func.functional_call needs whole_parameters() and no_grad()."
                )
        known = {(id(where), name) for where, name, _ in self._slots}
        others = [
            self._path(module._parameters, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if (id(module._parameters), name) not in known
            and parameter is not None
            and parameter.requires_grad
            and parameter not in self._ignored
        ]
        if others:
            raise RuntimeError(
                f"fully_shard: {some_of(others)} were added after fully_shard; their gradients "
                "would not be averaged.\nAdd them before fully_shard, or freeze them."
            )
        self._snapshot.take(modules)

    def _path(self, where: dict[str, Any], name: str) -> str:
        """Returns the path in the outermost module; only `name` if the module was removed."""
        for module, path in self._names().items():
            if module._parameters is where:
                return f"{path}.{name}" if path else name
        return name
