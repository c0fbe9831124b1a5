"""One walk over a module: which of its parameters are reduced, and under which names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch
from torch import nn

_OWN = nn.Module.named_parameters


@dataclasses.dataclass
class ReducedParameters:
    """The parameters that a reducer is made of, each once, in the order of registration."""

    tensors: list[torch.Tensor]
    names: list[str]  # by tensor
    expect_sparse: list[bool]  # by tensor


def reduced_parameters(module: nn.Module, ignored: Collection[str]) -> ReducedParameters:
    """Those of `module` that require a gradient, but for the names in `ignored`.

    As torch's DistributedDataParallel, it asks each submodule for its own parameters, puts a
    dot before the names of the root's own, and knows a shared one by its last name.
    """
    tensors, names, expect_sparse = [], [], []
    positions: dict[int, int] = {}
    for prefix, submodule in module.named_modules():
        is_sparse = isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        for name, parameter in _own_parameters(submodule):
            if parameter is None or not parameter.requires_grad:
                continue
            full_name = f"{prefix}.{name}"
            if full_name in ignored:
                continue
            key = id(parameter)
            if key in positions:
                names[positions[key]] = full_name
                continue
            positions[key] = len(tensors)
            tensors.append(parameter)
            names.append(full_name)
            expect_sparse.append(is_sparse)
    return ReducedParameters(tensors, names, expect_sparse)


def all_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """What dict(module.named_parameters()) gives, without a tuple for each.

    Thousands of new tuples would start the garbage collector, which looks at all there is.
    """
    if type(module).named_parameters is not _OWN:
        return dict(module.named_parameters())
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in submodule._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                named[start + name] = parameter
    return named


def frozen_parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that require no gradient, under each of their names."""
    if type(module).named_parameters is not _OWN:
        named = module.named_parameters(remove_duplicate=False)
        return [entry for entry in named if not entry[1].requires_grad]
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, submodule in module.named_modules(remove_duplicate=False)
        for name, parameter in submodule._parameters.items()
        if parameter is not None and not parameter.requires_grad
    ]


def _own_parameters(module: nn.Module) -> Iterable[tuple[str, torch.Tensor | None]]:
    if type(module).named_parameters is _OWN:
        return module._parameters.items()
    return module.named_parameters(recurse=False)
