"""Notices that a wrapped module no longer has the parameters that are reduced.

Shapes, dtypes and devices are the reducer's business; this looks at which tensors
are registered in the module, and under which names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import chain

import torch

from brigade import _checks
from brigade._C import ModuleScan, entries_of, has_entries

_requires_grad = operator.attrgetter("requires_grad")


class ParameterWatch:
    """Remembers a module's parameters, and tells what has become of them.

    Args:
        module: The module as it was wrapped.
        scan: Of that module.
        reduced: Those of its parameters that are reduced; None stands for one that may change.
        names: Gives theirs.
        all_parameters: Those that may be there, reduced or frozen.
        ignored: Names that are nobody's business.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        scan: ModuleScan,
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
        self._frozen = self._that_matter(scan.frozen_parameters())
        self._remember(scan)

    def check(self) -> None:
        """Raises RuntimeError naming parameters that were added, removed, replaced or unfrozen.

        Costs a pass over the module's dictionaries.
        """
        if not self._is_as_remembered():
            self._look_closely()
        if any(map(_requires_grad, self._frozen)):
            frozen = {id(p) for p in self._frozen}
            found = ModuleScan(self._module).named_parameters().items()
            unfrozen = [name for name, p in found if p.requires_grad and id(p) in frozen]
            raise RuntimeError(
                "DistributedDataParallel: expected parameters to be as frozen as when the module "
                f"was wrapped, unfrozen: {_checks.some_of(unfrozen)}. Nobody would average their "
                "gradients.\nWrap the module again after unfreezing."
            )

    def _that_matter(self, frozen: list[torch.Tensor]) -> list[torch.Tensor]:
        if not frozen:
            return frozen
        matter = {id(p) for p in self._all}
        matter.difference_update(id(self._parameter_named(name)) for name in self._ignored)
        return [p for p in frozen if id(p) in matter]

    def _parameter_named(self, name: str) -> torch.nn.Parameter | None:
        """By any of its names."""
        try:
            return self._module.get_parameter(name)
        except AttributeError:
            return None

    def _remember(self, scan: ModuleScan) -> None:
        self._tables = scan.tables()
        self._entries = entries_of(self._tables)

    def _is_as_remembered(self) -> bool:
        return has_entries(self._tables, self._entries)

    def _look_closely(self) -> None:
        scan = ModuleScan(self._module)
        found = scan.named_parameters()
        reduced = {
            name: parameter
            for name, parameter in zip(self._names(), self._reduced, strict=True)
            if parameter is not None
        }
        known = {id(p) for p in chain(reduced.values(), self._all)}
        changes: dict[str, list[str]] = {}
        for name, parameter in found.items():
            # functional_call() puts tensors there for a while.
            if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
                continue
            if id(parameter) not in known and name not in self._ignored:
                change = "replaced" if name in reduced else "added"
                changes.setdefault(change, []).append(name)
        there = {id(parameter) for parameter in found.values()}
        for name, parameter in reduced.items():
            if id(parameter) not in there and name not in found:
                changes.setdefault("removed", []).append(name)
        if changes:
            text = "; ".join(f"{c}: {_checks.some_of(names)}" for c, names in changes.items())
            cure = "Change the module first, then wrap it."
            if list(changes) == ["added"]:
                cure += (
                    " If its forward builds submodules lazily, run one forward before wrapping it, "
                    "on every rank alike."
                )
            raise RuntimeError(
                f"DistributedDataParallel: parameters of {type(self._module).__name__} are not "
                f"those that were wrapped. {text}.\n{cure}"
            )
        if all(
            isinstance(parameter, torch.nn.Parameter) or id(parameter) in known
            for parameter in found.values()
        ):
            self._remember(scan)
