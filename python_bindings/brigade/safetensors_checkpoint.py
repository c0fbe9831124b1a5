"""Checkpoints in safetensors files, which C++ and Python programs read of each other.

    brigade.save_whole(model, "step 17.safetensors", optimizer, metadata={"step": "17"})
    ...
    metadata = brigade.load_whole(model, "step 17.safetensors", optimizer)

They are those of fsdp/checkpoint/optimizer_state.h. Whole tensors in one file, which programs that
don't shard read too; or a folder of what each rank holds, which nothing is gathered for.
Parameters, and what SGD, Adam, AdamW, RMSprop and Adagrad keep for them; no buffers (of which
saving warns), learning rates or anything else. For those, and other optimizers, see
save_checkpoint().

A model is sharded, or is a DistributedDataParallel, whose ranks take part, or any other
module, which each process saves and loads for itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from brigade import _C
from brigade._checks import failure_told_to_peers
from brigade._shard_place import place_of
from brigade._sharded_tensors import ShardedParameter, as_shard
from brigade._sharded_units import unit_of

_ADAM = {"step": None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}

# Under which option each field is kept, if not always. The first class that fits.
_FIELDS: dict[type[torch.optim.Optimizer], dict[str, str | None]] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: {"momentum_buffer": "momentum"},
    torch.optim.RMSprop: {
        "step": None,
        "square_avg": None,
        "momentum_buffer": "momentum",
        "grad_avg": "centered",
    },
    torch.optim.Adagrad: {"step": None, "sum": None},
}
_COUNT = "step"
_COMPILED = "_orig_mod."  # torch.compile's, in names


def save_whole(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes whole tensors into one file, a unit in memory at a time. Collective.

    Args:
        model: The outermost module that fully_shard has sharded, between steps; a
            DistributedDataParallel; or a module of this process alone.
        path: Rank 0 writes it. The file before stays until all is written.
        optimizer: Of its parameters, or of some.
        metadata: What else is to be in the file, equal on all ranks.

    Raises:
        ValueError: Rank 0 can't write, or the optimizer is of another class or has other
            parameters; on all ranks.
        NotImplementedError: Units are on meshes of fewer ranks than the model.
    """
    _save(model, path, optimizer, metadata, in_shards=False)


