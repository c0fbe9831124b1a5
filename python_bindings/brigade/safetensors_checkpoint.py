"""Checkpoints in safetensors files, shared by C++ and Python programs.

    brigade.save_whole(model, "step 17.safetensors", optimizer, metadata={"step": "17"})
    ...
    metadata = brigade.load_whole(model, "step 17.safetensors", optimizer)

The format is that of checkpoint/checkpoint.h: one file of unsharded tensors, which other programs
read too, or a folder to which each rank writes its shards. A checkpoint has the parameters and the
state of SGD, Adam, AdamW, RMSprop and Adagrad with all options, such as learning rates.
torch.distributed.checkpoint supports other optimizers.

A model is sharded, or a DistributedDataParallel, or any other module, which each process saves
and loads on its own. Buffers are saved unless the model is sharded; saving warns of tensors that
it leaves out.
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
from brigade._checks import failure_told_to_peers
from brigade._sharded_tensors import ShardedParameter, as_shard
from brigade._sharded_units import unit_of

_ADAM = {"step": None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}

# Fields of the state, with the option that a field depends on. The first class that fits.
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
# Options that choose an implementation and change no result.
_MECHANISMS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_COMPILED = "_orig_mod."  # torch.compile's, in names


def save_whole(
    model: nn.Module,
    path: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes unsharded tensors into one file, one tensor in memory at a time. Collective.

    Args:
        model: The outermost module that fully_shard has sharded, between steps; a
            DistributedDataParallel; or a module of this process alone.
        path: Rank 0 writes it. The previous file stays until all is written.
        optimizer: Of its parameters, or of some.
        metadata: Further texts for the file, equal on all ranks.

    Raises:
        ValueError: Rank 0 can't write, or the optimizer is of another class or has other
            parameters; on all ranks.
    """
    _save(model, path, optimizer, metadata, in_shards=False)


def load_whole(
    model: nn.Module, path: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Reads a file of save_whole() on any number of ranks. Collective.

    Args:
        model: As for save_whole(), in any units. Files of other programs are read if they have
            tensors of the parameters' names, shapes and dtypes.
        path: A file that all ranks read.
        optimizer: Of the saved class; it may be new. Its options become the saved ones, as in
            load_state_dict().

    Returns:
        The metadata, and the optimizer's class under "brigade.optimizer" if it was saved.

    Warns:
        UserWarning: Names each option of the optimizer that differed from the saved one.

    Raises:
        ValueError: The file is missing or damaged, of another model or optimizer, or differs
            between ranks; on all ranks, and nothing is changed.
    """
    return _load(model, path, optimizer, "load_whole")


def save_shards(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes the shards of each rank into a file of its own. Collective.

    Args:
        model: The outermost module that fully_shard has sharded; units may be on any meshes.
        folder: A folder that all ranks see and that has nothing but one checkpoint; created if
            missing. The previous checkpoint stays until all is written.
        optimizer: As of save_whole().
        metadata: As of save_whole().

    Raises:
        ValueError: As save_whole(), of any rank.
    """
    _save(model, folder, optimizer, metadata, in_shards=True)


def load_shards(
    model: nn.Module, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, str]:
    """Reads a folder of save_shards(); otherwise as load_whole(). Collective."""
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
    _warn_of_the_rest(_as_made(model))
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
    """The arguments of C++'s functions; the first is collective. Raises on all ranks."""
    model = _as_made(model)
    with failure_told_to_peers(_group_of(model), functools.partial(_tell, model)):
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(
                    f"{where}: expected metadata of strings, found {key!r}: {value!r}.\nGive "
                    "str(value), and turn it back where it is loaded."
                )
            (key + value).encode()  # raises for surrogates
        path, state = os.fspath(path), _state_of(optimizer)
        return _model_maker(model, where), path, metadata, state


def _as_made(model: nn.Module) -> nn.Module:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # which takes seconds to import
    while compiler is not None and isinstance(model, compiler.OptimizedModule):
        model = model._orig_mod
    return model


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """None for a module of this process alone."""
    if (unit := unit_of(model)) is not None:
        return unit.outermost().group
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def _tell(model: nn.Module, failure: str) -> None:
    """Makes the peers' save or load raise. Collective."""
    if (unit := unit_of(model)) is not None:
        unit.outermost().require_root().native.meet_peers()
    _C.fail_checkpoint(_group_of(model), failure)


def _model_maker(model: nn.Module, where: str) -> Callable[[], _C.CheckpointModel]:
    """Returns a collective function. Raises if the model can't be saved or loaded."""
    unit = unit_of(model)
    if unit is not None and unit.outermost() is unit:
        root = unit.require_root()
        return lambda: _C.CheckpointModel(root.native)
    if any(unit_of(module) is not None for module in model.modules()):
        raise ValueError(
            f"{where}: expected the outermost module that fully_shard has sharded, found "
            f"{type(model).__name__}.\nGive that one."
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = list(module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in saved]
    for name, tensor in parameters + buffers:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{where}: expected parameters that brigade has sharded, or none has, found "
                f"'{name}', a DTensor.\nSave it by torch.distributed.checkpoint."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{where}: expected parameters with memory, found '{name}' on meta.\nCall "
                "to_empty(device=...) of the module first."
            )
    named = [
        [(name.replace(_COMPILED, ""), tensor) for name, tensor in tensors]
        for tensors in (parameters, buffers)
    ]
    return lambda: _C.CheckpointModel(*named, _group_of(model))


def _warn_of_the_rest(model: nn.Module) -> None:
    is_sharded = unit_of(model) is not None
    named = model.state_dict(keep_vars=True).items()
    kind = ShardedParameter if is_sharded else torch.Tensor
    rest = [name for name, value in named if not isinstance(value, kind)]
    if rest:
        what = "buffers and parameters that are not sharded" if is_sharded else "extra states"
        warnings.warn(
            f"{what} are not saved: {rest[:5]}{' and others' if len(rest) > 5 else ''}.\n"
            "Save them yourself, or all with torch.distributed.checkpoint.",
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
            f"expected one of {names}, found {type(optimizer).__name__}.\n"
            "Use torch.distributed.checkpoint, which takes any."
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
    # Schedulers add options of their own to a group.
    names = [name for name in optimizer.defaults if name not in _MECHANISMS]
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
