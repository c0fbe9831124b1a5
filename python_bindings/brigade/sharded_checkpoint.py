"""Checkpoints of sharded models: written by all ranks at once, read by any number of them.

    brigade.save_checkpoint(f"{folder}/{step}", model, optimizer, shared={"step": step},
                            own={"random": torch.get_rng_state()})
    ...
    loaded = brigade.load_checkpoint(f"{folder}/{step}", model, optimizer)

A folder of torch.distributed.checkpoint, which reads it too, with a list of its files'
digests. It has its name when it is complete, and is read only if it is undamaged.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from brigade._sharded_state import (
    load_sharded_optimizer_state_dict,
    require_same_groups,
    sharded_optimizer_state_dict,
)
from brigade._sharded_tensors import TensorShard, as_shard
from brigade._sharded_units import unit_of

_DIGESTS = "digests.json"


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """Values that were saved beside the model and the optimizer."""

    shared: dict[str, Any]
    own: dict[str, Any] | None  # None if another number of ranks has saved it


def save_checkpoint(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    shared: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
) -> None:
    """Writes the parts of all ranks, and makes `folder` when all have. Collective.

    Args:
        folder: All ranks read and write there. Created; incomplete files lie beside it.
        model: Sharded by fully_shard, between steps.
        optimizer: Of its parameters.
        shared: Values equal on all ranks, as the number of the step. Pickled.
        own: Values of each rank, as the state of its random numbers. Pickled.

    Raises:
        ValueError: `folder` exists, or is another one on some ranks.
        RuntimeError: A rank couldn't write; on all ranks. There is no `folder` then.
    """
    where = "save_checkpoint"
    group = _group_of(model, where)
    folder = pathlib.Path(folder)
    part = folder.with_name(folder.name + ".part")

    def begin() -> dict[str, Any]:
        if folder.exists():
            raise ValueError(f"'{folder}' exists.\nGive each step a folder of its own.")
        if group.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        state = {"model": model.state_dict(), "shared": _pickled(shared or {})}
        if optimizer is not None:
            state["optimizer"] = sharded_optimizer_state_dict(model, optimizer)
        rank = _own_key(group)
        return {
            **state,
            "own": {rank: _pickled(own or {})},
            "buffers": {rank: _pickled(_buffers_of(model))},
        }

    def end() -> None:
        if group.rank() == 0:
            with open(part / _DIGESTS, "w") as file:
                json.dump({name: each for found in digests for name, each in found.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, folder)
            _bring_to_disk(folder.parent)

    def digest() -> dict[str, Any]:
        names = [file.name for file in part.iterdir()]
        return {name: _digest_of(part / name) for name in _own_share(group, names)}

    _require_one_folder(group, where, folder)
    _require_one_mesh_each(group, where, model)
    state = _on_all(group, where, begin)
    _on_all(group, where, lambda: dcp.save(state, checkpoint_id=part, process_group=group))
    digests = _from_all(group, _on_all(group, where, digest))
    _on_all(group, where, end)


def load_checkpoint(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> LoadedCheckpoint:
    """Reads a checkpoint of save_checkpoint() on any number of ranks. Collective.

    All of it is read, into memory of its own, before anything is changed. Pickled code of a
    checkpoint is run: read those that you trust.

    Args:
        folder: Where all ranks read.
        model: With the parameters that were saved, in any units.
        optimizer: With the same parameters in the same groups as when it was saved; it may be
            new.

    Raises:
        ValueError: There is no checkpoint, it is incomplete or damaged, or it is of another
            model or optimizer; on all ranks, and nothing is changed.
    """
    where = "load_checkpoint"
    group = _group_of(model, where)
    folder = pathlib.Path(folder)
    _require_one_folder(group, where, folder)
    elsewhere = _names_elsewhere(group, model)

    def begin() -> dict[str, Any]:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        _require_same_model(metadata, model, elsewhere)
        return _targets(metadata, group, model, optimizer, elsewhere)

    def check() -> None:
        if optimizer is not None:
            if elsewhere:
                _give_own_names(model, optimizer, state["optimizer"])
            require_same_groups(model, optimizer, state["optimizer"])

    _on_all(group, where, lambda: _require_undamaged(group, folder))
    state = _on_all(group, where, begin)
    _on_all(group, where, lambda: dcp.load(state, checkpoint_id=folder, process_group=group))
    _on_all(group, where, check)
    model.load_state_dict(state["model"])
    if own_buffers := state.get("buffers"):
        for name, value in _unpickled(own_buffers[_own_key(group)]).items():
            model.get_buffer(name).copy_(value)
    if optimizer is not None:
        load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
    own = state["own"].get(_own_key(group))
    return LoadedCheckpoint(_unpickled(state["shared"]), None if own is None else _unpickled(own))


# ---- Steps of all ranks.


def _group_of(model: nn.Module, where: str) -> dist.ProcessGroup:
    """The outermost unit's, whose ranks meet; those below may have groups of fewer ranks."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    if units:
        outermost = max(units, key=lambda unit: unit.group.size())
        if outermost.root is not None:
            outermost.root.native.meet_peers()
        return outermost.group
    raise ValueError(
        f"{where}: expected a module that fully_shard has sharded, found "
        f"{type(model).__name__}.\nShard it first, or use torch.distributed.checkpoint."
    )


