"""Notices that a wrapped module no longer has the parameters that are reduced.

Looks at which tensors are registered in the module, and whether they are frozen; if that is
not as it was, brigade._C.check_parameters has a closer look.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import torch

from brigade._C import check_parameters, entries_of, has_entries

_requires_grad = operator.attrgetter("requires_grad")


class ParameterWatch:
    """Remembers a module's parameters, and tells what has become of them.

    Args:
        module: The module as it was wrapped.
        reduced: Those of its parameters that are reduced; None stands for one that may change.
        names: Gives theirs.
        all_parameters: Those that may be there, reduced or frozen.
        ignored: Names that are nobody's business.
    """

    def __init__(
        self,
        module: torch.nn.Module,
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
        self._frozen = self._that_matter([p for p in module.parameters() if not p.requires_grad])
        self._remember()

    def check(self) -> None:
        """Raises RuntimeError naming parameters that were added, removed, replaced or unfrozen.

        Costs a pass over the module's dictionaries.
        """
        if self._is_as_remembered() and not any(map(_requires_grad, self._frozen)):
            return
        may_be_remembered = check_parameters(
            type(self._module).__name__,
            present=dict(self._module.named_parameters()),
            reduced=self._reduced,
            names=self._names(),
            frozen=self._frozen,
            others=self._all,
            ignored=set(self._ignored),
        )
        if may_be_remembered:
            self._remember()

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

    def _remember(self) -> None:
        modules = self._module.modules()
        self._tables = [t for module in modules for t in (module._parameters, module._modules)]
        self._entries = entries_of(self._tables)

    def _is_as_remembered(self) -> bool:
        return has_entries(self._tables, self._entries)