def load_whole(
    model: nn.Module, path: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Reads what save_whole() has written, on any number of ranks. Collective.

    Args:
        model: As of save_whole(), in any units. Files of others do if they have tensors of
            the parameters' names, shapes and dtypes.
        path: Where all ranks read.
        optimizer: Of the same class and options as when it was saved; it may be new.

    Returns:
        The metadata, and the optimizer's class under "brigade.optimizer" if it was saved.

    Raises:
        ValueError: The file is missing or damaged, of another model or optimizer, or another
            one on some ranks; on all ranks, and nothing is changed.
    """
    return _load(model, path, optimizer, in_shards=False)


def save_shards(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Each rank writes what it holds into a file of its own. Collective.

    Args:
        model: The outermost module that fully_shard has sharded; units may be on any meshes.
        folder: One that all ranks see, made if need be; it has one checkpoint and nothing
            else. That before stays until all is written.
        optimizer: As of save_whole().
        metadata: As of save_whole().

    Raises:
        ValueError: As save_whole(), of any rank; the model is not sharded.
    """
    _save(model, folder, optimizer, metadata, in_shards=True)


def load_shards(
    model: nn.Module, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Reads what save_shards() has written; all else as of load_whole(). Collective."""
    return _load(model, folder, optimizer, in_shards=True)


def _save(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None,
    metadata: dict[str, str] | None,
    in_shards: bool,
) -> None:
    model = _as_made(model)
    where = "save_shards" if in_shards else "save_whole"
    with failure_told_to_peers(_group_of(model)):
        _require_text(where, metadata or {})
        path = os.fspath(path)
    checkpointed = _checkpointed(model, where)
    _warn_of_the_rest(model)
    kept = (
        [] if optimizer is None else [_fields_of(optimizer, *each) for each in _stepped(optimizer)]
    )
    _C.save_checkpoint(checkpointed, in_shards, path, metadata or {}, _form_of(optimizer), kept)


def _load(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None,
    in_shards: bool,
) -> dict[str, str]:
    model = _as_made(model)
    with failure_told_to_peers(_group_of(model)):
        path = os.fspath(path)
    checkpointed = _checkpointed(model, "load_shards" if in_shards else "load_whole")
    metadata, kept = _C.load_checkpoint(checkpointed, in_shards, path, _form_of(optimizer))
    if optimizer is not None:
        _set_fields(optimizer, kept)
    return metadata


def _as_made(model: nn.Module) -> nn.Module:
    """What torch.compile was given."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # which takes seconds to import
    while compiler is not None and isinstance(model, compiler.OptimizedModule):
        model = model._orig_mod
    return model


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Of the ranks that take part; None of a module of this process alone."""
    if (unit := unit_of(model)) is not None:
        return unit.outermost().group
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def _require_text(where: str, metadata: dict[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"{where}: expected metadata of strings, found {key!r}: {value!r}.\nGive "
                "str(value), and turn it back where it is loaded."
            )
        (key + value).encode()  # or says what is no text in it


def _checkpointed(model: nn.Module, where: str) -> _C.CheckpointedModel:
    unit = unit_of(model)
    if unit is not None and unit.outermost() is unit:
        root = unit.require_root()
        root.meet_peers()
        return _C.CheckpointedModel(root.native)
    if any(unit_of(module) is not None for module in model.modules()):
        raise ValueError(
            f"{where}: expected the outermost module that fully_shard has sharded, found "
            f"{type(model).__name__}.\nGive that one."
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = list(module.named_parameters())
    with failure_told_to_peers(_group_of(model)):
        for name, parameter in parameters:
            _require_own_memory(where, name, parameter)
    named = [(name.replace(_COMPILED, ""), parameter) for name, parameter in parameters]
    return _C.CheckpointedModel(named, _group_of(model))


def _require_own_memory(where: str, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{where}: expected parameters that brigade has sharded, or none has, found '{name}', "
            "a DTensor.\nSave it by torch.distributed.checkpoint."
        )
    if parameter.is_meta:
        raise ValueError(
            f"{where}: expected parameters with memory, found '{name}' on meta.\nCall "
            "to_empty(device=...) of the module first."
        )


def _warn_of_the_rest(model: nn.Module) -> None:
    is_sharded = unit_of(model) is not None
    named = model.state_dict(keep_vars=True).items()
    kind = ShardedParameter if is_sharded else nn.Parameter
    rest = [name for name, value in named if not isinstance(value, kind)]
    if rest:
        what = "buffers and parameters that are not sharded" if is_sharded else "buffers"
        warnings.warn(
            f"{what} are not saved: {rest[:5]}{' and others' if len(rest) > 5 else ''}.\n"
            "Save them yourself, or all with save_checkpoint().",
            stacklevel=4,
        )


def _stepped(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Parameters, each with its group."""
    return [(each, group) for group in optimizer.param_groups for each in group["params"]]


def _class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    return next((cls for cls in _FIELDS if isinstance(optimizer, cls)), None)


def _names_of(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> list[str]:
    return [name for name, option in _FIELDS[cls].items() if option is None or group[option]]


def _form_of(optimizer: torch.optim.Optimizer | None) -> _C.CheckpointedOptimizer | None:
    """What it keeps under its options."""
    if optimizer is None:
        return None
    cls = _class_of(optimizer)
    if cls is None:
        names = ", ".join(known.__name__ for known in _FIELDS)
        return _C.CheckpointedOptimizer(
            problem=f"expected one of {names}, found {type(optimizer).__name__}.\n"
            "Use save_checkpoint(), which takes any."
        )
    stepped = _stepped(optimizer)
    return _C.CheckpointedOptimizer(
        type=cls.__name__,
        has_state_before_steps=cls is torch.optim.Adagrad,
        shards=[parameter for parameter, _ in stepped],
        fields=[[(name, name == _COUNT) for name in _names_of(cls, group)] for _, group in stepped],
    )


def _fields_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """What it keeps of a parameter; nothing before it has stepped it."""
    cls = _class_of(optimizer)
    names = [] if cls is None else _names_of(cls, group)
    state = optimizer.state.get(parameter, {})
    kept = {name: state[name] for name in names if state.get(name) is not None}
    return {
        name: torch.tensor(int(value), device="cpu") if name == _COUNT else value.detach()
        for name, value in kept.items()
    }


def _set_fields(optimizer: torch.optim.Optimizer, kept: list[dict[str, torch.Tensor]]) -> None:
    stepped = zip(_stepped(optimizer), kept, strict=True)
    state = {
        index: {name: _as_kept(name, value, parameter) for name, value in fields.items()}
        for index, ((parameter, _), fields) in enumerate(stepped)
        if fields
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _as_kept(name: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if name == _COUNT:
        return torch.tensor(float(value), device="cpu")
    place = place_of(parameter)
    return value if place is None else as_shard(value, place)