def _on_all(group: dist.ProcessGroup, where: str, step: Callable[[], Any]) -> Any:
    """The result of `step` here, if no rank has failed in it. Collective."""
    result, failure = None, None
    try:
        result = step()
    except CheckpointException as error:
        failed, (reason, _) = next(iter(error.failures.items()))
        failure = (False, failed, str(reason))
    except Exception as error:
        is_value_error = isinstance(error, ValueError)
        failure = (is_value_error, group.rank(), str(error) or type(error).__name__)
    for found in _from_all(group, failure):
        if found is not None:
            is_value_error, rank, text = found
            raise (ValueError if is_value_error else RuntimeError)(
                f"{where}: on rank {rank}: {text}"
            )
    return result


def _from_all(group: dist.ProcessGroup, value: Any) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _require_one_folder(group: dist.ProcessGroup, where: str, folder: pathlib.Path) -> None:
    first, *others = _from_all(group, str(folder))
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"{where}: expected the same folder on all ranks, found '{first}' on rank 0 and "
                f"'{other}' on rank {rank}.\nGive one that all ranks share."
            )


# ---- Units that are on some ranks only.


def _own_meshes(group: dist.ProcessGroup, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """By name of a parameter that not all ranks of the group have: those that have it."""
    found = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, TensorShard):
            continue
        if (own := parameter._unit().group).size() < group.size():
            found[name] = tuple(dist.get_process_group_ranks(own))
    return found


def _require_one_mesh_each(group: dist.ProcessGroup, where: str, model: nn.Module) -> None:
    """ValueError if one name stands for several parameters. Collective."""
    own = _own_meshes(group, model)
    if not own:  # nor has another rank
        return
    known: dict[str, tuple[int, ...]] = {}
    for of_rank in _from_all(group, own):
        for name, ranks in of_rank.items():
            if known.setdefault(name, ranks) != ranks:
                raise ValueError(
                    f"{where}: '{name}' is one parameter on ranks {known[name]}, and another "
                    f"one on ranks {ranks}.\nGive modules on different ranks different names, "
                    "as in a ModuleDict by number of the expert."
                )


def _names_elsewhere(group: dist.ProcessGroup, model: nn.Module) -> set[str]:
    """Names that only other ranks' modules have. Collective."""
    if not _own_meshes(group, model):
        return set()
    own = list(model.state_dict())
    return set().union(*_from_all(group, own)) - set(own)


def _give_own_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """To its groups, which are those of some rank."""
    own = sharded_optimizer_state_dict(model, optimizer)["param_groups"]
    for group, of_own in zip(state["param_groups"], own, strict=False):
        if len(group["params"]) == len(of_own["params"]):
            group["params"] = of_own["params"]


