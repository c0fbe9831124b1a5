"""Checkpoints of models and optimizers in safetensors files, shared by C++ and Python programs.

    brigade.save_whole(model, "step 17.safetensors", optimizer, metadata={"step": "17"})
    ...
    metadata = brigade.load_whole(model, "step 17.safetensors", optimizer)

save_whole() writes one file of unsharded tensors, which other programs can read. save_shards()
writes a folder with a file per rank. checkpoint/checkpoint.h has the format. A checkpoint contains
parameters, buffers (unless the model is sharded), and the state and options of SGD, Adam, AdamW,
RMSprop and Adagrad. Use torch.distributed.checkpoint for other optimizers.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from brigade import _C
from brigade._checks import raises_on_all_ranks, some_of
from brigade._sharded_tensors import ShardedParameter, as_shard
from brigade._sharded_units import unit_of
from brigade._tensor_parallel import TensorParallelParameter

_ADAM = {"step": None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}

# State fields by class, with the option that enables the field. The first matching class counts.
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
# Options that do not change results, not saved.
_WITHOUT_EFFECT = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}
_COMPILED = "_orig_mod."  # torch.compile adds it to names


def save_whole(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes unsharded tensors into one safetensors file. Collective.

    Gathers one tensor at a time. Awaits the statuses of all iterations first.

    Args:
        model: The outermost sharded module, between steps; a DistributedDataParallel; or another
            module, which this process saves without communication.
        path: Rank 0 writes it, and replaces an existing file only when the new one is complete.
        optimizer: Optimizer of all or some of the model's parameters. Default: not saved.
        metadata: Strings to store in the file, equal on all ranks.

    Warns:
        UserWarning: Names tensors and extra states of the model that are not saved.

    Raises:
        ValueError: Rank 0 can't write the file, a parameter is a DTensor or on meta, or the
            optimizer's class is not supported; on all ranks.
        TypeError: Metadata are not strings; the other ranks raise ValueError.
        RuntimeError: A unit is unsharded by unshard() or whole_parameters().
    """
    _save(model, path, optimizer, metadata, in_shards=False)