# ---- Files.


def _own_share(group: dist.ProcessGroup, names: list[str]) -> list[str]:
    """Of files that all ranks go through together."""
    return sorted(names)[group.rank() :: group.size()]


def _bring_to_disk(folder: pathlib.Path) -> None:
    """The names of its files."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _digest_of(file: pathlib.Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _require_undamaged(group: dist.ProcessGroup, folder: pathlib.Path) -> None:
    try:
        expected = json.loads((folder / _DIGESTS).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{folder}' has no list of its files that can be read: {error}.\n"
            "Name a folder that save_checkpoint() has completed."
        ) from error
    for name in _own_share(group, list(expected)):
        try:
            found = _digest_of(folder / name)
        except OSError as error:
            found = str(error)
        if found != expected[name]:
            raise ValueError(
                f"'{folder / name}' is damaged: expected {expected[name]}, found {found}.\n"
                "Load an older checkpoint."
            )


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpickled(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location=_restored, weights_only=False)


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """On this rank's device of the kind that it was saved from, perhaps another rank's."""
    return torch.serialization.default_restore_location(storage, location.split(":")[0])


# ---- Memory that a checkpoint is read into.


def _require_same_model(metadata: Metadata, model: nn.Module, elsewhere: set[str]) -> None:
    paths = metadata.planner_data
    saved = {paths[key][1]: key for key in paths if paths[key][0] == "model"}
    own = model.state_dict()
    if saved.keys() != own.keys() | elsewhere:
        raise ValueError(
            "the checkpoint is of another model: these names are in one of both: "
            f"{sorted(saved.keys() ^ (own.keys() | elsewhere))[:5]}."
        )
    for name, value in own.items():
        form = metadata.state_dict_metadata[saved[name]]
        if not isinstance(form, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
            continue
        shape = value.shape
        if form.size != shape:
            raise ValueError(
                f"the checkpoint is of another model: '{name}': expected {tuple(shape)}, found "
                f"{tuple(form.size)}."
            )


def _targets(
    metadata: Metadata,
    group: dist.ProcessGroup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    elsewhere: set[str],
) -> dict[str, Any]:
    """A nest as was saved, with new memory for all tensors but those elsewhere."""
    state: dict[str, Any] = {"model": copy.deepcopy(model.state_dict()), "shared": b"", "own": {}}
    paths = metadata.planner_data
    if sum(path[0] == "own" for path in paths.values()) == group.size():
        for name in ("own", "buffers"):
            if (name, _own_key(group)) in paths.values():
                state[name] = {_own_key(group): b""}
    if optimizer is None:
        return state
    parameters = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for key, path in paths.items():
        if path[0] != "optimizer" or (path[1] == "state" and path[2] in elsewhere):
            continue
        form = metadata.state_dict_metadata[key]
        is_tensor = isinstance(form, TensorStorageMetadata)
        found[key] = _memory_for(form, parameters.get(path[2])) if is_tensor else None
    if not found:
        raise ValueError("the checkpoint has no optimizer's state.\nLoad the model alone.")
    state |= unflatten_state_dict(found, paths)
    state["optimizer"].setdefault("state", {})
    return state


def _own_key(group: dist.ProcessGroup) -> str:
    """Of this rank's own values: its place among the group's ranks in rising order."""
    return str(sorted(dist.get_process_group_ranks(group)).index(dist.get_rank()))


def _buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that are saved: ranks may have different ones."""
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in model.named_buffers() if name in saved}


def _memory_for(form: TensorStorageMetadata, parameter: torch.Tensor | None) -> torch.Tensor:
    dtype = form.properties.dtype
    if not isinstance(parameter, TensorShard) or form.size != parameter.shape:
        return torch.empty(form.size, dtype=dtype, device="cpu")
    return as_shard(torch.empty_like(parameter.detach(), dtype=dtype), parameter)