def load_whole(
    model: nn.Module, path: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Loads a file of save_whole() into a model and an optimizer. Collective.

    The number of ranks and the units may differ from those of save_whole(). Files of other programs
    work if they have tensors of the parameters' names, shapes and dtypes.

    Args:
        model: As for save_whole().
        path: All ranks read this file.
        optimizer: An optimizer of the saved class. Its options become the saved ones, as in
            load_state_dict().

    Returns:
        The metadata, with the optimizer's class as "brigade.optimizer" if it was saved.

    Warns:
        UserWarning: Names each option of the optimizer whose value differed from the saved one.

    Raises:
        ValueError: The file is missing or damaged, does not fit the model or optimizer, or differs
            between ranks; on all ranks, and nothing is changed.
        RuntimeError: As save_whole().
    """
    return _load(model, path, optimizer, "load_whole")


def save_shards(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes each rank's shards into a file of a folder. Collective.

    Args:
        model: The outermost sharded module; its units may be on any meshes.
        folder: A folder that all ranks can access and that contains at most one checkpoint; created
            if missing. The previous checkpoint is deleted only when the new one is complete.
        optimizer: As for save_whole().
        metadata: As for save_whole().

    Raises:
        ValueError, TypeError, RuntimeError: As save_whole(), for any rank.
    """
    _save(model, folder, optimizer, metadata, in_shards=True)


def load_shards(
    model: nn.Module, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Loads a folder of save_shards() into a model and an optimizer. Collective.

    Like load_whole(): the number of ranks, units and meshes may differ from those of save_shards().
    """
    return _load(model, folder, optimizer, "load_shards")


def _save(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None,
    metadata: dict[str, str] | None,
    in_shards: bool,
) -> None:
    where = "save_shards" if in_shards else "save_whole"
    make, *arguments = _checked(model, path, optimizer, where, metadata or {})
    unwrapped = _without_compile(model)
    _warn_of_unsaved(unwrapped)
    if hasattr(unwrapped, "_await_statuses"):  # brigade's DistributedDataParallel
        unwrapped._await_statuses()
    _C.save_checkpoint(make(), in_shards, *arguments)


def _load(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None,
    where: str,
) -> dict[str, str]:
    make, path, _, state = _checked(model, path, optimizer, where, {})
    metadata, texts = _C.load_checkpoint(make(), path, state)
    if optimizer is not None:
        _set_state(optimizer, state)
    for text in texts:
        warnings.warn(text, stacklevel=3)
    return metadata


def _checked(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None,
    where: str,
    metadata: dict[str, str],
) -> tuple[Callable[[], _C.CheckpointModel], str, dict[str, str], _C.OptimizerState | None]:
    """Checks the arguments and returns those of _C's functions; the first call is collective.

    Raises on all ranks.
    """
    model = _without_compile(model)
    with raises_on_all_ranks(_group_of(model), functools.partial(_fail_on_peers, model)):
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(
                    f"{where}: expected metadata of strings, found {key!r}: {value!r}.\nConvert "
                    "it to a string, and back after loading."
                )
            (key + value).encode()  # raises for surrogates
        path, state = os.fspath(path), _state_of(optimizer)
        return _model_maker(model, where), path, metadata, state


def _without_compile(model: nn.Module) -> nn.Module:
    """Returns the original module of a torch.compile() wrapper."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    while compiler is not None and isinstance(model, compiler.OptimizedModule):
        model = model._orig_mod
    return model


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Returns None for a module that is neither sharded nor a DistributedDataParallel."""
    if (unit := unit_of(model)) is not None:
        return unit.outermost().group
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def _fail_on_peers(model: nn.Module, failure: str) -> None:
    """Matches the peers' save or load, which then raises `failure`. Collective."""
    if (unit := unit_of(model)) is not None:
        unit.outermost().require_root().native.meet_peers()
    _C.fail_checkpoint(_group_of(model), failure)


def _model_maker(model: nn.Module, where: str) -> Callable[[], _C.CheckpointModel]:
    """Returns a collective function that makes the CheckpointModel. Raises for a bad model."""
    unit = unit_of(model)
    if unit is not None and unit.outermost() is unit:
        root = unit.require_root()
        if any(isinstance(p, TensorParallelParameter) for p in model.parameters()):
            raise ValueError(
                f"{where}: tensor-parallel parameters are not supported.\nUse "
                "torch.distributed.checkpoint."
            )
        return lambda: _C.CheckpointModel(root.native)
    if any(unit_of(module) is not None for module in model.modules()):
        raise ValueError(
            f"{where}: expected the outermost sharded module, found {type(model).__name__}.\nPass "
            "the outermost module."
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = list(module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in saved]
    for name, tensor in parameters + buffers:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{where}: expected plain tensors or brigade's sharded ones, found that '{name}' "
                "is a DTensor.\nUse torch.distributed.checkpoint."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{where}: expected parameters with memory, found '{name}' on meta.\nCall "
                "to_empty(device=...) on the module first."
            )
    named = [
        [(name.replace(_COMPILED, ""), tensor) for name, tensor in tensors]
        for tensors in (parameters, buffers)
    ]
    return lambda: _C.CheckpointModel(*named, _group_of(model))


def _warn_of_unsaved(model: nn.Module) -> None:
    is_sharded = unit_of(model) is not None
    named = model.state_dict(keep_vars=True).items()
    kind = ShardedParameter if is_sharded else torch.Tensor
    unsaved = [name for name, value in named if not isinstance(value, kind)]
    if unsaved:
        kinds = "buffers and unsharded parameters" if is_sharded else "extra states"
        warnings.warn(
            f"checkpoint: the model's {kinds} are not saved: {some_of(unsaved)}.\nSave them "
            "separately, or all with torch.distributed.checkpoint.",
            stacklevel=4,
        )


# ---- Optimizers.


def _state_of(optimizer: torch.optim.Optimizer | None) -> _C.OptimizerState | None:
    if optimizer is None:
        return None
    cls = next((cls for cls in _FIELDS if isinstance(optimizer, cls)), None)
    if cls is None:
        names = ", ".join(known.__name__ for known in _FIELDS)
        raise ValueError(
            f"optimizer: expected one of {names}, found {type(optimizer).__name__}.\nUse "
            "torch.distributed.checkpoint for other optimizers."
        )
    parameters = []
    for index, group in enumerate(optimizer.param_groups):
        fields = [name for name, option in _FIELDS[cls].items() if not option or group[option]]
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            values = {
                name: torch.tensor(int(kept[name]), device="cpu")
                if name == _COUNT
                else kept[name].detach()
                for name in fields
                if kept.get(name) is not None
            }
            parameters.append((parameter, index, fields, values))
    # `defaults` lacks the options that schedulers add to a group.
    names = [name for name in optimizer.defaults if name not in _WITHOUT_EFFECT]
    options = [
        json.dumps({name: group[name] for name in names}, default=torch.Tensor.tolist)
        for group in optimizer.param_groups
    ]
    return _C.OptimizerState(type=cls.__name__, options=options, parameters=parameters)


def _set_state(optimizer: torch.optim.Optimizer, saved: _C.OptimizerState) -> None:
    groups = optimizer.state_dict()["param_groups"]
    for group, options in zip(groups, saved.options, strict=True):
        for name, value in json.loads(options).items():
            if isinstance(group[name], torch.Tensor):
                value = torch.full_like(group[name], value)
            group[name] = tuple(value) if isinstance(value, list) else value
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = {
        index: {
            name: torch.tensor(float(value), device="cpu")
            if name == _COUNT
            else as_shard(value, parameter)
            if _C.is_sharded(value)
            else value
            for name, value in values.items()
        }
        for index, (parameter, values) in enumerate(zip(parameters, saved.values, strict=True))
        if values
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
